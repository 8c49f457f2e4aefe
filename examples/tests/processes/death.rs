//! Processes that die at the worst time: the others end in time and say who it was, and nobody is left behind.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use kvferry_examples::event::Event;
use kvferry_examples::meet::{Member, Side};
use kvferry_test_process::{in_time, within};

use crate::run::{Running, start};

/// Many short runs, so that there is time to die between the first and the last.
const JOB: &str = "--tokens 8192 --from pp2 --to tp1 --block-tokens-to 1";
const DEADLINE: Duration = Duration::from_secs(5);

/// To notice takes the deadline at most, and to part as long again.
const PARTED: Duration = DEADLINE.saturating_mul(2);

/// Longer than anything needs to fill pools and to notice a death, in an unoptimized build on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn rank(program: &'static str, rank: u32, meet: &str, transport: &str) -> Running {
    let deadline_s = DEADLINE.as_secs();
    start(program, &format!("{JOB} --rank {rank} --meet {meet} --deadline-s {deadline_s} --json {transport}"))
}

/// Kills a sender once its first bytes have moved. The receiver says who it was and ends within its deadline. Returns whether
/// there was something left to move, and how long the others went on.
fn sender_killed(transport: &str) -> (bool, Duration) {
    let directory = tempfile::tempdir().unwrap();
    let meet = directory.path().display().to_string();
    let receiver = rank("receiver", 0, &meet, transport);
    let other = rank("sender", 0, &meet, transport);
    let mut victim = rank("sender", 1, &meet, transport);
    victim.wait_for_first_bytes();
    victim.process.kill().unwrap();
    let killed = Instant::now();
    victim.end();

    let (receiver, other) = (receiver.end(), other.end());
    let took = killed.elapsed();
    if receiver.code == Some(0) {
        return (false, took);
    }
    let line = receiver.failure(1);
    assert!(line.contains("source rank 1 "), "{line}");
    let last = receiver.stdout.lines().last().unwrap();
    let culprit = Some(Member { side: Side::Sender, rank: 1 });
    let expected = Event::Error { message: line.to_owned(), exit_code: 1, culprit };
    assert_eq!(serde_json::from_str::<Event>(last).unwrap(), expected);
    // The other sender's own part may well have arrived before the receiver gave up.
    assert!(matches!(other.code, Some(0 | 1)), "{other:?}");
    (true, took)
}

/// A machine that does nothing else moves it all in the time that the test takes to hear of the first bytes, now and then.
fn kill(attempt: impl Fn() -> (bool, Duration)) {
    in_time(|| {
        let mut soon_enough = false;
        within(PARTED, || {
            let took;
            (soon_enough, took) = attempt();
            took
        });
        soon_enough
    });
}

fn kill_a_sender(transport: &str) {
    kill(|| sender_killed(transport));
}

#[test]
fn a_sender_is_killed_over_shared_memory() {
    kill_a_sender("--transport posix,sysv,cma,self,tcp");
}

#[test]
fn a_sender_is_killed_over_tcp() {
    kill_a_sender("--transport tcp");
}

#[test]
fn a_sender_is_killed_over_what_ucx_chooses() {
    kill_a_sender("");
}

/// Kills the receiver once a sender's first bytes have moved. A sender that had more to move says so and ends within its
/// deadline. Returns whether one had, and how long they went on.
fn receiver_killed(transport: &str) -> (bool, Duration) {
    let directory = tempfile::tempdir().unwrap();
    let meet = directory.path().display().to_string();
    let mut victim = rank("receiver", 0, &meet, transport);
    let other = rank("sender", 0, &meet, transport);
    let mut sender = rank("sender", 1, &meet, transport);
    sender.wait_for_first_bytes();
    victim.process.kill().unwrap();
    let killed = Instant::now();
    victim.end();
    let ended = [sender, other].map(Running::end);
    let took = killed.elapsed();
    let failed: Vec<_> = ended.iter().filter(|sender| sender.code != Some(0)).collect();
    for sender in &failed {
        let line = sender.failure(1);
        assert!(line.contains("destination rank 0 "), "{line}");
    }
    (!failed.is_empty(), took)
}

fn kill_the_receiver(transport: &str) {
    kill(|| receiver_killed(transport));
}

#[test]
fn the_receiver_is_killed_over_shared_memory() {
    kill_the_receiver("--transport posix,sysv,cma,self,tcp");
}

#[test]
fn the_receiver_is_killed_over_tcp() {
    kill_the_receiver("--transport tcp");
}

#[test]
fn the_receiver_is_killed_over_what_ucx_chooses() {
    kill_the_receiver("");
}

/// Processes whose parent is `parent`, with their names.
fn children(parent: u32) -> Vec<(u32, String)> {
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    processes
        .filter_map(|process| stat(process).filter(|stat| stat.parent == parent).map(|s| (process, s.name)))
        .collect()
}

struct Stat {
    name: String,
    state: char,
    parent: u32,
}

/// What the kernel says of a process that there is.
fn stat(process: u32) -> Option<Stat> {
    let text = fs::read_to_string(PathBuf::from(format!("/proc/{process}/stat"))).ok()?;
    let (head, tail) = text.rsplit_once(')')?;
    let mut fields = tail.split_whitespace();
    let (state, parent) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Stat { name: head.split_once('(')?.1.to_owned(), state, parent })
}

/// Waits until `done` gives something.
fn until<T>(mut done: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(started.elapsed() < LONG, "nothing happened");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until all three ranks of a loopback run.
fn ranks(loopback: &Running) -> Vec<(u32, String)> {
    until(|| {
        let children = children(loopback.process.id());
        let all = children.iter().filter(|(_, name)| name == "sender" || name == "receiver").count() == 3;
        all.then_some(children)
    })
}

/// Waits until processes have ended; one that nobody has waited for has ended too.
fn ended(processes: &[(u32, String)]) {
    for (process, name) in processes {
        until(|| stat(*process).is_none_or(|stat| stat.state == 'Z' || stat.name != *name).then_some(()));
    }
}

#[test]
fn a_rank_of_loopback_is_killed() {
    let loopback = start("loopback", JOB);
    let ranks = ranks(&loopback);
    let (victim, _) = ranks.iter().find(|(_, name)| name == "receiver").unwrap();
    kill_process(*victim);
    assert_eq!(loopback.end().failure(1), "receiver rank 0 ended with signal 9");
    ended(&ranks);
}

#[test]
fn nobody_outlives_loopback() {
    let mut loopback = start("loopback", JOB);
    let ranks = ranks(&loopback);
    loopback.process.kill().unwrap();
    loopback.process.wait().unwrap();
    ended(&ranks);
}

fn kill_process(process: u32) {
    let process = rustix::process::Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
}
