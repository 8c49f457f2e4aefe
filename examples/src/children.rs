//! Child processes, one a rank: started, listened to, and never left behind.
//!
//! Each child holds the reading end of a pipe from here as its standard input and ends when that ends, so that even a
//! parent killed outright leaves no rank behind. Everything else ends with [`Children`]'s drop.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::event::{Event, LINE_BYTES_MAX};
use crate::failure::one_line;
use crate::meet::Member;

/// How often children are looked after while they say nothing.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How long after a first failure others are listened to: a rank that was killed is the better reason than those that
/// missed it, and is noticed a little later.
const FAILURE_GRACE: Duration = Duration::from_secs(1);

/// Why a rank's process did not do its job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChildError {
    /// The program cannot be started. Build it beside this one.
    #[error("cannot start {}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The rank said what went wrong.
    #[error("{member}: {message}")]
    Failed {
        /// The rank.
        member: Member,
        /// Its line.
        message: String,
        /// The code that it exits with.
        exit_code: u8,
    },
    /// The rank ended without a word of its own.
    #[error("{member} ended with {end}")]
    Ended {
        /// The rank.
        member: Member,
        /// How.
        end: End,
    },
    /// No rank said anything for so long that something is stuck. All were stopped.
    #[error("no rank said anything for {silence_s} s, {member} has not ended")]
    Silence {
        /// The first rank that has not ended.
        member: Member,
        /// How long.
        silence_s: u64,
    },
    /// The rank cannot be waited for. It was stopped.
    #[error("cannot wait for {member}")]
    Wait {
        /// The rank.
        member: Member,
        /// Why.
        source: io::Error,
    },
}

/// How a process ended, with the last thing it printed outside its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Exit code or signal.
    pub status: ExitStatus,
    /// Last line.
    pub last_words: String,
}

/// Ranks that run.
#[derive(Debug, Default)]
pub struct Children {
    children: Vec<Running>,
}

#[derive(Debug)]
struct Running {
    member: Member,
    process: Child,
    status: Option<ExitStatus>,
    streams_open: u8,
    said: Option<LastWord>,
    last_words: String,
    failed_at: Option<Instant>,
}

/// What a rank said of its failure.
#[derive(Debug)]
struct LastWord {
    message: String,
    exit_code: u8,
    culprit: Option<Member>,
}

/// What comes from a child's two streams.
enum Heard {
    Event(Event),
    Words(String),
    Ended,
}

type Told = (usize, Heard);

impl Children {
    /// Starts one process for each rank, listens until all have ended, and gives their events to `hear`.
    ///
    /// # Errors
    ///
    /// The first [`ChildError`], or that of a rank that was killed about then. All ranks are stopped.
    pub fn run(
        commands: Vec<(Member, Command)>,
        silence_max: Duration,
        mut hear: impl FnMut(Member, Event),
    ) -> Result<(), ChildError> {
        let (tell, told) = mpsc::channel();
        let mut children = Self::default();
        for (member, command) in commands {
            children.start(member, command, &tell)?;
        }
        drop(tell);
        children.listen(&told, silence_max, &mut hear)
    }

    fn start(&mut self, member: Member, mut command: Command, tell: &Sender<Told>) -> Result<(), ChildError> {
        let program = PathBuf::from(command.get_program());
        let failed = |source| ChildError::Start { program: program.clone(), source };
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(failed)?;
        let (stdout, stderr) = (process.stdout.take(), process.stderr.take());
        let index = self.children.len();
        // Owned from here on, so that a failure below stops it too.
        self.children.push(Running {
            member,
            process,
            status: None,
            streams_open: 2,
            said: None,
            last_words: String::new(),
            failed_at: None,
        });
        relay(stdout, index, tell.clone(), |line| match serde_json::from_str(&line) {
            Ok(event) => Heard::Event(event),
            // Libraries print here too.
            Err(_) => Heard::Words(line),
        })
        .and_then(|()| relay(stderr, index, tell.clone(), Heard::Words))
        .map_err(failed)
    }

