//! The other process: this test binary again, which runs nothing but [`rank`].

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvferry::{InstanceCard, Link, Receive, RequestKey, Send};
use kvferry_test_process::{Answers, Process, serve, setup};
use serde::{Deserialize, Serialize};

use crate::rank::{Rank, Way};

#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    way: Way,
    rank: u32,
    patience: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Card,
    Connect {
        sources: Vec<u8>,
        destinations: Vec<u8>,
    },
    Send {
        key: RequestKey,
        slots: Vec<u32>,
        byte: u8,
    },
    Receive {
        key: RequestKey,
        slots: Vec<u32>,
    },
    Cancel {
        key: RequestKey,
    },
    /// How a request ended, once it has.
    Outcome {
        key: RequestKey,
    },
    /// Whether the slots are quiet within a time.
    Quiet {
        key: RequestKey,
        within: Duration,
    },
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Card(Vec<u8>),
    Done,
    Failed(String),
}

/// An engine in a process of its own.
pub(crate) struct Other {
    /// Of its instance, which has this rank only.
    pub(crate) card: InstanceCard,
    pub(crate) process: Process,
    answers: Answers<Answer>,
}

impl Other {
    pub(crate) fn start(way: Way, rank: u32, patience: Duration) -> Self {
        let (mut process, mut answers) = Process::start("child::rank", &Setup { way, rank, patience }, |_| {});
        process.tell(&Ask::Card);
        let Some(Answer::Card(card)) = answers.next() else { panic!("no card") };
        Self { card: InstanceCard::from_bytes(&card).unwrap(), process, answers }
    }

    fn hear(&mut self) -> Answer {
        self.answers.next().expect("the other process is there")
    }

    fn done(&mut self) -> Result<(), String> {
        match self.hear() {
            Answer::Done => Ok(()),
            Answer::Failed(why) => Err(why),
            answer => panic!("{answer:?}"),
        }
    }

    /// Connects it and whoever `meanwhile` connects at the same time.
    pub(crate) fn connect<T>(&mut self, cards: [&InstanceCard; 2], meanwhile: impl FnOnce() -> T) -> T {
        let [sources, destinations] = cards.map(InstanceCard::to_bytes);
        self.process.tell(&Ask::Connect { sources, destinations });
        let result = meanwhile();
        self.done().unwrap();
        result
    }

    pub(crate) fn send(&mut self, key: RequestKey, slots: &[u32], byte: u8) -> Result<(), String> {
        self.process.tell(&Ask::Send { key, slots: slots.to_vec(), byte });
        self.done()
    }

    pub(crate) fn receive(&mut self, key: RequestKey, slots: &[u32]) -> Result<(), String> {
        self.process.tell(&Ask::Receive { key, slots: slots.to_vec() });
        self.done()
    }

    pub(crate) fn cancel(&mut self, key: RequestKey) {
        self.process.tell(&Ask::Cancel { key });
        self.done().unwrap();
    }

    pub(crate) fn outcome(&mut self, key: RequestKey) -> Result<(), String> {
        self.process.tell(&Ask::Outcome { key });
        self.done()
    }

    pub(crate) fn quiet(&mut self, key: RequestKey, within: Duration) -> Result<(), String> {
        self.process.tell(&Ask::Quiet { key, within });
        self.done()
    }
}

/// A source in another process and a destination in this one, connected.
pub(crate) fn with_source(way: Way, patience: Duration) -> (Other, Rank, Link) {
    let (mut source, destination) = (Other::start(way, 0, patience), Rank::start(way, 0, patience));
    let (from, to) = (source.card.clone(), destination.card());
    let link = source.connect([&from, &to], || destination.engine.connect(&from, &to).unwrap());
    (source, destination, link)
}

/// A source in this process and a destination in another, connected.
pub(crate) fn with_destination(way: Way, patience: Duration) -> (Rank, Other, Link) {
    let (source, mut destination) = (Rank::start(way, 0, patience), Other::start(way, 0, patience));
    let (from, to) = (source.card(), destination.card.clone());
    let link = destination.connect([&from, &to], || source.engine.connect(&from, &to).unwrap());
    (source, destination, link)
}

#[test]
#[ignore = "the other process of the tests here; does nothing by itself"]
fn rank() {
    let Some(Setup { way, rank, patience }) = setup() else { return };
    let rank = Rank::start(way, rank, patience);
    let mut link = None::<Link>;
    let (mut sends, mut receives) = (BTreeMap::<RequestKey, Send>::new(), BTreeMap::<RequestKey, Receive>::new());
    let failed = |error: &dyn std::error::Error| Answer::Failed(error.to_string());
    let long = 4 * patience + Duration::from_secs(10);
    serve(|ask| match ask {
        Ask::Card => Answer::Card(rank.card().to_bytes()),
        Ask::Connect { sources, destinations } => {
            let [sources, destinations] =
                [sources, destinations].map(|card: Vec<u8>| InstanceCard::from_bytes(&card).unwrap());
            // What failed a moment ago may still be going down.
            let until = Instant::now() + Duration::from_secs(10);
            loop {
                match rank.engine.connect(&sources, &destinations) {
                    Ok(made) => {
                        link = Some(made);
                        break Answer::Done;
                    }
                    Err(error) if Instant::now() >= until => break failed(&error),
                    Err(_) => std::thread::sleep(Duration::from_millis(50)),
                }
            }
        }
        Ask::Send { key, slots, byte } => {
            rank.fill(&slots, byte);
            match rank.send(link.unwrap(), key, &slots) {
                Ok(send) => {
                    sends.insert(key, send);
                    Answer::Done
                }
                Err(error) => failed(&error),
            }
        }
        Ask::Receive { key, slots } => match rank.receive(link.unwrap(), key, &slots) {
            Ok(receive) => {
                receives.insert(key, receive);
                Answer::Done
            }
            Err(error) => failed(&error),
        },
        Ask::Cancel { key } => {
            sends.get(&key).into_iter().for_each(Send::cancel);
            receives.get(&key).into_iter().for_each(Receive::cancel);
            Answer::Done
        }
        Ask::Outcome { key } => {
            let sent = sends.get(&key).map(|send| send.wait(long).expect("it ends").map(|_| ()));
            let received = receives.get(&key).map(|receive| receive.wait(long).expect("it ends").map(|_| ()));
            match sent.or(received).expect("it was posted") {
                Ok(()) => Answer::Done,
                Err(error) => failed(&*error),
            }
        }
        Ask::Quiet { key, within } => {
            let sent = sends.get(&key).map(|send| send.wait_quiet(within));
            match sent.or_else(|| receives.get(&key).map(|receive| receive.wait_quiet(within))).unwrap() {
                Ok(_) => Answer::Done,
                Err(error) => failed(&error),
            }
        }
    });
    drop((sends, receives));
}
