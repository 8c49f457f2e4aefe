//! Every order in which two threads can meet in a ring, by loom:
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test --release --package kvferry-wire --lib frames::ring::model
//! ```
//!
//! # Safety
//!
//! The bytes are reached through loom's cells only, which fail the test where two threads might do so at once.
#![allow(unsafe_code, reason = "reads and writes the cells of the model")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;

/// Two records of a word each.
const CAPACITY: usize = 2 * (HEAD_BYTES + 8);

struct Model {
    words: Words,
    cells: Vec<UnsafeCell<u64>>,
}

impl Model {
    fn new() -> Arc<Self> {
        Arc::new(Self { words: Words::default(), cells: (0..CAPACITY / 8).map(|_| UnsafeCell::new(0)).collect() })
    }

    fn cells(&self, start: u64, bytes: usize) -> &[UnsafeCell<u64>] {
        let start = usize::try_from(start).expect("a small number");
        assert_eq!((start % 8, bytes % 8), (0, 0), "the model moves words");
        &self.cells[start / 8..][..bytes / 8]
    }
}

// SAFETY: whoever reaches the cells of a model does so under the eyes of loom.
unsafe impl Sync for Model {}

impl Memory for Arc<Model> {
    fn words(&self) -> &Words {
        &self.words
    }

    fn capacity(&self) -> u64 {
        CAPACITY as u64
    }

    fn write(&self, start: u64, from: &[u8]) {
        for (cell, word) in self.cells(start, from.len()).iter().zip(from.chunks(8)) {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            // SAFETY: loom has checked that nobody else reaches the cell now.
            cell.with_mut(|cell| unsafe { *cell = word });
        }
    }

    fn read(&self, start: u64, to: &mut [u8]) {
        for (cell, word) in self.cells(start, to.len()).iter().zip(to.chunks_mut(8)) {
            // SAFETY: as above, that nobody writes it.
            word.copy_from_slice(&cell.with(|cell| unsafe { *cell }).to_le_bytes());
        }
    }
}

fn next(reading: &mut Reading<Arc<Model>>) -> Option<(u64, Vec<u8>)> {
    let number = reading.front().expect("an honest writer")?;
    reading.take().map(|bytes| (number, bytes))
}

/// The third record overwrites the first.
#[test]
fn records_come_whole_and_in_order_and_are_overwritten_only_when_taken() {
    loom::model(|| {
        let memory = Model::new();
        let mut reading = Reading::attach(memory.clone(), false);
        let mut writer = Writer::new(memory);
        let writing = thread::spawn(move || {
            for number in 1..=3u64 {
                while writer.push(number, &(number * 7).to_le_bytes()) == Pushed::NoRoom {
                    thread::yield_now();
                }
            }
        });
        for number in 1..=3u64 {
            let taken = loop {
                match next(&mut reading) {
                    Some(taken) => break taken,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(taken, (number, (number * 7).to_le_bytes().to_vec()));
        }
        writing.join().expect("the writer does not panic");
    });
}

/// Whoever lies down sees what was published before, or is rung for.
#[test]
fn nobody_sleeps_over_a_record() {
    loom::model(|| {
        let memory = Model::new();
        let mut reading = Reading::attach(memory.clone(), false);
        let mut writer = Writer::new(memory);
        let writing = thread::spawn(move || (1..=2).map(|number| writer.push(number, b"")).collect::<Vec<_>>());
        let mut seen = 0;
        reading.lie_down();
        fence(Ordering::SeqCst);
        while next(&mut reading).is_some() {
            seen += 1;
        }
        let pushed = writing.join().expect("the writer does not panic");
        let bells = pushed.iter().filter(|pushed| **pushed == Pushed::Published { bell: true }).count();
        assert!(pushed.iter().all(|pushed| matches!(pushed, Pushed::Published { .. })));
        assert!(bells <= 1, "{bells} bells for one sleep");
        assert!(bells == 1 || seen == 2, "{seen} records were seen, and no bell was rung");
    });
}

/// A reader that attaches while another of its threads sleeps.
#[test]
fn the_first_record_rings_for_a_reader_that_attaches_asleep() {
    loom::model(|| {
        let memory = Model::new();
        let mut writer = Writer::new(memory.clone());
        let writing = thread::spawn(move || writer.push(1, b""));
        let mut reading = Reading::attach(memory, true);
        match writing.join().expect("the writer does not panic") {
            Pushed::Unattached => assert_eq!(next(&mut reading), None),
            pushed => {
                assert_eq!(pushed, Pushed::Published { bell: true });
                assert_eq!(next(&mut reading), Some((1, Vec::new())));
            }
        }
    });
}
