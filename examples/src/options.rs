//! The command lines.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, Parser, ValueEnum};
use kvferry_layout::{Cut, Dtype};
use kvferry_wire::Route;

use crate::failure::{Failure, SystemError, one_line};
use crate::meet::{MeetingPoint, Side};

/// Element types that a cache can have, of those that the layout knows.
const DTYPES: [Dtype; 5] = [Dtype::Fp8E4m3, Dtype::Fp8E5m2, Dtype::Bf16, Dtype::F16, Dtype::F32];

/// What is moved. Both instances must be told the same.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct JobOptions {
    /// Model whose cache is moved: one of `models/`, such as glm-5.2 or llama-3.1-8b, or the path of a config.json.
    /// Example: --model ./config.json
    #[arg(long, value_name = "NAME|PATH", default_value = "glm-5.2")]
    pub model: String,
    /// Cut of the sending instance: pipeline stages (even, or the layers of each), tensor-parallel shards, or both.
    /// Example: --from pp4tp2, or --from pp40+38tp2
    #[arg(long, value_name = "CUT", default_value = "pp2")]
    pub from: Cut,
    /// Cut of the receiving instance.
    /// Example: --to tp8
    #[arg(long, value_name = "CUT", default_value = "tp2")]
    pub to: Cut,
    /// Tokens of the request.
    /// Example: --tokens 8192
    #[arg(long, value_name = "COUNT", default_value_t = 8192, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub tokens: u64,
    /// Tokens of a block of the sending instance.
    /// Example: --block-tokens-from 16
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub block_tokens_from: u32,
    /// Tokens of a block of the receiving instance.
    /// Example: --block-tokens-to 48
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub block_tokens_to: u32,
    /// Element type of the cache: fp8_e4m3, fp8_e5m2, bf16, f16, f32.
    /// Example: --dtype bf16
    #[arg(long, value_name = "TYPE", default_value = "fp8_e4m3", value_parser = parse_dtype)]
    pub dtype: Dtype,
    /// Which instances hold the model's multi-token prediction layers, on their last pipeline stage. What only one has
    /// is not moved.
    /// Example: --mtp from
    #[arg(long, value_name = "WHO", default_value = "none")]
    pub mtp: Mtp,
    /// Decides the bytes of the cache and the shuffle of the slots.
    /// Example: --seed 7
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
}

/// How it is moved.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct MoveOptions {
    /// Transports that UCX may use, as in UCX_TLS; without it UCX chooses.
    /// Example: --transport tcp
    #[arg(long, value_name = "LIST")]
    pub transport: Option<String>,
    /// The only route that bytes may take: direct, landing, staged or runs; without it the wire chooses.
    /// Example: --route staged
    #[arg(long, value_name = "NAME", value_parser = parse_route)]
    pub route: Option<Route>,
    /// Where the pools are: host, or cuda for the GPUs of each machine in turn, from the first for senders and from the last for
    /// receivers.
    /// Example: --memory cuda
    #[arg(long, value_name = "KIND", default_value = "host")]
    pub memory: Memory,
    /// Give up when a rank has not come, or no byte has moved, for this many seconds. Ranks also wait for each other to
    /// fill their pools: a second more for each 256 MiB of them.
    /// Example: --deadline-s 10
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline_s: u64,
    /// Print JSON instead of text.
    /// Example: --json
    #[arg(long)]
    pub json: bool,
}

impl MoveOptions {
    /// `--deadline-s`.
    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline_s)
    }
}

/// Which of several ranks this process is.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct RankOptions {
    /// Rank of this process in its instance, from 0: pipeline stage x shards + shard.
    /// Example: --rank 1
    #[arg(long, value_name = "NUMBER")]
    pub rank: u32,
    /// Where all ranks meet: a TCP address, where receiver rank 0 listens, or a fresh directory that all can reach.
    /// Example: --meet 10.0.0.1:5000, or --meet /mnt/shared/run1
    #[arg(long, value_name = "HOST:PORT|DIR")]
    pub meet: MeetingPoint,
    /// Do not listen at the meeting's address even as receiver rank 0: another process does, as loopback does for its
    /// children.
    /// Example: --join
    #[arg(long)]
    pub join: bool,
    /// End at once when standard input ends, so that no rank outlives whoever started it.
    /// Example: --stop-on-eof
    #[arg(long)]
    pub stop_on_eof: bool,
}

