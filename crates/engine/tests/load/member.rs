//! A rank as the test sees it: a name under which processes follow each other.

use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use kvferry_test_process::Process;

use crate::serve::{Ask, Said, Setup};

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
    process: Process,
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
        let process = spawn(index, 0, &setup, heard.clone());
        let connection = Connection::None;
        Self { life: 0, card: None, connection, fragile: false, frozen_until: None, index, setup, process, heard }
    }

    pub(crate) fn ask(&mut self, ask: &Ask) {
        self.process.tell(ask);
    }

    pub(crate) fn freeze(&mut self, time: Duration) {
        self.process.stop();
        self.frozen_until = Some(Instant::now() + time);
    }

    pub(crate) fn go_on(&mut self) {
        self.process.go_on();
        self.frozen_until = None;
    }

    /// Kills it and starts the next under its name.
    pub(crate) fn restart(&mut self) {
        self.life += 1;
        self.process.kill();
        self.process = spawn(self.index, self.life, &self.setup, self.heard.clone());
        (self.card, self.connection, self.frozen_until) = (None, Connection::None, None);
    }
}

fn spawn(index: usize, life: u32, setup: &Setup, heard: Sender<Heard>) -> Process {
    let (process, answers) = Process::start("serve::member", setup, |_| {});
    std::thread::spawn(move || {
        // Nobody listens once the test has ended.
        answers.for_each(|said| drop(heard.send((index, life, Some(said)))));
        let _ = heard.send((index, life, None));
    });
    process
}
