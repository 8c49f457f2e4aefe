//! Two workers of one process over loopback UCX: 32 MiB in runs of one size, shuffled on both sides, beside a plain copy of
//! the same runs on one core. `UCX_TLS` chooses the transports.
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_wire::{Context, ContextOptions, Dim, Event, List, Part, Piece, Run, SlotPair, TransferId, Worker};

const BYTES: u64 = 32 << 20;

/// The `index`-th of `count` (a power of two) in an order that jumps about.
fn shuffled(index: u32, count: u32) -> u32 {
    index.wrapping_mul(0x9e37_79b1) % count
}

fn put(c: &mut Criterion) {
    let context = Context::open(&ContextOptions::default()).unwrap();
    let (target, _target_events) = Worker::start(&context, 1).unwrap();
    let (initiator, events) = Worker::start(&context, 2).unwrap();
    let endpoint = initiator.connect(target.address(), target.epoch()).unwrap();
    let (from, to) = (context.allocate(BYTES).unwrap(), context.allocate(BYTES).unwrap());
    from.write(0, &(0..BYTES).map(|i| ((i * 31) >> 3).to_le_bytes()[0]).collect::<Vec<_>>()).unwrap();
    let remote = initiator.import(endpoint, &to.card()).unwrap();
    let mut group = c.benchmark_group("loopback");
    group.throughput(Throughput::Bytes(BYTES)).sample_size(10).measurement_time(Duration::from_secs(3));
    for run_bytes in [4u64 << 10, 64 << 10, 1 << 20] {
        let count = u32::try_from(BYTES / run_bytes).unwrap();
        let pairs = (0..count).map(|i| SlotPair { local: shuffled(i, count), remote: shuffled(i + 1, count) });
        let part = Part {
            local: from.clone(),
            local_base: 0,
            local_slot_stride: run_bytes,
            remote,
            remote_base: 0,
            remote_slot_stride: run_bytes,
            pieces: Arc::new([Piece { local_offset: 0, remote_offset: 0, run_bytes, dims: [Dim::ONE; 2] }]),
            pairs: pairs.collect(),
        };
        group.bench_function(BenchmarkId::new("put", run_bytes), |b| {
            b.iter(|| {
                initiator.put(endpoint, TransferId(0), vec![part.clone()]).unwrap();
                loop {
                    match events.recv_timeout(Duration::from_secs(30)).unwrap() {
                        Event::TransferDone { result, .. } => break assert_eq!(result.unwrap().bytes, BYTES),
                        Event::Progress { .. } => {}
                        event => panic!("{event:?}"),
                    }
                }
            });
        });
        let size = usize::try_from(run_bytes).unwrap();
        let (source, mut copy) =
            (vec![7u8; usize::try_from(BYTES).unwrap()], vec![0u8; usize::try_from(BYTES).unwrap()]);
        group.bench_function(BenchmarkId::new("memcpy", run_bytes), |b| {
            b.iter(|| {
                for pair in &part.pairs {
                    let (from, to) = (pair.local as usize * size, pair.remote as usize * size);
                    copy[to..to + size].copy_from_slice(&source[from..from + size]);
                }
                black_box(&mut copy);
            });
        });
        let byte = |region: &kvferry_wire::Region, slot: u32| {
            let mut byte = [0];
            region.read(u64::from(slot) * run_bytes, &mut byte).unwrap();
            byte
        };
        assert!(part.pairs.iter().all(|pair| byte(&from, pair.local) == byte(&to, pair.remote)), "bytes are misplaced");
    }
    group.finish();
}

/// 131,072 pairs of addresses checked, and made into parts: rows of 64 layers in shuffled slots, and no structure at all.
fn list(c: &mut Criterion) {
    const ENTRIES: u32 = 131_072;
    const RUN_BYTES: u64 = 256;
    const LAYERS: u32 = 64;
    let context = Context::open(&ContextOptions::default()).unwrap();
    let (target, _target_events) = Worker::start(&context, 1).unwrap();
    let (initiator, _events) = Worker::start(&context, 2).unwrap();
    let endpoint = initiator.connect(target.address(), target.epoch()).unwrap();
    let (from, to) = (context.allocate(BYTES).unwrap(), context.allocate(BYTES).unwrap());
    let remote = initiator.import(endpoint, &to.card()).unwrap();
    let layered = |entry: u32| shuffled(entry / LAYERS, ENTRIES / LAYERS) * LAYERS + entry % LAYERS;
    let mut group = c.benchmark_group("list");
    group.throughput(Throughput::Elements(u64::from(ENTRIES)));
    for (name, at) in [("layers", &layered as &dyn Fn(u32) -> u32), ("shuffled", &|entry| shuffled(entry, ENTRIES))] {
        let runs = |base: u64| -> Vec<Run> {
            (0..ENTRIES)
                .map(|entry| Run { address: base + u64::from(at(entry)) * RUN_BYTES, bytes: RUN_BYTES })
                .collect()
        };
        let (local, distant) = (runs(from.base()), runs(to.base()));
        let check = || List::new(vec![from.clone()], vec![remote], &local, &distant).unwrap();
        let list = check();
        group.bench_function(BenchmarkId::new("check", name), |b| b.iter(check));
        group.bench_function(BenchmarkId::new("parts", name), |b| b.iter(|| list.parts()));
    }
    group.finish();
}

criterion_group!(benches, put, list);
criterion_main!(benches);
