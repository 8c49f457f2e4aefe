//! What each route of `kvferry-wire` makes of scattered pieces between two processes of this machine, beside a plain copy.
//!
//! ```sh
//! cargo run --release --package kvferry-benches --bin routes                # a table on stderr, JSON lines on stdout
//! cargo run --release --package kvferry-benches --bin routes -- --plan FILE # one plan, as JSON lines
//! ```
//!
//! A source and a target process each hold a pool; blocks in shuffled order on both sides move from one to the other. All
//! ways are measured in turn, round after round, so that a busy machine is busy for all of them; the figures are medians.
//! The whole pool of the target is checked in the first and the last round, blocks that must not change included.

mod ask;
mod cell;
mod end;
mod latency;
mod memory;
mod order;
mod pattern;
mod plan;
mod show;
mod target;
mod ways;

use std::process::ExitCode;

use clap::Parser;

/// Measures the routes of kvferry-wire between two processes of this machine.
#[derive(Debug, Parser)]
pub(crate) struct Arguments {
    /// Sizes of a piece, in bytes; k and m may follow.
    #[arg(long, value_delimiter = ',', default_value = "1k,4k,16k,64k,1m,64m", value_parser = order::parse_size)]
    sizes: Vec<u64>,
    /// Bytes of each pool.
    #[arg(long, default_value = "1024m", value_parser = order::parse_size)]
    pool: u64,
    /// Bytes that move in one round, at most.
    #[arg(long, default_value = "256m", value_parser = order::parse_size)]
    total: u64,
    /// Pieces that move in one round, at most.
    #[arg(long, default_value_t = 65536)]
    pieces: u64,
    /// Rounds that count; one more is run before them.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Names of the ways to measure, as the table has them; all of them if left out.
    #[arg(long, value_delimiter = ',')]
    ways: Vec<String>,
    /// Round trips of the latency measurement; 0 leaves it out.
    #[arg(long, default_value_t = 2000)]
    latency: usize,
    /// Bytes of a chunk of the inbox.
    #[arg(long, value_parser = order::parse_size)]
    chunk: Option<u64>,
    /// Leaves the memory of a peer to be mapped by the first transfer, whose time is `first_ms` of the JSON lines.
    #[arg(long)]
    unpopulated: bool,
    /// A file with cells to measure, as the benchmarks of other engines write it.
    #[arg(long)]
    plan: Option<std::path::PathBuf>,
    /// The process that is written to. For internal use.
    #[arg(long, hide = true)]
    target: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match (&arguments.plan, arguments.target) {
        (_, true) => target::serve(&arguments),
        (Some(plan), false) => plan::run(&arguments, plan),
        (None, false) => show::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
