//! Messages.

use std::time::{Duration, Instant};

use kvferry_test_process::within;
use kvferry_wire::{
    CommandError, Event, FRAME_PAYLOAD_BYTES_MAX, FrameError, Permit, Permitted, TransferId, TransferStats,
};

use super::end::{Way, bytes, filled, pair, pattern, side_by_side};

/// A worker that sleeps looks up once a second, which none of them has to wait for.
pub(crate) fn frames_arrive_in_order_with_their_epoch_up_to_the_limit(way: &Way) {
    within(Duration::from_millis(900), || {
        let [a, b] = pair(way);
        let start = Instant::now();
        let sizes = [0, 1, 100, 9000, FRAME_PAYLOAD_BYTES_MAX, 3];
        for (kind, size) in sizes.into_iter().enumerate() {
            a.worker.send(a.to_peer, kind.try_into().unwrap(), vec![kind as u8; size]).unwrap();
        }
        for (kind, size) in sizes.into_iter().enumerate() {
            let frame = b.frame();
            assert_eq!((frame.source_epoch, usize::from(frame.kind)), (a.epoch, kind), "{way:?}");
            assert!(frame.payload == vec![kind as u8; size], "{way:?}");
        }
        let took = start.elapsed();
        let over = vec![0; FRAME_PAYLOAD_BYTES_MAX + 1];
        assert!(matches!(a.worker.send(a.to_peer, 0, over), Err(CommandError::PayloadTooLong { .. })));
        took
    });
}

/// By whichever way each of them goes, while the ways change: some are too long for a ring, and it fills up and is emptied.
pub(crate) fn frames_of_all_sizes_keep_their_order_both_ways(way: &Way) {
    const ROUNDS: usize = 6;
    const FRAMES: usize = 150;
    let ends = pair(way);
    let size = |number: usize| match number % 50 {
        49 => 150_000,
        23 => 40_000,
        13 | 14 | 37 => 9_000,
        n => n * 61 % 700,
    };
    let payload = |number: usize| vec![number as u8; size(number)];
    for round in 0..ROUNDS {
        let numbers = round * FRAMES..(round + 1) * FRAMES;
        for number in numbers.clone() {
            for end in &ends {
                end.worker.send(end.to_peer, (number % 1000) as u16, payload(number)).unwrap();
            }
        }
        // Alone, each comes twice to the one queue.
        let copies = if way.alone { 2 } else { 1 };
        for end in &ends[..3 - copies] {
            let mut heard = [0; 2];
            for _ in 0..copies * FRAMES {
                let frame = end.frame();
                let next = numbers.start + heard[0];
                let whose = usize::from(usize::from(frame.kind) != next % 1000 || heard[0] == FRAMES);
                let number = numbers.start + heard[whose];
                assert_eq!(usize::from(frame.kind), number % 1000, "{way:?}, round {round}");
                assert!(frame.payload == payload(number), "{way:?}, frame {number}");
                heard[whose] += 1;
            }
        }
    }
}

pub(crate) fn a_frame_for_an_earlier_life_is_dropped_and_named(way: &Way) {
    let [a, b] = pair(way);
    let stale = a.worker.connect(b.worker.address(), 0xdead).unwrap();
    a.worker.send(stale, 1, vec![1, 2, 3]).unwrap();
    match b.event() {
        Event::BadFrame(FrameError::StaleEpoch { theirs: 0xdead, ours }) if ours == b.epoch => {}
        event => panic!("{event:?} in place of a stale frame"),
    }
}

/// The one ordering that there is between the two: whoever reads the frame can read the bytes.
pub(crate) fn a_frame_behind_a_transfer_finds_its_bytes(way: &Way) {
    const BYTES: u64 = 30_000;
    let [a, b] = pair(way);
    let (source, target) = (a.context.allocate(BYTES).unwrap(), b.context.allocate(BYTES).unwrap());
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    for round in 0..20u8 {
        source.write(0, &vec![round + 1; BYTES as usize]).unwrap();
        let part = side_by_side((&source, 0), (remote, 0), BYTES / 30, 30);
        let (parts, kind) = (vec![part], u16::from(round));
        let with_stats = round % 2 == 1;
        if with_stats {
            let permitted = Permitted { permit: Permit(u64::from(round)), inbox_only: false };
            b.worker.permit(a.worker.epoch(), permitted.permit);
            let report = Some((kind, vec![round]));
            if round % 4 == 1 {
                a.worker.put_permitted(a.to_peer, TransferId(0), parts, permitted, report).unwrap();
            } else {
                let sets = parts.iter().map(|part| part.pairs.clone()).collect();
                let prepared = a.worker.prepare(a.to_peer, parts).unwrap();
                a.worker.put_prepared_permitted(TransferId(0), &prepared, sets, permitted, report).unwrap();
            }
        } else {
            a.worker.put_then_send(a.to_peer, TransferId(0), parts, kind, vec![round]).unwrap();
        }
        // Alone, the two come to the same queue in either order.
        let (mut ended, mut heard) = (false, false);
        while !heard || (way.alone && !ended) {
            match b.event() {
                Event::Frame(frame) if frame.kind == u16::from(round) => {
                    assert!(bytes(&target) == vec![round + 1; BYTES as usize], "{way:?}, round {round}");
                    assert_eq!(frame.payload[0], round);
                    let stats = TransferStats::from_bytes(&frame.payload[1..]);
                    assert_eq!(stats.map(|stats| stats.bytes), with_stats.then_some(BYTES));
                    heard = true;
                }
                Event::TransferDone { result, .. } if way.alone => ended = result.is_ok(),
                Event::TakesInbox { .. } if way.alone => {}
                event => panic!("{way:?}: {event:?}"),
            }
        }
        if !way.alone {
            a.ended().1.unwrap();
        }
    }
    let other = filled(&a.context, &pattern(100));
    a.put(1, side_by_side((&other, 0), (remote, 0), 100, 1));
    a.done().1.unwrap();
}
