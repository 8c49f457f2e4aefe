//! Two agents of one process: what is written and read, and what is refused.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use kvferry_agent::wire::{ContextOptions, ListError, MemoryKind, Region, Route, Run};
use kvferry_agent::{
    Agent, AgentOptions, Failure, Indices, List, MakeError, MemoryError, MetadataError, Notification, Operation,
    PostError, RemoteError, State,
};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 64;
const DEADLINE: Duration = Duration::from_secs(20);

struct Side {
    agent: Agent,
    memory: Region,
}

impl Side {
    fn start(name: &str, options: AgentOptions) -> Self {
        let agent = Agent::new(name, options).unwrap();
        let memory = agent.context().allocate(BLOCK * BLOCKS).unwrap();
        agent.register(memory.clone()).unwrap();
        Self { agent, memory }
    }

    fn runs(&self) -> Vec<Run> {
        (0..BLOCKS).map(|block| Run { address: self.memory.base() + block * BLOCK, bytes: BLOCK }).collect()
    }

    fn fill(&self, seed: u8) {
        let block = |block: u64| vec![seed ^ block.to_le_bytes()[0]; usize::try_from(BLOCK).unwrap()];
        self.memory.write(0, &(0..BLOCKS).flat_map(block).collect::<Vec<_>>()).unwrap();
    }

    fn block(&self, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(BLOCK).unwrap()];
        self.memory.read(block * BLOCK, &mut bytes).unwrap();
        bytes
    }

    fn local(&self) -> List {
        self.agent.prepare_local(MemoryKind::Host, &self.runs()).unwrap()
    }

    /// A list of another agent's memory.
    fn remote(&self, other: &Self) -> List {
        let name = self.agent.add_remote(&other.agent.metadata()).unwrap();
        self.agent.prepare_remote(&name, MemoryKind::Host, &other.runs()).unwrap()
    }

    fn hears(&self, from: &str, message: &[u8]) {
        let heard = self.agent.wait_notifications(DEADLINE);
        assert_eq!(heard, [Notification { from: from.to_owned(), message: message.to_vec() }]);
    }
}

fn pair() -> [Side; 2] {
    ["a", "b"].map(|name| Side::start(name, AgentOptions::default()))
}

fn over(transports: Option<&str>, route: Option<Route>) -> AgentOptions {
    let context = ContextOptions { transports: transports.map(str::to_owned), route, ..ContextOptions::default() };
    AgentOptions { context, ..AgentOptions::default() }
}

/// Writes and reads, directly, by the kernel or by asking the peer, with notifications that say no more than is true.
#[test]
fn blocks_are_written_and_read_and_the_peer_is_notified() {
    for (transports, route) in [(None, None), (Some("tcp"), None), (None, Some(Route::Landing))] {
        let [a, b] = ["a", "b"].map(|name| Side::start(name, over(transports, route)));
        let (local, remote) = (a.local(), a.remote(&b));
        a.agent.connect("b", DEADLINE).unwrap();
        a.fill(7);
        let (from, to) = ([3, 9, 4, 9], [60, 0, 1, 2]);
        let write = a.agent.make(Operation::Write, &local, Indices::I32(&from), &remote, Indices::U64(&to), Some(b"w"));
        let write = write.unwrap();
        assert_eq!((write.state(), write.bytes()), (State::Made, 4 * BLOCK));
        let _ = write.post(None).unwrap();
        b.hears("a", b"w");
        for (from, to) in from.iter().zip(to) {
            assert_eq!(b.block(to), a.block(u64::try_from(*from).unwrap()), "{transports:?} {route:?}");
        }
        assert_eq!(write.wait(DEADLINE), State::Done);
        assert_eq!(b.block(3), vec![0; 512]);
        let told = write.telemetry().unwrap();
        assert_eq!((told.bytes, told.entries), (4 * BLOCK, 4));

        b.fill(9);
        let read = a.agent.make(Operation::Read, &local, Indices::All, &remote, Indices::All, Some(b"r")).unwrap();
        for _ in 0..2 {
            a.memory.write(0, &vec![0; usize::try_from(BLOCK * BLOCKS).unwrap()]).unwrap();
            let _ = read.post(None).unwrap();
            assert_eq!(read.wait(DEADLINE), State::Done, "{:?}", read.failure());
            assert!((0..BLOCKS).all(|block| a.block(block) == b.block(block)), "{transports:?} {route:?}");
            b.hears("a", b"r");
        }
        let _ = read.post(Some(b"another")).unwrap();
        b.hears("a", b"another");
        read.release(DEADLINE).unwrap();
    }
}

