//! Short replays: every request accounted for, every byte compared, every transfer drawn, and figures to be had meanwhile.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::run::{command, run};

/// So little room that blocks are forgotten and some requests rejected.
const TIGHT: &str = "--speed max --scale 128 --in-flight 4 --pool-blocks 30 --verify";

/// No scrape takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(120);

fn requests(result: &Value) -> [u64; 4] {
    ["all", "done", "rejected", "failed"].map(|name| result["requests"][name].as_u64().unwrap())
}

fn figure(result: &Value, name: &str) -> u64 {
    result["figures"][name].as_u64().unwrap_or_else(|| panic!("{name}: {result}"))
}

#[test]
fn every_request_is_accounted_for_and_every_transfer_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("timeline.svg");
    let result = run("replay", &format!("{TIGHT} --requests 40 --json --svg {}", path.display())).json();
    let [all, done, rejected, failed] = requests(&result);
    assert_eq!((result["outcome"].as_str(), all, failed), (Some("done"), 40, 0));
    assert_eq!(done + rejected, 40);
    assert!(rejected > 0 && done > 30, "{result}");

    // A trace's block is 4 tokens here, on each of two decode ranks; a prompt's last one may be fewer.
    let block_bytes = 2 * 4 * (78 * 576 + 21 * 132);
    let (blocks, reused) = (figure(&result, "blocks"), figure(&result, "reused_blocks"));
    assert!(reused > 0 && reused < blocks, "{result}");
    let (moved, saved) = (figure(&result, "moved_bytes"), figure(&result, "saved_bytes"));
    assert!(saved <= reused * block_bytes && saved > reused.saturating_sub(done) * block_bytes, "{result}");
    // The last block of a prompt is moved whole, with what is behind its end.
    assert_eq!(moved, (blocks - reused) * block_bytes);
    // Both sides count alike.
    let routes = result["figures"]["routes"].as_object().unwrap();
    assert_eq!(routes.values().map(|bytes| bytes.as_u64().unwrap()).sum::<u64>(), moved);
    let checked = figure(&result, "checked_bytes");
    assert!(checked <= blocks * block_bytes && checked > (blocks - done) * block_bytes, "{result}");
    assert!(result["audited_blocks"].as_u64().unwrap() > 10, "{result}");
    assert_eq!(result["figures"]["transfer"]["count"], done);

    let picture = fs::read_to_string(path).unwrap();
    let bars = svg::read(&picture).unwrap().filter(|event| match event {
        svg::parser::Event::Tag("rect", _, attributes) => {
            attributes.get("class").is_some_and(|class| class.starts_with("bar "))
        }
        svg::parser::Event::Error(error) => panic!("{error}"),
        _ => false,
    });
    // Two ranks on each side.
    assert_eq!(bars.count() as u64, 4 * done);
}

/// Blocks of other sizes on the two sides, heads that are cut, and blocks that are dealt out.
#[test]
fn other_cuts_and_blocks() {
    for line in [
        "--model llama-3.1-8b --from tp2 --to tp4 --block-tokens-from 1 --block-tokens-to 4",
        "--from pp2 --to cp2 --block-tokens-from 4 --block-tokens-to 2 --route staged",
    ] {
        let result = run("replay", &format!("{TIGHT} --requests 20 --json {line}")).json();
        assert_eq!(result["outcome"], "done", "{line}");
        if line.contains("staged") {
            assert_eq!(result["figures"]["routes"].as_object().unwrap().keys().collect::<Vec<_>>(), ["staged"]);
        }
        assert!(figure(&result, "checked_bytes") > 0 && figure(&result, "saved_bytes") > 0, "{result}");
    }
}

/// A byte that is wrong fails its request and no other, and the run.
#[test]
fn a_flipped_byte_fails_its_request_alone() {
    let ended = run("replay", &format!("{TIGHT} --requests 40 --json --flip-byte"));
    let line = ended.failure(1);
    assert!(line.starts_with("1 of 40 requests failed, first 3: block ") && line.ends_with(" is wrong"), "{line}");
    let result: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&result["outcome"], requests(&result)[3]), (&"failed".into(), 1));
    assert_eq!(requests(&result)[1..].iter().sum::<u64>(), 40);
}

#[test]
fn a_trace_is_read_and_its_bad_lines_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.jsonl");
    let good = r#"{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [8, 9]}"#;
    fs::write(&path, format!("{good}\n{good}\n")).unwrap();
    let line = format!("--trace {} --speed max --in-flight 1", path.display());
    let ended = run("replay", &line);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    let first =
        "trace   trace.jsonl: 2 requests in 0.0 s, 2000 input tokens in 4 blocks of 512, 2 of them named before\n";
    assert!(ended.stdout.starts_with(first), "{}", ended.stdout);
    assert!(
        ended.stdout.contains(
            "\nsaved     1.5 MB by prefix reuse: decode held 2 of 4 blocks (50.0 %), and all of 1 requests\n"
        ),
        "{}",
        ended.stdout
    );
    let last = "requests  2: 2 done, 0 rejected as longer than the pool, 0 failed: all accounted for\n";
    assert!(ended.stdout.ends_with(last), "{}", ended.stdout);

    fs::write(&path, format!("{good}\n\n{}\n", good.replace("1000", "2000"))).unwrap();
    let why = "input_length 2000 is 4 blocks of 512 tokens, hash_ids has 2";
    assert_eq!(run("replay", &line).failure(2), format!("--trace: {} line 3: {why}", path.display()));
}

/// Ends with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn metrics_can_be_scraped() {
    // A trace that lasts for longer than it takes to look.
    let mut command = command("replay", "--requests 100000 --scale 512 --pool-blocks 64 --token-ms 0 --metrics 0");
    let mut replay = Killed(command.stdout(Stdio::null()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(replay.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address =
        line.trim().strip_prefix("metrics at http://").and_then(|line| line.strip_suffix("/metrics")).unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{line}");

    let started = Instant::now();
    let text = loop {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        // A source counts a request a moment after its destination.
        let counted = [
            r#"kvferry_requests_total{side="destination",outcome="succeeded"}"#,
            r#"kvferry_requests_total{side="source",outcome="succeeded"}"#,
            r#"kvferry_post_seconds_count{side="source"}"#,
        ];
        if counted.iter().all(|name| value(body, name) > 10.0) {
            break body.to_owned();
        }
        assert!(started.elapsed() < HANG, "{body}");
        thread::sleep(Duration::from_millis(50));
    };
    assert!(text.contains("# TYPE kvferry_sent_bytes_total counter\n"), "{text}");
    assert!(text.contains("# TYPE kvferry_requests_in_flight gauge\n"), "{text}");
    assert!(value(&text, "kvferry_received_bytes_total") > 0.0, "{text}");
    let route = text.lines().find(|line| line.starts_with("kvferry_sent_bytes_total{")).unwrap();
    assert!(route.contains("route=\"") && route.contains("reason=\""), "{route}");
    let buckets = text.lines().filter(|line| line.starts_with("kvferry_request_seconds_bucket{side=\"source\""));
    assert_eq!(buckets.count(), 20, "19 bounds and one without");
}

/// The value of a line; 0 if there is none.
fn value(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(0.0, |value| value.parse().unwrap())
}
