//! What many transfers leave behind, and what an idle agent costs.

use std::time::Duration;

use kvferry_agent::{Indices, Operation, State};
use kvferry_test_process::{cpu_seconds, footprint, within};

use crate::child::Other;
use crate::end::{DEADLINE, End, alone, options};

const TRANSFERS: u32 = 10_000;

#[test]
fn ten_thousand_transfers_leave_memory_and_descriptors_as_they_were() {
    let _alone = alone();
    let (end, mut other) = (End::start_alone(options(None)), Other::start("other", None));
    let remote = end.list(&other);
    let mut one = |number: u32| {
        let pieces = [number % 2048, number * 7 % 2048, number * 13 % 2048];
        let pieces = Indices::U32(if number.is_multiple_of(3) { &pieces } else { &pieces[..1] });
        let operation = if number.is_multiple_of(4) { Operation::Read } else { Operation::Write };
        let transfer = end.agent.make(operation, &end.local, pieces, &remote, pieces, None).unwrap();
        let _ = transfer.post(None).unwrap();
        if number.is_multiple_of(11) {
            return transfer.release(DEADLINE).unwrap();
        }
        assert_eq!(transfer.wait(DEADLINE), State::Done, "{:?}", transfer.failure());
    };
    (0..TRANSFERS / 5).for_each(&mut one);
    let (here, there) = (footprint(), other.footprint());
    (0..TRANSFERS).for_each(&mut one);
    let (here_after, there_after) = (footprint(), other.footprint());
    assert!(here_after.0 <= here.0 && there_after.0 <= there.0, "{here:?} {here_after:?} {there:?} {there_after:?}");
    let slack = 2 << 20;
    assert!(
        here_after.1 < here.1 + slack && there_after.1 < there.1 + slack,
        "{here:?} {here_after:?} {there:?} {there_after:?}"
    );
}

#[test]
fn an_idle_agent_takes_no_processor() {
    let _alone = alone();
    let (end, other) = (End::start_alone(options(None)), Other::start("other", None));
    let remote = end.list(&other);
    let transfer = end.all(Operation::Write, &remote, b"");
    let _ = transfer.post(None).unwrap();
    assert_eq!(transfer.wait(DEADLINE), State::Done);
    // For a second after the last deadline, and after its start, the control thread keeps the time: 3 ms of processor time, where
    // an idle agent takes 0.1 ms a second.
    std::thread::sleep(Duration::from_millis(1500));
    within(Duration::from_millis(10), || {
        let used = cpu_seconds();
        std::thread::sleep(Duration::from_secs(1));
        Duration::from_secs_f64(cpu_seconds() - used)
    });
}
