//! Many small transfers, failures and cancels among them: what is held stays flat.

use std::time::{Duration, Instant};

use kvferry_test_process::footprint;
use kvferry_wire::{EndpointId, PutError, TransferId, Version};

use crate::child::Target;
use crate::end::{DEADLINE, End, PIECE, WAYS};

/// 10^5 transfers in release mode.
const TRANSFERS: u64 = if cfg!(debug_assertions) { 5_000 } else { 100_000 };

/// An endpoint lives for so many transfers; then it is closed with some of them under way.
const PER_ENDPOINT: u64 = 500;

#[test]
fn memory_and_descriptors_stay_flat_over_many_transfers() {
    for way in WAYS {
        let mut target = Target::start(way.0, 1, 64 * PIECE);
        let end = End::start(way, 64 * PIECE, DEADLINE);
        let run = |target: &Target, transfers: u64| {
            let (mut well, mut cut) = (0, 0);
            let mut count = |result: Result<_, PutError>| match result {
                Ok(_) => well += 1,
                Err(_) => cut += 1,
            };
            for _ in 0..transfers / PER_ENDPOINT {
                let (endpoint, remote): (EndpointId, _) = end.connect(target);
                for transfer in 1..=PER_ENDPOINT {
                    end.put(endpoint, TransferId(transfer), end.part(remote, transfer % 64));
                    if transfer % 7 == 3 {
                        end.worker.cancel(TransferId(transfer)).unwrap();
                    }
                    if transfer % 10 == 0 && transfer < PER_ENDPOINT {
                        (transfer - 9..=transfer).for_each(|transfer| count(end.done(TransferId(transfer))));
                    }
                }
                end.worker.close(endpoint).unwrap();
                (PER_ENDPOINT - 9..=PER_ENDPOINT).for_each(|transfer| count(end.done(TransferId(transfer))));
            }
            (well, cut)
        };
        run(&target, 1000);
        std::thread::sleep(Duration::from_millis(700));
        let (ours, theirs) = (footprint(), target.footprint());
        let (well, cut) = run(&target, TRANSFERS / WAYS.len() as u64);
        // UCX 1.13 keeps the socket of an endpoint that only one side has closed, until either process ends.
        let sockets = if end.context.ucx_version() < Version::new(1, 16, 0) { TRANSFERS / PER_ENDPOINT } else { 0 };
        let descriptors_max = theirs.0 as u64 + 2 + sockets;
        // The last endpoints take a while to go.
        let deadline = Instant::now() + DEADLINE;
        let theirs_after = loop {
            std::thread::sleep(Duration::from_millis(100));
            let footprint = target.footprint();
            if footprint.0 as u64 <= descriptors_max || Instant::now() > deadline {
                break footprint;
            }
        };
        let ours_after = footprint();
        println!("{way:?}: {well} well, {cut} cut; {ours:?} -> {ours_after:?}, target {theirs:?} -> {theirs_after:?}");
        assert!(theirs_after.0 as u64 <= descriptors_max, "{way:?}: descriptors {} -> {}", theirs.0, theirs_after.0);
        assert!(theirs_after.1 < theirs.1 + (16 << 20), "{way:?}: resident {} -> {}", theirs.1, theirs_after.1);
    }
}
