//! What the two ends of an inbox say to each other. Everything received is a claim.
//!
//! ```text
//! source                              target
//!   Hello {address}            ->       how to answer
//!   Describe {bytes, ...}      ->       where the bytes belong, once a transfer
//!                              <-     Grant {chunks}, again for each that has been scattered
//!                              <-     Ahead {chunks}, for a transfer yet to come: it names those that it begins with
//!   Chunk {index, chunk}       ->       the chunk holds that part of the stream
//!   Chunks {index, chunks}     ->       those chunks hold the parts from that one on
//!   Filled {..., bytes}        ->       or: put these bytes into it, where puts cannot be had
//!                              <-     Landed, when all of it has been scattered
//!                              <-     Refused {refusal}, instead
//!                              <-     Revoked: nothing of this stream is scattered any more, and it is to be dropped
//!   Drop                       ->       nothing more comes of this stream, none of its chunks is written any more
//!                              <-     Dropped: nothing of it is scattered any more
//!   Bye                        ->       nothing more comes, no chunk is written any more
//!                              <-     Unanswered: the way back has failed, nothing is answered any more
//!   Ring {share, ...}          ->       frames come through this memory, if you can map it: see `frames.rs`
//!   Bell                       ->       and there is one
//! ```

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::frame::StreamNumber;
use crate::permits::Permit;
use crate::pieces::{Dim, Piece, Shape, SlotPair, Span};
use crate::region::RegionId;
use crate::share::ShareCard;

/// One connection of a source: its endpoint, by its own numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct ConnectionId(pub(crate) u64);

/// One transfer of a source worker. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct StreamId(pub(crate) u64);

/// One message, in either direction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Message {
    pub(crate) connection: ConnectionId,
    pub(crate) body: Body,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Body {
    Hello {
        address: Vec<u8>,
    },
    /// The next bytes of a [`Description`] of `total_bytes`.
    Describe {
        stream: StreamId,
        permit: Option<Permit>,
        total_bytes: u32,
        bytes: Vec<u8>,
    },
    /// Chunks of the inbox that may be filled for this stream. `before` were granted earlier: a grant that is said twice, or
    /// that another has overtaken, is told by it.
    Grant {
        stream: StreamId,
        before: u64,
        chunks: Vec<u32>,
    },
    /// Chunk `chunk` of the inbox holds part `index` of the stream.
    Chunk {
        stream: StreamId,
        index: u64,
        chunk: u32,
    },
    /// As `Chunk`, with the bytes.
    Filled {
        stream: StreamId,
        index: u64,
        chunk: u32,
        bytes: Vec<u8>,
    },
    Landed {
        stream: StreamId,
    },
    Refused {
        stream: StreamId,
        refusal: Refusal,
    },
    Bye,
    /// The source gives a stream up, and has nothing under way into its chunks.
    Drop {
        stream: StreamId,
    },
    Dropped {
        stream: StreamId,
    },
    /// The target scatters no more of a stream, and keeps its chunks for it until it is dropped.
    Revoked {
        stream: StreamId,
    },
    /// As `Describe`, of a stream in the order of a GPU's ([`Units`](crate::units::Units)), which gathers it, or is to scatter
    /// it, or both: the next bytes of a [`DeviceDescription`](crate::cuda::description::DeviceDescription). Its chunks are those of
    /// the slab, or of the inbox.
    DescribeDevice {
        stream: StreamId,
        permit: Option<Permit>,
        slab: bool,
        total_bytes: u32,
        bytes: Bytes,
    },
    /// As `Chunk`, several at once, for the parts from `index` on.
    Chunks {
        stream: StreamId,
        index: u64,
        chunks: Vec<u32>,
    },
    /// Chunks of the slab that the next transfer may begin with, before it has been granted any.
    Ahead {
        chunks: Vec<u32>,
    },
    /// What the target answers through has failed. Said by another way, it ends the connection that it is about.
    Unanswered,
    /// Frames of this stream are to come through a memory file, if it can be mapped.
    Ring {
        stream: StreamNumber,
        share: ShareCard,
        bytes: u32,
    },
    /// There is a frame in a ring, whose reader sleeps.
    Bell,
}

/// Bytes that are copied as one. Those of a `Vec` are encoded one by one, which takes longer than to send them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <&[u8]>::deserialize(deserializer).map(|bytes| Self(bytes.to_vec()))
    }
}

/// Bytes of a description in one message.
pub(crate) const DESCRIBE_BYTES: usize = 256 << 10;

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("a plain structure has an encoding")
    }

    /// `None` for bytes that are no message. Nothing is allocated beyond a small multiple of their length.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

