//! The other process: this test binary again, which runs nothing but [`target`].

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::process::Command;
use std::time::{Duration, Instant};

use kvferry_test_process::{Answers, Process, cpu_seconds, footprint, serve, setup};
use kvferry_wire::{Context, ContextOptions, Event, RegionCard, Route, TransferId, Worker};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::end::{DEADLINE, MANY, PIECE, pieces};

#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    transports: Option<String>,
    /// Pulls by puts of UCX, whatever is mapped.
    runs: bool,
    epoch: u64,
    bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Card,
    Digest,
    Unregister,
    Cpu,
    Open,
    /// Waits for a frame.
    HearAny,
    /// Says hello, then pulls the whole of a peer's region, so often that it takes a while.
    Pull {
        address: Vec<u8>,
        epoch: u64,
        card: RegionCard,
    },
    /// Sends frames to a worker, and answers when all are on their way.
    Send {
        address: Vec<u8>,
        epoch: u64,
        numbers: Range<u64>,
    },
    /// Waits for so many frames and checks them.
    Hear {
        count: u64,
    },
}

/// Frames from this number on are long: over a socket they come in many parts.
pub(crate) const LONG: u64 = 1 << 20;

/// Frame `number` of a test: its kind and payload.
pub(crate) fn frame(number: u64) -> (u16, Vec<u8>) {
    let bytes = if number < LONG { number * 37 % 1000 } else { 900_000 };
    (number as u16, vec![number as u8; bytes as usize])
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Card { address: Vec<u8>, card: RegionCard },
    Digest(u64),
    Cpu(f64),
    Open { descriptors: usize, resident_bytes: u64 },
    Done,
}

/// A process with a worker and one region, which peers write.
pub(crate) struct Target {
    pub(crate) address: Vec<u8>,
    pub(crate) epoch: u64,
    pub(crate) card: RegionCard,
    pub(crate) process: Process,
    answers: Answers<Answer>,
}

impl Target {
    pub(crate) fn start(transports: Option<&str>, epoch: u64, bytes: u64) -> Self {
        Self::start_with(Setup { transports: transports.map(str::to_owned), runs: false, epoch, bytes })
    }

    /// One that pulls by UCX, a run at a time, or as it likes.
    pub(crate) fn start_puller(runs: bool, epoch: u64, bytes: u64) -> Self {
        Self::start_with(Setup { transports: None, runs, epoch, bytes })
    }

    /// One whose UCX asks after its endpoints all the time.
    pub(crate) fn start_asking(transports: Option<&str>, epoch: u64, bytes: u64) -> Self {
        let setup = Setup { transports: transports.map(str::to_owned), runs: false, epoch, bytes };
        Self::start_in(setup, |command| {
            command.env("UCX_KEEPALIVE_INTERVAL", "10ms");
        })
    }

    fn start_with(setup: Setup) -> Self {
        Self::start_in(setup, |_| {})
    }

    fn start_in(setup: Setup, adapt: impl FnOnce(&mut Command)) -> Self {
        let epoch = setup.epoch;
        let (mut process, mut answers) = Process::start("child::target", &setup, adapt);
        process.tell(&Ask::Card);
        let Some(Answer::Card { address, card }) = answers.next() else { panic!("no card") };
        Self { address, epoch, card, process, answers }
    }

    fn ask(&mut self, question: &Ask) -> Answer {
        self.process.tell(question);
        self.answers.next().expect("the target is there")
    }

    /// Whether the region holds these bytes.
    pub(crate) fn holds(&mut self, expected: &[u8]) -> bool {
        let Answer::Digest(digest) = self.ask(&Ask::Digest) else { panic!("no digest") };
        digest == xxh3_64(expected)
    }

    pub(crate) fn unregister(&mut self) {
        assert!(matches!(self.ask(&Ask::Unregister), Answer::Done));
    }

    pub(crate) fn cpu_seconds(&mut self) -> f64 {
        let Answer::Cpu(seconds) = self.ask(&Ask::Cpu) else { panic!("no time") };
        seconds
    }

    /// Open descriptors and resident bytes.
    pub(crate) fn footprint(&mut self) -> (usize, u64) {
        let Answer::Open { descriptors, resident_bytes } = self.ask(&Ask::Open) else { panic!("no footprint") };
        (descriptors, resident_bytes)
    }