#[test]
fn an_agent_writes_to_itself_and_says_things_alone() {
    let [a, b] = pair();
    let own = a.agent.prepare_remote("a", MemoryKind::Host, &a.runs()).unwrap();
    a.fill(1);
    let copy = a.agent.make(Operation::Write, &a.local(), Indices::U32(&[1]), &own, Indices::I64(&[2]), Some(b"me"));
    assert_ne!(copy.as_ref().unwrap().post(None).unwrap(), State::Failed);
    a.hears("a", b"me");
    assert_eq!(a.block(2), a.block(1));
    assert!(matches!(a.agent.send_notification("b", b"x"), Err(RemoteError::Unknown { .. })));
    a.agent.add_remote(&b.agent.metadata()).unwrap();
    a.agent.send_notification("b", b"hello").unwrap();
    b.hears("a", b"hello");
}

#[test]
fn what_is_wrong_is_named_and_nothing_is_sent() {
    let [a, b] = pair();
    let (local, remote) = (a.local(), a.remote(&b));
    let make = |from: &[i32], to: &[i32]| {
        a.agent.make(Operation::Write, &local, Indices::I32(from), &remote, Indices::I32(to), None).unwrap_err()
    };
    let entries = usize::try_from(BLOCKS).unwrap();
    assert!(
        matches!(make(&[0, 64], &[0, 0]), MakeError::Pair(ListError::Index { place: 1, index: 64, entries: e }) if e == entries)
    );
    assert!(matches!(make(&[0, 0], &[-1, 0]), MakeError::Pair(ListError::RemoteIndex { place: 0, .. })));
    assert!(matches!(make(&[0, 0], &[0]), MakeError::Pair(ListError::Count { local: 2, remote: 1 })));
    let outside = Run { address: a.memory.base() + BLOCK * BLOCKS - 1, bytes: 2 };
    let runs = [a.runs()[0], outside];
    let error = a.agent.prepare_local(MemoryKind::Host, &runs).unwrap_err();
    assert!(matches!(error, MakeError::Local { index: 1, run, .. } if run == outside));
    let error = a.agent.prepare_local(MemoryKind::Cuda, &a.runs()).unwrap_err();
    assert!(matches!(error, MakeError::Local { index: 0, .. }));
    let error = a.agent.prepare_remote("b", MemoryKind::Host, &[outside]).unwrap_err();
    assert!(matches!(error, MakeError::Remote { index: 0, name, .. } if name == "b"));
    let half = a.agent.prepare_local(MemoryKind::Host, &[Run { address: a.memory.base(), bytes: 1 }]).unwrap();
    let error = a.agent.make(Operation::Write, &half, Indices::All, &remote, Indices::I32(&[0]), None).unwrap_err();
    assert!(matches!(error, MakeError::Pair(ListError::Bytes { index: 0, local: 1, remote: BLOCK })));
    let error = a.agent.make(Operation::Write, &remote, Indices::All, &local, Indices::All, None).unwrap_err();
    assert!(matches!(error, MakeError::Side { local: true }));
    let mut damaged = b.agent.metadata();
    damaged[40] ^= 1;
    let damaged = a.agent.add_remote(&damaged).unwrap_err();
    assert!(matches!(damaged, RemoteError::Metadata(MetadataError::Damaged { .. })));
    assert!(b.agent.notifications().is_empty() && (0..BLOCKS).all(|block| b.block(block) == vec![0; 512]));
}