    fn listen(
        &mut self,
        told: &Receiver<Told>,
        silence_max: Duration,
        hear: &mut impl FnMut(Member, Event),
    ) -> Result<(), ChildError> {
        let mut last_heard = Instant::now();
        loop {
            match told.recv_timeout(LOOK_INTERVAL) {
                Ok((index, heard)) => {
                    last_heard = Instant::now();
                    self.children[index].take(heard, hear);
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Every stream has ended; what is left is to wait for the processes, without spinning.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK_INTERVAL),
            }
            for child in &mut self.children {
                child.look()?;
            }
            let running = self.children.iter().find(|child| !child.is_over());
            let failed_at = self.children.iter().filter_map(|child| child.failed_at).min();
            match (running, failed_at) {
                (None, None) => return Ok(()),
                (Some(_), Some(at)) if at.elapsed() < FAILURE_GRACE => {}
                (_, Some(_)) => return Err(self.failure()),
                (Some(child), None) if last_heard.elapsed() >= silence_max => {
                    let silence_s = silence_max.as_secs();
                    return Err(ChildError::Silence { member: child.member, silence_s });
                }
                (Some(_), None) => {}
            }
        }
    }

    /// The failure behind that of `first`, as far as ranks name each other. Those who do so in a circle leave it at `first`.
    fn cause<'a>(&'a self, first: &'a Running) -> &'a Running {
        let mut cause = first;
        for _ in &self.children {
            let failed = |child: &&Running| Some(child.member) == cause.culprit() && child.failed_at.is_some();
            match self.children.iter().find(failed) {
                Some(earlier) => cause = earlier,
                None => return cause,
            }
        }
        first
    }

    /// The failure to report, of those there are: a kill before a rank's own words, then the earliest, or the one that
    /// it is the consequence of. The order in which lines arrive here says little between two that depend on each other.
    fn failure(&self) -> ChildError {
        let failed = self.children.iter().filter_map(|child| Some((!child.is_killed(), child.failed_at?, child)));
        let (_, _, first) = failed.min_by_key(|(unkilled, at, _)| (*unkilled, *at)).expect("asked for once one failed");
        let child = self.cause(first);
        match (&child.said, child.status) {
            (Some(LastWord { message, exit_code, .. }), _) => {
                ChildError::Failed { member: child.member, message: message.clone(), exit_code: *exit_code }
            }
            (None, status) => {
                let end = End { status: status.unwrap_or_default(), last_words: child.last_words.clone() };
                ChildError::Ended { member: child.member, end }
            }
        }
    }
}

impl Running {
    fn culprit(&self) -> Option<Member> {
        self.said.as_ref()?.culprit
    }

    fn take(&mut self, heard: Heard, hear: &mut impl FnMut(Member, Event)) {
        match heard {
            Heard::Event(Event::Error { message, exit_code, culprit }) => {
                self.said.get_or_insert(LastWord { message: one_line(&message), exit_code, culprit });
                self.failed_at.get_or_insert_with(Instant::now);
            }
            Heard::Event(event) => hear(self.member, event),
            Heard::Words(words) => self.last_words = one_line(&words),
            Heard::Ended => self.streams_open -= 1,
        }
    }

    /// Notices the end of the process.
    fn look(&mut self) -> Result<(), ChildError> {
        if self.status.is_none() {
            self.status = self.process.try_wait().map_err(|source| ChildError::Wait { member: self.member, source })?;
        }
        if self.is_over() && self.status.is_some_and(|status| !status.success()) {
            self.failed_at.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.status.is_some() && self.streams_open == 0
    }

    fn is_killed(&self) -> bool {
        self.status.is_some_and(|status| status.signal().is_some())
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in self.children.iter_mut().filter(|child| child.status.is_none()) {
            // Fails only if the process has ended meanwhile; waiting is right then too.
            let _ = child.process.kill();
            let _ = child.process.wait();
        }
    }
}

/// Reads lines on a thread of its own until the stream ends; one that is too long comes in parts.
fn relay(
    stream: Option<impl Read + Send + 'static>,
    index: usize,
    tell: Sender<Told>,
    heard: impl Fn(String) -> Heard + Send + 'static,
) -> io::Result<()> {
    let stream = stream.ok_or(io::ErrorKind::BrokenPipe)?;
    let read = move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        // Nobody listens any more once the run is over.
        while let Ok(1..) = stream.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            let _ = tell.send((index, heard(String::from_utf8_lossy(&line).trim_end().to_owned())));
            line.clear();
        }
        let _ = tell.send((index, Heard::Ended));
    };
    thread::Builder::new().name("relay".into()).spawn(read).map(|_| ())
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.status.signal(), self.status.code()) {
            (Some(signal), _) => write!(f, "signal {signal}")?,
            (None, code) => write!(f, "exit code {}", code.unwrap_or_default())?,
        }
        if self.last_words.is_empty() { Ok(()) } else { write!(f, ", last words {:?}", self.last_words) }
    }
}

#[cfg(test)]
mod tests {
    use kvferry_test_process::in_time;

