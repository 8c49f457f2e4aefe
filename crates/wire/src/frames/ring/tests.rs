//! The ring alone: what it gives and takes, and what a hostile other end can do to it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::options::Pages;
use crate::share::ring::RingMemory;
use crate::share::{Mapped, Share};

/// The words and a little room.
const BYTES: usize = size_of::<Words>() + 256;

/// Two mappings of one file.
fn mappings(bytes: usize) -> (RingMemory<Share>, RingMemory<Mapped>) {
    let share = Share::create(bytes, Pages::Normal).unwrap();
    let mapped = Mapped::open(&share.card().unwrap(), bytes as u64).unwrap();
    (RingMemory::new(share).unwrap(), RingMemory::new(mapped).unwrap())
}

fn ring() -> (Writer<RingMemory<Share>>, Reading<RingMemory<Mapped>>) {
    let (ours, theirs) = mappings(BYTES);
    (Writer::new(ours), Reading::attach(theirs, false))
}

const PUBLISHED: Pushed = Pushed::Published { bell: false };

fn next(reading: &mut Reading<impl Memory>) -> Option<(u64, Vec<u8>)> {
    let number = reading.front().unwrap()?;
    Some((number, reading.take().unwrap()))
}

#[test]
fn nothing_is_written_before_somebody_reads_and_after_nobody_does() {
    let (ours, theirs) = mappings(BYTES);
    let mut writer = Writer::new(ours);
    assert_eq!((writer.push(1, b"a"), writer.is_attached()), (Pushed::Unattached, false));
    let mut reading = Reading::attach(theirs, false);
    assert!(writer.is_attached());
    assert_eq!(writer.push(2, b"b"), PUBLISHED);
    assert_eq!(next(&mut reading), Some((2, b"b".to_vec())));
    drop(reading);
    assert_eq!(writer.push(3, b"c"), Pushed::Gone);
}

#[test]
fn what_has_no_room_is_refused_and_taken_later_or_never() {
    let (mut writer, mut reading) = ring();
    assert_eq!(writer.push(1, &[0; 256 - HEAD_BYTES + 1]), Pushed::TooLong);
    for number in 0..4 {
        assert_eq!(writer.push(number, &[7; 48]), PUBLISHED);
    }
    assert_eq!(writer.push(4, b""), Pushed::NoRoom);
    assert_eq!(next(&mut reading), Some((0, vec![7; 48])));
    assert_eq!(writer.push(4, b"around the end of the memory"), PUBLISHED);
    for number in 1..4 {
        assert_eq!(next(&mut reading), Some((number, vec![7; 48])));
    }
    assert_eq!(next(&mut reading), Some((4, b"around the end of the memory".to_vec())));
    assert_eq!(next(&mut reading), None);
    assert_eq!(writer.push(5, &[1; 256 - HEAD_BYTES]), PUBLISHED);
    assert_eq!(next(&mut reading), Some((5, vec![1; 256 - HEAD_BYTES])));
}

#[test]
fn a_sleeping_reader_is_rung_for_once() {
    let (ours, theirs) = mappings(BYTES);
    let mut writer = Writer::new(ours);
    let reading = Reading::attach(theirs, true);
    assert_eq!(writer.push(1, b""), Pushed::Published { bell: true });
    assert_eq!(writer.push(2, b""), PUBLISHED);
    reading.lie_down();
    assert_eq!(writer.push(3, b""), Pushed::Published { bell: true });
    reading.lie_down();
    reading.get_up();
    assert_eq!(writer.push(4, b""), PUBLISHED);
}

/// Each claim of the writer by itself.
#[test]
fn a_writer_that_claims_what_cannot_be_is_damage() {
    let claim = |tail: u64, front: [u64; 2]| {
        let (writer, mut reading) = ring();
        let front: Vec<u8> = front.iter().flat_map(|word| word.to_le_bytes()).collect();
        writer.memory().write(0, &front);
        writer.memory().words().tail.0.store(tail, Ordering::Release);
        reading.front()
    };
    assert_eq!(claim(24, [9, 8]), Ok(Some(9)));
    for (tail, length) in [
        (8, 0),
        (23, 1),
        (24, 9),
        (24, u64::MAX),
        (24, u64::MAX - 7),
        (256, 241),
        (264, 0),
        (u64::MAX, 0),
        (u64::MAX - 7, 0),
    ] {
        assert_eq!(claim(tail, [1, length]), Err(Damaged), "tail {tail}, length {length}");
    }
    // And one that takes back what it has said.
    let (mut writer, mut reading) = ring();
    assert_eq!(writer.push(1, b"whole"), PUBLISHED);
    assert_eq!(next(&mut reading), Some((1, b"whole".to_vec())));
    writer.memory().words().tail.0.store(0, Ordering::Release);
    assert_eq!(reading.front(), Err(Damaged));
}

