//! What two engines say to each other about requests. Each message is one frame: the kind in the header, the fields in the
//! payload. Everything decoded here is a claim of the peer's.

use std::ops::Range;

use kvferry_layout::Digest;
use kvferry_match::BlockMap;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The peer's call that asks.
    pub(crate) call: CallId,
    /// Rank in its instance.
    pub(crate) rank: u32,
    /// Digest of the template between the two ranks, as the peer computed it.
    pub(crate) template: Digest,
}

/// The destination is ready to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Want {
    pub(crate) key: RequestKey,
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
    pub(crate) key: RequestKey,
    pub(crate) bytes: u64,
}

/// Every byte is visible at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) key: RequestKey,
    /// Bytes written, by the source's count.
    pub(crate) bytes: u64,
    /// Digest of the plan that was carried out.
    pub(crate) plan: Digest,
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
}

/// The request ends at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refused {
    pub(crate) key: RequestKey,
    pub(crate) reason: Refusal,
}

/// A message with its fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello(Hello),
    /// The peer's answer to this side's call: it has a link of its own for the two ranks.
    Welcome(CallId),
    /// The peer's call, and the link that it made, are over.
    Bye(CallId),
    Want(Want),
    Moved(Moved),
    Done(Done),
    /// The destination has compared the bytes of `Done` with its own count.
    DoneAck(RequestKey),
    Refused(Refused),
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
        }
    }

    /// Reads what a peer sent.
    pub(crate) fn decode(kind: u16, payload: &[u8]) -> Result<Self, MessageError> {
        Ok(match kind {
            1 => Self::Hello(fields(kind, payload)?),
            2 => Self::Want(fields(kind, payload)?),
            3 => Self::Moved(fields(kind, payload)?),
            4 => Self::Done(fields(kind, payload)?),
            5 => Self::DoneAck(fields(kind, payload)?),
            6 => Self::Refused(fields(kind, payload)?),
            7 => Self::Welcome(fields(kind, payload)?),
            8 => Self::Bye(fields(kind, payload)?),
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

#[cfg(test)]
mod tests {
    use kvferry_layout::Slot;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_message_survives_the_wire() {
        let key = RequestKey { request: 7, attempt: 2 };
        let block_maps = vec![BlockMap::new(3, vec![Some(Slot(9)), None])];
        for message in [
            Message::Hello(Hello { call: CallId(8), rank: 3, template: Digest(5) }),
            Message::Welcome(CallId(1)),
            Message::Bye(CallId(u64::MAX)),
            Message::Want(Want { key, tokens: 0..128, bytes: 4096, plan: Digest(6), block_maps }),
            Message::Moved(Moved { key, bytes: 1 }),
            Message::Done(Done { key, bytes: u64::MAX, plan: Digest(6) }),
            Message::DoneAck(key),
            Message::Refused(Refused { key, reason: Refusal::BlockMaps }),
        ] {
            let (kind, payload) = message.encode();
            assert_eq!(Message::decode(kind, &payload), Ok(message));
        }
    }

    #[test]
    fn what_is_left_over_is_an_error() {
        let (kind, mut payload) = Message::DoneAck(RequestKey { request: 7, attempt: 2 }).encode();
        payload.push(0);
        assert_eq!(Message::decode(kind, &payload), Err(MessageError::Payload { kind: 5 }));
        assert_eq!(Message::decode(99, &[]), Err(MessageError::Kind(99)));
    }

    proptest! {
        #[test]
        fn any_payload_is_decoded_or_refused(kind in 0u16..10, payload: Vec<u8>) {
            let _ = Message::decode(kind, &payload);
        }
    }
}
