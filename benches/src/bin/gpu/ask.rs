//! What the source asks of the target process, a JSON line each, over the target's standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvferry_wire::RegionCard;
use serde::{Deserialize, Serialize};

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Kind of the frame that says that a transfer has arrived, and of its acknowledgement.
pub(crate) const ARRIVED: u16 = 1;
pub(crate) const ACKNOWLEDGED: u16 = 2;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// A pool of so many bytes.
    Open { bytes: u64 },
    /// Acknowledgements go to this worker as well.
    Connect { address: Vec<u8>, epoch: u64 },
    /// Fill the first bytes of the pool with the canary.
    Scrub { bytes: u64 },
    /// Say how long the stages of the transfers took since the last time.
    Stages { heading: String },
    /// Compare the first bytes of the pool with what they must be after a job.
    Check { job: String, total_bytes: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Opened { address: Vec<u8>, epoch: u64, card: Box<RegionCard> },
    Done,
    Checked { wrong: Option<u64> },
}

/// The target process. Ends with its standard input.
pub(crate) struct Target {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _child: Child,
}

impl Target {
    pub(crate) fn start() -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--target").args(std::env::args_os().skip(1)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.ok_or("the target has no pipes")?;
        Ok(Self { input, output: BufReader::new(output), _child: child })
    }

    pub(crate) fn ask(&mut self, ask: &Ask) -> Result<Answer, Error> {
        writeln!(self.input, "{}", serde_json::to_string(ask)?)?;
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err("the target is gone".into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}