    /// Has it pull from `source`, and waits until they are connected, but not for the end.
    pub(crate) fn pull(&mut self, source: &mut Self) {
        let (address, epoch, card) = (source.address.clone(), source.epoch, source.card.clone());
        assert!(matches!(self.ask(&Ask::Pull { address, epoch, card }), Answer::Done));
        assert!(matches!(source.ask(&Ask::HearAny), Answer::Done));
    }

    /// Has it connect, if it has not, and send frames.
    pub(crate) fn send(&mut self, to: &Worker, numbers: Range<u64>) {
        let (address, epoch) = (to.address().to_owned(), to.epoch());
        assert!(matches!(self.ask(&Ask::Send { address, epoch, numbers }), Answer::Done));
    }

    /// As [`send`](Self::send), and does not wait for that.
    pub(crate) fn start_to_send(&mut self, to: &Worker, numbers: Range<u64>) {
        let (address, epoch) = (to.address().to_owned(), to.epoch());
        self.process.tell(&Ask::Send { address, epoch, numbers });
    }

    /// Whether the frames that it hears are the first `count`, in their order.
    pub(crate) fn hears(&mut self, count: u64) {
        assert!(matches!(self.ask(&Ask::Hear { count }), Answer::Done));
    }
}

#[test]
#[ignore = "the other process of the tests here; does nothing by itself"]
fn target() {
    let Some(setup) = setup::<Setup>() else { return };
    let route = setup.runs.then_some(Route::Runs);
    let context = Context::open(&ContextOptions { transports: setup.transports, route, ..Default::default() }).unwrap();
    let (worker, events) = Worker::start(&context, setup.epoch).unwrap();
    let mut region = Some(context.allocate(setup.bytes).unwrap());
    let card = region.as_ref().unwrap().card();
    let (mut heard, mut endpoints) = (VecDeque::new(), BTreeMap::new());
    serve(|ask| {
        let answer = match ask {
            Ask::Card => Answer::Card { address: worker.address().to_owned(), card: card.clone() },
            Ask::Digest => {
                let mut bytes = vec![0; setup.bytes as usize];
                region.as_ref().unwrap().read(0, &mut bytes).unwrap();
                Answer::Digest(xxh3_64(&bytes))
            }
            Ask::Unregister => {
                region = None;
                std::thread::sleep(Duration::from_millis(20));
                Answer::Done
            }
            Ask::Pull { address, epoch, card } => {
                let endpoint = worker.connect(&address, epoch).unwrap();
                let remote = worker.import(endpoint, &card).unwrap();
                let local = region.as_ref().unwrap();
                worker.send(endpoint, 1, Vec::new()).unwrap();
                for transfer in 0..MANY {
                    let part = pieces(local, remote, setup.bytes / PIECE);
                    worker.get(endpoint, TransferId(transfer), vec![part]).unwrap();
                }
                Answer::Done
            }
            Ask::Send { address, epoch, numbers } => {
                let connect = || worker.connect(&address, epoch).unwrap();
                let endpoint = *endpoints.entry(epoch).or_insert_with(connect);
                for (kind, payload) in numbers.map(frame) {
                    worker.send(endpoint, kind, payload).unwrap();
                }
                worker.lanes(endpoint).unwrap(); // behind the others
                Answer::Done
            }
            Ask::Hear { count } => {
                for number in 0..count {
                    let next = heard.pop_front().unwrap_or_else(|| {
                        loop {
                            if let Event::Frame(frame) = events.recv_timeout(DEADLINE).unwrap() {
                                break (frame.kind, frame.payload);
                            }
                        }
                    });
                    assert_eq!(next, frame(number));
                }
                Answer::Done
            }
            Ask::HearAny => {
                let deadline = Instant::now() + DEADLINE;
                while !matches!(events.recv_deadline(deadline).unwrap(), Event::Frame(_)) {}
                Answer::Done
            }
            Ask::Cpu => Answer::Cpu(cpu_seconds()),
            Ask::Open => {
                let (descriptors, resident_bytes) = footprint();
                Answer::Open { descriptors, resident_bytes }
            }
        };
        for event in events.try_iter() {
            if let Event::Frame(frame) = event {
                heard.push_back((frame.kind, frame.payload));
            }
        }
        answer
    });
}
