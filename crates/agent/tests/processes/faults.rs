//! Peers that are killed, frozen and started again.

use std::time::{Duration, Instant};

use kvferry_agent::{AgentOptions, Failure, Operation, PostError, RemoteError, State, Transfer};
use kvferry_test_process::{in_time, within};

use crate::child::Other;
use crate::end::{DEADLINE, End, PATIENCE, WAYS, options};

const BOTH: [Operation; 2] = [Operation::Write, Operation::Read];

fn post(transfer: &Transfer) {
    let _ = transfer.post(None).unwrap();
}

#[test]
fn memory_of_the_callers_own_is_written_and_read() {
    for way in WAYS {
        let (end, mut other) = (End::start(way), Other::start("other", way));
        let remote = end.list(&other);
        end.memory.fill(7);
        let write = end.all(Operation::Write, &remote, b"written");
        post(&write);
        assert_eq!(other.heard(), [b"written"]);
        assert!(other.holds(7) && write.wait(DEADLINE) == State::Done, "{way:?}");
        other.fill(9);
        let read = end.all(Operation::Read, &remote, b"read");
        post(&read);
        assert_eq!(read.wait(DEADLINE), State::Done, "{way:?}: {:?}", read.failure());
        assert!(end.memory.holds(9) && other.heard() == [b"read"], "{way:?}");
        other.greet(end.agent.metadata());
        let heard = end.agent.wait_notifications(DEADLINE);
        assert_eq!(
            heard.iter().map(|heard| (&*heard.from, &*heard.message)).collect::<Vec<_>>(),
            [("other", &b"hello"[..])]
        );
    }
}

/// Everything that is under way ends with an error, soon, and is quiet; a later life of the peer is another.
#[test]
fn a_killed_peer_is_an_error_and_its_next_life_another_agent() {
    for way in WAYS {
        for operation in BOTH {
            in_time(|| {
                let mut was_under_way = false;
                within(Duration::from_secs(5), || {
                    let took;
                    (was_under_way, took) = killed_during_transfers(way, operation);
                    took
                });
                was_under_way
            });
        }
    }
}

/// Whether something was under way when the peer was killed, and how long it took to end.
fn killed_during_transfers(way: Option<&str>, operation: Operation) -> (bool, Duration) {
    let (end, mut other) = (End::start(way), Other::start("other", way));
    let remote = end.list(&other);
    let all: Vec<Transfer> = (0..50).map(|_| end.all(operation, &remote, b"")).collect();
    all.iter().for_each(post);
    other.process.kill();
    let start = Instant::now();
    let states: Vec<State> = all.iter().map(|transfer| transfer.wait(DEADLINE)).collect();
    let took = start.elapsed();
    assert!(!states.contains(&State::Active), "{way:?} {operation:?}");
    if !states.contains(&State::Failed) {
        return (false, took);
    }
    let is_gone = |failure| matches!(failure, Failure::Disconnected { name } if name == "other");
    assert!(all.iter().filter_map(Transfer::failure).all(is_gone), "{way:?} {operation:?}");
    assert!(matches!(all[0].post(None), Err(PostError::Stale { .. } | PostError::Active)), "{way:?}");
    for transfer in all {
        transfer.release(DEADLINE).unwrap();
    }
    let mut next = Other::start("other", way);
    let remote = end.list(&next);
    end.memory.fill(3);
    let write = end.all(Operation::Write, &remote, b"again");
    post(&write);
    assert_eq!(next.heard(), [b"again"]);
    assert!(next.holds(3), "{way:?} {operation:?}");
    (true, took)
}

#[test]
fn a_peer_that_is_frozen_is_given_up_in_time_and_its_memory_is_not_quiet() {
    for operation in BOTH {
        within(4 * PATIENCE, || {
            let (end, other) = (End::start(Some("tcp")), Other::start("other", Some("tcp")));
            let remote = end.list(&other);
            end.agent.connect("other", DEADLINE).unwrap();
            other.process.stop();
            let transfer = end.all(operation, &remote, b"");
            post(&transfer);
            let start = Instant::now();
            assert!(matches!(end.agent.connect("other", PATIENCE / 4), Ok(()) | Err(RemoteError::Silent { .. })));
            assert_eq!(transfer.wait(DEADLINE), State::Failed);
            let took = start.elapsed();
            let failure = transfer.failure().unwrap();
            assert!(matches!(failure, Failure::Disconnected { .. } | Failure::Silent { .. }), "{failure:?}");
            // What this side reads it has stopped to read; what the peer was asked to write it may still write.
            match operation {
                Operation::Write => transfer.quiet(DEADLINE).unwrap(),
                Operation::Read => assert!(transfer.quiet(Duration::from_millis(50)).is_err()),
            }
            other.process.go_on();
            transfer.release(DEADLINE).unwrap();
            took
        });
    }
}

#[test]
fn a_transfer_that_takes_longer_than_it_may_is_cancelled() {
    for operation in BOTH {
        let allowed = Duration::from_millis(100);
        let options = AgentOptions { transfer_deadline: Some(allowed), ..options(Some("tcp")) };
        let (end, other) = (End::start_with(options), Other::start("other", Some("tcp")));
        let remote = end.list(&other);
        end.agent.connect("other", DEADLINE).unwrap();
        other.process.stop();
        let transfer = end.all(operation, &remote, b"");
        post(&transfer);
        std::thread::sleep(5 * allowed);
        assert_eq!(transfer.state(), State::Active); // it may still be written
        other.process.go_on();
        assert_eq!(transfer.wait(DEADLINE), State::Failed);
        assert_eq!(transfer.failure(), Some(Failure::Deadline { allowed }), "{operation:?}");
        transfer.release(DEADLINE).unwrap();
    }
}
