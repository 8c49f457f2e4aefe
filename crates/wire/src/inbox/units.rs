//! The host's ends of a stream in the order of a GPU's: gathers it for a GPU to scatter, and scatters what one has gathered.

use std::sync::Arc;

use crate::context::Context;
use crate::copy::{Stores, Window};
use crate::cuda::description::{self, DeviceDescription, slot};
use crate::cuda::expand::UNIT_BYTES;
use crate::error::TransferError;
use crate::inbox::message::Refusal;
use crate::pieces::{HighestSlots, Shape, Size, SlotPair};
use crate::region::{Region, RegionId};
use crate::transfer::Work;
use crate::units::Units;

/// One transfer on its way in.
pub(crate) struct UnitStream {
    shapes: Vec<Shape>,
    /// The target of each shape, registered for as long as bytes may come.
    regions: Vec<Region>,
    units: Units,
    chunk_units: u32,
}

impl UnitStream {
    /// Checks a peer's description against the regions that it names.
    pub(crate) fn check(context: &Context, bytes: &[u8], inbox_chunk_bytes: u32) -> Result<Self, Refusal> {
        let description = DeviceDescription::parse(bytes).ok_or(Refusal::Unreadable)?;
        let chunk_units = description.chunk_units;
        let room = u64::from(inbox_chunk_bytes) / UNIT_BYTES;
        // Nothing of an inbox in host memory is granted ahead.
        if chunk_units == 0 || u64::from(chunk_units) > room || !description.ahead.is_empty() {
            return Err(Refusal::Unreadable);
        }
        let pairs = |slots: &&[[u8; 4]]| -> Arc<[SlotPair]> {
            slots.iter().map(|bytes| SlotPair { local: 0, remote: slot(bytes) }).collect()
        };
        let sets: Vec<Arc<[SlotPair]>> = description.sets.iter().map(pairs).collect();
        let highest: Vec<HighestSlots> = sets.iter().map(|pairs| HighestSlots::of(pairs)).collect();
        let claims = description::parse_parts(description.parts).ok_or(Refusal::Unreadable)?;
        let (mut shapes, mut regions, mut set_of) = (Vec::new(), Vec::<Region>::new(), Vec::new());
        for (part, (claim, set)) in claims.iter().enumerate() {
            let set = usize::try_from(*set).map_err(|_| Refusal::Unreadable)?;
            let (pairs, highest) = sets.get(set).zip(highest.get(set)).ok_or(Refusal::Unreadable)?;
            let region = match regions.last() {
                Some(last) if last.id() == claim.region => last.clone(),
                _ => context.region(claim.region).ok_or(Refusal::Unregistered { part })?,
            };
            let shape = Shape { pairs: pairs.clone(), ..claim.shape(region.bytes()) };
            shape.check_with(part, *highest).map_err(|error| match error {
                TransferError::OutsideRemote { .. } => Refusal::Outside { part },
                _ => Refusal::Unreadable,
            })?;
            shapes.push(shape);
            regions.push(region);
            set_of.push(set);
        }
        let units = Units::of(&shapes, &set_of).ok_or(Refusal::Unreadable)?;
        Ok(Self { shapes, regions, units, chunk_units })
    }

    /// That of the units, filled up as they are.
    pub(crate) fn size(&self) -> Size {
        Size { bytes: self.units.count() * UNIT_BYTES, runs: self.units.count() }
    }

    pub(crate) fn chunk_bytes(&self) -> u64 {
        u64::from(self.chunk_units) * UNIT_BYTES
    }

    /// Copies `bytes` bytes of units from `start` on out of `inbox`, where they begin at `chunk_base`, to where they belong.
    pub(crate) fn scatter(&self, inbox: &Region, chunk_base: u64, start: u64, bytes: u64) {
        let mut walk = self.units.walk(&self.shapes, start / UNIT_BYTES, bytes / UNIT_BYTES).peekable();
        while let Some((run, place)) = walk.next() {
            if let Some((after, _)) = walk.peek() {
                self.regions[after.part].window().prefetch_target(after.remote_offset);
            }
            let (target, from) = (self.regions[run.part].window(), chunk_base + place);
            let copied = target.copy_from(run.remote_offset, inbox.window(), from, run.bytes, Stores::Streaming);
            debug_assert!(copied.is_some(), "the shapes were checked against their regions");
        }
    }
}

/// One transfer on its way out.
pub(crate) struct UnitSource {
    shapes: Vec<Shape>,
    units: Units,
}

