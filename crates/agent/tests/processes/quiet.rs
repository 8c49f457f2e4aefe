//! Cancelled transfers: once they are released, no byte of them moves.

use std::time::{Duration, Instant};

use kvferry_agent::wire::MemoryKind;
use kvferry_agent::{Indices, MemoryError, Operation, State};
use kvferry_test_process::within;

use crate::child::Other;
use crate::end::{DEADLINE, End, PIECE, WAYS, lend, runs_of};

/// Trials of each way and direction.
fn trials() -> u32 {
    std::env::var("KVFERRY_CANCEL_TRIALS").map_or(20, |trials| trials.parse().unwrap())
}

#[test]
fn memory_is_used_again_right_after_the_release_and_does_not_change() {
    for way in WAYS {
        let (end, mut other) = (End::start(way), Other::start("other", way));
        let remote = end.list(&other);
        let mut cut = 0;
        // More, if all of them were over before they were given up.
        for trial in 0..10 * trials() {
            if trial >= trials() && cut > 0 {
                break;
            }
            let pause = Duration::from_micros(300 * u64::from(trial % 10));
            // What was to be sent is overwritten: were it still read, the peer would show it.
            end.memory.fill(1);
            other.fill(0);
            let write = end.all(Operation::Write, &remote, b"");
            let _ = write.post(None).unwrap();
            std::thread::sleep(pause);
            write.quiet(DEADLINE).unwrap();
            end.memory.fill(2);
            cut += u32::from(write.state() == State::Failed);
            other.fill(4);
            // What was to be read is overwritten: were it still written, it would change.
            let read = end.all(Operation::Read, &remote, b"");
            let _ = read.post(None).unwrap();
            std::thread::sleep(pause);
            read.release(DEADLINE).unwrap();
            end.memory.fill(5);
            assert!(other.holds(4), "{way:?}, trial {trial}: written after the release");
            assert!(end.memory.holds(5), "{way:?}, trial {trial}: read after the release");
        }
        assert!(cut > 0, "{way:?}: nothing was ever cancelled in its middle");
    }
}

#[test]
fn a_transfer_that_is_dropped_in_its_middle_is_cancelled_and_nobody_waits() {
    for operation in [Operation::Write, Operation::Read] {
        let (end, mut other) = (End::start(Some("tcp")), Other::start("other", Some("tcp")));
        let remote = end.list(&other);
        end.agent.connect("other", DEADLINE).unwrap();
        other.process.stop();
        // A destructor does not wait.
        within(Duration::from_millis(500), || {
            let transfer = end.all(operation, &remote, b"");
            let _ = transfer.post(None).unwrap();
            let start = Instant::now();
            drop(transfer);
            start.elapsed()
        });
        other.process.go_on();
        end.memory.fill(6);
        let next = end.all(Operation::Write, &remote, b"next");
        let _ = next.post(None).unwrap();
        assert_eq!(other.heard(), [b"next"]);
        assert!(other.holds(6), "{operation:?}");
    }
}

/// A read that its peer was asked for, and the peer does not answer: whether its handle is kept, and whether the agent is.
#[test]
fn memory_is_not_given_back_while_a_peer_may_write_it() {
    for (is_dropped, is_closed) in [(false, false), (true, false), (true, true)] {
        let (end, other) = (End::start(Some("tcp")), Other::start("other", Some("tcp")));
        let remote = end.list(&other);
        end.agent.connect("other", DEADLINE).unwrap();
        let (region, lent) = lend(&end.agent);
        let id = region.id();
        let runs = runs_of(&region, PIECE);
        drop(region); // the agent's alone from here on
        let local = end.agent.prepare_local(MemoryKind::Host, &runs).unwrap();
        let read = end.agent.make(Operation::Read, &local, Indices::All, &remote, Indices::All, None).unwrap();
        drop(local);
        other.process.stop();
        let _ = read.post(None).unwrap();
        let read = (!is_dropped).then_some(read);
        if is_closed {
            drop(end);
            assert!(lent.upgrade().is_some(), "given back by an agent that was dropped");
            continue;
        }
        let busy = end.agent.deregister(id, Duration::from_millis(100));
        assert!(matches!(busy, Err(MemoryError::Busy { .. })), "{is_dropped}: {busy:?}");
        assert!(lent.upgrade().is_some(), "{is_dropped}");
        other.process.go_on();
        if let Some(read) = read {
            read.release(DEADLINE).unwrap();
        }
        if is_dropped {
            end.agent.deregister(id, DEADLINE).unwrap();
        }
        // By itself, if nobody asks again.
        let late = Instant::now() + DEADLINE;
        while lent.upgrade().is_some() {
            assert!(Instant::now() < late, "{is_dropped}: never given back");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
