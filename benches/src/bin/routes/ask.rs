//! What the source asks of the target process, a JSON line each, over the target's standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvferry_wire::RegionCard;
use serde::{Deserialize, Serialize};

use crate::order::Order;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Which memory of the target is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Pool {
    /// Allocated by the library.
    Allocated,
    /// Allocated by the caller, and registered.
    Callers,
}

/// Which blocks of a pool are meant, and what is in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Blocks {
    pub(crate) order: Order,
    pub(crate) size: u64,
    pub(crate) pool_blocks: u64,
    pub(crate) count: u64,
    /// Of the source's order; the target's is one more.
    pub(crate) seed: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// The worker for a list of transports, and the cards of both pools.
    Open { transports: Option<String> },
    /// The target's worker for these transports is to connect back.
    Connect { transports: Option<String>, address: Vec<u8>, epoch: u64, card: RegionCard },
    /// Fill the first bytes of a pool with what no source writes.
    Scrub { pool: Pool, bytes: u64 },
    /// Compare a whole pool with what it must be after round `tag`.
    Check { pool: Pool, blocks: Blocks, tag: u64 },
    /// CPU seconds of the process so far.
    Cpu,
    /// Answer pings of a block each, until as many have come.
    Pong { transports: Option<String>, count: usize },
    /// Pull the blocks from number `from` on, out of the pool of the source that was named when connecting back.
    Pull { transports: Option<String>, blocks: Blocks, from: usize },
    /// The process, and the address of a pool.
    Where { pool: Pool },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Opened(Box<Opened>),
    Done,
    Checked { right: bool },
    Cpu { seconds: f64 },
    Where { process: i32, address: u64 },
}

/// A worker of the target, and its pools.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Opened {
    pub(crate) address: Vec<u8>,
    pub(crate) epoch: u64,
    pub(crate) allocated: RegionCard,
    pub(crate) callers: RegionCard,
}

/// The target process. Ends with its standard input.
pub(crate) struct Target {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _child: Child,
}

impl Target {
    pub(crate) fn start(arguments: &[String]) -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--target").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.ok_or("the target has no pipes")?;
        Ok(Self { input, output: BufReader::new(output), _child: child })
    }

    pub(crate) fn tell(&mut self, ask: &Ask) -> Result<(), Error> {
        writeln!(self.input, "{}", serde_json::to_string(ask)?)?;
        Ok(())
    }

    pub(crate) fn hear(&mut self) -> Result<Answer, Error> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err("the target is gone".into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    pub(crate) fn ask(&mut self, ask: &Ask) -> Result<Answer, Error> {
        self.tell(ask)?;
        self.hear()
    }
}
