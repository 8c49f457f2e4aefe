//! What two engines say to each other about requests. Each message is one frame: the kind in the header, the fields in the
//! payload. Everything decoded here is a claim of the peer's.

use std::ops::Range;

use kvferry_layout::Digest;
use kvferry_match::BlockMap;
use kvferry_wire::TransferStats;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::report::carry;

/// Names one try at one request. The two instances agree on it outside of kvferry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestKey {
    /// The request.
    pub request: u64,
    /// Counts the tries at it.
    pub attempt: u32,
}

/// One call of `connect` by one engine. An engine never uses a number twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct CallId(pub(crate) u64);

/// The peer has matched the two instances and asks to be connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The peer's call that asks.
    pub(crate) call: CallId,
    /// The call of this side that the peer answers with its own: such a greeting starts nothing anew.
    pub(crate) answers: Option<CallId>,
    /// Whether the peer is a source.
    pub(crate) source: bool,
    /// Name of its instance.
    pub(crate) instance: String,
    /// Rank in its instance.
    pub(crate) rank: u32,
    /// When this life of it began, in microseconds by its clock.
    pub(crate) born: u64,
    /// Digest of the template between the two ranks, as the peer computed it.
    pub(crate) template: Digest,
    /// The peer's card, for those who know an earlier life of it only.
    pub(crate) card: Vec<u8>,
}

/// The peer has a link of its own for the two ranks, and has heard this side's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// This side's call.
    pub(crate) call: CallId,
    /// Every want that the peer had sent before it heard that call has a serial below this one, and is over.
    pub(crate) floor: u64,
}

/// The peer leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bye {
    pub(crate) call: CallId,
    /// It writes nothing any more, and nothing that it had written is on its way.
    pub(crate) settled: bool,
}

/// One want of one destination. A destination never uses a serial twice, so that what is late is told from what is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Serial(pub(crate) u64);

/// What most messages are about: a request, and the want that asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct About {
    pub(crate) key: RequestKey,
    pub(crate) serial: Serial,
}

/// The destination is ready to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Want {
    pub(crate) about: About,
    /// Tokens of the sequence that are wanted.
    pub(crate) tokens: Range<u64>,
    /// Bytes that the destination expects from this source.
    pub(crate) bytes: u64,
    /// Digest of the plan that the destination expects.
    pub(crate) plan: Digest,
    /// The destination's slots, a map a layer group.
    pub(crate) block_maps: Vec<BlockMap>,
}

/// Bytes that have left the source so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moved {
    pub(crate) about: About,
    pub(crate) bytes: u64,
    /// Whatever the source writes for this want, from the first byte to the last, it writes through the destination's inbox. A
    /// promise: once made it stays.
    pub(crate) inbox: bool,
}

/// Every byte is visible at the destination, and the source writes none any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) about: About,
    /// Bytes written, by the source's count.
    pub(crate) bytes: u64,
    /// Digest of the plan that was carried out.
    pub(crate) plan: Digest,
    /// How they went. Of the last write the wire adds it, behind the message.
    pub(crate) carried: Vec<TransferStats>,
    /// What the sender's user adds.
    pub(crate) note: Vec<u8>,
    /// Of what was sent, part by part, if the source makes any.
    pub(crate) checks: Vec<PartCheck>,
}

/// Checksum of one part of a send.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartCheck {
    /// Tokens of the part.
    pub(crate) tokens: Range<u64>,
    /// Its layers, if it has not all of them.
    pub(crate) layers: Option<Range<u32>>,
    /// Over its bytes, a piece of the template after the other, of each in every pair of slots.
    pub(crate) sum: u64,
}

/// The source writes nothing of the request any more, and has not written all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stopped {
    pub(crate) about: About,
    pub(crate) reason: Refusal,
    pub(crate) late: Late,
}

/// What a source has written for a want may still arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Late {
    /// It is there or lost.
    Nothing,
    /// Through the destination's inbox only.
    Inbox,
    Anything,
}

/// Why the other side ends a request. One word each: the details are in the error of the side that says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The two sides ask for different tokens of the request. Post it again with the same range on both.
    #[error("the two sides name different tokens of the request")]
    TokensDiffer,
    /// The two sides have different plans. A bug, or block maps that were altered on the way.
    #[error("the two sides have different plans")]
    PlansDiffer,
    /// The block maps do not cover the tokens: a hole, a slot outside the pool, or one named twice.
    #[error("the block maps cannot be bound")]
    BlockMaps,
    /// The side ran out of patience, or its write failed.
    #[error("the transfer failed there")]
    Failed,
    /// Nobody there waits for this request and attempt.
    #[error("nobody there waits for the request")]
    Unknown,
    /// Too many receives are posted and not yet sent. Wait for some to end.
    #[error("too many receives are posted")]
    TooMany,
    /// Its user has cancelled the request.
    #[error("the request was cancelled there")]
    Cancelled,
    /// Another group of sources was chosen to serve the request. Nothing is asked of this one.
    #[error("another instance serves the request")]
    NotChosen,
    /// What arrived is not what was sent. Send it again.
    #[error("the checksums differ")]
    Corrupted,
}

