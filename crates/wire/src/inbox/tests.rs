//! The target's end against a source whose messages are lost, late, doubled, reordered or wrong.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::message::{Body, ConnectionId, Description, PartDescription, Refusal, StreamId};
use super::target::{DESCRIPTION_BYTES_MAX, Inbox, Peer};
use super::{chunk_offset, chunk_stride};
use crate::context::Context;
use crate::copy::Stores;
use crate::options::ContextOptions;
use crate::permits::Permit;
use crate::pieces::{Dim, Piece, Shape, SlotPair, Span};
use crate::region::Region;

const CHUNK: u32 = 100;
const PEER: Peer = Peer { epoch: 1, connection: ConnectionId(1) };
const STREAM: StreamId = StreamId(5);

fn context() -> Context {
    // The smallest inbox in which two peers meet: 12 chunks, of which one peer may hold 8.
    let options =
        ContextOptions { inbox_bytes: 12 * chunk_stride(CHUNK), chunk_bytes: CHUNK, ..ContextOptions::default() };
    Context::open(&options).unwrap()
}

/// 30 runs of 33 bytes into every other place of a region of 2,000 bytes.
fn shape(region_bytes: u64) -> Shape {
    Shape {
        local: Span { base: 0, slot_stride: 33, region_bytes: u64::MAX },
        remote: Span { base: 5, slot_stride: 66, region_bytes },
        pieces: [Piece { local_offset: 0, remote_offset: 0, run_bytes: 33, dims: [Dim::ONE; 2] }].into(),
        pairs: (0..30).map(|slot| SlotPair { local: slot, remote: 29 - slot }).collect(),
    }
}

const BYTES: u64 = 30 * 33;

fn description(target: &Region) -> Vec<u8> {
    let part = PartDescription::new(target.card().id, &shape(target.bytes()));
    Description { chunk_bytes: CHUNK, parts: vec![part] }.encode()
}

fn byte(position: u64) -> u8 {
    u8::try_from(position * 7 % 250).unwrap() + 1
}

/// What the region must hold once all has been scattered.
fn expected() -> Vec<u8> {
    let mut bytes = vec![0; 2000];
    for run in 0..30 {
        for i in 0..33 {
            bytes[5 + (29 - run) * 66 + i] = byte((run * 33 + i) as u64);
        }
    }
    bytes
}

/// A source in the same process: its messages are calls, between which a test does as it likes.
struct Source {
    context: Context,
    inbox: Inbox,
    target: Region,
    next_index: u64,
    credits: VecDeque<u32>,
    landed: bool,
}

impl Source {
    fn new() -> Self {
        let context = context();
        let mut inbox = Inbox::new(&context).unwrap().unwrap();
        assert!(inbox.welcome(PEER));
        let target = context.allocate(2000).unwrap();
        Self { context, inbox, target, next_index: 0, credits: VecDeque::new(), landed: false }
    }

    fn describe(&mut self, bytes: &[u8], total: usize) -> Option<Body> {
        let total = u32::try_from(total).unwrap();
        self.inbox.describe(&self.context, PEER, STREAM, total, bytes).map(|(_, body)| body)
    }

    fn take_grants(&mut self) {
        for (peer, body) in self.inbox.grant() {
            let Body::Grant { stream, chunks, .. } = body else { panic!("{body:?} in place of a grant") };
            assert_eq!((peer, stream), (PEER, STREAM));
            self.credits.extend(chunks);
        }
    }

    /// Writes the next part of the stream into a chunk, and returns the message that says so.
    fn fill(&mut self) -> Option<(u64, u32)> {
        let start = self.next_index * u64::from(CHUNK);
        let chunk = (start < BYTES).then(|| self.credits.pop_front()).flatten()?;
        let bytes: Vec<u8> = (start..BYTES.min(start + u64::from(CHUNK))).map(byte).collect();
        let from = self.context.allocate(u64::from(CHUNK)).unwrap();
        from.write(0, &bytes).unwrap();
        let offset = chunk_offset(chunk, CHUNK);
        let window = self.inbox.region().window();
        window.copy_from(offset, from.window(), 0, bytes.len() as u64, Stores::Cached).unwrap();
        self.next_index += 1;
        Some((self.next_index - 1, chunk))
    }