/// One rank of the sending instance: fills its part of a request's cache and sends it.
///
/// Starts with all other ranks of both instances, one process each, and meets them at --meet.
#[derive(Parser, Clone, Debug, PartialEq, Eq)]
#[command(
    version,
    after_help = "Example, with `receiver` started beside it:\n  \
    sender --from pp2 --to tp1 --rank 0 --meet 127.0.0.1:5000 &\n  \
    sender --from pp2 --to tp1 --rank 1 --meet 127.0.0.1:5000\n\n\
    UCX's own messages are off unless UCX_LOG_LEVEL is set: UCX_LOG_LEVEL=warn shows them, RUST_LOG=warn those of this \
    library."
)]
pub struct SenderOptions {
    /// What is moved.
    #[command(flatten)]
    pub job: JobOptions,
    /// Which rank this is.
    #[command(flatten)]
    pub rank: RankOptions,
    /// How it is moved.
    #[command(flatten)]
    pub moving: MoveOptions,
}

/// One rank of the receiving instance: receives its part of a request's cache and compares every byte of its pools.
///
/// Starts with all other ranks of both instances, one process each, and meets them at --meet.
#[derive(Parser, Clone, Debug, PartialEq, Eq)]
#[command(
    version,
    after_help = "Example, with two `sender`s started beside it:\n  \
    receiver --from pp2 --to tp1 --rank 0 --meet 127.0.0.1:5000\n\n\
    UCX's own messages are off unless UCX_LOG_LEVEL is set: UCX_LOG_LEVEL=warn shows them, RUST_LOG=warn those of this \
    library."
)]
pub struct ReceiverOptions {
    /// What is moved.
    #[command(flatten)]
    pub job: JobOptions,
    /// Which rank this is.
    #[command(flatten)]
    pub rank: RankOptions,
    /// How it is moved.
    #[command(flatten)]
    pub moving: MoveOptions,
    /// For tests: flip a bit of one byte of the request before comparing, which must then fail.
    /// Example: --flip-byte
    #[arg(long)]
    pub flip_byte: bool,
}

/// Moves a request's cache between two instances on this machine, one process a rank, and compares every byte.
#[derive(Parser, Clone, Debug, PartialEq, Eq)]
#[command(
    version,
    after_help = "Examples:\n  \
    loopback\n  \
    loopback --from pp4tp2 --to tp8 --tokens 2048\n  \
    loopback --model llama-3.1-8b --dtype bf16 --from tp2 --to tp4 --block-tokens-from 16 --transport tcp\n\n\
    UCX's own messages are off unless UCX_LOG_LEVEL is set; of those the last line of a rank that dies is shown."
)]
pub struct LoopbackOptions {
    /// What is moved.
    #[command(flatten)]
    pub job: JobOptions,
    /// How it is moved.
    #[command(flatten)]
    pub moving: MoveOptions,
    /// Where the senders' pools are, if not as --memory says.
    /// Example: --memory-from cuda
    #[arg(long, value_name = "KIND")]
    pub memory_from: Option<Memory>,
    /// Where the receivers' pools are, if not as --memory says.
    /// Example: --memory-to host
    #[arg(long, value_name = "KIND")]
    pub memory_to: Option<Memory>,
    /// For tests: receiver rank 0 flips a bit of one byte of the request before comparing, which must then fail.
    /// Example: --flip-byte
    #[arg(long)]
    pub flip_byte: bool,
}

impl LoopbackOptions {
    /// Where the pools of a side are.
    pub fn memory(&self, side: Side) -> Memory {
        let of_side = if side == Side::Sender { self.memory_from } else { self.memory_to };
        of_side.unwrap_or(self.moving.memory)
    }
}

