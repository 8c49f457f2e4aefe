//! The conformance suite over real UCX, and what needs more than two ends.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

mod driven;
mod large;
mod suite;

use crossbeam::channel::Receiver;
use kvferry_wire::{Context, ContextOptions, Event, OpenError, Pages, Region, RegionError, Route, TransferId, Worker};
use suite::end::{Way, bytes, filled, side_by_side};

/// UCX's own choice, a socket, shared memory without and with the kernel's copies, and a worker that is its own peer. The last
/// has UCX's `self` on offer, which UCX leaves aside: it cannot say that a peer failed.
fn ways() -> Vec<Way> {
    let mut ways = Way::all(None, true);
    ways.extend(Way::all(Some("tcp"), false));
    ways.extend(Way::all(Some("posix,sysv"), true));
    ways.extend(Way::all(Some("posix,sysv,cma,tcp"), true));
    ways.extend(Way::all(Some("self,posix,tcp"), true).into_iter().map(|way| Way { alone: true, ..way }));
    ways
}

fn run(behaviour: fn(&Way)) {
    ways().iter().for_each(behaviour);
}

suite::conformance!(run);

#[test]
fn an_unknown_transport_is_named() {
    let list = "no-such-transport".to_owned();
    match Context::open(&ContextOptions { transports: Some(list.clone()), ..Default::default() }) {
        Err(OpenError::Transports { list: named, .. }) => assert_eq!(named, list),
        result => panic!("{result:?}"),
    }
}

#[test]
fn thirty_two_workers_of_one_host_reach_each_other() {
    const WORKERS: usize = 32;
    let ends: Vec<(Context, Worker, Receiver<Event>, Region)> = (0..WORKERS as u64)
        .map(|epoch| {
            let context = Context::open(&ContextOptions::default()).unwrap();
            let (worker, events) = Worker::start(&context, epoch).unwrap();
            let region = context.allocate(WORKERS as u64 * 4096).unwrap();
            (context, worker, events, region)
        })
        .collect();
    // Everybody writes page `i` of everybody, `i` being its own number.
    for (number, (context, worker, events, _)) in ends.iter().enumerate() {
        let from = filled(context, &[number as u8 + 1; 4096]);
        for (_, peer, _, to) in &ends {
            let endpoint = worker.connect(peer.address(), peer.epoch()).unwrap();
            let remote = worker.import(endpoint, &to.card()).unwrap();
            let part = side_by_side((&from, 0), (remote, number as u64 * 4096), 4096, 1);
            worker.put(endpoint, TransferId(0), vec![part]).unwrap();
            loop {
                match events.recv_timeout(suite::end::DEADLINE).unwrap() {
                    Event::TransferDone { result, .. } => {
                        result.unwrap();
                        break;
                    }
                    event => println!("{event:?}"),
                }
            }
        }
    }
    let expected: Vec<u8> = (0..WORKERS * 4096).map(|byte| (byte / 4096) as u8 + 1).collect();
    assert!(ends.iter().all(|(_, _, _, region)| bytes(region) == expected));
}

/// They share its registrations, and each has its own thread, pinned here, its own endpoints and its own events.
#[test]
fn several_workers_of_one_context_move_bytes_at_once() {
    const WORKERS: usize = 4;
    for transports in [None, Some("tcp")] {
        let transports = transports.map(str::to_owned);
        let options = ContextOptions { transports, cpus: vec![0], ..ContextOptions::default() };
        let [ours, theirs] = [0; 2].map(|_| Context::open(&options).unwrap());
        let bytes_each = 1 << 20;
        let sent = suite::end::pattern(WORKERS as u64 * bytes_each);
        let (from, to) = (filled(&ours, &sent), theirs.allocate(WORKERS as u64 * bytes_each).unwrap());
        let pairs: Vec<_> = (0..WORKERS as u64)
            .map(|number| (Worker::start(&ours, number).unwrap(), Worker::start(&theirs, 100 + number).unwrap()))
            .collect();
        for (number, ((source, _), (target, _))) in (0..).zip(&pairs) {
            let endpoint = source.connect(target.address(), target.epoch()).unwrap();
            let remote = source.import(endpoint, &to.card()).unwrap();
            let base = number * bytes_each;
            let part = side_by_side((&from, base), (remote, base), 4096, (bytes_each / 4096) as u32);
            source.put(endpoint, TransferId(number), vec![part]).unwrap();
        }
        for (number, ((_, events), _)) in (0..).zip(&pairs) {
            loop {
                match events.recv_timeout(suite::end::DEADLINE).unwrap() {
                    Event::Progress { .. } => {}
                    Event::TransferDone { transfer: TransferId(ended), result: Ok(_) } => {
                        assert_eq!(ended, number);
                        break;
                    }
                    event => panic!("{event:?}"),
                }
            }
        }
        assert!(bytes(&to) == sent);
    }
}

