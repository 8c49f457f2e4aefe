//! The command line.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use kvferry_layout::{Cut, Dtype};

use crate::options::{MoveOptions, parse_dtype};
use crate::replay::dispatch::{Rules, Speed};

/// Replays a trace of requests between a prefill and a decode instance on this machine: blocks are allocated, prefixes are
/// used again, and only what the decode instance does not hold is moved. Each rank is an engine of its own.
///
/// A trace is JSON lines with timestamp (ms), input_length, output_length (tokens) and hash_ids (a name for every 512 tokens
/// of the prompt: equal names are equal cache). Bytes are scaled to the machine by --scale alone, and what that means is
/// printed first.
#[derive(Parser, Clone, Debug, PartialEq)]
#[command(
    version,
    after_help = "Examples:\n  \
    replay --verify --svg timeline.svg\n  \
    replay --trace conversation_trace.jsonl --requests 2000 --scale 64 --speed 10\n  \
    replay --trace conversation_trace.jsonl --model llama-3.1-8b --dtype bf16 --from tp2 --to tp4 --speed max\n\n\
    UCX's own messages are off unless UCX_LOG_LEVEL is set: UCX_LOG_LEVEL=warn shows them, RUST_LOG=kvferry=debug the spans \
    of requests."
)]
pub struct ReplayOptions {
    /// File with the trace. Without it one is made, of conversations behind a shared prompt, that --seed decides.
    /// Example: --trace conversation_trace.jsonl
    #[arg(long, value_name = "PATH")]
    pub trace: Option<PathBuf>,
    /// Only the first so many requests of the trace; of a made one the number of requests, 200 without this.
    /// Example: --requests 2000
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: Option<u32>,
    /// Times as fast as in the trace requests arrive and tokens are generated; max begins a request as soon as there is room,
    /// and generates nothing.
    /// Example: --speed 10, or --speed max
    #[arg(long, value_name = "TIMES|max", default_value = "1", value_parser = parse_speed)]
    pub speed: Speed,
    /// Time that generating a token takes, in the trace's time. So long the decode instance keeps a request's blocks.
    /// Example: --token-ms 30
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    pub token_ms: u64,
    /// Tokens of the trace that are one token of the cache here. It divides 512; 1 moves the model's true bytes.
    /// Example: --scale 64
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=512))]
    pub scale: u64,
    /// Blocks of the trace that each instance has room for. A request that needs more is rejected.
    /// Example: --pool-blocks 4096
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub pool_blocks: u32,
    /// Requests that are moved at a time at most. Others wait.
    /// Example: --in-flight 32
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=128))]
    pub in_flight: u32,
    /// Model whose cache is moved: one of `models/` or the path of a config.json. One that keeps every token.
    /// Example: --model llama-3.1-8b
    #[arg(long, value_name = "NAME|PATH", default_value = "glm-5.2")]
    pub model: String,
    /// Element type of the cache: fp8_e4m3, fp8_e5m2, bf16, f16, f32.
    /// Example: --dtype bf16
    #[arg(long, value_name = "TYPE", default_value = "fp8_e4m3", value_parser = parse_dtype)]
    pub dtype: Dtype,
    /// Cut of the prefill instance.
    /// Example: --from pp4
    #[arg(long, value_name = "CUT", default_value = "pp2")]
    pub from: Cut,
    /// Cut of the decode instance.
    /// Example: --to tp4
    #[arg(long, value_name = "CUT", default_value = "tp2")]
    pub to: Cut,
    /// Tokens of a block of the prefill instance's cache: a divisor of what a block of the trace has here, 512 over --scale,
    /// which is also what it is without this.
    /// Example: --block-tokens-from 4
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub block_tokens_from: Option<u32>,
    /// The same of the decode instance's.
    /// Example: --block-tokens-to 8
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub block_tokens_to: Option<u32>,
    /// Write every block at the prefill instance before it is moved, and compare every byte of a request's prompt at the
    /// decode instance when it has arrived, prefix included; at the end, all blocks that are still held.
    /// Example: --verify
    #[arg(long)]
    pub verify: bool,
    /// Decides a made trace, the bytes of the cache and the order of the pools' slots.
    /// Example: --seed 7
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// Draw a timeline of all transfers into this file.
    /// Example: --svg timeline.svg
    #[arg(long, value_name = "PATH")]
    pub svg: Option<PathBuf>,
    /// Serve the engines' metrics as Prometheus text while the replay runs: at a port of this host (0 is any free one), or at
    /// an address. Where is said on standard error.
    /// Example: --metrics 9464, or --metrics 0.0.0.0:9464
    #[arg(long, value_name = "PORT|ADDRESS", value_parser = parse_listen)]
    pub metrics: Option<SocketAddr>,
    /// For tests: flip a bit of the last block of the fourth request at decode rank 0 when it has arrived. With --verify that
    /// request must fail, and no other.
    /// Example: --flip-byte
    #[arg(long)]
    pub flip_byte: bool,
    /// How it is moved.
    #[command(flatten)]
    pub moving: MoveOptions,
}

impl ReplayOptions {
    /// What decides when requests go.
    pub fn rules(&self) -> Rules {
        Rules {
            in_flight_max: usize::try_from(self.in_flight).unwrap_or(usize::MAX),
            frame_count: self.pool_blocks,
            speed: self.speed,
            token_time: Duration::from_millis(self.token_ms),
            seed: self.seed,
        }
    }
}

/// Not a speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("neither max nor a number in 0.001..=1000000")]
struct NoSpeed;

fn parse_speed(text: &str) -> Result<Speed, NoSpeed> {
    if text == "max" {
        return Ok(Speed::Max);
    }
    let times = text.parse::<f64>().map_err(|_| NoSpeed)?;
    if (0.001..=1e6).contains(&times) { Ok(Speed::Times(times)) } else { Err(NoSpeed) }
}

/// Not a place to listen at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("neither a port nor an address such as 127.0.0.1:9464")]
struct NoListen;

/// A port alone is one of this host only: figures are nobody else's business unless somebody says so.
fn parse_listen(text: &str) -> Result<SocketAddr, NoListen> {
    match text.parse::<u16>() {
        Ok(port) => Ok((Ipv4Addr::LOCALHOST, port).into()),
        Err(_) => text.parse().map_err(|_| NoListen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds() {
        assert_eq!(parse_speed("max"), Ok(Speed::Max));
        assert_eq!(parse_speed("2.5"), Ok(Speed::Times(2.5)));
        for text in ["", "0", "-1", "nan", "inf", "1e7", "fast"] {
            assert_eq!(parse_speed(text), Err(NoSpeed), "{text}");
        }
    }

    #[test]
    fn a_port_alone_is_not_open_to_others() {
        assert_eq!(parse_listen("9464").unwrap().to_string(), "127.0.0.1:9464");
        assert_eq!(parse_listen("0.0.0.0:9464").unwrap().to_string(), "0.0.0.0:9464");
        for text in ["", "70000", "localhost", "1.2.3.4"] {
            assert_eq!(parse_listen(text), Err(NoListen), "{text}");
        }
    }
}
