//! What one small request costs between two engines in two processes: from `send` to the receiver's completion on a warm
//! pair, and how that grows with the number of requests in flight; and what checksums cost. Or, with `--workers`, what several
//! progress threads gain a rank that sends to four.
//!
//! The sender's clock reading travels in the note of the request, so that one monotonic clock measures both ends.

mod fan;
mod pair;
mod source;

use std::process::ExitCode;

use clap::Parser;
use kvferry_wire::Route;

use pair::{Pair, Pools};

/// Rounds of each number in flight.
const ROUNDS: usize = 9;

/// Latency and marginal cost of small requests, and the cost of checksums.
#[derive(Debug, Parser)]
struct Options {
    /// Requests of each measurement.
    #[arg(long, default_value_t = 2000)]
    requests: usize,
    /// Transports that UCX may use, as in UCX_TLS; "default" leaves the choice to UCX.
    #[arg(long, default_value = "posix,sysv,cma,self,tcp")]
    transports: String,
    /// Requests in flight besides the one that is measured.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 10_000])]
    in_flight: Vec<usize>,
    /// Bytes of the request that is moved with checksums and without.
    #[arg(long, default_value_t = 256 << 20)]
    verify_bytes: u64,
    /// Pauses in front of each send: time for its receive to arrive, after which the threads of both sides sleep, or not.
    #[arg(long, value_delimiter = ',', default_values_t = [200, 20])]
    pause_us: Vec<u64>,
    /// Pools, one a layer, of a request whose latency is measured.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pools: u32,
    /// KiB of a slot of such a pool, which is what moves of it.
    #[arg(long, default_value_t = 1)]
    slot_kib: u64,
    /// Both pools of that request on the first GPU.
    #[arg(long)]
    cuda: bool,
    /// Measures nothing but that latency.
    #[arg(long)]
    only_latency: bool,
    /// Polls for the completion instead of sleeping until it comes.
    #[arg(long)]
    spin: bool,
    /// Measures only this: a request of 256 MiB to four ranks, with so many progress threads of the rank that sends, in turn.
    #[arg(long, value_delimiter = ',')]
    workers: Vec<usize>,
    /// The route of those requests; chosen if left out.
    #[arg(long, value_parser = route)]
    route: Option<Route>,
    /// The other process.
    #[arg(long, hide = true)]
    source: bool,
    /// One of the four.
    #[arg(long, hide = true)]
    destination: bool,
}

fn route(name: &str) -> Result<Route, &'static str> {
    let routes = [Route::Direct, Route::Landing, Route::Staged, Route::Runs];
    routes.into_iter().find(|route| route.to_string() == name).ok_or("none of direct, landing, staged and runs")
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match &options {
        Options { source: true, .. } => source::serve(),
        Options { destination: true, .. } => fan::serve(),
        Options { workers, .. } if !workers.is_empty() => fan::run(&options.transports, options.route, workers),
        _ => run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("requests: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let pools = Pools { slots: 64, slot_bytes: options.slot_kib << 10, count: options.pools, cuda: options.cuda };
    let mut pair = Pair::start(&options.transports, false, pools)?;
    for pause_us in &options.pause_us {
        pair.latencies(options.requests / 10, *pause_us, options.spin)?;
        let mut latencies = pair.latencies(options.requests, *pause_us, options.spin)?;
        latencies.sort();
        let at = |percent: usize| latencies[(latencies.len() - 1) * percent / 100];
        println!(
            "one request of {} KiB in each of {} pools{} every {pause_us} us, {}, UCX {}, {}: from send to the receiver's completion p50 {:.1?}, \
             p90 {:.1?}, p99 {:.1?}, least {:.1?}",
            options.slot_kib,
            options.pools,
            if options.cuda { " of the GPU" } else { "" },
            if options.spin { "polled" } else { "waited for" },
            pair.ucx_version(),
            options.transports,
            at(50),
            at(90),
            at(99),
            at(0)
        );
    }
    drop(pair);
    if options.only_latency {
        return Ok(());
    }
    // In turn, so that what else the machine does happens to all of them alike.
    let mut pairs = Vec::new();
    for in_flight in &options.in_flight {
        let mut pair = Pair::start(&options.transports, false, Pools::of_host(64, 1 << 10))?;
        pair.hold(*in_flight)?;
        pair.throughput(options.requests / 10)?;
        pairs.push((*in_flight, pair, Vec::new()));
    }
    for _ in 0..ROUNDS {
        for (_, pair, rounds) in &mut pairs {
            rounds.push(pair.throughput(options.requests)?);
        }
    }
    let mut first = None;
    for (in_flight, _, rounds) in &mut pairs {
        rounds.sort();
        let each = rounds[ROUNDS / 2] / u32::try_from(options.requests)?;
        let least = rounds[0] / u32::try_from(options.requests)?;
        let of_first = first.get_or_insert(each);
        println!(
            "{in_flight:>6} in flight: one more costs {each:.2?} (least {least:.2?}), {:.2} of the first",
            each.as_secs_f64() / of_first.as_secs_f64()
        );
    }
    drop(pairs);
    for verify in [false, true] {
        let blocks = u32::try_from(options.verify_bytes >> 20)?;
        let mut pair = Pair::start(&options.transports, verify, Pools::of_host(blocks, 1 << 20))?;
        let mut rounds = Vec::new();
        for _ in 0..6 {
            rounds.push(pair.large(blocks)?);
        }
        rounds.remove(0); // page faults of pools that a peer has just mapped
        rounds.sort();
        let median = rounds[rounds.len() / 2];
        println!(
            "{} MiB, checksums {}: {median:.1?}, {:.2} GB/s",
            options.verify_bytes >> 20,
            if verify { "on" } else { "off" },
            options.verify_bytes as f64 / median.as_secs_f64() / 1e9
        );
    }
    Ok(())
}
