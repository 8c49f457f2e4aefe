//! Checksums of what moves: made where it is read, compared where it has been written.
//!
//! There is one for each piece of a template, over its bytes in each pair of slots. Both sides go through them in the same
//! order, since both have the template and the blocks.

use kvferry_layout::{PageTable, PoolId, Slot};
use kvferry_match::{Chunk, Piece, Plan, Template};
use kvferry_wire::Region;
use xxhash_rust::xxh3::Xxh3;

use crate::core::ToVerify;

/// One sum a piece of the plan's template, in order. `None` if a pool is not in its region.
pub(crate) fn of_source(plan: &Plan, regions: &[Region], table: &PageTable) -> Option<Vec<u64>> {
    let mut sums = Vec::new();
    for (section, pairs) in plan.sections() {
        let memory = Memory::new(section.source_pool, regions, table)?;
        let slots = || pairs.iter().map(|pair| pair.source);
        for piece in section.pieces.iter() {
            let strides = piece.dims.map(|dim| dim.source_stride);
            sums.push(memory.sum(slots(), piece, piece.source_offset, strides)?);
        }
    }
    Some(sums)
}

/// Whether what has arrived has the sums that the source made, and the source made them of all of it.
pub(crate) fn holds_at_destination(
    claim: &ToVerify,
    templates: &[Template],
    regions: &[Region],
    table: &PageTable,
) -> bool {
    compare(claim, templates, regions, table).unwrap_or(false)
}

fn compare(claim: &ToVerify, templates: &[Template], regions: &[Region], table: &PageTable) -> Option<bool> {
    let mut bytes = 0u64;
    for (check, template) in claim.checks.iter().zip(templates) {
        let chunk = Chunk::new(check.tokens.clone(), claim.tokens.end);
        let slots = template.destination_slots(&claim.block_maps, chunk).ok()?;
        let mut sums = check.sums.iter();
        for (section, slots) in template.sections().iter().zip(&slots) {
            let memory = Memory::new(section.destination_pool, regions, table)?;
            bytes = bytes.checked_add(section.bytes_per_pair.checked_mul(slots.len() as u64)?)?;
            for piece in section.pieces.iter() {
                let strides = piece.dims.map(|dim| dim.destination_stride);
                let sum = memory.sum(slots.iter().copied(), piece, piece.destination_offset, strides)?;
                if sums.next() != Some(&sum) {
                    return Some(false);
                }
            }
        }
        if sums.next().is_some() {
            return Some(false);
        }
    }
    Some(bytes == claim.bytes)
}

/// A pool where it lies in its region.
struct Memory<'a> {
    region: &'a Region,
    base: u64,
    slot_stride: u64,
}

impl<'a> Memory<'a> {
    fn new(pool: PoolId, regions: &'a [Region], table: &PageTable) -> Option<Self> {
        let (region, pool) = (regions.get(usize::from(pool.0))?, table.pools.get(usize::from(pool.0))?);
        Some(Self { region, base: pool.base.checked_sub(region.base())?, slot_stride: pool.slot_stride })
    }

    fn sum(&self, slots: impl Iterator<Item = Slot>, piece: &Piece, offset: u64, strides: [u64; 2]) -> Option<u64> {
        let mut hasher = Xxh3::new();
        let mut run = vec![0; usize::try_from(piece.run_bytes).ok()?];
        for slot in slots {
            // Slots and pieces are inside the pool: the table and the plan were checked.
            let start = self.base + u64::from(slot.0) * self.slot_stride + offset;
            for outer in 0..piece.dims[0].count {
                for inner in 0..piece.dims[1].count {
                    self.region.read(start + outer * strides[0] + inner * strides[1], &mut run).ok()?;
                    hasher.update(&run);
                }
            }
        }
        Some(hasher.digest())
    }
}
