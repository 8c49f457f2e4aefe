//! Both ends of the two pipes.

use std::io::{BufRead, BufReader, Lines, StdinLock, Write};
use std::marker::PhantomData;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Set in the other process, to what it is to be.
const VARIABLE: &str = "KVFERRY_TEST_PROCESS";

/// Before each answer. The test harness prints lines of its own, and the name of the test in front of the first answer.
const MARK: &str = "answer: ";

/// Another process, which is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    input: ChildStdin,
}

impl Process {
    /// Starts this test binary again with nothing but the ignored test `test` (its path within the binary), which finds
    /// `setup` by [`setup`]. `adapt` may change its environment.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    pub fn start<A>(test: &str, setup: &impl Serialize, adapt: impl FnOnce(&mut Command)) -> (Self, Answers<A>) {
        let mut command = Command::new(std::env::current_exe().expect("a process has a file"));
        command.args(["--ignored", "--exact", test, "--nocapture"]);
        command.env(VARIABLE, json(setup)).stdin(Stdio::piped()).stdout(Stdio::piped());
        adapt(&mut command);
        let mut child = command.spawn().expect("this binary runs");
        let input = child.stdin.take().expect("a pipe");
        let output = child.stdout.take().expect("a pipe");
        (Self { child, input }, Answers { lines: BufReader::new(output).lines(), answer: PhantomData })
    }

    /// Asks it something.
    ///
    /// # Panics
    ///
    /// If it has ended.
    pub fn tell(&mut self, ask: &impl Serialize) {
        writeln!(self.input, "{}", json(ask)).expect("the other process is there");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it has not been waited for");
    }

    /// Freezes it: none of its threads does anything any more when this returns. The signal alone is taken by one of them, which
    /// has to run to stop the others, and those go on until then.
    ///
    /// # Panics
    ///
    /// If it cannot be waited for.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(Pid::from_child(&self.child)), stopped).expect("it is ours");
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it and waits for its end.
    ///
    /// # Panics
    ///
    /// If it cannot be waited for.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it is ours");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

/// What another process answers, in order; over when it has ended.
#[derive(Debug)]
pub struct Answers<A> {
    lines: Lines<BufReader<ChildStdout>>,
    answer: PhantomData<fn() -> A>,
}

impl<A: DeserializeOwned> Iterator for Answers<A> {
    type Item = A;

    /// Waits for the next answer. A line that a process was killed over is none.
    fn next(&mut self) -> Option<A> {
        self.lines.by_ref().map_while(Result::ok).find_map(|line| serde_json::from_str(line.split_once(MARK)?.1).ok())
    }
}

/// In the other process: what it is to be, or `None` where the test harness runs it for itself.
///
/// # Panics
///
/// If it is something else than a `T`.
pub fn setup<T: DeserializeOwned>() -> Option<T> {
    let setup = std::env::var(VARIABLE).ok()?;
    Some(serde_json::from_str(&setup).expect("both ends are this binary"))
}

/// In the other process: what it is asked, until nobody asks any more.
///
/// # Panics
///
/// While iterating, if something else than a `Q` is asked.
pub fn asked<Q: DeserializeOwned>() -> impl Iterator<Item = Q> {
    let lines: Lines<StdinLock<'static>> = std::io::stdin().lock().lines();
    lines.map_while(Result::ok).map(|line| serde_json::from_str(&line).expect("both ends are this binary"))
}

/// In the other process: says something that it may not have been asked.
pub fn say(answer: &impl Serialize) {
    println!("{MARK}{}", json(answer));
}

/// In the other process: answers until nobody asks any more.
pub fn serve<Q: DeserializeOwned, A: Serialize>(mut answer: impl FnMut(Q) -> A) {
    asked().for_each(|ask| say(&answer(ask)));
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("what tests say is JSON")
}