#[test]
fn memory_that_was_deregistered_takes_part_in_nothing() {
    let [a, b] = pair();
    let (local, remote) = (a.local(), a.remote(&b));
    let write = a.agent.make(Operation::Write, &local, Indices::All, &remote, Indices::All, None).unwrap();
    let id = a.memory.id();
    let busy = a.agent.deregister(id, Duration::from_millis(5)).unwrap_err(); // `a.memory` is a clone
    assert!(matches!(busy, MemoryError::Busy { .. }));
    let busy = a.agent.deregister(id, Duration::from_millis(5)).unwrap_err();
    assert!(matches!(busy, MemoryError::Busy { .. }));
    assert!(matches!(write.post(None), Err(PostError::Deregistered)));
    let again = a.agent.make(Operation::Write, &local, Indices::All, &remote, Indices::All, None);
    assert!(matches!(again, Err(MakeError::Deregistered)));
    // A part of the metadata, and the address alone.
    let name = |bytes: &[u8]| a.agent.add_remote(bytes).unwrap();
    assert_eq!(name(&b.agent.metadata_of(&[], true).unwrap()), "b");
    assert!(a.agent.knows("b", MemoryKind::Host, &b.runs()));
    let more = b.agent.context().allocate(100).unwrap();
    let run = Run { address: more.base(), bytes: 100 };
    let more = b.agent.register(more).unwrap();
    assert!(!a.agent.knows("b", MemoryKind::Host, &[run]));
    name(&b.agent.metadata_of(&[more], false).unwrap());
    assert!(a.agent.knows("b", MemoryKind::Host, &[run, b.runs()[0]]));
    b.agent.deregister(more, DEADLINE).unwrap();
    // A read of it is refused by the peer, where it is asked, or found to be withdrawn where it is not.
    let mine = a.agent.context().allocate(100).unwrap();
    let here = [Run { address: mine.base(), bytes: 100 }];
    a.agent.register(mine).unwrap();
    let read = a.agent.make_once(Operation::Read, (MemoryKind::Host, &here), ("b", MemoryKind::Host, &[run]), None);
    let read = read.unwrap();
    let _ = read.post(None).unwrap();
    assert_eq!(read.wait(DEADLINE), State::Failed, "{:?}", read.telemetry());
    assert!(matches!(read.failure(), Some(Failure::Refused { .. } | Failure::Wire(_))), "{:?}", read.failure());
}

#[test]
fn each_run_is_looked_up_by_itself() {
    let a = Side::start("a", AgentOptions::default());
    let part = a.agent.context().allocate(4 * BLOCK).unwrap();
    let (base, other) = (a.memory.base(), part.base());
    a.agent.register(part).unwrap();
    let whole = BLOCK * BLOCKS;
    let runs = [(base, whole), (base + 1, whole), (base + whole, 0), (base - 1, 1), (other, 4 * BLOCK), (u64::MAX, 1)];
    let runs = runs.map(|(address, bytes)| Run { address, bytes });
    assert_eq!(a.agent.is_registered(MemoryKind::Host, &runs), [true, false, true, false, true, false]);
    assert_eq!(a.agent.is_registered(MemoryKind::Cuda, &runs[..1]), [false]);
}