impl UnitSource {
    /// `None` past what a GPU can count.
    pub(crate) fn new(work: &Work) -> Option<Self> {
        let shape = |(shape, set): (&Shape, &usize)| Shape { pairs: work.sets[*set].clone(), ..shape.clone() };
        let shapes: Vec<Shape> = work.bare.iter().zip(&work.set_of).map(shape).collect();
        let units = Units::of(&shapes, &work.set_of)?;
        Some(Self { shapes, units })
    }

    /// Bytes of the units.
    pub(crate) fn bytes(&self) -> u64 {
        self.units.count() * UNIT_BYTES
    }

    /// What the target is told.
    pub(crate) fn describe(&self, work: &Work, chunk_units: u32) -> Vec<u8> {
        let regions: Vec<RegionId> = work.remotes.iter().map(|remote| remote.id).collect();
        let parts = description::parts(&work.bare, &regions, &work.set_of);
        description::encode(chunk_units, &[], &parts, &work.sets)
    }

    /// Copies `bytes` bytes of units from `start` on to `to`, `offset` bytes from its start. Returns how many of them are not
    /// what the units are filled up with.
    pub(crate) fn gather(&self, work: &Work, start: u64, bytes: u64, to: Window<'_>, offset: u64) -> u64 {
        let mut walk = self.units.walk(&self.shapes, start / UNIT_BYTES, bytes / UNIT_BYTES).peekable();
        let mut moved = 0;
        while let Some((run, place)) = walk.next() {
            if let Some((after, _)) = walk.peek() {
                work.locals[after.part].window().prefetch(after.local_offset, after.bytes);
            }
            let from = work.locals[run.part].window();
            let copied = to.copy_from(offset + place, from, run.local_offset, run.bytes, Stores::Cached);
            debug_assert!(copied.is_some(), "the shapes and the chunk were checked");
            moved += run.bytes;
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::ContextOptions;
    use crate::pieces::{Dim, Piece, Span};

    const CHUNK_BYTES: u32 = 3000;

    /// 20 slots of 100 bytes each, one behind the other.
    fn shape(run_bytes: u64) -> Shape {
        let span = Span { base: 0, slot_stride: 100, region_bytes: u64::MAX };
        let piece = Piece { local_offset: 0, remote_offset: 0, run_bytes, dims: [Dim::ONE; 2] };
        Shape { local: span, remote: span, pieces: [piece].into(), pairs: Arc::new([]) }
    }

    fn pairs(remotes: &[u32]) -> Arc<[SlotPair]> {
        remotes.iter().map(|&remote| SlotPair { local: 0, remote }).collect()
    }

    #[test]
    fn what_a_peer_describes_is_checked() {
        let context = Context::open(&ContextOptions::default()).unwrap();
        let region = context.allocate(2000).unwrap();
        let gone = context.allocate(2000).unwrap().id();
        let check = |chunk_units, ahead: &[u32], regions: &[RegionId], set_of: &[usize], run_bytes, slots: &[u32]| {
            let shapes = vec![shape(run_bytes); regions.len()];
            let parts = description::parts(&shapes, regions, set_of);
            let sets = [pairs(slots), pairs(&[0])];
            let bytes = description::encode(chunk_units, ahead, &parts, &sets);
            UnitStream::check(&context, &bytes, CHUNK_BYTES).map(|stream| stream.size().bytes)
        };
        let id = region.id();
        assert_eq!(check(5, &[], &[id, id], &[0, 1], 100, &[19, 3]), Ok(3 * UNIT_BYTES));
        assert_eq!(check(5, &[], &[], &[], 100, &[1 << 31]), Ok(0));
        for (checked, refusal) in [
            (check(0, &[], &[id], &[0], 100, &[0]), Refusal::Unreadable),
            (check(6, &[], &[id], &[0], 100, &[0]), Refusal::Unreadable),
            (check(5, &[1], &[id], &[0], 100, &[0]), Refusal::Unreadable),
            (check(5, &[], &[id], &[2], 100, &[0]), Refusal::Unreadable),
            (check(5, &[], &[id], &[0], 0, &[0]), Refusal::Unreadable),
            (check(5, &[], &[id, gone], &[0, 1], 100, &[0]), Refusal::Unregistered { part: 1 }),
            (check(5, &[], &[id, id], &[1, 0], 100, &[20]), Refusal::Outside { part: 1 }),
            (check(5, &[], &[id], &[0], 101, &[19]), Refusal::Outside { part: 0 }),
        ] {
            assert_eq!(checked, Err(refusal));
        }
        assert_eq!(UnitStream::check(&context, &[0xff; 30], CHUNK_BYTES).map(|_| ()), Err(Refusal::Unreadable));
    }
}
