//! Sizes at the edges, and many workers at once, on every route.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Receiver;
use kvferry_wire::{
    Context, ContextOptions, Dim, EndpointId, Event, Part, Piece, PutError, Region, RemoteRegion, Route, SlotPair,
    TransferId, TransferStats, Worker,
};

const DEADLINE: Duration = Duration::from_secs(120);

const WAYS: [(Option<&str>, Route); 6] = [
    (None, Route::Direct),
    (None, Route::Landing),
    (None, Route::Staged),
    (None, Route::Runs),
    (Some("tcp"), Route::Staged),
    (Some("tcp"), Route::Runs),
];

fn open(transports: Option<&str>, route: Option<Route>) -> Context {
    let transports = transports.map(str::to_owned);
    Context::open(&ContextOptions { transports, route, ..Default::default() }).unwrap()
}

/// `pairs` runs of `bytes` bytes, from `local_base` to `remote_base`, side by side.
fn part(local: &Region, local_base: u64, remote: RemoteRegion, remote_base: u64, bytes: u64, pairs: u32) -> Part {
    Part {
        local: local.clone(),
        local_base,
        local_slot_stride: bytes,
        remote,
        remote_base,
        remote_slot_stride: bytes,
        pieces: [Piece { local_offset: 0, remote_offset: 0, run_bytes: bytes, dims: [Dim::ONE; 2] }].into(),
        pairs: (0..pairs).map(|slot| SlotPair { local: slot, remote: slot }).collect(),
    }
}

fn done(events: &Receiver<Event>) -> Result<TransferStats, PutError> {
    loop {
        if let Event::TransferDone { result, .. } = events.recv_timeout(DEADLINE).expect("an end within the deadline") {
            return result;
        }
    }
}

#[test]
fn one_byte_odd_lengths_and_odd_addresses_arrive_exactly() {
    for (transports, route) in WAYS {
        let context = open(transports, Some(route));
        let (source, events) = Worker::start(&context, 1).unwrap();
        let (target, _events) = Worker::start(&context, 2).unwrap();
        let endpoint = source.connect(target.address(), 2).unwrap();
        let (from, to) = (context.allocate(100_000).unwrap(), context.allocate(100_000).unwrap());
        let filled: Vec<u8> = (0..100_000u32).map(|byte| (byte % 251) as u8 + 1).collect();
        from.write(0, &filled).unwrap();
        let remote = source.import(endpoint, &to.card()).unwrap();
        for (bytes, pairs) in [(1, 1), (1, 300), (4097, 1), (4097, 20), (63, 64), (4096, 1)] {
            for (local_base, remote_base) in [(0, 0), (1, 0), (0, 3), (17, 4093)] {
                to.write(0, &vec![0; 100_000]).unwrap();
                source
                    .put(endpoint, TransferId(0), vec![part(&from, local_base, remote, remote_base, bytes, pairs)])
                    .unwrap();
                assert_eq!(done(&events).unwrap().bytes, bytes * u64::from(pairs));
                let (count, local, remote) =
                    ((bytes * u64::from(pairs)) as usize, local_base as usize, remote_base as usize);
                let mut expected = vec![0; 100_000];
                expected[remote..remote + count].copy_from_slice(&filled[local..local + count]);
                let mut found = vec![0; 100_000];
                to.read(0, &mut found).unwrap();
                assert!(found == expected, "{transports:?} {route} {bytes} x {pairs} at {local_base}, {remote_base}");
            }
        }
    }
}

#[test]
fn a_worker_can_be_its_own_peer() {
    for (transports, route) in WAYS {
        let context = open(transports, Some(route));
        let (worker, events) = Worker::start(&context, 1).unwrap();
        let endpoint = worker.connect(worker.address(), 1).unwrap();
        let (from, to) = (context.allocate(40_000).unwrap(), context.allocate(40_000).unwrap());
        from.write(0, &[7; 40_000]).unwrap();
        let remote = worker.import(endpoint, &to.card()).unwrap();
        worker.put(endpoint, TransferId(0), vec![part(&from, 0, remote, 0, 1000, 40)]).unwrap();
        done(&events).unwrap();
        let mut found = vec![0; 40_000];
        to.read(0, &mut found).unwrap();
        assert!(found == [7; 40_000], "{transports:?} {route}");
    }
}