#[test]
fn an_agent_that_starts_again_is_another_and_what_was_made_for_the_last_is_refused() {
    let [a, b] = pair();
    let (local, remote) = (a.local(), a.remote(&b));
    let write = a.agent.make(Operation::Write, &local, Indices::All, &remote, Indices::All, Some(b"1")).unwrap();
    let _ = write.post(None).unwrap();
    b.hears("a", b"1");
    assert_eq!(write.wait(DEADLINE), State::Done);
    drop(b);
    let b = Side::start("b", AgentOptions::default());
    let renewed = a.remote(&b);
    assert!(matches!(write.post(None), Err(PostError::Stale { name }) if name == "b"));
    let stale = a.agent.make(Operation::Write, &local, Indices::All, &remote, Indices::All, None);
    assert!(matches!(stale, Err(MakeError::Stale { name }) if name == "b"));
    let write = a.agent.make(Operation::Write, &local, Indices::All, &renewed, Indices::All, Some(b"2")).unwrap();
    let _ = write.post(None).unwrap();
    b.hears("a", b"2");
    a.agent.remove_remote("b").unwrap();
    assert!(matches!(write.post(None), Err(PostError::Stale { .. })));
    assert!(matches!(a.agent.remove_remote("b"), Err(RemoteError::Unknown { .. })));
}

#[test]
fn metadata_is_exchanged_by_agents_that_listen() {
    let listen = || AgentOptions { listen: Some(([127, 0, 0, 1], 0).into()), ..AgentOptions::default() };
    let [a, b] = ["a", "b"].map(|name| Side::start(name, listen()));
    let (at_a, at_b) = (a.agent.listens_at().unwrap(), b.agent.listens_at().unwrap());
    assert_eq!(a.agent.fetch_metadata(at_b, Some("b"), DEADLINE).unwrap(), "b");
    assert!(a.agent.fetch_metadata(at_b, Some("c"), DEADLINE).is_err());
    a.agent.send_metadata(at_b, None, DEADLINE).unwrap();
    assert!(a.agent.knows("b", MemoryKind::Host, &b.runs()) && b.agent.knows("a", MemoryKind::Host, &a.runs()));
    b.agent.withdraw_metadata(at_a, DEADLINE).unwrap();
    assert!(!a.agent.knows("b", MemoryKind::Host, &[]));
    assert!(a.agent.send_metadata(at_b, Some(vec![1, 2, 3]), DEADLINE).is_err());
    drop(b);
    let start = Instant::now();
    assert!(a.agent.fetch_metadata(at_b, None, Duration::from_millis(200)).is_err());
    assert!(start.elapsed() < Duration::from_secs(5));
}

/// One deadline for all of an answer, though it comes byte by byte.
#[test]
fn a_peer_that_answers_slowly_is_given_up_in_time() {
    let [a, _] = pair();
    let slow = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let at = slow.local_addr().unwrap();
    let answering = thread::spawn(move || {
        let (mut stream, _) = slow.accept().unwrap();
        let _ = stream.read(&mut [0; 64]).unwrap();
        let mut answer = b"KVFX\x01\x00\x04\x00\x00\x00\x01".to_vec();
        answer.extend([0; 200]);
        // Until the other end is closed.
        answer.iter().take_while(|byte| stream.write_all(&[**byte]).is_ok()).for_each(|_| {
            thread::sleep(Duration::from_millis(50));
        });
    });
    let start = Instant::now();
    assert!(a.agent.fetch_metadata(at, None, Duration::from_millis(300)).is_err());
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    answering.join().unwrap();
}

/// Calls of other threads return, and peers are told, though those threads have the agent still.
#[test]
fn an_agent_that_is_stopped_ends_the_calls_that_wait() {
    let [a, b] = pair();
    let _ = a.remote(&b);
    a.agent.connect("b", DEADLINE).unwrap();
    let nobody = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
    thread::scope(|scope| {
        let exchange = scope.spawn(|| a.agent.fetch_metadata(nobody, None, DEADLINE));
        let heard = scope.spawn(|| a.agent.wait_notifications(DEADLINE));
        thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        a.agent.stop();
        assert!(exchange.join().unwrap().is_err() && heard.join().unwrap().is_empty());
        assert!(start.elapsed() < DEADLINE / 2, "{:?}", start.elapsed());
    });
    assert!(matches!(a.agent.send_notification("b", b"x"), Err(RemoteError::Unknown { .. })));
    a.agent.stop();
}
