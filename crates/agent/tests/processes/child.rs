//! The other process: an agent that lends memory and does what it is told.

use std::time::Duration;

use kvferry_agent::wire::{ContextOptions, MemoryKind, Run};
use kvferry_agent::{Agent, AgentOptions, Notification};
use kvferry_test_process::{Answers, Process, footprint, serve as answer, setup};
use serde::{Deserialize, Serialize};

use crate::end::{BYTES, DEADLINE, Memory, options};

#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    name: String,
    transports: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Metadata,
    /// Takes in another agent and says something to it.
    Greet(Vec<u8>),
    Fill(u8),
    /// Whether all of the memory is this.
    Holds(u8),
    Heard,
    Footprint,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Metadata { metadata: Vec<u8>, base: u64 },
    Holds(bool),
    Heard(Vec<Vec<u8>>),
    Footprint(usize, u64),
    Done,
}

/// An agent in another process.
pub(crate) struct Other {
    pub(crate) process: Process,
    answers: Answers<Answer>,
    pub(crate) metadata: Vec<u8>,
    base: u64,
}

impl Other {
    pub(crate) fn start(name: &str, transports: Option<&str>) -> Self {
        let setup = Setup { name: name.to_owned(), transports: transports.map(str::to_owned) };
        let (mut process, mut answers) = Process::start("child::serve", &setup, |_| {});
        process.tell(&Ask::Metadata);
        let Some(Answer::Metadata { metadata, base }) = answers.next() else { panic!("no metadata") };
        Self { process, answers, metadata, base }
    }

    /// Its memory, in runs of `bytes`.
    pub(crate) fn runs(&self, bytes: u64) -> Vec<Run> {
        (0..BYTES / bytes).map(|run| Run { address: self.base + run * bytes, bytes }).collect()
    }

    fn ask(&mut self, ask: &Ask) -> Answer {
        self.process.tell(ask);
        self.answers.next().expect("it is there")
    }

    pub(crate) fn fill(&mut self, with: u8) {
        assert!(matches!(self.ask(&Ask::Fill(with)), Answer::Done));
    }

    pub(crate) fn greet(&mut self, metadata: Vec<u8>) {
        assert!(matches!(self.ask(&Ask::Greet(metadata)), Answer::Done));
    }

    pub(crate) fn holds(&mut self, all: u8) -> bool {
        let Answer::Holds(holds) = self.ask(&Ask::Holds(all)) else { panic!("no answer") };
        holds
    }

    pub(crate) fn heard(&mut self) -> Vec<Vec<u8>> {
        let Answer::Heard(heard) = self.ask(&Ask::Heard) else { panic!("no answer") };
        heard
    }

    /// Open descriptors and resident bytes.
    pub(crate) fn footprint(&mut self) -> (usize, u64) {
        let Answer::Footprint(descriptors, bytes) = self.ask(&Ask::Footprint) else { panic!("no answer") };
        (descriptors, bytes)
    }
}

#[test]
#[ignore = "the other process of the tests here; does nothing by itself"]
fn serve() {
    let Some(setup) = setup::<Setup>() else { return };
    // It gives nobody up itself, not even when it goes on after it has been frozen for longer than its peer's patience.
    let options = options(setup.transports.as_deref());
    let context = ContextOptions { stall_deadline: DEADLINE, ..options.context };
    let agent = Agent::new(&setup.name, AgentOptions { context, patience: DEADLINE, ..options }).unwrap();
    let memory = Memory::lend(&agent);
    answer(|ask| match ask {
        Ask::Metadata => Answer::Metadata { metadata: agent.metadata(), base: memory.runs(BYTES)[0].address },
        Ask::Greet(metadata) => {
            let name = agent.add_remote(&metadata).unwrap();
            agent.send_notification(&name, b"hello").unwrap();
            Answer::Done
        }
        Ask::Fill(with) => {
            memory.fill(with);
            Answer::Done
        }
        Ask::Holds(all) => Answer::Holds(memory.holds(all)),
        Ask::Heard => {
            let heard = agent.wait_notifications(DEADLINE).into_iter();
            Answer::Heard(heard.map(|Notification { message, .. }| message).collect())
        }
        Ask::Footprint => {
            std::thread::sleep(Duration::from_millis(50)); // what it was asked for last may be about to end
            let (descriptors, bytes) = footprint();
            Answer::Footprint(descriptors, bytes)
        }
    });
    assert!(agent.prepare_local(MemoryKind::Host, &[]).is_ok());
}
