//! What a caller asks to be moved, checked before anything is posted.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use crate::cuda::event::CudaEvent;
use crate::endpoint::{EndpointId, RemoteRegion};
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

/// What transfers have in common that differ in their slots: parts, each with the number of the set of pairs that it takes.
/// The lists have one entry a part.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Without pairs.
    pub(crate) bare: Vec<Shape>,
    pub(crate) set_of: Vec<usize>,
    pub(crate) locals: Vec<Region>,
    pub(crate) remotes: Vec<RemoteRegion>,
    /// Whether a GPU's memory is on either side.
    pub(crate) uses_gpu: bool,
}

/// A checked transfer.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) direction: Direction,
    parts: Arc<Parts>,
    /// The pairs of each set.
    pub(crate) sets: Vec<Arc<[SlotPair]>>,
    /// The parts with their pairs. A GPU expands them itself: then there are none.
    pub(crate) shapes: Vec<Shape>,
    pub(crate) size: Size,
    /// What a GPU has to reach before the local side is read.
    pub(crate) ready: Option<CudaEvent>,
    pub(crate) permitted: Option<Permitted>,
}

impl Deref for Work {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl Work {
    /// Checks all parts before any of them is posted.
    pub(crate) fn check(direction: Direction, parts: Vec<Part>) -> Result<Self, TransferError> {
        let (parts, sets) = Parts::of(parts);
        let highest: Vec<HighestSlots> = sets.iter().map(|pairs| HighestSlots::of(pairs)).collect();
        let mut size = Size::default();
        for (part, (shape, set)) in parts.bare.iter().zip(&parts.set_of).enumerate() {
            let checked = shape.check_pairs(part, &sets[*set], highest[*set])?;
            size = size.checked_add(checked).ok_or(TransferError::TooLarge { part })?;
        }
        Ok(Self::new(direction, Arc::new(parts), sets, size))
    }

    fn new(direction: Direction, parts: Arc<Parts>, sets: Vec<Arc<[SlotPair]>>, size: Size) -> Self {
        let shape = |(shape, set): (&Shape, &usize)| Shape { pairs: sets[*set].clone(), ..shape.clone() };
        let shapes =
            if parts.uses_gpu { Vec::new() } else { parts.bare.iter().zip(&parts.set_of).map(shape).collect() };
        Self { direction, parts, sets, shapes, size, ready: None, permitted: None }
    }

    /// What the target is told that the transfer belongs to.
    pub(crate) fn permit(&self) -> Option<Permit> {
        self.permitted.map(|permitted| permitted.permit)
    }

    /// Whether it takes the inbox or none.
    pub(crate) fn inbox_only(&self) -> bool {
        self.permitted.is_some_and(|permitted| permitted.inbox_only)
    }

    pub(crate) fn parts(&self) -> &Arc<Parts> {
        &self.parts
    }
}

impl Parts {
    /// The parts, and the sets of pairs, in the order in which they come. Lists that are one in memory are one set.
    fn of(parts: Vec<Part>) -> (Self, Vec<Arc<[SlotPair]>>) {
        let count = parts.len();
        let (mut bare, mut set_of) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let (mut locals, mut remotes) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut sets: Vec<Arc<[SlotPair]>> = Vec::new();
        let mut known: HashMap<*const SlotPair, usize> = HashMap::new();
        let none: Arc<[SlotPair]> = Arc::new([]);
        for part in parts {
            let (base, slot_stride) = (part.local_base, part.local_slot_stride);
            let local = Span { base, slot_stride, region_bytes: part.local.bytes() };
            let (base, slot_stride) = (part.remote_base, part.remote_slot_stride);
            let remote = Span { base, slot_stride, region_bytes: part.remote.bytes() };
            let set = match sets.last() {
                Some(last) if Arc::ptr_eq(last, &part.pairs) => sets.len() - 1,
                // Empty ones are one at the most: they have no address of their own.
                _ => *known.entry(part.pairs.as_ptr()).or_insert_with(|| {
                    sets.push(part.pairs);
                    sets.len() - 1
                }),
            };
            bare.push(Shape { local, remote, pieces: part.pieces, pairs: none.clone() });
            set_of.push(set);
            locals.push(part.local);
            remotes.push(part.remote);
        }
        let uses_gpu = locals.iter().any(|local| local.kind() == MemoryKind::Cuda)
            || remotes.iter().any(|remote| remote.kind() == MemoryKind::Cuda);
        (Self { bare, set_of, locals, remotes, uses_gpu }, sets)
    }
}

/// Parts that are moved again and again, each time for other slots: checked once, as far as they can be without.
/// [`Worker::prepare`](crate::Worker::prepare) makes them.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub(crate) endpoint: EndpointId,
    parts: Arc<Parts>,
    limits: Arc<[Limit]>,
}