/// The destination does not believe, or no longer needs, what the source has reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refused {
    pub(crate) about: About,
    pub(crate) reason: Refusal,
}

/// A message with its fields. Each that asks for something is said again until it is answered; each can be heard twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello(Hello),
    /// The peer's answer to this side's call.
    Welcome(Welcome),
    /// The peer's call, and the link that it made, are over.
    Bye(Bye),
    /// From a destination. Answered by `Got`, or any word of how it goes.
    Want(Want),
    /// From a source: the want has come.
    Got(About),
    Moved(Moved),
    /// From a source. Answered by `DoneAck` or `Refused`.
    Done(Done),
    /// The destination has compared the bytes of `Done` with its own count.
    DoneAck(About),
    Refused(Refused),
    /// From a destination, about a want that may not even have come. Answered by `Stopped` or `Done`.
    Cancel(About),
    /// From a source. Answered by `StopAck`.
    Stopped(Stopped),
    StopAck(About),
    /// From a source: a send is posted. Answered by a `Want` or `Release`, when there is a receive.
    Announce(RequestKey),
    /// From a destination: another group of sources serves the request, or it is over.
    Release(RequestKey),
}

/// A frame is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum MessageError {
    #[error("message of unknown kind {0}")]
    Kind(u16),
    #[error("message of kind {kind} does not decode")]
    Payload { kind: u16 },
}

impl Message {
    /// The frame's kind and payload.
    pub(crate) fn encode(&self) -> (u16, Vec<u8>) {
        match self {
            Self::Hello(fields) => (1, payload(fields)),
            Self::Want(fields) => (2, payload(fields)),
            Self::Moved(fields) => (3, payload(fields)),
            Self::Done(fields) => (4, payload(fields)),
            Self::DoneAck(fields) => (5, payload(fields)),
            Self::Refused(fields) => (6, payload(fields)),
            Self::Welcome(fields) => (7, payload(fields)),
            Self::Bye(fields) => (8, payload(fields)),
            Self::Got(fields) => (9, payload(fields)),
            Self::Cancel(fields) => (10, payload(fields)),
            Self::Stopped(fields) => (11, payload(fields)),
            Self::StopAck(fields) => (12, payload(fields)),
            Self::Announce(fields) => (13, payload(fields)),
            Self::Release(fields) => (14, payload(fields)),
        }
    }

    /// Reads what a peer sent.
    pub(crate) fn decode(kind: u16, payload: &[u8]) -> Result<Self, MessageError> {
        Ok(match kind {
            1 => Self::Hello(fields(kind, payload)?),
            2 => Self::Want(fields(kind, payload)?),
            3 => Self::Moved(fields(kind, payload)?),
            4 => Self::Done(done(kind, payload)?),
            5 => Self::DoneAck(fields(kind, payload)?),
            6 => Self::Refused(fields(kind, payload)?),
            7 => Self::Welcome(fields(kind, payload)?),
            8 => Self::Bye(fields(kind, payload)?),
            9 => Self::Got(fields(kind, payload)?),
            10 => Self::Cancel(fields(kind, payload)?),
            11 => Self::Stopped(fields(kind, payload)?),
            12 => Self::StopAck(fields(kind, payload)?),
            13 => Self::Announce(fields(kind, payload)?),
            14 => Self::Release(fields(kind, payload)?),
            kind => return Err(MessageError::Kind(kind)),
        })
    }
}

fn payload<T: Serialize>(fields: &T) -> Vec<u8> {
    postcard::to_allocvec(fields).expect("plain data in memory always encodes")
}

fn fields<T: DeserializeOwned>(kind: u16, payload: &[u8]) -> Result<T, MessageError> {
    match postcard::take_from_bytes(payload) {
        Ok((fields, [])) => Ok(fields),
        _ => Err(MessageError::Payload { kind }),
    }
}

