//! Strided pieces times pairs of slots, checked against the two regions that they name. Lengths and strides only.

use std::sync::Arc;

use zerocopy::{Immutable, IntoBytes};

use crate::error::TransferError;

/// One loop of a [`Piece`]: `count` runs, each `local_stride` and `remote_stride` bytes after the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dim {
    /// Iterations, at least 1.
    pub count: u64,
    /// Bytes from one run to the next in the local slot.
    pub local_stride: u64,
    /// Bytes from one run to the next in the remote slot.
    pub remote_stride: u64,
}

impl Dim {
    /// The loop that is not there: one iteration.
    pub const ONE: Self = Self { count: 1, local_stride: 0, remote_stride: 0 };
}

/// A strided copy between a local and a remote slot: `dims[0].count * dims[1].count` runs of `run_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// First byte, from the start of the local slot.
    pub local_offset: u64,
    /// First byte, from the start of the remote slot.
    pub remote_offset: u64,
    /// Bytes of one contiguous run, at least 1.
    pub run_bytes: u64,
    /// Outer loop, then inner loop.
    pub dims: [Dim; 2],
}

impl Piece {
    /// Runs of the piece for one pair of slots; `None` past `u64`.
    fn runs(&self) -> Option<u64> {
        self.dims[0].count.checked_mul(self.dims[1].count)
    }

    /// Bytes of a checked piece for one pair of slots.
    pub(crate) fn bytes(&self) -> u64 {
        self.dims[0].count * self.dims[1].count * self.run_bytes
    }

    /// One past the last byte touched in the local and in the remote slot; `None` past `u64` or for an empty loop.
    fn ends(&self) -> Option<(u64, u64)> {
        let mut ends =
            (self.local_offset.checked_add(self.run_bytes)?, self.remote_offset.checked_add(self.run_bytes)?);
        for dim in &self.dims {
            let steps = dim.count.checked_sub(1)?;
            ends.0 = ends.0.checked_add(steps.checked_mul(dim.local_stride)?)?;
            ends.1 = ends.1.checked_add(steps.checked_mul(dim.remote_stride)?)?;
        }
        Some(ends)
    }
}

/// A slot of the local pool and the slot of the remote pool that its bytes go to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoBytes, Immutable)]
pub struct SlotPair {
    /// Slot of the local pool.
    pub local: u32,
    /// Slot of the remote pool.
    pub remote: u32,
}

/// Bytes and runs of a checked shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) bytes: u64,
    pub(crate) runs: u64,
}

impl Size {
    pub(crate) fn checked_add(self, other: Self) -> Option<Self> {
        let bytes = self.bytes.checked_add(other.bytes)?;
        Some(Self { bytes, runs: self.runs.checked_add(other.runs)? })
    }

    pub(crate) fn checked_mul(self, times: u64) -> Option<Self> {
        Some(Self { bytes: self.bytes.checked_mul(times)?, runs: self.runs.checked_mul(times)? })
    }
}

/// Where the slots of one side lie in its region of `region_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) base: u64,
    pub(crate) slot_stride: u64,
    pub(crate) region_bytes: u64,
}

impl Span {
    /// Whether `slot`'s first `end` bytes lie inside the region.
    fn contains(&self, slot: u32, end: u64) -> bool {
        u64::from(slot)
            .checked_mul(self.slot_stride)
            .and_then(|start| start.checked_add(self.base))
            .and_then(|start| start.checked_add(end))
            .is_some_and(|last| last <= self.region_bytes)
    }
}

impl Span {
    /// The highest slot whose first `end` bytes lie inside the region, or more than any slot.
    fn highest(&self, end: u64) -> Option<u64> {
        let room = self.region_bytes.checked_sub(self.base.checked_add(end)?)?;
        Some(room.checked_div(self.slot_stride).unwrap_or(u64::MAX))
    }
}

/// What moves between one local and one remote region.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) local: Span,
    pub(crate) remote: Span,
    pub(crate) pieces: Arc<[Piece]>,
    pub(crate) pairs: Arc<[SlotPair]>,
}

/// The highest slot of each side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HighestSlots {
    local: u32,
    remote: u32,
}

impl HighestSlots {
    pub(crate) fn of(pairs: &[SlotPair]) -> Self {
        pairs.iter().fold(Self::default(), |highest, pair| Self {
            local: highest.local.max(pair.local),
            remote: highest.remote.max(pair.remote),
        })
    }

    /// Whether neither is higher than its limit.
    pub(crate) fn within(self, (local, remote): (u64, u64)) -> bool {
        u64::from(self.local) <= local && u64::from(self.remote) <= remote
    }
}

impl Shape {
    /// What the pieces move for one pair, and where the last of them ends in the local and in the remote slot.
    fn sum_pieces(&self, part: usize) -> Result<(Size, u64, u64), TransferError> {
        let (mut local_end, mut remote_end) = (0, 0);
        let mut one = Size::default();
        for (piece, shape) in self.pieces.iter().enumerate() {
            let bad = TransferError::BadPiece { part, piece };
            let (Some((local, remote)), Some(runs)) = (shape.ends(), shape.runs()) else { return Err(bad) };
            if shape.run_bytes == 0 {
                return Err(bad);
            }
            (local_end, remote_end) = (local.max(local_end), remote.max(remote_end));
            let size = runs.checked_mul(shape.run_bytes).and_then(|bytes| one.checked_add(Size { bytes, runs }));
            one = size.ok_or(TransferError::TooLarge { part })?;
        }
        Ok((one, local_end, remote_end))
    }

