//! What arrives is what left, and nothing else changes.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvferry_test_process::footprint;
use kvferry_wire::{Context, ContextOptions, CudaEvent, CudaOptions, PutError, Route, RouteReason, TransferId, Worker};

use crate::child::{Kind, Setup, Target};
use crate::end::{End, pattern};
use crate::framework::Framework;
use crate::plan::{Random, Shape, random};

const BYTES: u64 = 4 << 20;

/// Moves the shapes, and compares the whole of the target.
pub(crate) fn check(end: &End, target: &mut Target, shapes: &[Shape], what: &str) {
    let (endpoint, remote) = end.connect(target);
    target.fill(0xee);
    let mut expected = vec![0xee; target.card.bytes as usize];
    let source = pattern(end.pool.bytes());
    shapes.iter().for_each(|shape| shape.apply(&source, &mut expected));
    let parts = shapes.iter().map(|shape| shape.part(&end.pool, remote)).collect();
    end.put(endpoint, parts).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(target.holds(&expected), "{what}");
    end.worker.close(endpoint).unwrap();
}

pub(crate) fn check_random(end: &End, target: &mut Target, rounds: u64) {
    for round in 0..rounds {
        for align in [1, 2, 4, 8, 16, 48] {
            let mut numbers = Random(round * 100 + align);
            let shapes = random(&mut numbers, align, BYTES);
            check(end, target, &shapes, &format!("round {round}, alignment {align}: {shapes:?}"));
        }
    }
}

/// Sizes around those at which something changes: a word, a unit, a block of the kernel.
pub(crate) fn check_sizes(end: &End, target: &mut Target) {
    for size in [1, 3, 4, 8, 16, 24, 127, 128, 256, 511, 512, 513, 528, 656, 4096, 4112, 65536, 1 << 20] {
        let count = (BYTES / size).min(3000) as u32;
        let shapes = [Shape::blocks(size, count, &mut Random(size))];
        check(end, target, &shapes, &format!("blocks of {size} B"));
    }
    for (units, tokens, cell) in [(8, 64, 128), (3, 16, 256), (5, 7, 24), (2, 16, 2), (1, 64, 576)] {
        let slots = (BYTES / (units * tokens * cell)).min(20) as u32;
        let shapes = [Shape::transposed(units, tokens, cell, slots, &mut Random(cell))];
        check(end, target, &shapes, &format!("{units} units, {tokens} tokens, cells of {cell} B"));
    }
}

#[test]
#[ignore = "needs CUDA"]
fn direct_into_another_process() {
    let mut target = Target::start(&Setup::new(BYTES));
    let end = End::start(Some(Route::Direct), None, BYTES);
    check_sizes(&end, &mut target);
    check_random(&end, &mut target, 8);
}

#[test]
#[ignore = "needs CUDA"]
fn direct_on_the_same_gpu() {
    let mut target = Target::start(&Setup { device: Some(0), ..Setup::new(BYTES) });
    let end = End::start(Some(Route::Direct), None, BYTES);
    check_sizes(&end, &mut target);
    check_random(&end, &mut target, 2);
}

#[test]
#[ignore = "needs CUDA"]
fn direct_to_a_gpu_that_this_process_does_not_see() {
    // Both are device 0 to themselves.
    let visible = Some(crate::child::other_device().to_string());
    let mut target = Target::start(&Setup { device: Some(0), visible, ..Setup::new(BYTES) });
    let end = End::start(Some(Route::Direct), None, BYTES);
    check_sizes(&end, &mut target);
}

/// Both GPUs in one process, a worker each: what is mapped is mapped in the process that has it.
#[test]
#[ignore = "needs CUDA"]
fn between_two_gpus_of_one_process() {
    let cuda = Some(CudaOptions::new(crate::child::other_device()));
    let context = Context::open(&ContextOptions { cuda, ..Default::default() }).unwrap();
    let (worker, _events) = Worker::start(&context, 0xb).unwrap();
    let target = context.allocate_device(BYTES).unwrap();
    let mut expected = vec![0; BYTES as usize];
    let shape = Shape::blocks(528, 3000, &mut Random(6));
    for route in [Route::Direct, Route::Landing] {
        let end = End::start(Some(route), None, BYTES);
        let endpoint = end.worker.connect(worker.address(), worker.epoch()).unwrap();
        let remote = end.worker.import(endpoint, &target.card()).unwrap();
        target.write(0, &vec![0xee; BYTES as usize]).unwrap();
        end.put(endpoint, vec![shape.part(&end.pool, remote)]).unwrap();
        expected.fill(0xee);
        shape.apply(&pattern(BYTES), &mut expected);
        let mut found = vec![0; BYTES as usize];
        target.read(0, &mut found).unwrap();
        assert!(found == expected, "{route}");
    }
}