/// What a set's pairs must keep to, and what one of them moves.
#[derive(Clone, Copy, Debug)]
struct Limit {
    /// Neither slot may be higher.
    highest: (u64, u64),
    /// No slot at all is inside.
    none: bool,
    of_pair: Size,
}

impl Prepared {
    /// Of parts that have all been imported on `endpoint`.
    pub(crate) fn new(endpoint: EndpointId, parts: Vec<Part>) -> Result<Self, TransferError> {
        let (parts, sets) = Parts::of(parts);
        let open = Limit { highest: (u64::MAX, u64::MAX), none: false, of_pair: Size::default() };
        let mut limits = vec![open; sets.len()];
        for (part, (shape, set)) in parts.bare.iter().zip(&parts.set_of).enumerate() {
            let limit = &mut limits[*set];
            let (of_pair, highest) = shape.check_pieces(part)?;
            limit.of_pair = limit.of_pair.checked_add(of_pair).ok_or(TransferError::TooLarge { part })?;
            match highest {
                Some((local, remote)) => {
                    limit.highest = (limit.highest.0.min(local), limit.highest.1.min(remote));
                }
                None => limit.none = true,
            }
        }
        Ok(Self { endpoint, parts: Arc::new(parts), limits: limits.into() })
    }

    /// Sets of pairs that a transfer has to name.
    #[must_use]
    pub fn set_count(&self) -> usize {
        self.limits.len()
    }

    pub(crate) fn locals(&self) -> &[Region] {
        &self.parts.locals
    }

    pub(crate) fn uses_gpu(&self) -> bool {
        self.parts.uses_gpu
    }

    /// A transfer for these pairs.
    pub(crate) fn work(&self, direction: Direction, sets: Vec<Arc<[SlotPair]>>) -> Result<Work, TransferError> {
        if sets.len() != self.limits.len() {
            return Err(TransferError::Sets { sets: sets.len(), prepared: self.limits.len() });
        }
        let mut size = Size::default();
        for (set, (pairs, limit)) in sets.iter().zip(&*self.limits).enumerate() {
            let highest = HighestSlots::of(pairs);
            let parts = self.parts.bare.iter().zip(&self.parts.set_of).enumerate();
            if limit.none || !highest.within(limit.highest) {
                // Which part it is, and which pair. None of no pairs.
                for (part, (shape, _)) in parts.filter(|(_, (_, of))| **of == set) {
                    shape.check_pairs(part, pairs, highest)?;
                }
            }
            let of_set = limit.of_pair.checked_mul(pairs.len() as u64);
            let sum = of_set.and_then(|of_set| size.checked_add(of_set));
            let first = || self.parts.set_of.iter().position(|of| *of == set).unwrap_or(0);
            size = sum.ok_or_else(|| TransferError::TooLarge { part: first() })?;
        }
        Ok(Work::new(direction, self.parts.clone(), sets, size))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pieces::Dim;

    fn shape() -> impl Strategy<Value = Shape> {
        let span = (0..200u64, 0..50u64, 0..900u64).prop_map(|(base, slot_stride, region_bytes)| Span {
            base,
            slot_stride,
            region_bytes,
        });
        let piece =
            (0..50u64, 0..50u64, 0..40u64, 0..3u64).prop_map(|(local_offset, remote_offset, run_bytes, count)| {
                let dim = Dim { count, local_stride: 9, remote_stride: 30 };
                Piece { local_offset, remote_offset, run_bytes, dims: [dim, Dim::ONE] }
            });
        (span.clone(), span, prop::collection::vec(piece, 0..3)).prop_map(|(local, remote, pieces)| Shape {
            local,
            remote,
            pieces: pieces.into(),
            pairs: Arc::new([]),
        })
    }

    proptest! {
        /// What is known of pieces without slots is what is found with them.
        #[test]
        fn a_limit_is_the_highest_slot_that_is_inside(shape in shape(), slots in prop::collection::vec((0..40u32, 0..40u32), 1..4)) {
            let pairs: Vec<SlotPair> = slots.into_iter().map(|(local, remote)| SlotPair { local, remote }).collect();
            let highest = HighestSlots::of(&pairs);
            let checked = shape.check_pairs(3, &pairs, highest);
            match shape.check_pieces(3) {
                Err(error) => prop_assert_eq!(checked.unwrap_err().to_string(), error.to_string()),
                Ok((of_pair, limit)) => {
                    let inside = limit.is_some_and(|limit| highest.within(limit));
                    let size = of_pair.checked_mul(pairs.len() as u64).unwrap();
                    prop_assert_eq!(checked.ok(), inside.then_some(size));
                }
            }
        }
    }
}