/// Says who would send what to whom, for a request that is moved between two instances, and moves nothing. What cannot be
/// matched ends in one line that says why.
#[derive(Parser, Clone, Debug, PartialEq, Eq)]
#[command(
    version,
    after_help = "Examples:\n  \
    plan --model glm-5.2 --from pp4 --to tp8 --svg out.svg\n  \
    plan --model llama-3.1-70b --dtype bf16 --from tp2 --to tp4 --pools-from layer-stacked --cells-from nhd --roles\n  \
    plan --from pp4dp2 --part-from 1 --to tp8"
)]
pub struct PlanOptions {
    /// Model whose cache would be moved: one of `models/`, such as glm-5.2 or llama-3.1-8b, or the path of a config.json.
    /// Example: --model ./config.json
    #[arg(long, value_name = "NAME|PATH", default_value = "glm-5.2")]
    pub model: String,
    /// Cut of the sending instance: pipeline stages, data-parallel parts, context-parallel and tensor-parallel ranks.
    /// Example: --from pp4tp2, --from pp40+38, or --from dp4tp2
    #[arg(long, value_name = "CUT", default_value = "pp4")]
    pub from: Cut,
    /// Cut of the receiving instance.
    /// Example: --to tp8
    #[arg(long, value_name = "CUT", default_value = "tp8")]
    pub to: Cut,
    /// Data-parallel part of the sending instance that has the request.
    /// Example: --part-from 1
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub part_from: u32,
    /// Data-parallel part of the receiving instance that gets it.
    /// Example: --part-to 1
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub part_to: u32,
    /// Tokens of the request.
    /// Example: --tokens 8192
    #[arg(long, value_name = "COUNT", default_value_t = 131_072, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub tokens: u64,
    /// First tokens of the request that the receiving instance holds already.
    /// Example: --held-tokens 4096
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    pub held_tokens: u64,
    /// Tokens of a block of the sending instance.
    /// Example: --block-tokens-from 16
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub block_tokens_from: u32,
    /// Tokens of a block of the receiving instance.
    /// Example: --block-tokens-to 48
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub block_tokens_to: u32,
    /// Which rows share a pool in the sending instance.
    /// Example: --pools-from layer-split
    #[arg(long, value_name = "HOW", default_value = "block-major")]
    pub pools_from: Pools,
    /// Which rows share a pool in the receiving instance.
    /// Example: --pools-to layer-together
    #[arg(long, value_name = "HOW", default_value = "block-major")]
    pub pools_to: Pools,
    /// Order of heads and tokens in the sending instance.
    /// Example: --cells-from nhd
    #[arg(long, value_name = "ORDER", default_value = "hnd")]
    pub cells_from: Cells,
    /// Order of heads and tokens in the receiving instance.
    /// Example: --cells-to nhd
    #[arg(long, value_name = "ORDER", default_value = "hnd")]
    pub cells_to: Cells,
    /// Element type of the cache: fp8_e4m3, fp8_e5m2, bf16, f16, f32.
    /// Example: --dtype bf16
    #[arg(long, value_name = "TYPE", default_value = "fp8_e4m3", value_parser = parse_dtype)]
    pub dtype: Dtype,
    /// Which instances hold the model's multi-token prediction layers, on their last pipeline stage.
    /// Example: --mtp both
    #[arg(long, value_name = "WHO", default_value = "none")]
    pub mtp: Mtp,
    /// Say for each receiving rank which roles and units of which layers it gets from whom, too.
    /// Example: --roles
    #[arg(long)]
    pub roles: bool,
    /// Draw the matrix of ranks into this file.
    /// Example: --svg out.svg
    #[arg(long, value_name = "PATH")]
    pub svg: Option<PathBuf>,
}

/// Where pools are.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// In host memory.
    Host,
    /// In GPU memory.
    Cuda,
}

/// Which rows share a pool.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pools {
    /// One slot holds all layers.
    BlockMajor,
    /// A pool a layer, keys and values side by side in a slot.
    LayerTogether,
    /// An allocation a layer, all keys before all values.
    LayerStacked,
    /// A pool for each layer and role.
    LayerSplit,
}

/// Order of heads and tokens.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cells {
    /// Heads outside tokens.
    Hnd,
    /// Tokens outside heads.
    Nhd,
}

/// Which instances hold the MTP layers.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mtp {
    /// Neither.
    None,
    /// The sending one.
    From,
    /// The receiving one.
    To,
    /// Both.
    Both,
}

impl Mtp {
    /// The option's value.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::From => "from",
            Self::To => "to",
            Self::Both => "both",
        }
    }
}

impl JobOptions {
    /// The command line that parses to these options.
    pub fn to_args(&self) -> Vec<String> {
        let options = [
            ("--model", self.model.clone()),
            ("--from", self.from.to_string()),
            ("--to", self.to.to_string()),
            ("--tokens", self.tokens.to_string()),
            ("--block-tokens-from", self.block_tokens_from.to_string()),
            ("--block-tokens-to", self.block_tokens_to.to_string()),
            ("--dtype", self.dtype.to_string()),
            ("--mtp", self.mtp.name().to_owned()),
            ("--seed", self.seed.to_string()),
        ];
        // One argument each, so that no value can be taken for an option.
        options.map(|(option, value)| format!("{option}={value}")).into()
    }
}

