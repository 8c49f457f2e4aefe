//! What `kvferry-wire` makes of scattered pieces between two GPUs of this machine, two processes, end to end: from binding a
//! request until the source has the acknowledgement of the target that it was told of.
//!
//! ```sh
//! cargo run --release --package kvferry-benches --bin gpu                 # a table on stderr, JSON lines on stdout
//! cargo run --release --package kvferry-benches --bin gpu -- --to 0       # both processes on one GPU
//! ```
//!
//! Slots are in shuffled order on both sides. All ways of a job are measured in turn, round after round; the figures are
//! medians. The whole pool of the target is checked after the last round of each, bytes that must not change included.

mod ask;
mod end;
mod job;
mod pattern;
mod source;
mod stages;
mod target;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};

/// Measures transfers between two GPUs of this machine.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Arguments {
    /// GPU of the source, as CUDA counts them.
    #[arg(long, default_value_t = 0)]
    from: u32,
    /// GPU of the target.
    #[arg(long, default_value_t = 1)]
    to: u32,
    /// The side that has no GPU, and whose pool is in host memory: what is offloaded to a host, or comes back from there.
    #[arg(long, value_enum)]
    without: Option<Without>,
    /// What is moved: a size of pieces in bytes, apart from each other on both sides, of which a slot has a mebibyte; the same with
    /// `s` behind it for slots of one piece each; `glm` or `glm-block` (GLM-5.2, fp8, blocks of 64 tokens, layer-major: 131,072
    /// tokens, or one block), `llama` (Llama-70B, TP4 to TP8, NHD: 32,768 tokens), `list-BYTES-COUNT` (an explicit list of so many
    /// runs, scattered over 2 GiB).
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "128,256,512,1024,4096,16384,65536,1048576,glm,llama,glm-block,\
                         list-4096-16384,list-4096-131072"
    )]
    jobs: Vec<String>,
    /// Ways to move it: a route, with `:` and the number of blocks for the kernel if it is not the default.
    #[arg(long, value_delimiter = ',', default_value = "direct,direct:16,landing")]
    ways: Vec<String>,
    /// Megabytes that move in a round of pieces of one size.
    #[arg(long, default_value_t = 1024)]
    total_mb: u64,
    /// Rounds that count; two more are run before them.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Rounds of a job that is over in microseconds.
    #[arg(long, default_value_t = 2000)]
    short_rounds: usize,
    /// Transports of UCX, which carries the messages, as in UCX_TLS.
    #[arg(long)]
    transports: Option<String>,
    /// Blocks with which the target scatters, if not the default.
    #[arg(long)]
    target_blocks: Option<u32>,
    /// Megabytes of the target's slab, if not the default.
    #[arg(long)]
    slab_mb: Option<u64>,
    /// Megabytes of a chunk of it, if not the default.
    #[arg(long)]
    chunk_mb: Option<u32>,
    /// Milliseconds that threads look on for more before they sleep.
    #[arg(long, default_value_t = 20)]
    linger_ms: u64,
    /// Makes the parts of a model's request anew each time, rather than to prepare them.
    #[arg(long)]
    plain: bool,
    /// Says how long each stage of the transfers takes, in the median, on both sides. Costs some of it.
    #[arg(long)]
    stages: bool,
    /// The process that is written to. For internal use.
    #[arg(long, hide = true)]
    target: bool,
}

/// A side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Without {
    Source,
    Target,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.stages {
        stages::start();
    }
    let done = if arguments.target { target::serve(&arguments) } else { source::run(&arguments) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let chain = std::iter::successors(error.source(), |error| error.source());
            eprintln!("gpu: {}", chain.fold(error.to_string(), |text, cause| format!("{text}: {cause}")));
            ExitCode::FAILURE
        }
    }
}
