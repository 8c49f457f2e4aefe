//! Whose turn it is, between rings and what comes by UCX.

use std::sync::Arc;

use super::*;
use crate::frames::ring::{Memory, Pushed, Writer};
use crate::options::Pages;
use crate::share::Share;

const EPOCH: u64 = 7;
const BYTES: u32 = 4096;
const PATIENCE: Duration = Duration::from_secs(5);

/// The other end of a ring, and the rings that read it.
struct Ends {
    rings: Rings,
    writer: Writer<RingMemory<Share>>,
    stream: StreamNumber,
    start: Instant,
}

impl Ends {
    fn new() -> Self {
        let (share, stream) = (Share::create(BYTES as usize, Pages::Normal).unwrap(), StreamNumber::next());
        let mut rings = Rings::new(PATIENCE);
        rings.open((EPOCH, stream), &share.card().unwrap(), BYTES);
        assert_eq!(rings.all.len(), 1);
        Self { rings, writer: Writer::new(RingMemory::new(share).unwrap()), stream, start: Instant::now() }
    }

    fn push(&mut self, number: u8) -> Pushed {
        self.writer.push(u64::from(number), &[number])
    }

    /// What the rings give, a byte for each frame, and `None` for damage.
    fn take(&mut self) -> Vec<Option<u8>> {
        self.rings.take(100).into_iter().map(|(_, taken)| taken.ok().map(|bytes| bytes[0])).collect()
    }

    /// Frame `number` comes by UCX.
    fn come(&mut self, number: u64) -> (Vec<u8>, Turn) {
        let mut before = Vec::new();
        let turn = self.rings.turn_of(EPOCH, Place { stream: self.stream, number }, &mut before);
        (before.into_iter().map(|bytes| bytes[0]).collect(), turn)
    }

    /// Looks after so many seconds from the beginning; how many rings are left.
    fn look(&mut self, seconds: u64) -> usize {
        self.rings.look(self.start + Duration::from_secs(seconds));
        self.rings.all.len()
    }
}

const PUBLISHED: Pushed = Pushed::Published { bell: false };

#[test]
fn whichever_has_the_next_number_is_next() {
    let mut ends = Ends::new();
    assert_eq!(ends.come(1), (vec![], Turn::Deliver));
    for number in [2, 3, 5, 6, 9] {
        assert_eq!(ends.push(number), PUBLISHED);
    }
    assert_eq!(ends.come(4), (vec![2, 3], Turn::Deliver));
    assert_eq!(ends.take(), [Some(5), Some(6)]);
    assert_eq!(ends.take(), []);
    assert!(ends.rings.arm(), "what waits for others is nothing to do");
    assert_eq!(ends.come(7), (vec![], Turn::Deliver));
    assert_eq!(ends.come(7), (vec![], Turn::Drop), "it has come before");
    assert_eq!(ends.come(8), (vec![], Turn::Deliver));
    assert!(!ends.rings.arm(), "now it can be taken");
    assert_eq!(ends.come(10), (vec![9], Turn::Deliver));
    assert_eq!(ends.push(11), Pushed::Published { bell: true });
    ends.rings.disarm();
    assert_eq!(ends.push(12), PUBLISHED);
    assert_eq!(ends.take(), [Some(11), Some(12)]);
}

#[test]
fn what_is_of_no_ring_is_delivered_as_it_comes() {
    let mut ends = Ends::new();
    let mut before = Vec::new();
    for (epoch, place) in [
        (EPOCH, Place::NONE),
        (EPOCH + 1, Place { stream: ends.stream, number: 9 }),
        (EPOCH, Place { stream: StreamNumber::next(), number: 9 }),
    ] {
        assert_eq!(ends.rings.turn_of(epoch, place, &mut before), Turn::Deliver);
    }
    assert!(before.is_empty());
}

#[test]
fn a_stream_of_which_something_is_missing_ends() {
    let mut ends = Ends::new();
    assert_eq!(ends.push(1), PUBLISHED);
    assert_eq!(ends.come(3), (vec![1], Turn::Failed));
    assert_eq!(ends.push(2), Pushed::Gone, "and its sender sees it");
    assert_eq!(ends.come(4), (vec![], Turn::Drop));
    assert_eq!(ends.take(), []);
}