    /// What one pair moves, and the highest local and remote slots that are inside of the regions; `None` if none is.
    pub(crate) fn check_pieces(&self, part: usize) -> Result<(Size, Option<(u64, u64)>), TransferError> {
        let (one, local_end, remote_end) = self.sum_pieces(part)?;
        Ok((one, self.local.highest(local_end).zip(self.remote.highest(remote_end))))
    }

    /// Checks every run against both regions, in time of pieces plus pairs. `part` is named in errors.
    pub(crate) fn check(&self, part: usize) -> Result<Size, TransferError> {
        self.check_with(part, HighestSlots::of(&self.pairs))
    }

    /// As [`check`](Self::check), in time of pieces, for pairs whose `highest` slots are known.
    pub(crate) fn check_with(&self, part: usize, highest: HighestSlots) -> Result<Size, TransferError> {
        self.check_pairs(part, &self.pairs, highest)
    }

    /// The same of other `pairs` than the shape's own.
    pub(crate) fn check_pairs(
        &self,
        part: usize,
        pairs: &[SlotPair],
        highest: HighestSlots,
    ) -> Result<Size, TransferError> {
        let (one, local_end, remote_end) = self.sum_pieces(part)?;
        let inside = self.local.contains(highest.local, local_end) && self.remote.contains(highest.remote, remote_end);
        // Looked at one by one only to name the first that is not.
        for (pair, slots) in pairs.iter().enumerate().filter(|_| !inside) {
            if !self.local.contains(slots.local, local_end) {
                let (slot, region_bytes) = (slots.local, self.local.region_bytes);
                return Err(TransferError::OutsideLocal { part, pair, slot, region_bytes });
            }
            if !self.remote.contains(slots.remote, remote_end) {
                let (slot, region_bytes) = (slots.remote, self.remote.region_bytes);
                return Err(TransferError::OutsideRemote { part, pair, slot, region_bytes });
            }
        }
        let pairs = pairs.len() as u64;
        let size = one.bytes.checked_mul(pairs).zip(one.runs.checked_mul(pairs));
        let (bytes, runs) = size.ok_or(TransferError::TooLarge { part })?;
        Ok(Size { bytes, runs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(local_offset: u64, remote_offset: u64, run_bytes: u64, dims: [(u64, u64, u64); 2]) -> Piece {
        let dims = dims.map(|(count, local_stride, remote_stride)| Dim { count, local_stride, remote_stride });
        Piece { local_offset, remote_offset, run_bytes, dims }
    }

    fn check_one(piece: Piece, pair: (u32, u32), bytes: (u64, u64)) -> Result<Size, TransferError> {
        let shape = Shape {
            local: Span { base: 10, slot_stride: 100, region_bytes: bytes.0 },
            remote: Span { base: 0, slot_stride: 200, region_bytes: bytes.1 },
            pieces: Arc::new([piece]),
            pairs: Arc::new([SlotPair { local: pair.0, remote: pair.1 }]),
        };
        shape.check(0)
    }

    #[test]
    fn bounds_are_exact_on_both_sides() {
        // Local bytes touched in slot 2: 10 + 200 + 5 .. + 3*10 + 1*4 + 4 = 253. Remote, slot 1: 200 + 7 + 3*20 + 1*8 + 4 = 279.
        let p = piece(5, 7, 4, [(4, 10, 20), (2, 4, 8)]);
        assert_eq!(check_one(p, (2, 1), (253, 279)).unwrap(), Size { bytes: 32, runs: 8 });
        assert!(matches!(
            check_one(p, (2, 1), (252, 279)),
            Err(TransferError::OutsideLocal { part: 0, pair: 0, slot: 2, region_bytes: 252 })
        ));
        assert!(matches!(
            check_one(p, (2, 1), (253, 278)),
            Err(TransferError::OutsideRemote { part: 0, pair: 0, slot: 1, region_bytes: 278 })
        ));
    }

    #[test]
    fn nonsense_pieces_are_refused_without_overflow() {
        let whole = (u64::MAX, u64::MAX);
        let one = (1, 0, 0);
        for bad in [
            piece(0, 0, 0, [one, one]),
            piece(0, 0, 8, [(0, 0, 0), one]),
            piece(u64::MAX, 0, 8, [one, one]),
            piece(0, 0, 8, [(u64::MAX, u64::MAX, 1), one]),
            piece(0, 0, 8, [(1 << 40, 0, 0), (1 << 40, 0, 0)]),
        ] {
            assert!(
                matches!(check_one(bad, (0, 0), whole), Err(TransferError::BadPiece { part: 0, piece: 0 })),
                "{bad:?}"
            );
        }
        let huge = piece(0, 0, 8, [(1 << 62, 0, 0), one]);
        assert!(matches!(check_one(huge, (0, 0), whole), Err(TransferError::TooLarge { part: 0 })));
        let far = piece(0, 0, u64::MAX - 500, [one, one]);
        assert!(matches!(check_one(far, (u32::MAX, 0), whole), Err(TransferError::OutsideLocal { .. })));
    }
}
