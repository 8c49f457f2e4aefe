//! Checksums of what moves: made where it is read, compared where it has been written.
//!
//! There is one for each part of a send, over each piece of its template in every pair of slots. Both sides go through them in
//! the same order, since both have the template and the blocks.

use kvferry_layout::{PageTable, PoolId, Slot};
use kvferry_match::{Chunk, Piece, Plan, Template};
use kvferry_wire::Region;
use xxhash_rust::xxh3::Xxh3;

use crate::core::ToVerify;

/// The sum of a plan. `None` if a pool is not in its region.
pub(crate) fn of_source(plan: &Plan, regions: &[Region], table: &PageTable) -> Option<u64> {
    let mut sum = Xxh3::new();
    for (section, pairs) in plan.sections() {
        let memory = Memory::new(section.source_pool, regions, table)?;
        let slots = || pairs.iter().map(|pair| pair.source);
        for piece in section.pieces.iter() {
            let strides = piece.dims.map(|dim| dim.source_stride);
            memory.add_to(&mut sum, slots(), piece, piece.source_offset, strides)?;
        }
    }
    Some(sum.digest())
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
        let mut sum = Xxh3::new();
        for (section, slots) in template.sections().iter().zip(&slots) {
            let memory = Memory::new(section.destination_pool, regions, table)?;
            bytes = bytes.checked_add(section.bytes_per_pair.checked_mul(slots.len() as u64)?)?;
            for piece in section.pieces.iter() {
                let strides = piece.dims.map(|dim| dim.destination_stride);
                memory.add_to(&mut sum, slots.iter().copied(), piece, piece.destination_offset, strides)?;
            }
        }
        if sum.digest() != check.sum {
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

    fn add_to(
        &self,
        sum: &mut Xxh3,
        slots: impl Iterator<Item = Slot>,
        piece: &Piece,
        offset: u64,
        strides: [u64; 2],
    ) -> Option<()> {
        let mut run = vec![0; usize::try_from(piece.run_bytes).ok()?];
        for slot in slots {
            // Slots and pieces are inside the pool: the table and the plan were checked.
            let start = self.base + u64::from(slot.0) * self.slot_stride + offset;
            for outer in 0..piece.dims[0].count {
                for inner in 0..piece.dims[1].count {
                    self.region.read(start + outer * strides[0] + inner * strides[1], &mut run).ok()?;
                    sum.update(&run);
                }
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use kvferry_layout::{Cut, Dtype, ModelFacts, TableOptions, build};
    use kvferry_match::{BlockMap, assign};
    use kvferry_wire::{Context, ContextOptions};

    use super::*;
    use crate::message::{PartCheck, Serial};

    /// Two ranks that are laid out differently, with memory for each.
    fn rank(context: &Context, block_tokens: u32) -> (PageTable, Vec<Region>) {
        let facts = r#"{"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}"#;
        let facts = ModelFacts::from_config(facts).unwrap();
        let options = TableOptions::new(block_tokens, Dtype::F16, 8);
        let mut table = build(&facts, &"tp1".parse::<Cut>().unwrap(), 0, &options).unwrap();
        let mut regions = Vec::new();
        for pool in &mut table.pools {
            let region = context.allocate(pool.extent_bytes().unwrap()).unwrap();
            pool.base = region.base();
            regions.push(region);
        }
        (table, regions)
    }

    #[test]
    fn a_byte_that_differs_is_found_and_one_that_did_not_move_is_not_looked_at() {
        let context = Context::open(&ContextOptions::default()).unwrap();
        let ((ours, from), (theirs, to)) = (rank(&context, 16), rank(&context, 32));
        for region in &from {
            let bytes: Vec<u8> = (0..region.bytes()).map(|i| (i * 31 % 251).to_le_bytes()[0]).collect();
            region.write(0, &bytes).unwrap();
        }
        let template = assign([(0, &ours)], [(0, &theirs)]).unwrap()[0].template(0).unwrap();
        let map = |slots: &[u32]| vec![BlockMap::dense(0, slots.iter().copied().map(Slot))];
        let (source, destination) = (map(&[3, 1, 0, 6]), map(&[5, 2]));
        // In two chunks, as a send in parts would make them.
        let mut checks = Vec::new();
        for tokens in [0..40, 40..60] {
            let plan = template.bind(&source, &destination, Chunk::new(tokens.clone(), 60)).unwrap();
            checks.push(PartCheck { tokens, layers: None, sum: of_source(&plan, &from, &ours).unwrap() });
            plan.for_each_run(|run| {
                let mut bytes = vec![0; usize::try_from(run.bytes).unwrap()];
                from[usize::from(run.source_pool.0)].read(run.source_offset, &mut bytes).unwrap();
                to[usize::from(run.destination_pool.0)].write(run.destination_offset, &bytes).unwrap();
            });
        }
        let bytes = template.expected_bytes(&destination, 0..60).unwrap();
        let claim = |checks: &[PartCheck]| ToVerify {
            serial: Serial(0),
            tokens: 0..60,
            bytes,
            block_maps: destination.clone().into(),
            checks: checks.to_vec(),
        };
        let templates = [template.clone(), template];
        let holds = |checks: &[PartCheck]| holds_at_destination(&claim(checks), &templates, &to, &theirs);
        assert!(holds(&checks));
        assert!(!holds(&checks[..1]), "a part is missing");
        assert!(!holds(&[]), "nothing is said");
        let slot_bytes = theirs.pools[0].slot_stride;
        let flip = |offset: u64| {
            let mut byte = [0];
            to[0].read(offset, &mut byte).unwrap();
            to[0].write(offset, &[byte[0] ^ 1]).unwrap();
        };
        flip(4 * slot_bytes);
        assert!(holds(&checks), "slot 4 is not of the request");
        flip(2 * slot_bytes + 7);
        assert!(!holds(&checks), "a bit of the second block differs");
    }
}