/// Parses a command line. `None` if it asked for help or the version, which is then printed.
///
/// # Errors
///
/// [`Failure::Usage`] says on one line what is wrong.
pub fn parse<T: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<Option<T>, Failure> {
    let error = match T::try_parse_from(args) {
        Ok(options) => return Ok(Some(options)),
        Err(error) => error,
    };
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return error.print().map(|()| None).map_err(SystemError::Output).map_err(Failure::failed);
    }
    // Clap's text goes on with usage and hints behind an empty line; names of missing options come on lines before it.
    let text = error.to_string();
    let words: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
    let text = words.join(" ");
    Err(Failure::Usage(one_line(text.strip_prefix("error: ").unwrap_or(&text))))
}

/// A route by the name that reports give it.
fn parse_route(text: &str) -> Result<Route, UnknownRoute> {
    let routes = [Route::Direct, Route::Landing, Route::Staged, Route::Runs];
    routes.into_iter().find(|route| route.to_string() == text).ok_or(UnknownRoute)
}

/// Not the name of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not one of direct, landing, staged, runs")]
struct UnknownRoute;

pub(crate) fn parse_dtype(text: &str) -> Result<Dtype, String> {
    let known = DTYPES.map(|dtype| dtype.to_string());
    match known.iter().position(|name| name == text) {
        Some(index) => Ok(DTYPES[index]),
        None => Err(format!("known are {}", known.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::replay::options::ReplayOptions;

    fn parse_loopback(line: &str) -> Result<Option<LoopbackOptions>, Failure> {
        parse(["loopback"].into_iter().chain(line.split_whitespace()).map(OsString::from))
    }

    #[test]
    fn children_get_the_same_job() {
        for line in
            ["", "--model a.json --from pp40+38tp2 --to tp1 --tokens 7 --block-tokens-from 1 --dtype bf16 --mtp to"]
        {
            let options = parse_loopback(line).unwrap().unwrap();
            let again = parse_loopback(&options.job.to_args().join(" ")).unwrap().unwrap();
            assert_eq!(again.job, options.job);
        }
    }

    #[test]
    fn usage_errors_are_one_line_that_names_the_option() {
        for (line, expected) in [
            ("--tokens 0", "invalid value '0' for '--tokens <COUNT>': 0 is not in 1..=4294967296"),
            ("--block-tokens-to 0", "invalid value '0' for '--block-tokens-to <COUNT>': 0 is not in 1..=1048576"),
            ("--dtype int7", "invalid value 'int7' for '--dtype <TYPE>': known are fp8_e4m3, fp8_e5m2, bf16, f16, f32"),
            ("--mtp maybe", "invalid value 'maybe' for '--mtp <WHO>' [possible values: none, from, to, both]"),
            ("--nonsense", "unexpected argument '--nonsense' found"),
        ] {
            assert_eq!(parse_loopback(line), Err(Failure::Usage(expected.to_owned())));
        }
        let cut = parse_loopback("--from pp4xx").unwrap_err();
        assert!(cut.line().starts_with("invalid value 'pp4xx' for '--from <CUT>': "), "{}", cut.line());
        let missing = parse::<SenderOptions>(["sender"].map(OsString::from)).unwrap_err();
        assert_eq!(
            missing.line(),
            "the following required arguments were not provided: --rank <NUMBER> --meet <HOST:PORT|DIR>"
        );
    }

    /// `--help` explains every option, with an example.
    #[test]
    fn every_option_has_a_help_with_an_example() {
        let replay = ReplayOptions::command();
        for command in [SenderOptions::command(), ReceiverOptions::command(), LoopbackOptions::command(), replay] {
            command.clone().debug_assert();
            for option in command.get_arguments() {
                let name = format!("--{}", option.get_long().unwrap());
                let help = option.get_long_help().or(option.get_help()).unwrap().to_string();
                let (_, example) = help.split_once("Example: ").unwrap_or_else(|| panic!("{name}: {help}"));
                assert!(example.starts_with(&name), "{name}: {help}");
            }
        }
    }
}
