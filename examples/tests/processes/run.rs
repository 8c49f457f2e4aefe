//! Starts programs and waits for their end, but not for ever.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvferry_examples::event::{Event, Phase};
use serde_json::Value;

/// No run of any test takes this long unless it hangs, however busy the machine.
const HANG: Duration = Duration::from_secs(240);

/// How a program ended.
pub(crate) struct Ended {
    pub(crate) program: &'static str,
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) elapsed: Duration,
}

/// A program that runs; killed if a test fails before its end.
pub(crate) struct Running {
    program: &'static str,
    pub(crate) process: Child,
    stderr: JoinHandle<String>,
    started: Instant,
}

/// `program` with `line` as its arguments, split at spaces.
pub(crate) fn command(program: &'static str, line: &str) -> Command {
    let path = match program {
        "loopback" => env!("CARGO_BIN_EXE_loopback"),
        "receiver" => env!("CARGO_BIN_EXE_receiver"),
        "replay" => env!("CARGO_BIN_EXE_replay"),
        "sender" => env!("CARGO_BIN_EXE_sender"),
        _ => panic!("no program {program}"),
    };
    let mut command = Command::new(path);
    command.args(line.split_whitespace());
    prepared(command)
}

fn prepared(mut command: Command) -> Command {
    for variable in ["UCX_TLS", "UCX_LOG_LEVEL", "RUST_LOG"] {
        command.env_remove(variable);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub(crate) fn start(program: &'static str, line: &str) -> Running {
    spawn(program, command(program, line))
}

/// The same in a network namespace.
pub(crate) fn start_in(namespace: &str, program: &'static str, line: &str) -> Running {
    let inner = command(program, line);
    let mut outer = Command::new("ip");
    outer.args(["netns", "exec", namespace]).arg(inner.get_program()).args(inner.get_args());
    spawn(program, prepared(outer))
}

fn spawn(program: &'static str, mut command: Command) -> Running {
    let mut process = command.spawn().unwrap();
    let stderr = read_all(process.stderr.take().unwrap());
    Running { program, process, stderr, started: Instant::now() }
}

pub(crate) fn run(program: &'static str, line: &str) -> Ended {
    start(program, line).end()
}

impl Running {
    /// Waits until a rank says that bytes of its own have moved, or has ended without having had to say so. What it says later is
    /// read and forgotten, so that it never waits for a reader.
    pub(crate) fn wait_for_first_bytes(&mut self) {
        let mut lines = BufReader::new(self.process.stdout.take().unwrap()).lines();
        let moves = |line: String| {
            let event = serde_json::from_str(&line).unwrap();
            matches!(event, Event::Progress { phase: Phase::Move, done_bytes: 1.., .. })
        };
        lines.any(|line| moves(line.unwrap()));
        thread::spawn(move || lines.for_each(drop));
    }

    /// Waits for the end. Whatever of standard output was not taken before is in the result.
    pub(crate) fn end(mut self) -> Ended {
        let stdout = self.process.stdout.take().map(read_all);
        let status = loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                break status;
            }
            if self.started.elapsed() > HANG {
                self.process.kill().unwrap();
                panic!("{} hangs", self.program);
            }
            thread::sleep(Duration::from_millis(5));
        };
        Ended {
            program: self.program,
            code: status.code(),
            stdout: stdout.map(|stdout| stdout.join().unwrap()).unwrap_or_default(),
            stderr: self.stderr.join().unwrap(),
            elapsed: self.started.elapsed(),
        }
    }
}

impl Ended {
    /// The program ended with `code` and said why in one line, which is returned.
    pub(crate) fn failure(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{self:?}");
        let line = self.stderr.strip_prefix(self.program).and_then(|line| line.strip_prefix(": "));
        let line = line.and_then(|line| line.strip_suffix('\n')).unwrap_or_else(|| panic!("{self:?}"));
        assert!(!line.is_empty() && !line.contains('\n'), "{self:?}");
        line
    }

    /// The program succeeded silently and printed one JSON object.
    pub(crate) fn json(&self) -> Value {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        serde_json::from_str(&self.stdout).unwrap()
    }
}

impl fmt::Debug for Ended {
    /// Without all lines of progress but the last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, code, stdout, stderr, elapsed } = self;
        let last = stdout.lines().last().unwrap_or_default();
        write!(f, "{program} ended with {code:?} after {elapsed:?}, last line {last:?}, stderr {stderr:?}")
    }
}

fn read_all(mut stream: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    })
}
