//! The table of all ways and sizes.

use serde_json::json;

use crate::Arguments;
use crate::ask::{Answer, Ask, Blocks, Error};
use crate::cell::{self, Measured};
use crate::latency;
use crate::order::{Order, size_text};
use crate::ways::{By, Source, WAYS, Way};

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let chosen = |way: &&Way| arguments.ways.is_empty() || arguments.ways.iter().any(|name| name == way.name);
    let ways: Vec<Way> = WAYS.iter().filter(chosen).copied().collect();
    if let Some(unknown) = arguments.ways.iter().find(|name| !WAYS.iter().any(|way| way.name == **name)) {
        return Err(format!("no way is called {unknown}").into());
    }
    let mut source = Source::open(arguments)?;
    let version = source.line(arguments, None, By::AUTO)?.end.context.ucx_version().to_string();
    println!("{}", json!({ "kind": "env", "ucx": version, "pool_bytes": arguments.pool, "rounds": arguments.rounds }));
    eprintln!("UCX {version}, pools of {}, medians of {}", size_text(arguments.pool), arguments.rounds);
    for &size in &arguments.sizes {
        let pool_blocks = arguments.pool / size;
        let count = (arguments.total / size).min(pool_blocks).min(arguments.pieces).max(1);
        let blocks = Blocks { order: Order::Shuffled, size, pool_blocks, count, seed: 1 };
        let measured = cell::measure(arguments, &mut source, &ways, &blocks, 1, arguments.rounds)?;
        let copy = ways.iter().position(|way| way.by == By::Copy).and_then(|copy| measured.get(copy));
        eprintln!("\n{} x {count}\n{HEAD}", size_text(size));
        for (way, measured) in ways.iter().zip(&measured) {
            println!("{}", line(way, &blocks, measured));
            eprintln!("{}", row(way, &blocks, measured, copy));
        }
    }
    for transports in [None, Some("tcp")] {
        if arguments.latency > 0 {
            show_latency(arguments, &mut source, transports, transports.unwrap_or("default"))?;
        }
    }
    Ok(())
}

const HEAD: &str = "  way           GB/s   (min ..  max)   us/piece  of memcpy  CPU s/GB  route, and why";

fn row(way: &Way, blocks: &Blocks, measured: &Measured, copy: Option<&Measured>) -> String {
    let bytes = (blocks.size * blocks.count) as f64;
    let (gbps, low, high) =
        (bytes / measured.median() / 1e9, bytes / measured.worst() / 1e9, bytes / measured.best() / 1e9);
    let each = measured.median() * 1e6 / blocks.count as f64;
    let of_copy = copy.map_or("-".to_owned(), |copy| format!("{:.0} %", 100.0 * copy.median() / measured.median()));
    let route = measured.stats.map_or(String::new(), |stats| format!("{}: {}", stats.route, stats.reason));
    let wrong = if measured.right { "" } else { "  WRONG BYTES" };
    let cpu = cpu_per_gb(blocks, measured);
    let name = way.name;
    format!("  {name:12} {gbps:5.2}  ({low:4.2} .. {high:5.2}) {each:10.3}  {of_copy:>9}  {cpu:8.3}  {route}{wrong}")
}

fn cpu_per_gb(blocks: &Blocks, measured: &Measured) -> f64 {
    measured.cpu_seconds / measured.seconds.len() as f64 / ((blocks.size * blocks.count) as f64 / 1e9)
}

/// One cell, with the keys that the benchmarks of other engines use.
pub(crate) fn line(way: &Way, blocks: &Blocks, measured: &Measured) -> serde_json::Value {
    let Blocks { order, size, count, .. } = *blocks;
    let bytes = (size * count) as f64;
    let gbps = |seconds: f64| bytes / seconds / 1e9;
    json!({
        "kind": "bw",
        "engine": "kvferry",
        "op": "WRITE",
        "way": way.name,
        "tls": way.transports.unwrap_or("default"),
        "order": order,
        "size": size,
        "count": count,
        "bytes": size * count,
        "iters": measured.seconds.len(),
        "gbps": gbps(measured.median()),
        "gbps_min": gbps(measured.worst()),
        "gbps_max": gbps(measured.best()),
        "gbps_e2e": gbps(measured.median()),
        "us_per_desc": measured.median() * 1e6 / count as f64,
        "round_ms": measured.seconds.iter().map(|seconds| seconds * 1e3).collect::<Vec<_>>(),
        "first_ms": measured.first_seconds * 1e3,
        "total_ms": measured.median() * 1e3,
        "cpu_s_per_gb": cpu_per_gb(blocks, measured),
        "route": measured.stats.map(|stats| stats.route.to_string()),
        "reason": measured.stats.map(|stats| stats.reason.to_string()),
        "verified": measured.right,
    })
}

pub(crate) fn show_latency(
    arguments: &Arguments,
    source: &mut Source,
    transports: Option<&'static str>,
    label: &str,
) -> Result<(), Error> {
    let line = source.line(arguments, transports, By::AUTO)?;
    let owned = transports.map(str::to_owned);
    let local = line.end.context.allocate(1 << 16)?;
    let (address, epoch, card) = (line.end.worker.address().to_owned(), line.end.worker.epoch(), local.card());
    source.target.ask(&Ask::Connect { transports: owned.clone(), address, epoch, card })?;
    let count = arguments.latency;
    source.target.ask(&Ask::Pong { transports: owned, count })?;
    let line = source.line(arguments, transports, By::AUTO)?;
    let halves = latency::ping(&line.end, line.endpoint, &local, line.allocated, count)?;
    let Answer::Done = source.target.hear()? else { return Err("the target did not pong".into()) };
    let at = |percent: usize| halves[(halves.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    let (best, median, p99) = (at(0), at(50), at(99));
    println!(
        "{}",
        json!({ "kind": "lat", "engine": "kvferry", "tls": label, "size": 4096, "iters": halves.len(), "one_way_us": median,
            "one_way_min_us": best, "one_way_p99_us": p99 })
    );
    eprintln!("\n4 KiB and its message, one way, {label}: median {median:.1} us, best {best:.1}, 99 % {p99:.1}");
    Ok(())
}
