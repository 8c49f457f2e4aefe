//! A target that dies: its peers' GPU contexts go on.

use kvferry_wire::{PutError, Route, TransferId};

use crate::child::{Setup, Target};
use crate::end::{End, pattern};
use crate::plan::{Random, Shape};

const BYTES: u64 = 1 << 30;

/// Kills the target before, in the middle of, or after transfers, and goes on with another.
fn check(route: Route) {
    let end = End::start(Some(route), None, BYTES);
    let mut other = Target::start(&Setup { epoch: 0xc, ..Setup::new(BYTES) });
    let (other_endpoint, other_remote) = end.connect(&other);
    let shape = Shape::blocks(1024, (BYTES / 1024) as u32, &mut Random(1));
    let source = pattern(BYTES);
    let mut expected = vec![0; BYTES as usize];
    shape.apply(&source, &mut expected);
    for (when, transfers_before, transfers_after) in [("before", 0, 1), ("during", 0, 40), ("after", 1, 1)] {
        let mut target = Target::start(&Setup { epoch: 0xd, ..Setup::new(BYTES) });
        let (endpoint, remote) = end.connect(&target);
        for _ in 0..transfers_before {
            end.put(endpoint, vec![shape.part(&end.pool, remote)]).unwrap();
        }
        if when != "during" {
            target.kill();
        }
        for transfer in 0..transfers_after {
            end.worker.put(endpoint, TransferId(transfer), vec![shape.part(&end.pool, remote)]).unwrap();
        }
        if when == "during" {
            end.done().unwrap();
            target.kill();
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
fn direct() {
    check(Route::Direct);
}
