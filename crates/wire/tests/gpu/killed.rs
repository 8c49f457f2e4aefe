//! A target that dies: its peers' GPU contexts go on.

use kvferry_test_process::{Process, setup};
use kvferry_wire::{PutError, RegionCard, Route, TransferId};

use crate::child::{Setup, Target};
use crate::end::{End, pattern};
use crate::plan::{Random, Shape};

const BYTES: u64 = 1 << 30;

/// Kills the target before, in the middle of, or after transfers, and goes on with another.
fn check(route: Route) {
    let end = End::start(Some(route), None, BYTES);
    let mut other = Target::start(&Setup { epoch: 0xc, ..Setup::new(BYTES) });
    let (other_endpoint, other_remote) = end.connect(&other);
    let shape = Shape::blocks(64 << 10, (BYTES >> 16) as u32, &mut Random(1));
    let source = pattern(BYTES);
    let mut expected = vec![0; BYTES as usize];
    shape.apply(&source, &mut expected);
    let moments = [(1, "before", 0, 1), (2, "during", 0, 40), (3, "after", 1, 1)];
    for (epoch, when, transfers_before, transfers_after) in moments {
        let mut target = Target::start(&Setup { epoch, ..Setup::new(BYTES) });
        let (endpoint, remote) = end.connect(&target);
        for _ in 0..transfers_before {
            end.put(endpoint, vec![shape.part(&end.pool, remote)]).unwrap();
        }
        if when != "during" {
            target.process.kill();
        }
        for transfer in 0..transfers_after {
            end.worker.put(endpoint, TransferId(transfer), vec![shape.part(&end.pool, remote)]).unwrap();
        }
        if when == "during" {
            end.done().unwrap();
            target.process.kill();
        }
        let ends: Vec<_> = (usize::from(when == "during")..transfers_after as usize).map(|_| end.done()).collect();
        let last = ends.last().unwrap();
        assert!(matches!(last, Err(PutError::Endpoint { .. })), "{when}: {last:?}");
        // As long as CUDA IPC was seen to take to kill the initiator, and longer.
        std::thread::sleep(std::time::Duration::from_millis(500));
        other.fill(0);
        end.put(other_endpoint, vec![shape.part(&end.pool, other_remote)]).unwrap();
        assert!(other.holds(&expected), "{when}: the other target");
    }
}

#[test]
#[ignore = "needs CUDA"]
fn landing() {
    check(Route::Landing);
}

#[test]
#[ignore = "needs CUDA"]
fn staged() {
    check(Route::Staged);
}

/// Sources that die in the middle: what they were granted serves others, and the target's context goes on.
#[test]
#[ignore = "needs CUDA"]
fn sources_that_land() {
    let mut target = Target::start(&Setup { epoch: 0xf, ..Setup::new(BYTES / 8) });
    for _ in 0..3 {
        let setup = (&target.address, target.epoch, &target.card);
        let (mut source, _open) = Process::start::<()>("killed::source", &setup, |_| {});
        std::thread::sleep(std::time::Duration::from_millis(1500));
        source.kill();
    }
    let end = End::start(Some(Route::Landing), None, BYTES / 8);
    let shape = Shape::blocks(16 << 10, (BYTES >> 17) as u32, &mut Random(2));
    let (endpoint, remote) = end.connect(&target);
    end.put(endpoint, vec![shape.part(&end.pool, remote)]).unwrap();
    let mut expected = vec![0; (BYTES / 8) as usize];
    shape.apply(&pattern(BYTES / 8), &mut expected);
    assert!(target.holds(&expected));
}

#[test]
#[ignore = "a process that is killed; does nothing by itself"]
fn source() {
    let Some((address, epoch, card)) = setup::<(Vec<u8>, u64, RegionCard)>() else { return };
    let end = End::start(Some(Route::Landing), None, BYTES / 8);
    let endpoint = end.worker.connect(&address, epoch).unwrap();
    let remote = end.worker.import(endpoint, &card).unwrap();
    let shape = Shape::blocks(16 << 10, (BYTES >> 17) as u32, &mut Random(1));
    loop {
        (0..4).for_each(|id| end.worker.put(endpoint, TransferId(id), vec![shape.part(&end.pool, remote)]).unwrap());
        for _ in 0..4 {
            end.done().unwrap();
        }
    }
}

#[test]
#[ignore = "needs CUDA"]
fn direct() {
    check(Route::Direct);
}