/// Why a target does not take a transfer. Nothing of it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// A region of the target is not registered any more. Ask the peer for its cards.
    #[error("the target region of part {part} is not registered")]
    Unregistered {
        /// Index of the part.
        part: usize,
    },
    /// A range is outside its region, as the target knows it. Mend the plan.
    #[error("part {part} leaves its target region")]
    Outside {
        /// Index of the part.
        part: usize,
    },
    /// The target holds as much for this peer as it will. Try again when other transfers have ended.
    #[error("the target has no room for another transfer")]
    Busy,
    /// The target has given up what the transfer belongs to. Some of it may have been written; nothing more is.
    #[error("the target has given up what the transfer belongs to")]
    Revoked,
    /// The target's GPU failed, perhaps in the middle. Connect to another.
    #[error("the target's GPU failed")]
    Gpu,
    /// The target could not read the description: the peer runs another release, or something is damaged.
    #[error("the target cannot read the transfer")]
    Unreadable,
}

/// Where the bytes of a stream belong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) chunk_bytes: u32,
    pub(crate) parts: Vec<PartDescription>,
}

/// The target's half of a shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartDescription {
    pub(crate) region: RegionId,
    base: u64,
    slot_stride: u64,
    pieces: Vec<PieceDescription>,
    slots: Vec<u32>,
}

/// The target's half of a [`Piece`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PieceDescription {
    offset: u64,
    run_bytes: u64,
    /// Count and stride.
    dims: [(u64, u64); 2],
}

impl PartDescription {
    pub(crate) fn new(region: RegionId, shape: &Shape) -> Self {
        let piece = |piece: &Piece| PieceDescription {
            offset: piece.remote_offset,
            run_bytes: piece.run_bytes,
            dims: piece.dims.map(|dim| (dim.count, dim.remote_stride)),
        };
        Self {
            region,
            base: shape.remote.base,
            slot_stride: shape.remote.slot_stride,
            pieces: shape.pieces.iter().map(piece).collect(),
            slots: shape.pairs.iter().map(|pair| pair.remote).collect(),
        }
    }

    /// Without the slots, which are told apart.
    pub(crate) fn without_slots(region: RegionId, shape: &Shape, none: &Arc<[SlotPair]>) -> Self {
        Self::new(region, &Shape { pairs: none.clone(), ..shape.clone() })
    }

    /// The shape as the target sees it, to be checked against its own region: `remote` is that region, and the local side,
    /// the stream itself, is no place.
    pub(crate) fn shape(&self, region_bytes: u64) -> Shape {
        let piece = |piece: &PieceDescription| Piece {
            local_offset: 0,
            remote_offset: piece.offset,
            run_bytes: piece.run_bytes,
            dims: piece.dims.map(|(count, remote_stride)| Dim { count, local_stride: 0, remote_stride }),
        };
        Shape {
            local: Span { base: 0, slot_stride: 0, region_bytes: u64::MAX },
            remote: Span { base: self.base, slot_stride: self.slot_stride, region_bytes },
            pieces: self.pieces.iter().map(piece).collect::<Arc<[_]>>(),
            pairs: self.slots.iter().map(|&remote| SlotPair { local: 0, remote }).collect(),
        }
    }
}

impl Description {
    pub(crate) fn encode(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("a plain structure has an encoding")
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_is_itself_after_the_way() {
        let stream = StreamId(7);
        for body in [
            Body::Hello { address: vec![1, 2] },
            Body::Describe { stream, permit: Some(Permit(9)), total_bytes: 3, bytes: vec![1, 2, 3] },
            Body::Grant { stream, before: 3, chunks: vec![0, 9] },
            Body::Chunk { stream, index: 1, chunk: 2 },
            Body::Filled { stream, index: 1, chunk: 2, bytes: vec![5; 300] },
            Body::Refused { stream, refusal: Refusal::Outside { part: 4 } },
            Body::Bye,
            Body::Drop { stream },
            Body::Dropped { stream },
            Body::Revoked { stream },
            Body::DescribeDevice { stream, permit: None, slab: true, total_bytes: 400, bytes: Bytes(vec![9; 300]) },
            Body::Chunks { stream, index: 5, chunks: vec![3, 1] },
            Body::Ahead { chunks: vec![7] },
            Body::Unanswered,
        ] {
            let message = Message { connection: ConnectionId(1), body };
            assert_eq!(Message::parse(&message.encode()), Some(message));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_and_never_a_panic(bytes: Vec<u8>) {
            let _ = Message::parse(&bytes);
            let _ = Description::parse(&bytes);
        }
    }
}
