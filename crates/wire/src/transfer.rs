//! What a caller asks to be moved, checked before anything is posted.

use std::sync::Arc;

use crate::cuda::event::CudaEvent;
use crate::endpoint::RemoteRegion;
use crate::error::TransferError;
use crate::permits::{Permit, Permitted};
use crate::pieces::{HighestSlots, Piece, Shape, Size, SlotPair, Span};
use crate::region::{MemoryKind, Region};

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
    /// The pairs of slots. Parts that have the same pairs are best given clones of one list: it is looked at once then.
    pub pairs: Arc<[SlotPair]>,
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
    /// What a GPU has to reach before the local side is read.
    pub(crate) ready: Option<CudaEvent>,
    pub(crate) permitted: Option<Permitted>,
}

impl Work {
    /// Checks all parts before any of them is posted.
    pub(crate) fn check(direction: Direction, parts: Vec<Part>) -> Result<Self, TransferError> {
        let count = parts.len();
        let (mut shapes, mut locals, mut remotes) =
            (Vec::with_capacity(count), Vec::with_capacity(count), Vec::with_capacity(count));
        let mut size = Size::default();
        let mut last: Option<(Arc<[SlotPair]>, HighestSlots)> = None;
        for (index, part) in parts.into_iter().enumerate() {
            let (base, slot_stride) = (part.local_base, part.local_slot_stride);
            let local = Span { base, slot_stride, region_bytes: part.local.bytes() };
            let (base, slot_stride) = (part.remote_base, part.remote_slot_stride);
            let remote = Span { base, slot_stride, region_bytes: part.remote.bytes() };
            let shape = Shape { local, remote, pieces: part.pieces, pairs: part.pairs };
            let highest = match &last {
                Some((pairs, highest)) if Arc::ptr_eq(pairs, &shape.pairs) => *highest,
                _ => last.insert((shape.pairs.clone(), HighestSlots::of(&shape.pairs))).1,
            };
            size =
                size.checked_add(shape.check_with(index, highest)?).ok_or(TransferError::TooLarge { part: index })?;
            shapes.push(shape);
            locals.push(part.local);
            remotes.push(part.remote);
        }
        Ok(Self { direction, shapes, locals, remotes, size, ready: None, permitted: None })
    }

    /// What the target is told that the transfer belongs to.
    pub(crate) fn permit(&self) -> Option<Permit> {
        self.permitted.map(|permitted| permitted.permit)
    }

    /// Whether it takes the inbox or none.
    pub(crate) fn inbox_only(&self) -> bool {
        self.permitted.is_some_and(|permitted| permitted.inbox_only)
    }

    /// Whether a GPU's memory is on either side.
    pub(crate) fn uses_gpu(&self) -> bool {
        self.locals.iter().any(|local| local.kind() == MemoryKind::Cuda)
            || self.remotes.iter().any(|remote| remote.kind() == MemoryKind::Cuda)
    }
}
