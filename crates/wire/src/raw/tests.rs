use std::thread::sleep;
use std::time::{Duration, Instant};

use super::*;
use crate::options::ContextOptions;

/// Long enough for the thread with which UCX accepts connections.
const STEP: Duration = Duration::from_millis(1);

/// UCX 1.13 aborts where a worker is destroyed that has yet to answer a peer's request to be connected.
#[test]
fn a_worker_is_not_destroyed_under_a_peer_that_connects() {
    let context = Context::open(&ContextOptions::default()).unwrap();
    let region = context.allocate(4096).unwrap();
    let mut waited = false;
    // The peer stands still after each number of steps that it takes to connect, and goes on only to let the worker settle.
    for steps in 0..12 {
        let peer = RawWorker::create(context.clone()).unwrap();
        let target = RawWorker::create(context.clone()).unwrap();
        let mut endpoint = peer.connect(&target.address().unwrap()).unwrap();
        endpoint.import(KeyId(0), &region.card().key).unwrap(); // UCX asks to be connected when there may be puts
        let target_steps = || {
            while target.progress() {}
            sleep(STEP);
            while target.progress() {}
        };
        for _ in 0..steps {
            while peer.progress() {}
            target_steps();
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while !target.is_settled() {
            waited = true;
            assert!(Instant::now() < deadline, "not connected after {steps} steps and 10 s");
            while peer.progress() {}
            target_steps();
        }
        drop(target);
        let closing = endpoint.close(true);
        while !closing.is_closed() {
            peer.progress();
        }
        closing.finish();
    }
    assert!(waited || context.ucx_version() >= LETS_GO_SINCE, "no peer was caught in the middle");
}
