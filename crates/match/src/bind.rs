//! Joining a template to the block maps of one request.

use std::ops::Range;

use kvferry_layout::{Digest, GroupId, GroupKind, PoolId, Slot};

use crate::block_map::BlockMap;
use crate::error::{BindError, Side};
use crate::plan::{Plan, SlotPair, begin_digest};
use crate::slot_set::SlotSet;
use crate::template::{Inner, Pairing, Template};

/// What a receiver expects of one source rank, worked out from its own block maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Expectation {
    /// Equal to the sender's [`Plan::bytes`].
    pub bytes: u64,
    /// Equal to the sender's [`Plan::digest`].
    pub digest: Digest,
}

impl Template {
    /// What the source rank copies for a request.
    ///
    /// - `source`, `destination`: one block map for each group of the side's page table, in the table's order.
    /// - `tokens`: what of the sequence is wanted. The overlap of a source block and a destination block is copied, whole,
    ///   iff it shares a token with `tokens`; then both maps must have the block. All other blocks need not be there.
    ///   State is copied whatever `tokens` is: it has no token axis.
    ///
    /// Blocks are paired by their ordinals; then the maps are asked for their slots. Cost: O(blocks).
    ///
    /// # Errors
    ///
    /// [`BindError`] names the side, group and block that are wrong.
    pub fn bind(&self, source: &[BlockMap], destination: &[BlockMap], tokens: Range<u64>) -> Result<Plan, BindError> {
        let mut plan = Plan::default();
        self.bind_into(source, destination, tokens, &mut plan)?;
        Ok(plan)
    }

    /// Like [`Self::bind`], into a plan whose memory is used again: nothing is allocated once it has held as much.
    ///
    /// # Errors
    ///
    /// As [`Self::bind`]; `plan` is then a plan of nothing.
    pub fn bind_into(
        &self,
        source: &[BlockMap],
        destination: &[BlockMap],
        tokens: Range<u64>,
        plan: &mut Plan,
    ) -> Result<(), BindError> {
        plan.reset(self, tokens.clone());
        let bound = self.fill(source, destination, &tokens, plan);
        if bound.is_err() {
            plan.reset(self, 0..0);
        }
        bound
    }

    fn fill(
        &self,
        source: &[BlockMap],
        destination: &[BlockMap],
        tokens: &Range<u64>,
        plan: &mut Plan,
    ) -> Result<(), BindError> {
        let inner = &*self.inner;
        count_maps(Side::Source, source, &inner.source.groups)?;
        count_maps(Side::Destination, destination, &inner.destination.groups)?;
        inner.check_distinct(destination, tokens, &mut plan.seen)?;
        for (pairing, pairs) in inner.pairings.iter().zip(&mut plan.pairs) {
            let (source, destination) = (Blocks::source(pairing, source), Blocks::destination(pairing, destination));
            for period in pairing.phase.periods(tokens) {
                let (source_ordinal, destination_ordinal) = pairing.phase.ordinals(period);
                let source = source.slot(source_ordinal)?;
                pairs.push(SlotPair { source, destination: destination.slot(destination_ordinal)? });
            }
        }
        plan.bytes = inner.bytes(|pairing| plan.pairs[pairing].len() as u64)?;
        Ok(())
    }

    /// What a receiver is to get from the source rank. It need not know the source's slots.
    ///
    /// # Errors
    ///
    /// As [`Self::bind`], of the destination's maps.
    pub fn expectation(&self, destination: &[BlockMap], tokens: Range<u64>) -> Result<Expectation, BindError> {
        let inner = &*self.inner;
        count_maps(Side::Destination, destination, &inner.destination.groups)?;
        inner.check_distinct(destination, &tokens, &mut SlotSet::default())?;
        let mut transcript = begin_digest(self, &tokens);
        let mut counts = vec![0; inner.pairings.len()];
        for (pairing, count) in inner.pairings.iter().zip(&mut counts) {
            let blocks = Blocks::destination(pairing, destination);
            for period in pairing.phase.periods(&tokens) {
                transcript.word(blocks.slot(pairing.phase.ordinals(period).1)?.0);
                *count += 1;
            }
        }
        let bytes = inner.bytes(|pairing| counts[pairing])?;
        Ok(Expectation { bytes, digest: transcript.finish() })
    }

    /// Bytes that a receiver is to get from the source rank: those of [`Self::expectation`].
    ///
    /// # Errors
    ///
    /// As [`Self::expectation`].
    pub fn expected_bytes(&self, destination: &[BlockMap], tokens: Range<u64>) -> Result<u64, BindError> {
        self.expectation(destination, tokens).map(|expected| expected.bytes)
    }