    use super::*;
    use crate::meet::Side;

    const SILENCE_MAX: Duration = Duration::from_secs(60);

    fn shell(rank: u32, script: &str) -> (Member, Command) {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        (Member { side: Side::Sender, rank }, command)
    }

    fn run(scripts: &[&str], silence_max: Duration) -> (Result<(), String>, Vec<(u32, Event)>) {
        let mut events = Vec::new();
        let commands = (0..).zip(scripts).map(|(rank, script)| shell(rank, script)).collect();
        let outcome = Children::run(commands, silence_max, |member, event| events.push((member.rank, event)));
        (outcome.map_err(|error| crate::failure::line(&error)), events)
    }

    #[test]
    fn events_are_told_apart_from_other_lines() {
        let line = r#"{"event":"progress","phase":"move","done_bytes":1,"total_bytes":2}"#;
        let (outcome, events) = run(&[&format!("echo noise; echo '{line}'; printf '%s' '{line}'")], SILENCE_MAX);
        let event = Event::Progress { phase: crate::event::Phase::Move, done_bytes: 1, total_bytes: Some(2) };
        assert_eq!((outcome, events), (Ok(()), vec![(0, event.clone()), (0, event)]));
    }

    /// One failure ends the run at once, whatever the others do.
    #[test]
    fn the_first_failure_ends_all() {
        let started = Instant::now();
        let error = r#"{"event":"error","message":"no luck","exit_code":1}"#;
        for (script, expected) in [
            (format!("echo '{error}'; exit 1"), "sender rank 1: no luck"),
            ("echo word >&2; exit 3".to_owned(), "sender rank 1 ended with exit code 3, last words \"word\""),
            ("kill -KILL $$".to_owned(), "sender rank 1 ended with signal 9"),
        ] {
            let (outcome, _) = run(&["exec sleep 600", &script], SILENCE_MAX);
            assert_eq!(outcome, Err(expected.to_owned()));
        }
        assert!(started.elapsed() < SILENCE_MAX);
    }

    /// A rank that missed a killed one is not the reason.
    #[test]
    fn a_kill_goes_before_words() {
        let error = r#"{"event":"error","message":"rank 1 is gone","exit_code":1}"#;
        // Within a second, which a busy machine may take to start a shell.
        in_time(|| {
            let (outcome, _) = run(&[&format!("echo '{error}'; exit 1"), "sleep 0.1; kill -KILL $$"], SILENCE_MAX);
            outcome == Err("sender rank 1 ended with signal 9".to_owned())
        });
    }

    /// Of two failures the one behind the other is reported, in whatever order their lines come.
    #[test]
    fn a_cause_goes_before_its_consequence() {
        let error = |message: &str, culprit: &str| {
            format!(r#"echo '{{"event":"error","message":"{message}","exit_code":1{culprit}}}'; exit 1"#)
        };
        let of = |rank: u32| format!(r#","culprit":{{"side":"sender","rank":{rank}}}"#);
        let late = |script: String| format!("sleep 0.1; {script}");
        for (scripts, expected) in [
            ([error("lost 1", &of(1)), late(error("full", "")), "exec sleep 600".into()], "sender rank 1: full"),
            ([error("lost 1", &of(1)), late(error("lost 2", &of(2))), late("exit 3".into())], "sender rank 2 ended"),
            (
                [error("lost 1", &of(1)), late(error("lost 0", &of(0))), "exec sleep 600".into()],
                "sender rank 0: lost 1",
            ),
            ([error("lost 1", &of(1)), "exec sleep 600".into(), "exec sleep 600".into()], "sender rank 0: lost 1"),
        ] {
            // As above.
            in_time(|| {
                let (outcome, _) = run(&scripts.each_ref().map(String::as_str), SILENCE_MAX);
                let line = outcome.unwrap_err();
                println!("{line}");
                line.starts_with(expected)
            });
        }
    }

    #[test]
    fn silence_ends_all() {
        let (outcome, _) = run(&["exec sleep 600"], Duration::from_secs(1));
        assert_eq!(outcome, Err("no rank said anything for 1 s, sender rank 0 has not ended".to_owned()));
    }

    #[test]
    fn a_missing_program_is_named() {
        let commands = vec![(Member { side: Side::Sender, rank: 0 }, Command::new("/nonexistent/sender"))];
        let error = Children::run(commands, SILENCE_MAX, |_, _| {}).unwrap_err();
        assert!(crate::failure::line(&error).starts_with("cannot start /nonexistent/sender: "), "{error}");
    }
}