    fn scatter(&mut self) {
        while let Some(reply) = self.inbox.scatter() {
            self.landed |= reply == Some((PEER, Body::Landed { stream: STREAM }));
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 2000];
        self.target.read(0, &mut bytes).unwrap();
        bytes
    }
}

/// Chunks are granted ahead to whoever is idle, as long as there are some, and those of a peer that leaves go to others at once.
#[test]
fn chunks_that_are_granted_ahead_come_back_when_their_peer_leaves() {
    let context = context();
    let mut inbox = Inbox::new(&context).unwrap().unwrap().granting_ahead(3);
    let peer = |epoch| Peer { epoch, connection: ConnectionId(1) };
    let ahead = |inbox: &mut Inbox| {
        let chunks = |body| if let Body::Ahead { chunks } = body { chunks.len() } else { panic!("{body:?}") };
        inbox.grant().into_iter().map(|(peer, body)| (peer.epoch, chunks(body))).collect::<Vec<_>>()
    };
    assert!(inbox.welcome(peer(1)));
    assert_eq!(ahead(&mut inbox), [(1, 3)]);
    assert!(inbox.welcome(peer(2)));
    assert_eq!(ahead(&mut inbox), [], "none are left for it");
    inbox.farewell(peer(1));
    assert_eq!(ahead(&mut inbox), [], "who leaves is granted nothing");
    inbox.forget(peer(1));
    assert!(inbox.welcome(peer(3)));
    assert_eq!(ahead(&mut inbox), [(3, 1)]);
    assert!(inbox.welcome(peer(4)));
    assert_eq!(ahead(&mut inbox), [(4, 1)]);
}

/// What a peer was granted that is out of reach but alive goes to nobody else before it is dead, or takes leave.
#[test]
fn chunks_that_a_lost_peer_may_write_are_nobodys() {
    let context = context();
    let mut inbox = Inbox::new(&context).unwrap().unwrap().granting_ahead(3);
    let peer = |epoch| Peer { epoch, connection: ConnectionId(1) };
    assert!(inbox.welcome(peer(1)));
    let granted = inbox.grant();
    let free = inbox.free_chunks();
    inbox.lose(peer(1));
    assert_eq!(inbox.free_chunks(), free, "{granted:?} may still be written");
    inbox.recover(peer(2));
    assert_eq!(inbox.free_chunks(), free, "that was another");
    inbox.recover(peer(1));
    assert_eq!(inbox.free_chunks(), free + 3);
    inbox.recover(peer(1));
    assert_eq!(inbox.free_chunks(), free + 3, "they come back once");
    assert!(inbox.welcome(peer(3)));
    inbox.grant();
    inbox.lose(peer(3));
    assert_eq!(inbox.free_chunks(), free);
    inbox.farewell(peer(3));
    assert_eq!(inbox.free_chunks(), free + 3, "it says that it is done");
}

/// What becomes of a message on its way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Lost,
    Doubled,
    /// Comes behind the next one.
    Late,
    /// Names another chunk.
    WrongChunk,
    /// Names another part.
    WrongIndex,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever happens to the messages, no byte lands that is not the right one in the right place, and it is over only
    /// when every byte has landed.
    #[test]
    fn faults_lose_time_and_never_bytes(faults in prop::collection::vec(prop_oneof![
        4 => Just(Fault::None), 1 => Just(Fault::Lost), 1 => Just(Fault::Doubled), 1 => Just(Fault::Late),
    ], 10)) {
        let mut source = Source::new();
        let described = description(&source.target);
        let (first, second) = described.split_at(described.len() / 2);
        prop_assert_eq!(source.describe(first, described.len()), None);
        prop_assert_eq!(source.describe(second, described.len()), None);
        let mut late = VecDeque::new();
        for fault in &faults {
            source.take_grants();
            let Some((index, chunk)) = source.fill() else { continue };
            match fault {
                Fault::Lost => {}
                Fault::Late => late.push_back((index, chunk)),
                Fault::Doubled => {
                    source.inbox.filled(PEER, STREAM, index, chunk, None);
                    source.inbox.filled(PEER, STREAM, index, chunk, None);
                }
                _ => source.inbox.filled(PEER, STREAM, index, chunk, None),
            }
            source.scatter();
            if *fault != Fault::Late && let Some((index, chunk)) = late.pop_front() {
                source.inbox.filled(PEER, STREAM, index, chunk, None);
                // Said again after the chunk has gone to another part.
                source.scatter();
                source.take_grants();
                source.inbox.filled(PEER, STREAM, index, chunk, None);
            }
        }
        late.into_iter().for_each(|(index, chunk)| source.inbox.filled(PEER, STREAM, index, chunk, None));
        source.scatter();
        source.take_grants();
        while let Some((index, chunk)) = source.fill() {
            source.inbox.filled(PEER, STREAM, index, chunk, None);
            source.scatter();
            source.take_grants();
        }
        let (found, expected) = (source.bytes(), expected());
        prop_assert!(found.iter().zip(&expected).all(|(found, expected)| found == expected || *found == 0));
        prop_assert_eq!(source.landed, found == expected);
        if !faults.contains(&Fault::Lost) {
            prop_assert!(source.landed);
        }
    }
}

