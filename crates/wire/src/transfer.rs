//! What a caller asks to be moved, checked before anything is posted.

use std::sync::Arc;

use crate::endpoint::RemoteRegion;
use crate::error::TransferError;
use crate::pieces::{Piece, Shape, Size, SlotPair, Span};
use crate::region::Region;

/// Pieces that move between one local and one remote pool, for each pair of slots.
#[derive(Clone, Debug)]
pub struct Part {
    /// Registered memory that is read by a put and written by a get.
    pub local: Region,
    /// Byte of slot 0, from the start of `local`.
    pub local_base: u64,
    /// Bytes from one local slot to the next.
    pub local_slot_stride: u64,
    /// Imported memory that is written by a put and read by a get.
    pub remote: RemoteRegion,
    /// Byte of slot 0, from the start of `remote`.
    pub remote_base: u64,
    /// Bytes from one remote slot to the next.
    pub remote_slot_stride: u64,
    /// What moves for one pair of slots.
    pub pieces: Arc<[Piece]>,
    /// The pairs of slots.
    pub pairs: Vec<SlotPair>,
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From here to the peer.
    Put,
    /// From the peer to here.
    Get,
}

/// A checked transfer. The three lists have one entry a part.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) direction: Direction,
    pub(crate) shapes: Vec<Shape>,
    pub(crate) locals: Vec<Region>,
    pub(crate) remotes: Vec<RemoteRegion>,
    pub(crate) size: Size,
}

impl Work {
    /// Checks all parts before any of them is posted.
    pub(crate) fn check(direction: Direction, parts: Vec<Part>) -> Result<Self, TransferError> {
        let (mut shapes, mut locals, mut remotes) = (Vec::new(), Vec::new(), Vec::new());
        let mut size = Size::default();
        for (index, part) in parts.into_iter().enumerate() {
            let (base, slot_stride) = (part.local_base, part.local_slot_stride);
            let local = Span { base, slot_stride, region_bytes: part.local.bytes() };
            let (base, slot_stride) = (part.remote_base, part.remote_slot_stride);
            let remote = Span { base, slot_stride, region_bytes: part.remote.bytes() };
            let shape = Shape { local, remote, pieces: part.pieces, pairs: part.pairs };
            size = size.checked_add(shape.check(index)?).ok_or(TransferError::TooLarge { part: index })?;
            shapes.push(shape);
            locals.push(part.local);
            remotes.push(part.remote);
        }
        Ok(Self { direction, shapes, locals, remotes, size })
    }
}