    /// The tokens that the maps of both sides reach, in every paged group of the template. Holes are not looked at.
    pub fn common_tokens(&self, source: &[BlockMap], destination: &[BlockMap]) -> Range<u64> {
        let reach = |map: Option<&BlockMap>, kind: GroupKind| {
            let tokens = u64::from(kind.tokens());
            map.map_or(0..0, |map| map.first().saturating_mul(tokens)..map.end().saturating_mul(tokens))
        };
        let mut common = None::<Range<u64>>;
        let paged = self.inner.pairings.iter().filter(|pairing| pairing.phase.period_tokens > 0);
        for Pairing { source_group, destination_group, .. } in paged {
            let ours = reach(source.get(usize::from(source_group.0)), self.inner.source.kind(*source_group));
            let theirs = reach(
                destination.get(usize::from(destination_group.0)),
                self.inner.destination.kind(*destination_group),
            );
            for reached in [ours, theirs] {
                let so_far = common.unwrap_or(0..u64::MAX);
                common = Some(so_far.start.max(reached.start)..so_far.end.min(reached.end));
            }
        }
        common.filter(|tokens| !tokens.is_empty()).unwrap_or(0..0)
    }
}

impl Plan {
    fn reset(&mut self, template: &Template, tokens: Range<u64>) {
        self.template = template.clone();
        self.tokens = tokens;
        self.bytes = 0;
        self.pairs.iter_mut().for_each(Vec::clear);
        let pairings = template.inner.pairings.len();
        if self.pairs.len() < pairings {
            self.pairs.resize_with(pairings, Vec::new);
        }
    }
}

/// The blocks of one group on one side.
struct Blocks<'a> {
    side: Side,
    group: GroupId,
    map: &'a BlockMap,
    bound: (PoolId, u32),
}

impl<'a> Blocks<'a> {
    /// `maps` has one map a group.
    fn source(pairing: &Pairing, maps: &'a [BlockMap]) -> Self {
        let group = pairing.source_group;
        Self { side: Side::Source, group, map: &maps[usize::from(group.0)], bound: pairing.source_bound }
    }

    /// `maps` has one map a group.
    fn destination(pairing: &Pairing, maps: &'a [BlockMap]) -> Self {
        let group = pairing.destination_group;
        Self { side: Side::Destination, group, map: &maps[usize::from(group.0)], bound: pairing.destination_bound }
    }

    /// The slot of a block that is needed.
    fn slot(&self, ordinal: u64) -> Result<Slot, BindError> {
        let Self { side, group, map, bound: (pool, slot_count) } = *self;
        match map.entry(ordinal) {
            Some(Some(slot)) if slot.0 < slot_count => Ok(slot),
            Some(Some(slot)) => Err(BindError::SlotOutOfRange { side, group, ordinal, slot, pool, slot_count }),
            Some(None) => Err(BindError::Hole { side, group, ordinal }),
            None => Err(BindError::OutOfMap { side, group, ordinal, first: map.first(), end: map.end() }),
        }
    }
}

impl Inner {
    /// Bytes of a plan with so many slot pairs in each pairing.
    fn bytes(&self, pairs: impl Fn(usize) -> u64) -> Result<u64, BindError> {
        let of_section = self.sections.iter().map(|section| pairs(section.pairing).checked_mul(section.bytes_per_pair));
        of_section.reduce(|sum, bytes| sum?.checked_add(bytes?)).unwrap_or(Some(0)).ok_or(BindError::TooManyBytes)
    }

    /// That no slot is written for two blocks. Groups that this template does not write count too, where they share bytes
    /// of the pool with one that it does: another source rank writes those.
    fn check_distinct(&self, maps: &[BlockMap], tokens: &Range<u64>, seen: &mut SlotSet) -> Result<(), BindError> {
        for set in &self.rivals {
            let blocks = set.iter().flat_map(|group| {
                let ordinals = ordinals(self.destination.kind(*group), tokens);
                maps[usize::from(group.0)].present(&ordinals).map(|(ordinal, slot)| (*group, ordinal, slot))
            });
            let Some(repeated) = seen.first_repeated(blocks.clone().map(|(.., slot)| slot.0)) else {
                continue;
            };
            let named: Vec<_> = blocks.take(repeated + 1).collect();
            let (group, ordinal, slot) = named[repeated];
            let earlier = named.iter().position(|(.., other)| *other == slot).unwrap_or(repeated);
            let (earlier_group, earlier_ordinal, _) = named[earlier];
            return Err(BindError::SlotTwice { slot, group, ordinal, earlier_group, earlier_ordinal });
        }
        Ok(())
    }
}

/// Ordinals of the blocks that share a token with `tokens`.
fn ordinals(kind: GroupKind, tokens: &Range<u64>) -> Range<u64> {
    match kind {
        GroupKind::State => 0..1,
        GroupKind::Paged { .. } if tokens.is_empty() => 0..0,
        GroupKind::Paged { tokens_per_block, .. } => {
            let block = u64::from(tokens_per_block);
            tokens.start / block..tokens.end.div_ceil(block)
        }
    }
}

fn count_maps(side: Side, maps: &[BlockMap], groups: &[GroupKind]) -> Result<(), BindError> {
    if maps.len() == groups.len() {
        Ok(())
    } else {
        Err(BindError::MapCount { side, groups: groups.len(), maps: maps.len() })
    }
}