#[test]
#[ignore = "needs CUDA"]
fn landing_in_another_process() {
    let mut target = Target::start(&Setup::new(BYTES));
    let end = End::start(None, None, BYTES);
    check_sizes(&end, &mut target);
    check_random(&end, &mut target, 8);
}

#[test]
#[ignore = "needs CUDA"]
fn landing_in_memory_of_the_callers() {
    let mut target = Target::start(&Setup { kinds: vec![Kind::Callers], ..Setup::new(BYTES) });
    let end = End::start(None, None, BYTES);
    check_sizes(&end, &mut target);
    let (endpoint, remote) = end.connect(&target);
    let part = Shape::blocks(4096, 100, &mut Random(1)).part(&end.pool, remote);
    let stats = end.put(endpoint, vec![part]).unwrap();
    assert_eq!((stats.route, stats.reason), (Route::Landing, RouteReason::GpusOfOneHost));
    // What cudaMalloc gives is never mapped by another process.
    let direct = End::start(Some(Route::Direct), None, BYTES);
    let (endpoint, remote) = direct.connect(&target);
    let part = Shape::blocks(4096, 100, &mut Random(1)).part(&direct.pool, remote);
    let refused = Err(PutError::RouteUnavailable { route: Route::Direct });
    assert_eq!(direct.put(endpoint, vec![part]), refused);
}

/// As between hosts: nothing is mapped, the bytes go through host memory and tcp.
#[test]
#[ignore = "needs CUDA"]
fn staged_through_host_memory() {
    let mut target = Target::start(&Setup { transports: Some("tcp".to_owned()), ..Setup::new(BYTES) });
    let end = End::start(None, Some("tcp"), BYTES);
    let (endpoint, remote) = end.connect(&target);
    let part = Shape::blocks(4096, 100, &mut Random(1)).part(&end.pool, remote);
    let stats = end.put(endpoint, vec![part]).unwrap();
    assert_eq!((stats.route, stats.reason), (Route::Staged, RouteReason::GpuNotMapped));
    check_sizes(&end, &mut target);
    check_random(&end, &mut target, 2);
}

/// What the caller's stream has yet to write is what arrives, though nobody waits for it on the host.
#[test]
#[ignore = "needs CUDA"]
fn nothing_is_read_before_the_callers_event() {
    for route in [Route::Direct, Route::Landing] {
        let mut target = Target::start(&Setup::new(BYTES));
        let end = End::start(Some(route), None, BYTES);
        let busy = end.context.allocate_device(1 << 30).unwrap();
        let (endpoint, remote) = end.connect(&target);
        let framework = Framework::on(0);
        let stream = framework.stream();
        for _ in 0..200 {
            framework.fill(stream, busy.base(), busy.bytes(), 1); // a quarter of a millisecond each
        }
        framework.fill(stream, end.pool.base(), BYTES, 0x77);
        // SAFETY: the event is recorded, and never destroyed.
        let ready = unsafe { CudaEvent::new(framework.event(stream), Arc::new(())) };
        let part = Shape::blocks(4096, (BYTES / 4096) as u32, &mut Random(3)).part(&end.pool, remote);
        end.worker.put_when(endpoint, TransferId(1), vec![part], ready).unwrap();
        end.done().unwrap();
        assert!(target.holds(&vec![0x77; BYTES as usize]), "{route}");
    }
}

/// A transfer that is given up ends when nothing of it can be written any more, one way or the other.
#[test]
#[ignore = "needs CUDA"]
fn what_is_cancelled_is_over() {
    for (route, transports) in [(Route::Direct, None), (Route::Landing, None), (Route::Staged, Some("tcp"))] {
        let bytes = 64 << 20;
        let transports_of_target = transports.map(str::to_owned);
        let mut target = Target::start(&Setup { transports: transports_of_target, ..Setup::new(bytes) });
        let end = End::start(Some(route), transports, bytes);
        check_cancelled(&end, &mut target, (0..20).map(|round| Duration::from_micros(50 * round)));
    }
}