#[test]
fn a_reader_that_claims_what_cannot_be_is_gone() {
    for head in [65, 64 + 256, u64::MAX] {
        let (mut writer, reading) = ring();
        assert_eq!(writer.push(1, &[0; 48]), PUBLISHED);
        reading.memory().words().head.0.store(head, Ordering::Release);
        assert_eq!(writer.push(2, &[0; 240]), Pushed::Gone, "{head}");
    }
    let (mut writer, mut reading) = ring();
    for _ in 0..4 {
        assert_eq!(writer.push(1, &[0; 200]), PUBLISHED);
        next(&mut reading).unwrap();
    }
    reading.memory().words().head.0.store(0, Ordering::Release);
    assert_eq!(writer.push(2, &[0; 200]), Pushed::Gone, "it has been further");
    let (mut writer, reading) = ring();
    reading.memory().words().reader.0.link.store(77, Ordering::Release);
    assert_eq!(writer.push(2, b""), Pushed::Gone);
}

proptest! {
    /// Against a plain queue.
    #[test]
    fn what_is_pushed_is_taken_in_order(steps in prop::collection::vec(prop::option::of(0..120usize), 0..200)) {
        let (mut writer, mut reading) = ring();
        let (mut queue, mut number) = (std::collections::VecDeque::new(), 0u64);
        let mut room = 256;
        for step in steps {
            match step {
                Some(length) => {
                    number += 1;
                    let bytes: Vec<u8> = (0..length).map(|byte| (byte as u64 * 31 + number * 7).to_le_bytes()[0]).collect();
                    let record = length.next_multiple_of(8) + 16;
                    if record <= room {
                        prop_assert_eq!(writer.push(number, &bytes), PUBLISHED);
                        room -= record;
                        queue.push_back((number, bytes));
                    } else {
                        prop_assert_eq!(writer.push(number, &bytes), Pushed::NoRoom);
                    }
                }
                None => {
                    let taken = next(&mut reading);
                    room += taken.as_ref().map_or(0, |(_, bytes)| bytes.len().next_multiple_of(8) + 16);
                    prop_assert_eq!(taken, queue.pop_front());
                }
            }
        }
    }

    /// Whatever a writer leaves in the memory, and goes on changing.
    #[test]
    fn any_bytes_are_records_or_damage_and_never_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 256),
        tails in prop::collection::vec(prop_oneof![0..40u64, 0..300u64, any::<u64>()], 1..20),
        lengths in prop::collection::vec(0..64u64, 32),
        small: bool,
    ) {
        let (writer, mut reading) = ring();
        writer.memory().write(0, &bytes);
        if small {
            for (place, length) in (0..).zip(lengths) {
                writer.memory().write(place * 8, &length.to_le_bytes());
            }
        }
        let mut taken = 0;
        for tail in tails {
            writer.memory().words().tail.0.store(tail, Ordering::Release);
            while let Ok(Some(_)) = reading.front() {
                taken += reading.take().unwrap().len();
            }
        }
        prop_assert!(taken <= 256 * 20);
    }
}

/// Two threads as fast as they can, the reader asleep whenever it has found nothing: every record comes once, whole and in order,
/// and none is left with a sleeper.
#[test]
fn two_threads_lose_nothing_and_nobody_sleeps_over_a_record() {
    const RECORDS: u64 = if cfg!(miri) { 200 } else { 200_000 };
    let (mut writer, mut reading) = ring();
    let rung = Arc::new(AtomicBool::new(false));
    let bell = rung.clone();
    let writing = thread::spawn(move || {
        let mut bells = 0u64;
        for number in 0..RECORDS {
            let bytes = number.to_le_bytes().repeat((number % 11) as usize);
            loop {
                match writer.push(number, &bytes) {
                    Pushed::Published { bell: true } => {
                        bells += 1;
                        bell.store(true, Ordering::Release);
                        break;
                    }
                    PUBLISHED => break,
                    Pushed::NoRoom => thread::yield_now(),
                    other => panic!("{other:?}"),
                }
            }
        }
        bells
    });
    let (mut expected, mut slept) = (0, 0u64);
    while expected < RECORDS {
        match next(&mut reading) {
            Some((number, bytes)) => {
                assert_eq!(number, expected);
                assert!(bytes == number.to_le_bytes().repeat((number % 11) as usize), "record {number}");
                expected += 1;
            }
            None => {
                reading.lie_down();
                fence(Ordering::SeqCst);
                if reading.front().unwrap().is_some() {
                    reading.get_up();
                    continue;
                }
                slept += 1;
                // Only the bell ends this; without one the test hangs, and fails by the deadline.
                let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
                while !rung.swap(false, Ordering::Acquire) {
                    assert!(std::time::Instant::now() < deadline, "asleep over record {expected}");
                    thread::yield_now();
                }
            }
        }
    }
    let bells = writing.join().unwrap();
    println!("{RECORDS} records, {slept} sleeps, {bells} bells");
    assert!(slept > 0 && bells >= slept, "{slept} sleeps, {bells} bells");
}