#[test]
fn damage_ends_its_stream_and_no_other() {
    let mut ends = Ends::new();
    let other = Share::create(BYTES as usize, Pages::Normal).unwrap();
    ends.rings.open((EPOCH + 1, StreamNumber::next()), &other.card().unwrap(), BYTES);
    let mut other = Writer::new(RingMemory::new(other).unwrap());
    assert_eq!((ends.push(1), other.push(1, &[77])), (PUBLISHED, PUBLISHED));
    ends.writer.memory().write(8, &u64::MAX.to_le_bytes()); // the length of the record
    assert_eq!(ends.take(), [None, Some(77)]);
    assert_eq!(ends.take(), []);
    assert_eq!(ends.come(2), (vec![], Turn::Drop));
    assert_eq!((ends.push(3), other.push(2, &[78])), (Pushed::Gone, PUBLISHED));
    assert_eq!(ends.take(), [Some(78)]);
    // A number that has been is damage too.
    assert_eq!(other.push(1, &[79]), PUBLISHED);
    assert_eq!(ends.take(), [None]);
}

#[test]
fn what_is_offered_in_vain_takes_nothing() {
    let mut ends = Ends::new();
    let share = Share::create(BYTES as usize, Pages::Normal).unwrap();
    let card = share.card().unwrap();
    ends.rings.open((EPOCH, StreamNumber::next()), &card, BYTES * 2);
    ends.rings.open((EPOCH, StreamNumber::next()), &card, 0);
    ends.rings.open((EPOCH, ends.stream), &card, BYTES);
    let huge = Share::create(2 * RING_BYTES_MAX as usize, Pages::Normal).unwrap();
    ends.rings.open((EPOCH, StreamNumber::next()), &huge.card().unwrap(), 2 * RING_BYTES_MAX);
    assert_eq!(ends.rings.all.len(), 1);
    assert_eq!(Writer::new(RingMemory::new(share).unwrap()).push(1, b""), Pushed::Unattached);
}

#[test]
fn a_ring_that_is_closed_is_read_to_its_end_and_let_go_of() {
    let mut ends = Ends::new();
    assert_eq!(ends.look(10), 1, "its writer lives");
    assert_eq!(ends.push(1), PUBLISHED);
    assert_eq!(ends.push(3), PUBLISHED);
    ends.writer.memory().withdraw();
    assert_eq!(ends.look(20), 1);
    assert_eq!(ends.take(), [Some(1)]);
    assert_eq!(ends.look(22), 1, "the second may still come by UCX");
    assert_eq!(ends.look(26), 0, "or was lost");
    let mut ends = Ends::new();
    ends.writer.memory().withdraw();
    assert_eq!(ends.look(10), 0);
}

#[test]
fn what_a_dead_peer_has_left_is_taken_before_it_is_let_go_of() {
    let mut ends = Ends::new();
    assert!(ends.rings.is_drained(EPOCH));
    assert_eq!(ends.push(1), PUBLISHED);
    assert_eq!(ends.push(3), PUBLISHED);
    assert!(!ends.rings.is_drained(EPOCH) && ends.rings.is_drained(EPOCH + 1));
    assert_eq!(ends.take(), [Some(1)]);
    assert!(ends.rings.is_drained(EPOCH), "what is missing comes no more");
    ends.rings.close_of(EPOCH);
    assert_eq!(ends.rings.all.len(), 0);
    assert_eq!(ends.push(4), Pushed::Gone);
}

#[test]
fn rings_of_one_process_share_its_descriptor() {
    let mut rings = Rings::new(PATIENCE);
    let shares: Vec<Share> = (0..50).map(|_| Share::create(BYTES as usize, Pages::Normal).unwrap()).collect();
    for share in &shares {
        rings.open((EPOCH, StreamNumber::next()), &share.card().unwrap(), BYTES);
    }
    let first = rings.all.values().next().unwrap().process.descriptor().clone();
    assert_eq!(rings.all.len(), 50);
    assert!(rings.all.values().all(|incoming| Arc::ptr_eq(incoming.process.descriptor(), &first)));
}