#[test]
fn claims_about_chunks_that_were_not_granted_are_ignored() {
    let mut source = Source::new();
    let described = description(&source.target);
    source.describe(&described, described.len());
    source.take_grants();
    for fault in [Fault::WrongChunk, Fault::WrongIndex] {
        let (index, chunk) = if fault == Fault::WrongChunk { (0, 11) } else { (10, source.credits[0]) };
        source.inbox.filled(PEER, STREAM, index, chunk, None);
        source.inbox.filled(PEER, StreamId(9), 0, chunk, None);
        source.inbox.filled(Peer { epoch: 2, ..PEER }, STREAM, 0, chunk, None);
    }
    source.scatter();
    assert!(source.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn bytes_that_come_with_a_message_are_taken_in_their_length_only() {
    let mut source = Source::new();
    let described = description(&source.target);
    source.describe(&described, described.len());
    for index in 0..BYTES.div_ceil(u64::from(CHUNK)) {
        source.take_grants();
        let chunk = source.credits.pop_front().unwrap();
        let start = index * u64::from(CHUNK);
        let bytes: Vec<u8> = (start..BYTES.min(start + u64::from(CHUNK))).map(byte).collect();
        for wrong in [bytes.len() - 1, bytes.len() + 1] {
            source.inbox.filled(PEER, STREAM, index, chunk, Some(&vec![9; wrong]));
            assert!(source.inbox.scatter().is_none(), "part {index} of {wrong} bytes");
        }
        source.inbox.filled(PEER, STREAM, index, chunk, Some(&bytes));
        source.scatter();
    }
    assert!(source.landed && source.bytes() == expected());
}

#[test]
fn a_description_is_checked_against_the_region_that_it_names() {
    let mut source = Source::new();
    let refused = |refusal| Some(Body::Refused { stream: STREAM, refusal });
    let inside = shape(source.target.bytes());
    let mut outside = inside.clone();
    let mut pairs = outside.pairs.to_vec();
    pairs[3].remote = 31;
    outside.pairs = pairs.into();
    let whole = |shape: &Shape, region: &Region, chunk_bytes| {
        let parts = vec![PartDescription::new(region.card().id, shape); 2];
        Description { chunk_bytes, parts }.encode()
    };
    let gone = source.context.allocate(2000).unwrap();
    let unregistered = whole(&inside, &gone, CHUNK);
    drop(gone);
    for (described, refusal) in [
        (whole(&outside, &source.target, CHUNK), Refusal::Outside { part: 0 }),
        (whole(&inside, &source.target, 0), Refusal::Unreadable),
        (whole(&inside, &source.target, CHUNK + 1), Refusal::Unreadable),
        (vec![0xff; 30], Refusal::Unreadable),
        (unregistered, Refusal::Unregistered { part: 0 }),
    ] {
        assert_eq!(source.describe(&described, described.len()), refused(refusal));
    }
    assert_eq!(source.describe(&[1, 2, 3], 2), refused(Refusal::Unreadable));
    assert_eq!(source.describe(&[], DESCRIPTION_BYTES_MAX + 1), refused(Refusal::Busy));
    assert!(source.inbox.grant().is_empty(), "nothing of a refused transfer is granted");
}

/// A peer that takes all it can get and does nothing with it leaves room for another.
#[test]
fn connections_take_turns_and_one_does_not_hold_everything() {
    let mut source = Source::new();
    let other = Peer { epoch: 2, ..PEER };
    source.inbox.welcome(other);
    let described = description(&source.target);
    let total = u32::try_from(described.len()).unwrap();
    source.describe(&described, described.len());
    let held: usize = granted(&mut source.inbox, PEER);
    assert_eq!(held, 8);
    source.inbox.describe(&source.context, other, STREAM, total, &described);
    assert_eq!(granted(&mut source.inbox, other), 4);
    // What the first one held is free when it is known to write no more.
    source.inbox.forget(PEER);
    assert_eq!(granted(&mut source.inbox, other), 4);
}

fn granted(inbox: &mut Inbox, wanted: Peer) -> usize {
    let chunks = |(peer, body): (Peer, Body)| match body {
        Body::Grant { chunks, .. } => {
            assert_eq!(peer, wanted);
            chunks.len()
        }
        _ => 0,
    };
    inbox.grant().into_iter().map(chunks).sum()
}

/// What a source gives up is free at once, and what it had said of it before is not believed after.
#[test]
fn a_dropped_stream_scatters_nothing_and_keeps_nothing() {
    let mut source = Source::new();
    let described = description(&source.target);
    let dropped = Some((PEER, Body::Dropped { stream: STREAM }));
    for turn in 0..20 {
        // In part, or whole with chunks granted, filled and said to be: all of it goes.
        if turn % 2 == 0 {
            source.describe(&described[..5], described.len());
        } else {
            source.describe(&described, described.len());
            source.credits.clear();
            source.take_grants();
            assert_eq!(source.credits.len(), 8, "turn {turn}");
            source.next_index = 0;
            let (index, chunk) = source.fill().unwrap();
            source.inbox.filled(PEER, STREAM, index, chunk, None);
            assert_eq!(source.inbox.drop_stream(PEER, STREAM), dropped);
            source.inbox.filled(PEER, STREAM, index, chunk, None);
        }
        assert_eq!(source.inbox.drop_stream(PEER, STREAM), dropped);
        assert_eq!(source.inbox.scatter(), None);
    }
    assert!(source.bytes() == vec![0; 2000]);
    assert_eq!(source.inbox.drop_stream(Peer { epoch: 9, ..PEER }, STREAM), None);
}

/// What is filled when its permit is revoked, and what is filled later, stays in the inbox; its chunks come back with the
/// source's word.
#[test]
fn nothing_of_a_revoked_permit_is_scattered() {
    let mut source = Source::new();
    let described = description(&source.target);
    source.describe(&described, described.len());
    source.inbox.belongs(PEER, STREAM, Some(Permit(3)));
    source.take_grants();
    let mut fill =
        || source.fill().map(|(index, chunk)| source.inbox.filled(PEER, STREAM, index, chunk, None)).unwrap();
    fill();
    fill();
    source.inbox.scatter();
    let before = source.bytes();
    assert!(source.inbox.revoke(PEER.epoch + 1, Permit(3)).is_empty(), "another peer's");
    assert!(source.inbox.revoke(PEER.epoch, Permit(4)).is_empty(), "another permit");
    assert_eq!(source.inbox.revoke(PEER.epoch, Permit(3)), [(PEER, Body::Revoked { stream: STREAM })]);
    let (index, chunk) = source.fill().unwrap();
    source.inbox.filled(PEER, STREAM, index, chunk, None);
    assert_eq!(source.inbox.scatter(), None);
    assert!(source.inbox.grant().is_empty());
    assert_eq!(source.bytes(), before);
    assert_eq!(source.inbox.drop_stream(PEER, STREAM), Some((PEER, Body::Dropped { stream: STREAM })));
    // All chunks are there for whoever comes next.
    source.describe(&described, described.len());
    assert_eq!(granted(&mut source.inbox, PEER), 8);
}
