//! Whole transfers: models, cuts, blocks and transports, every byte compared by the programs themselves.

use serde_json::Value;

use crate::run::run;

/// Shared memory in earnest: with peer error handling UCX takes it only if nothing else is left but tcp.
const SHARED_MEMORY: &str = "posix,sysv,cma,self,tcp";

fn verified(line: &str) -> Value {
    let result = run("loopback", &format!("{line} --json")).json();
    assert_eq!(result["outcome"], "verified", "{line}");
    result
}

/// Bytes of the request that each receiver rank found right.
fn request_bytes(result: &Value) -> Vec<u64> {
    result["receivers"].as_array().unwrap().iter().map(|receiver| receiver["request_bytes"].as_u64().unwrap()).collect()
}

fn pairs(result: &Value, field: &str) -> Vec<u64> {
    result["pairs"].as_array().unwrap().iter().map(|pair| pair[field].as_u64().unwrap()).collect()
}

/// GLM-5.2 has 78 latents of 576 B and 21 index rows of 132 B a token; both are on each tensor-parallel rank.
#[test]
fn glm_5_2_over_every_transport() {
    let per_token = 78 * 576 + 21 * 132;
    for transport in ["", "--transport tcp", &format!("--transport {SHARED_MEMORY}")] {
        let result = verified(&format!("--tokens 512 --from pp2 --to tp2 {transport}"));
        assert_eq!(request_bytes(&result), [512 * per_token; 2]);
        assert_eq!(pairs(&result, "source_rank"), [0, 0, 1, 1]);
        assert_eq!(pairs(&result, "destination_rank"), [0, 1, 0, 1]);
        // 39 layers a stage; indexers at 0, 1, 2, 6, 10, ... 38 and at 42, ... 74.
        assert_eq!(pairs(&result, "rows"), [39 + 12, 39 + 12, 39 + 9, 39 + 9]);
        assert_eq!(pairs(&result, "bytes").iter().sum::<u64>(), 2 * 512 * per_token);
        assert!(result["pairs"][0]["gb_per_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn latent_models_and_cuts() {
    for line in [
        "--from pp4 --to pp1",
        "--from pp2tp2 --to pp1tp4",
        "--from pp40+38 --to pp3",
        "--model glm-5 --from pp2 --to tp2",
        "--model deepseek-v3.2 --from tp2 --to pp2",
    ] {
        verified(&format!("--tokens 256 {line}"));
    }
}

/// Llama-3.1-8B has 8 heads; more ranks than heads hold replicas, and 3 ranks hold 2, 3 and 3.
#[test]
fn heads_over_tensor_parallel_ranks() {
    // Keys and values of 32 layers, 128 elements of 2 B.
    let per_head_and_token = 2 * 32 * 128 * 2;
    for (cuts, heads) in [
        ("--from tp2 --to tp4", &[2; 4][..]),
        ("--from tp4 --to tp2", &[4, 4]),
        ("--from tp1 --to tp3", &[2, 3, 3]),
        ("--from tp3 --to tp2", &[4, 4]),
        ("--from pp2tp2 --to tp16", &[1; 16]),
        ("--from tp16 --to pp2tp2", &[2, 2, 2, 2]),
    ] {
        let result = verified(&format!("--model llama-3.1-8b --dtype bf16 --tokens 192 {cuts}"));
        let layers = if cuts.ends_with("pp2tp2") { 2 } else { 1 };
        let expected: Vec<u64> = heads.iter().map(|heads| heads * per_head_and_token * 192 * 2 / layers / 2).collect();
        let expected = if layers == 2 { vec![4 * per_head_and_token * 192 / 2; 4] } else { expected };
        assert_eq!(request_bytes(&result), expected, "{cuts}");
    }
}

#[test]
fn other_block_sizes_and_odd_tokens() {
    for (from, to, tokens) in [(16, 64, 500), (64, 16, 333), (48, 32, 497), (64, 64, 1), (1, 7, 50)] {
        for model in ["--from pp2 --to tp2", "--model llama-3.1-8b --from tp2 --to tp4"] {
            verified(&format!("--tokens {tokens} --block-tokens-from {from} --block-tokens-to {to} {model}"));
        }
    }
}

/// The MTP layer, 78, is moved if both have it; what only the receiver has stays as it was.
#[test]
fn layers_that_only_one_side_has() {
    let hidden = 128 * (78 * 576 + 21 * 132);
    let mtp = 128 * (576 + 132);
    for (who, expected) in [("none", hidden), ("from", hidden), ("to", hidden), ("both", hidden + mtp)] {
        let result = verified(&format!("--tokens 128 --from pp2 --to tp1 --mtp {who}"));
        assert_eq!(request_bytes(&result), [expected], "--mtp {who}");
    }
}

#[test]
fn people_get_a_table() {
    let ended = run("loopback", "--tokens 64 --from pp2 --to tp1 --seed 5");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let lines: Vec<&str> = ended.stdout.lines().collect();
    for word in ["from -> to", "rows", "pieces", "bytes", "route", "GB/s", "ms"] {
        assert!(lines[1].contains(word), "{}", lines[1]);
    }
    let [.., receiver, last] = lines[..] else { panic!("{lines:?}") };
    assert!(receiver.starts_with("receiver rank 0: verified 3052800 bytes, canary "), "{receiver}");
    assert!(receiver.ends_with(" bytes intact"), "{receiver}");
    assert_eq!(last, "verified");
}

/// One byte that is not what it should be fails the run, and is named.
#[test]
fn a_flipped_byte() {
    let ended = run("loopback", "--tokens 256 --flip-byte --json");
    let line = ended.failure(1).to_owned();
    assert!(line.starts_with("receiver rank 0: 1 of "), "{line}");
    assert!(line.contains(" bytes are wrong, first at pool 0 slot "), "{line}");
    // The middle one of four blocks.
    assert!(line.contains(" (layer 0 latent plane 0 unit 0 token 128 byte 0): expected 0x"), "{line}");
    let json: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&json["outcome"], &json["error"]), (&"failed".into(), &line.into()));
}

/// Every family: more ranks than heads, a replicated index key, windows, recurrent state, compressed cells; and cuts by data
/// and context. One request of the second data-parallel part.
#[test]
fn every_family_and_every_kind_of_cut() {
    for line in [
        "--from pp4 --to tp4 --tokens 256",
        "--from dp4 --to tp8 --tokens 192",
        "--from cp2 --to tp2 --tokens 300",
        "--from tp2 --to cp2tp2 --tokens 300",
        "--from pp2 --to tp2 --tokens 512 --block-tokens-from 32",
        "--model qwen3-235b-a22b --from tp1 --to tp8 --tokens 128",
        "--model llama-3.1-70b --from tp2 --to tp4 --tokens 128",
        "--model llama-3.1-70b --from tp4 --to tp2 --tokens 128",
        "--model minimax-m3 --from tp2 --to tp4 --tokens 128",
        "--model gpt-oss-120b --from tp1 --to tp4 --tokens 512",
        "--model gemma-3-27b --from tp2 --to tp4 --tokens 1500 --block-tokens-from 32",
        "--model qwen3-next-80b-a3b --from tp2 --to tp4 --tokens 128",
        "--model deepseek-v4-pro --from tp2 --to tp4 --tokens 512 --block-tokens-from 128 --block-tokens-to 128",
    ] {
        verified(line);
    }
}

/// A window moves and what lies in front of it does not, on either side of which more may come along with its block.
#[test]
fn of_a_window_only_what_the_request_needs_is_moved() {
    let result = verified("--model gpt-oss-120b --from tp1 --to tp1 --tokens 1024 --dtype bf16");
    // 18 layers with all tokens, 18 with the last 128; keys and values of 8 heads, 64 elements of 2 B.
    assert_eq!(request_bytes(&result), [(18 * 1024 + 18 * 128) * 2 * 8 * 64 * 2]);
}

/// Every route, where it can be taken, moves the same bytes; one that cannot be taken is refused by name.
#[test]
fn routes_that_are_forced() {
    for route in ["direct", "landing", "staged", "runs"] {
        let result = verified(&format!("--tokens 512 --from pp2 --to tp2 --route {route}"));
        assert!(result["pairs"].as_array().unwrap().iter().all(|pair| pair["route"] == *route), "{result}");
    }
    let line = run("loopback", "--tokens 512 --from pp2 --to tp1 --transport tcp --route direct");
    assert!(line.failure(1).contains("direct"), "{line:?}");
}
