//! The other process: this test binary again, which runs nothing but [`serve`].

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use kvferry_wire::{Context, ContextOptions, RegionCard, Route, TransferId, Worker};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::end::{MANY, PIECE, pieces};

/// Set in the other process, to what it is to be.
const VARIABLE: &str = "KVFERRY_TEST_TARGET";

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
    /// Pulls the whole of a peer's region, so often that it takes a while.
    Pull {
        address: Vec<u8>,
        epoch: u64,
        card: RegionCard,
    },
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
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Target {
    pub(crate) fn start(transports: Option<&str>, epoch: u64, bytes: u64) -> Self {
        Self::start_with(Setup { transports: transports.map(str::to_owned), runs: false, epoch, bytes })
    }

    /// One that pulls by UCX, a run at a time, or as it likes.
    pub(crate) fn start_puller(runs: bool, epoch: u64, bytes: u64) -> Self {
        Self::start_with(Setup { transports: None, runs, epoch, bytes })
    }

    fn start_with(setup: Setup) -> Self {
        let epoch = setup.epoch;
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "child::serve", "--nocapture"]);
        command.env(VARIABLE, serde_json::to_string(&setup).unwrap());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut output = BufReader::new(output);
        let Answer::Card { address, card } = ask(&mut input, &mut output, &Ask::Card) else { panic!("no card") };
        Self { address, epoch, card, child, input, output }
    }

    fn ask(&mut self, question: &Ask) -> Answer {
        ask(&mut self.input, &mut self.output, question)
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

    /// Has it pull from `source`, and does not wait for that.
    pub(crate) fn pull(&mut self, source: &Self) {
        let (address, epoch, card) = (source.address.clone(), source.epoch, source.card.clone());
        assert!(matches!(self.ask(&Ask::Pull { address, epoch, card }), Answer::Done));
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().unwrap();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(input: &mut ChildStdin, output: &mut BufReader<ChildStdout>, question: &Ask) -> Answer {
    writeln!(input, "{}", serde_json::to_string(question).unwrap()).unwrap();
    loop {
        let mut line = String::new();
        assert!(output.read_line(&mut line).unwrap() > 0, "the target is gone");
        // The test harness prints lines of its own, and the name of the test in front of the first.
        if let Some((_, answer)) = line.split_once("answer: ") {
            return serde_json::from_str(answer).unwrap();
        }
    }
}

pub(crate) fn footprint() -> (usize, u64) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
    (descriptors, pages * rustix::param::page_size() as u64)
}

pub(crate) fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[test]
#[ignore = "the other process of the tests here; does nothing by itself"]
fn serve() {
    let Ok(setup) = std::env::var(VARIABLE) else { return };
    let setup: Setup = serde_json::from_str(&setup).unwrap();
    let route = setup.runs.then_some(Route::Runs);
    let context = Context::open(&ContextOptions { transports: setup.transports, route, ..Default::default() }).unwrap();
    let (worker, events) = Worker::start(&context, setup.epoch).unwrap();
    let mut region = Some(context.allocate(setup.bytes).unwrap());
    let card = region.as_ref().unwrap().card();
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line.unwrap()).unwrap() {
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
                for transfer in 0..MANY {
                    let part = pieces(local, remote, setup.bytes / PIECE);
                    worker.get(endpoint, TransferId(transfer), vec![part]).unwrap();
                }
                Answer::Done
            }
            Ask::Cpu => Answer::Cpu(cpu_seconds()),
            Ask::Open => {
                let (descriptors, resident_bytes) = footprint();
                Answer::Open { descriptors, resident_bytes }
            }
        };
        while events.try_recv().is_ok() {}
        println!("answer: {}", serde_json::to_string(&answer).unwrap());
    }
}