/// By the mappings of this process, of which each ring has two, one of either end.
#[test]
fn frames_take_a_ring_where_memory_may_be_shared_and_leave_none_behind() {
    const RING_BYTES: u32 = 28 << 10;
    let rings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let bytes = |line: &str| {
            let (start, end) = line.split_whitespace().next()?.split_once('-')?;
            Some(usize::from_str_radix(end, 16).ok()? - usize::from_str_radix(start, 16).ok()?)
        };
        // And the page that says whose it is. No other test has mappings of this length.
        maps.lines().filter(|line| line.contains("memfd:kvferry-") && bytes(line) == Some(32 << 10)).count()
    };
    for (transports, ring_bytes, expected) in [
        (None, RING_BYTES, 4),
        (Some("posix,sysv,cma,tcp"), RING_BYTES, 4),
        (Some("tcp"), RING_BYTES, 0),
        (None, 0, 0),
        (None, 4095, 0),
    ] {
        let options = ContextOptions { ring_bytes, ..Way::all(transports, true)[0].options.clone() };
        let [a, b] = suite::end::pair(&Way { options, alone: false });
        // There and back, so that each offer has been heard when the next frame is sent.
        for _ in 0..3 {
            a.worker.send(a.to_peer, 1, vec![1]).unwrap();
            b.frame();
            b.worker.send(b.to_peer, 2, vec![2]).unwrap();
            a.frame();
        }
        assert_eq!(rings(), expected, "{transports:?}, {ring_bytes}");
        a.worker.close(a.to_peer).unwrap();
        b.worker.close(b.to_peer).unwrap();
        let deadline = std::time::Instant::now() + suite::end::DEADLINE;
        while rings() > 0 {
            assert!(std::time::Instant::now() < deadline, "{transports:?}: {} are left", rings());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// Without a wake-up each would wait for the look that a sleeper takes once a second.
#[test]
fn a_frame_wakes_a_worker_that_sleeps_and_a_caller_in_its_place() {
    const FRAMES: u32 = 60;
    for transports in [None, Some("posix,sysv,cma,tcp"), Some("tcp")] {
        let [a, b] = suite::end::pair(&Way::all(transports, true)[0]);
        let mut waited = std::time::Duration::ZERO;
        for number in 0..FRAMES {
            std::thread::sleep(std::time::Duration::from_millis(2)); // many times what a thread lingers
            let sent = std::time::Instant::now();
            a.worker.send(a.to_peer, 1, vec![1]).unwrap();
            let heard = if number % 3 == 2 {
                let heard = b.worker.drive(sent + suite::end::DEADLINE, || b.events.try_recv().ok());
                heard.unwrap_or_else(|| b.event())
            } else {
                b.event()
            };
            waited += sent.elapsed();
            assert!(matches!(heard, Event::Frame(_)), "{heard:?}");
        }
        println!("{transports:?}: {:?} each", waited / FRAMES);
        assert!(waited < std::time::Duration::from_millis(250) * FRAMES, "{transports:?}: {waited:?}");
    }
}

/// The sleeping thread is rung for once; a caller that polls takes the ring, and goes away.
#[test]
fn a_frame_is_heard_by_a_thread_that_slept_while_a_caller_polled() {
    const ROUNDS: u32 = 40;
    let pause = || std::thread::sleep(std::time::Duration::from_millis(5)); // many times what a thread lingers or rests
    for transports in [None, Some("posix,sysv,cma,tcp"), Some("tcp")] {
        let [a, b] = suite::end::pair(&Way::all(transports, true)[0]);
        let mut waited = std::time::Duration::ZERO;
        for _ in 0..ROUNDS {
            pause();
            a.worker.send(a.to_peer, 1, vec![1]).unwrap();
            let sent = std::time::Instant::now();
            // And on, for what rings.
            while sent.elapsed() < std::time::Duration::from_micros(300) {
                b.worker.progress();
            }
            b.frame();
            pause();
            let sent = std::time::Instant::now();
            a.worker.send(a.to_peer, 2, vec![2]).unwrap();
            b.frame();
            waited += sent.elapsed();
        }
        println!("{transports:?}: {:?} each", waited / ROUNDS);
        assert!(waited < std::time::Duration::from_millis(100) * ROUNDS, "{transports:?}: {waited:?}");
    }
}

#[test]
fn a_processor_that_is_not_there_is_named() {
    let context = Context::open(&ContextOptions { cpus: vec![1 << 20], ..ContextOptions::default() }).unwrap();
    assert!(matches!(Worker::start(&context, 1), Err(OpenError::Processor { cpu: 0x10_0000 })));
}

#[test]
fn memory_in_huge_pages_is_a_target_like_any_other_or_refused_by_name() {
    let way = &Way::all(None, true)[0];
    let [a, b] = suite::end::pair(way);
    let target = match b.context.allocate_in(100_000, Pages::Huge) {
        Ok(target) => target,
        Err(RegionError::HugePages { bytes: 100_000 }) => return println!("none are set aside"),
        Err(error) => panic!("{error}"),
    };
    let sent = suite::end::pattern(100_000);
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    a.put(1, side_by_side((&filled(&a.context, &sent), 0), (remote, 0), 1000, 100));
    assert_eq!(a.done().1.unwrap().route, Route::Direct);
    assert!(bytes(&target) == sent);
}