/// A report, which the statistics of the last write may follow.
fn done(kind: u16, payload: &[u8]) -> Result<Done, MessageError> {
    let unreadable = MessageError::Payload { kind };
    let (mut done, last) = postcard::take_from_bytes::<Done>(payload).map_err(|_| unreadable)?;
    if !last.is_empty() {
        carry(&mut done.carried, TransferStats::from_bytes(last).ok_or(unreadable)?);
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvferry_layout::Slot;
    use kvferry_wire::{FRAME_PAYLOAD_BYTES_MAX, Route, RouteReason};
    use proptest::prelude::*;

    use super::*;
    use crate::core::{NOTE_BYTES_MAX, PARTS_MAX};

    fn stats() -> TransferStats {
        let (route, reason) = (Route::Landing, RouteReason::Forced);
        TransferStats { bytes: 3, runs: 2, elapsed: Duration::from_micros(5), route, reason }
    }

    #[test]
    fn every_message_survives_the_wire() {
        let key = RequestKey { request: 7, attempt: 2 };
        let about = About { key, serial: Serial(3) };
        let block_maps = vec![BlockMap::new(3, vec![Some(Slot(9)), None])];
        let (call, answers, card) = (CallId(8), Some(CallId(2)), vec![1, 2]);
        let (template, instance) = (Digest(5), "prefill".to_owned());
        for message in [
            Message::Hello(Hello { call, answers, source: true, instance, rank: 3, born: 5, template, card }),
            Message::Welcome(Welcome { call: CallId(1), floor: 4 }),
            Message::Bye(Bye { call: CallId(u64::MAX), settled: true }),
            Message::Want(Want { about, tokens: 0..128, bytes: 4096, plan: Digest(6), block_maps }),
            Message::Got(about),
            Message::Moved(Moved { about, bytes: 1, inbox: true }),
            Message::Done(Done {
                about,
                bytes: u64::MAX,
                plan: Digest(6),
                carried: vec![stats()],
                note: vec![7],
                checks: vec![PartCheck { tokens: 0..16, layers: Some(2..3), sum: 1 }],
            }),
            Message::DoneAck(about),
            Message::Refused(Refused { about, reason: Refusal::BlockMaps }),
            Message::Cancel(about),
            Message::Stopped(Stopped { about, reason: Refusal::Cancelled, late: Late::Inbox }),
            Message::StopAck(about),
            Message::Announce(key),
            Message::Release(key),
        ] {
            let (kind, payload) = message.encode();
            assert_eq!(Message::decode(kind, &payload), Ok(message));
        }
    }

    #[test]
    fn what_the_wire_adds_to_a_report_is_a_part_of_it() {
        let about = About { key: RequestKey { request: 7, attempt: 2 }, serial: Serial(3) };
        let report =
            |carried| Message::Done(Done { about, bytes: 9, plan: Digest(6), carried, note: vec![], checks: vec![] });
        let (kind, payload) = report(vec![stats()]).encode();
        let with = |last: TransferStats| [payload.clone(), postcard::to_allocvec(&last).unwrap()].concat();
        let same = TransferStats { bytes: 6, runs: 4, elapsed: Duration::from_micros(10), ..stats() };
        assert_eq!(Message::decode(kind, &with(stats())), Ok(report(vec![same])));
        let other = TransferStats { route: Route::Direct, reason: RouteReason::TargetMapped, ..stats() };
        assert_eq!(Message::decode(kind, &with(other)), Ok(report(vec![stats(), other])));
        assert_eq!(Message::decode(kind, &[payload, vec![1]].concat()), Err(MessageError::Payload { kind }));
    }

    /// Sums are of each part, however many pieces there are in it.
    #[test]
    fn the_longest_report_fits_a_frame() {
        let about = About { key: RequestKey { request: u64::MAX, attempt: u32::MAX }, serial: Serial(u64::MAX) };
        let check = PartCheck { tokens: u64::MAX..u64::MAX, layers: Some(u32::MAX..u32::MAX), sum: u64::MAX };
        let longest = TransferStats { bytes: u64::MAX, runs: u64::MAX, elapsed: Duration::MAX, ..stats() };
        let (bytes, plan, carried, note) = (u64::MAX, Digest(u128::MAX), vec![longest; 64], vec![0; NOTE_BYTES_MAX]);
        let checks = vec![check; PARTS_MAX];
        let (_, payload) = Message::Done(Done { about, bytes, plan, carried, note, checks }).encode();
        assert!(payload.len() <= FRAME_PAYLOAD_BYTES_MAX, "{} B", payload.len());
    }

    #[test]
    fn what_is_left_over_is_an_error() {
        let (kind, mut payload) = Message::Announce(RequestKey { request: 7, attempt: 2 }).encode();
        payload.push(0);
        assert_eq!(Message::decode(kind, &payload), Err(MessageError::Payload { kind: 13 }));
        assert_eq!(Message::decode(99, &[]), Err(MessageError::Kind(99)));
    }

    proptest! {
        #[test]
        fn any_payload_is_decoded_or_refused(kind in 0u16..16, payload: Vec<u8>) {
            let _ = Message::decode(kind, &payload);
        }
    }
}
