//! Cancelled transfers: once they are released, no byte of them moves.

use std::time::{Duration, Instant};

use kvferry_agent::{Operation, State};
use kvferry_test_process::within;

use crate::child::Other;
use crate::end::{DEADLINE, End, WAYS};

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