#[test]
fn thirty_two_workers_of_one_host_reach_each_other() {
    const WORKERS: usize = 32;
    let ends: Vec<(Context, Worker, Receiver<Event>, Region)> = (0..WORKERS as u64)
        .map(|epoch| {
            let context = open(None, None);
            let (worker, events) = Worker::start(&context, epoch).unwrap();
            let region = context.allocate(WORKERS as u64 * 4096).unwrap();
            (context, worker, events, region)
        })
        .collect();
    // Everybody writes page `i` of everybody, `i` being its own number, by way of the inbox and directly.
    for (number, (context, worker, events, _)) in ends.iter().enumerate() {
        let from = context.allocate(4096).unwrap();
        from.write(0, &[number as u8 + 1; 4096]).unwrap();
        for (_, peer, _, to) in &ends {
            let endpoint: EndpointId = worker.connect(peer.address(), peer.epoch()).unwrap();
            let remote = worker.import(endpoint, &to.card()).unwrap();
            worker.put(endpoint, TransferId(0), vec![part(&from, 0, remote, number as u64 * 4096, 4096, 1)]).unwrap();
            done(events).unwrap();
        }
    }
    let expected: Vec<u8> = (0..WORKERS * 4096).map(|byte| (byte / 4096) as u8 + 1).collect();
    for (_, _, _, region) in &ends {
        let mut found = vec![0; expected.len()];
        region.read(0, &mut found).unwrap();
        assert!(found == expected);
    }
}

/// Memory of which only the pages that are written exist.
struct Sparse {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length, which nobody dereferences here.
unsafe impl Send for Sparse {}
// SAFETY: as above.
unsafe impl Sync for Sparse {}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `sparse` and is undone only here.
        unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) }.unwrap();
    }
}

fn sparse(context: &Context, bytes: u64) -> Region {
    use rustix::mm::{MapFlags, ProtFlags};
    let (length, access) = (bytes as usize, ProtFlags::READ | ProtFlags::WRITE);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping replaces nothing.
    let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, access, flags) }.unwrap();
    let base = NonNull::new(base.cast()).unwrap();
    let owner = Arc::new(Sparse { base, bytes: length });
    // SAFETY: the mapping lives as long as its owner, and nobody has a reference into it.
    unsafe { context.register(base, bytes, owner) }.unwrap()
}

#[test]
#[ignore = "moves 24 runs of 2 to 4 GiB, and takes 4 GiB of memory: run it in release mode"]
fn runs_around_two_and_four_gib_arrive_whole() {
    const GIB: u64 = 1 << 30;
    for (transports, route) in WAYS {
        let context = open(transports, Some(route));
        let (source, events) = Worker::start(&context, 1).unwrap();
        let (target, _events) = Worker::start(&context, 2).unwrap();
        let endpoint = source.connect(target.address(), 2).unwrap();
        for bytes in [2 * GIB - 4096, 2 * GIB + 4096, 4 * GIB - 4096, 4 * GIB + 4096] {
            let (from, to) = (sparse(&context, bytes), context.allocate(bytes).unwrap());
            let marks = [0, GIB - 1, 2 * GIB - 4097, 2 * GIB - 1, 2 * GIB, 3 * GIB, 4 * GIB - 1, 4 * GIB, bytes - 1];
            for mark in marks.into_iter().filter(|mark| *mark < bytes) {
                from.write(mark, &[mark as u8 | 1]).unwrap();
            }
            let remote = source.import(endpoint, &to.card()).unwrap();
            source.put(endpoint, TransferId(0), vec![part(&from, 0, remote, 0, bytes, 1)]).unwrap();
            assert_eq!(done(&events).unwrap().bytes, bytes);
            let (mut expected, mut found) = (vec![0; 64 << 20], vec![0; 64 << 20]);
            for start in (0..bytes).step_by(64 << 20) {
                let count = (bytes - start).min(64 << 20) as usize;
                from.read(start, &mut expected[..count]).unwrap();
                to.read(start, &mut found[..count]).unwrap();
                assert!(found[..count] == expected[..count], "{transports:?} {route} {bytes} B at {start}");
            }
        }
    }
}
