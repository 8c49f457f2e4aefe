//! A rank as the test sees it: a name under which processes follow each other.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use rustix::process::{Pid, Signal, kill_process};

use crate::serve::{Ask, Said, Setup, VARIABLE};

/// Who and in which life, and what it says; `None`: its process has ended.
pub(crate) type Heard = (usize, u32, Option<Said>);

pub(crate) struct Member {
    pub(crate) life: u32,
    /// Of this life, once it has said it.
    pub(crate) card: Option<(Vec<u8>, u64)>,
    pub(crate) connection: Connection,
    pub(crate) fragile: bool,
    pub(crate) frozen_until: Option<Instant>,
    index: usize,
    setup: Setup,
    child: Child,
    input: ChildStdin,
    heard: Sender<Heard>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connection {
    None,
    Asked,
    Made,
}

impl Member {
    pub(crate) fn start(index: usize, setup: Setup, heard: Sender<Heard>) -> Self {
        let (child, input) = spawn(index, 0, &setup, heard.clone());
        let connection = Connection::None;
        Self { life: 0, card: None, connection, fragile: false, frozen_until: None, index, setup, child, input, heard }
    }

    pub(crate) fn ask(&mut self, ask: &Ask) {
        writeln!(self.input, "{}", serde_json::to_string(ask).unwrap()).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn freeze(&mut self, time: Duration) {
        self.signal(Signal::STOP);
        self.frozen_until = Some(Instant::now() + time);
    }

    pub(crate) fn go_on(&mut self) {
        self.signal(Signal::CONT);
        self.frozen_until = None;
    }

    /// Kills it and starts the next under its name.
    pub(crate) fn restart(&mut self) {
        self.life += 1;
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        (self.child, self.input) = spawn(self.index, self.life, &self.setup, self.heard.clone());
        (self.card, self.connection, self.frozen_until) = (None, Connection::None, None);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

fn spawn(index: usize, life: u32, setup: &Setup, heard: Sender<Heard>) -> (Child, ChildStdin) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "serve::serve", "--nocapture"]);
    command.env(VARIABLE, serde_json::to_string(setup).unwrap());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            // The test harness prints lines of its own, and the name of the test in front of the first.
            if let Some((_, said)) = line.split_once("said: ")
                && let Ok(said) = serde_json::from_str(said)
            {
                let _ = heard.send((index, life, Some(said))); // nobody listens: the test has ended
            }
        }
        let _ = heard.send((index, life, None));
    });
    (child, input)
}