/// Cancels a transfer of all of the pool after each of these times, and then moves it whole.
pub(crate) fn check_cancelled(end: &End, target: &mut Target, times: impl Iterator<Item = Duration>) {
    let bytes = target.card.bytes;
    let (endpoint, remote) = end.connect(target);
    let shape = Shape::blocks(4096, (bytes / 4096) as u32, &mut Random(4));
    for (round, time) in (0..).zip(times) {
        end.worker.put(endpoint, TransferId(round), vec![shape.part(&end.pool, remote)]).unwrap();
        thread::sleep(time);
        end.worker.cancel(TransferId(round)).unwrap();
        let ended = end.done();
        assert!(matches!(ended, Ok(_) | Err(PutError::Cancelled)), "{time:?}: {ended:?}");
        target.fill(0xee);
        assert!(target.holds(&vec![0xee; bytes as usize]), "{time:?}: something was written after the end");
    }
    // And the slab, or the inbox, has all its chunks again.
    end.put(endpoint, vec![shape.part(&end.pool, remote)]).unwrap();
    let mut expected = vec![0; bytes as usize];
    shape.apply(&pattern(bytes), &mut expected);
    assert!(target.holds(&expected));
}

/// A slab of few small chunks: every credit is used again and again.
#[test]
#[ignore = "needs CUDA"]
fn landing_in_a_slab_of_two_chunks() {
    let mut target = Target::start(&Setup { slab_bytes: 128 << 10, slab_chunk_bytes: 64 << 10, ..Setup::new(BYTES) });
    let end = End::start(Some(Route::Landing), None, BYTES);
    check_sizes(&end, &mut target);
}

#[test]
#[ignore = "needs CUDA"]
fn two_sources_share_a_slab() {
    let setup = Setup { slab_bytes: 256 << 10, slab_chunk_bytes: 64 << 10, ..Setup::new(2 * BYTES) };
    let mut target = Target::start(&setup);
    let ends = [End::start(None, None, BYTES), End::start(None, None, BYTES)];
    target.fill(0xee);
    let source = pattern(BYTES);
    let mut expected = vec![0xee; 2 * BYTES as usize];
    let shape = Shape::blocks(1024, (BYTES / 1024) as u32, &mut Random(5));
    let connected: Vec<_> = ends.iter().map(|end| end.connect(&target)).collect();
    for round in 0..20 {
        for (half, (end, (endpoint, remote))) in ends.iter().zip(&connected).enumerate() {
            let mut part = shape.part(&end.pool, *remote);
            part.remote_base = half as u64 * BYTES;
            end.worker.put(*endpoint, TransferId(round), vec![part]).unwrap();
        }
        for end in &ends {
            end.done().unwrap();
        }
    }
    expected.chunks_mut(BYTES as usize).for_each(|half| shape.apply(&source, half));
    assert!(target.holds(&expected));
}

#[test]
#[ignore = "needs CUDA"]
fn from_a_gpu_into_host_memory() {
    let mut target = Target::start(&Setup { kinds: vec![Kind::Host], ..Setup::new(BYTES) });
    let end = End::start(None, None, BYTES);
    check_sizes(&end, &mut target);
}

#[test]
#[ignore = "needs CUDA"]
fn from_host_memory_into_a_gpu() {
    let mut target = Target::start(&Setup::new(BYTES));
    let end = End::start_with(None, None, BYTES, Context::allocate);
    check_sizes(&end, &mut target);
}

#[test]
#[ignore = "needs CUDA"]
fn rounds_leave_nothing_behind() {
    rounds(Route::Direct);
    rounds(Route::Landing);
}

fn rounds(route: Route) {
    let mut target = Target::start(&Setup::new(BYTES));
    let end = End::start(Some(route), None, BYTES);
    let round = |target: &Target, seed: u64| {
        let shapes = random(&mut Random(seed), 16, BYTES);
        let (endpoint, remote) = end.connect(target);
        end.put(endpoint, shapes.iter().map(|shape| shape.part(&end.pool, remote)).collect()).unwrap();
        end.worker.close(endpoint).unwrap();
    };
    (0..300).for_each(|seed| round(&target, seed));
    let own = || (end.context.gpu_memory().unwrap().unwrap().1, footprint().0);
    let before = own();
    (300..1300).for_each(|seed| round(&target, seed));
    check_left(before, own);
    let before = target.footprint();
    (1300..1400).for_each(|seed| round(&target, seed));
    check_left(before, || target.footprint());
}

/// Checks that of the GPU's memory is free what was `before`, and no more descriptors are open: those of what has just been closed
/// are, for a moment.
fn check_left(before: (u64, usize), mut now: impl FnMut() -> (u64, usize)) {
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut after = now();
    while after.1 > before.1 + 2 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(50));
        after = now();
    }
    assert!(after.0 + (8 << 20) >= before.0, "GPU memory: {} B free, then {} B", before.0, after.0);
    assert!(after.1 <= before.1 + 2, "descriptors: {} then {}", before.1, after.1);
}
