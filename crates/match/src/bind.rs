//! Joining a template to the block maps of one request.

use std::ops::Range;

use kvferry_layout::{Digest, GroupId, GroupKind, PoolId, Slot};

use crate::block_map::BlockMap;
use crate::chunk::Chunk;
use crate::error::{BindError, Side};
use crate::geometry::GroupSlots;
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

/// How much moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Amount {
    /// As [`Plan::bytes`].
    pub bytes: u64,
    /// As [`Plan::pieces`].
    pub pieces: u64,
    /// As [`Plan::runs`].
    pub runs: u64,
}

impl Template {
    /// What the source rank copies for a request.
    ///
    /// - `source`, `destination`: one block map for each group of the side's page table, in the table's order.
    /// - `chunk`: what of the request is wanted; a range of tokens is a whole request. See [`Chunk`] for which overlaps of a
    ///   source block and a destination block move with it. Of those both maps must have the block. All other blocks need
    ///   not be there.
    ///
    /// Blocks are paired by their ordinals; then the maps are asked for their slots. Cost: O(blocks).
    ///
    /// # Errors
    ///
    /// [`BindError`] names the side, group and block that are wrong.
    pub fn bind(
        &self,
        source: &[BlockMap],
        destination: &[BlockMap],
        chunk: impl Into<Chunk>,
    ) -> Result<Plan, BindError> {
        let mut plan = Plan::default();
        self.bind_into(source, destination, chunk, &mut plan)?;
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
        chunk: impl Into<Chunk>,
        plan: &mut Plan,
    ) -> Result<(), BindError> {
        plan.reset(self, chunk.into());
        let bound = self.fill(source, destination, plan);
        if bound.is_err() {
            plan.reset(self, Chunk::default());
        }
        bound
    }

    fn fill(&self, source: &[BlockMap], destination: &[BlockMap], plan: &mut Plan) -> Result<(), BindError> {
        let Plan { chunk, pairs, seen, .. } = plan;
        check_end(chunk)?;
        count_maps(Side::Source, source, &self.source.groups)?;
        count_maps(Side::Destination, destination, &self.destination.groups)?;
        self.check_distinct(destination, chunk, seen)?;
        for (pairing, pairs) in self.inner.pairings.iter().zip(pairs) {
            let source = self.source_blocks(pairing, source);
            let destination = self.destination_blocks(pairing, destination);
            let periods = pairing.phase.periods(chunk, pairing.window_tokens);
            if periods.is_empty() {
                continue; // the ordinals of a period that is none need not fit in 64 bits
            }
            let ordinals = pairing.phase.ordinals(periods.start);
            let (ours, theirs) = (source.map.from(ordinals.0), destination.map.from(ordinals.1));
            let steps = (pairing.phase.source_step, pairing.phase.destination_step);
            pair(every(ours, steps.0), every(theirs, steps.1), (source.bound.1, destination.bound.1), &periods, pairs);
            // What is left has something wrong, which this finds.
            for period in periods.skip(pairs.len()) {
                let (source_ordinal, destination_ordinal) = pairing.phase.ordinals(period);
                let source = source.slot(source_ordinal)?;
                pairs.push(SlotPair { source, destination: destination.slot(destination_ordinal)? });
            }
        }
        plan.bytes = self.inner.bytes(|pairing| plan.pairs[pairing].len() as u64)?;
        Ok(())
    }

    /// What a receiver is to get from the source rank. It need not know the source's slots.
    ///
    /// # Errors
    ///
    /// As [`Self::bind`], of the destination's maps.
    pub fn expectation(&self, destination: &[BlockMap], chunk: impl Into<Chunk>) -> Result<Expectation, BindError> {
        let (inner, chunk) = (&*self.inner, chunk.into());
        check_end(&chunk)?;
        count_maps(Side::Destination, destination, &self.destination.groups)?;
        self.check_distinct(destination, &chunk, &mut SlotSet::default())?;
        let mut transcript = begin_digest(self, &chunk);
        let mut counts = vec![0; inner.pairings.len()];
        for (pairing, count) in inner.pairings.iter().zip(&mut counts) {
            let blocks = self.destination_blocks(pairing, destination);
            for period in pairing.phase.periods(&chunk, pairing.window_tokens) {
                transcript.word(blocks.slot(pairing.phase.ordinals(period).1)?.0);
                *count += 1;
            }
        }
        let bytes = inner.bytes(|pairing| counts[pairing])?;
        Ok(Expectation { bytes, digest: transcript.finish() })
    }

    /// The slots that a receiver is to get something into, by section and in the order of [`Plan::sections`]' pairs.
    ///
    /// # Errors
    ///
    /// As [`Self::expectation`].
    pub fn destination_slots(
        &self,
        destination: &[BlockMap],
        chunk: impl Into<Chunk>,
    ) -> Result<Vec<Vec<Slot>>, BindError> {
        let chunk = chunk.into();
        check_end(&chunk)?;
        count_maps(Side::Destination, destination, &self.destination.groups)?;
        let slots_of = |section: &crate::template::Section| {
            let pairing = &self.inner.pairings[section.pairing];
            let blocks = self.destination_blocks(pairing, destination);
            let periods = pairing.phase.periods(&chunk, pairing.window_tokens);
            periods.map(|period| blocks.slot(pairing.phase.ordinals(period).1)).collect()
        };
        self.inner.sections.iter().map(slots_of).collect()
    }

    /// Bytes that a receiver is to get from the source rank: those of [`Self::expectation`].
    ///
    /// # Errors
    ///
    /// As [`Self::expectation`].
    pub fn expected_bytes(&self, destination: &[BlockMap], chunk: impl Into<Chunk>) -> Result<u64, BindError> {
        self.expectation(destination, chunk).map(|expected| expected.bytes)
    }

    /// How much moves with `chunk`, if all blocks that it needs are there.
    ///
    /// # Errors
    ///
    /// [`BindError::PastEnd`], [`BindError::TooManyBytes`].
    pub fn amount(&self, chunk: impl Into<Chunk>) -> Result<Amount, BindError> {
        let chunk = chunk.into();
        check_end(&chunk)?;
        let mut amount = Amount::default();
        for section in &self.inner.sections {
            let periods = section.phase.periods(&chunk, section.window_tokens);
            let pairs = periods.end - periods.start;
            // Pieces and runs are at least a byte each.
            let bytes = pairs.checked_mul(section.bytes_per_pair).and_then(|bytes| bytes.checked_add(amount.bytes));
            amount.bytes = bytes.ok_or(BindError::TooManyBytes)?;
            amount.pieces += pairs * section.pieces.len() as u64;
            amount.runs += pairs * section.runs_per_pair;
        }
        Ok(amount)
    }

    /// The tokens that the maps of both sides reach, in every paged group of the template. Holes are not looked at, nor
    /// where maps of groups with a window begin: what a window has left behind is not needed.
    pub fn common_tokens(&self, source: &[BlockMap], destination: &[BlockMap]) -> Range<u64> {
        let reach = |map: Option<&BlockMap>, kind: GroupKind| {
            let tokens = u64::from(kind.tokens());
            map.map_or(0..0, |map| map.first().saturating_mul(tokens)..map.end().saturating_mul(tokens))
        };
        let mut common = None::<Range<u64>>;
        let paged = self.inner.pairings.iter().filter(|pairing| pairing.phase.period_tokens > 0);
        for Pairing { source_group, destination_group, window_tokens, .. } in paged {
            let ours = reach(source.get(usize::from(source_group.0)), self.source.kind(*source_group));
            let theirs =
                reach(destination.get(usize::from(destination_group.0)), self.destination.kind(*destination_group));
            for reached in [ours, theirs] {
                let so_far = common.unwrap_or(0..u64::MAX);
                let start = if window_tokens.is_some() { so_far.start } else { so_far.start.max(reached.start) };
                common = Some(start..so_far.end.min(reached.end));
            }
        }
        common.filter(|tokens| !tokens.is_empty()).unwrap_or(0..0)
    }

    /// `maps` has one map a group.
    fn source_blocks<'a>(&self, pairing: &Pairing, maps: &'a [BlockMap]) -> Blocks<'a> {
        let group = pairing.source_group;
        let bound = self.source.group(group).bound;
        Blocks { side: Side::Source, group, map: &maps[usize::from(group.0)], bound }
    }

    /// `maps` has one map a group.
    fn destination_blocks<'a>(&self, pairing: &Pairing, maps: &'a [BlockMap]) -> Blocks<'a> {
        let group = pairing.destination_group;
        let bound = self.destination.group(group).bound;
        Blocks { side: Side::Destination, group, map: &maps[usize::from(group.0)], bound }
    }

    /// That no slot is written for two blocks. Groups that this template does not write count too, where they share bytes
    /// of the pool with one that it does: another source rank writes those.
    fn check_distinct(&self, maps: &[BlockMap], chunk: &Chunk, seen: &mut SlotSet) -> Result<(), BindError> {
        for set in &self.inner.rivals {
            let blocks = set.iter().flat_map(|group| {
                let (ordinals, step) = needed(self.destination.kind(*group), chunk);
                maps[usize::from(group.0)].present(&ordinals, step).map(|(ordinal, slot)| (*group, ordinal, slot))
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

impl Plan {
    fn reset(&mut self, template: &Template, chunk: Chunk) {
        self.template = template.clone();
        self.chunk = chunk;
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

impl Blocks<'_> {
    /// The slot of a block that is needed.
    fn slot(&self, ordinal: u64) -> Result<Slot, BindError> {
        match self.map.entry(ordinal) {
            Some(Some(slot)) if slot.0 < self.bound.1 => Ok(slot),
            entry => Err(self.refuse(ordinal, entry)),
        }
    }

    /// Why there is no such slot.
    #[cold]
    fn refuse(&self, ordinal: u64, entry: Option<Option<Slot>>) -> BindError {
        let Self { side, group, map, bound: (pool, slot_count) } = *self;
        match entry {
            Some(Some(slot)) => BindError::SlotOutOfRange { side, group, ordinal, slot, pool, slot_count },
            Some(None) => BindError::Hole { side, group, ordinal },
            None => BindError::OutOfMap { side, group, ordinal, first: map.first(), end: map.end() },
        }
    }
}

/// Every `step`-th entry.
fn every(entries: &[Option<Slot>], step: u64) -> impl Iterator<Item = Option<Slot>> {
    entries.iter().copied().step_by(usize::try_from(step).unwrap_or(usize::MAX).max(1))
}

/// Pairs slots in order, as many as there are periods, until one of the two is a hole or not below its bound. Slower ways
/// of looking at a block at a time are what binding would mostly be.
fn pair(
    source: impl Iterator<Item = Option<Slot>>,
    destination: impl Iterator<Item = Option<Slot>>,
    bounds: (u32, u32),
    periods: &Range<u64>,
    pairs: &mut Vec<SlotPair>,
) {
    let both = |(source, destination): (Option<Slot>, Option<Slot>)| {
        let (source, destination) = (source?, destination?);
        (source.0 < bounds.0 && destination.0 < bounds.1).then_some(SlotPair { source, destination })
    };
    let count = usize::try_from(periods.end - periods.start).unwrap_or(usize::MAX);
    let paired = source.zip(destination).take(count);
    pairs.reserve_exact(paired.size_hint().0);
    pairs.extend(paired.map_while(both));
}

impl Inner {
    /// Bytes of a plan with so many slot pairs in each pairing.
    fn bytes(&self, pairs: impl Fn(usize) -> u64) -> Result<u64, BindError> {
        let of_section = self.sections.iter().map(|section| pairs(section.pairing).checked_mul(section.bytes_per_pair));
        of_section.reduce(|sum, bytes| sum?.checked_add(bytes?)).unwrap_or(Some(0)).ok_or(BindError::TooManyBytes)
    }
}

/// The blocks of a group that have a token which is needed: a range of ordinals, from one that the rank holds on, and how
/// many of them there are to each that it holds.
fn needed(kind: GroupKind, chunk: &Chunk) -> (Range<u64>, u32) {
    let GroupKind::Paged { tokens_per_block, window_tokens, ordinals } = kind else {
        return (0..u64::from(chunk.is_last()), 1);
    };
    let tokens = chunk.within(window_tokens);
    if tokens.is_empty() {
        return (0..0, 1);
    }
    let block = u64::from(tokens_per_block);
    let (first, step) = (tokens.start / block, u64::from(ordinals.step));
    // The first at or past it that is dealt to this rank; past all tokens if that is past 64 bits.
    let first = first.saturating_add((u64::from(ordinals.first) + step - first % step) % step);
    (first..tokens.end.div_ceil(block).max(first), ordinals.step)
}

fn check_end(chunk: &Chunk) -> Result<(), BindError> {
    if chunk.tokens.end > chunk.request_tokens {
        return Err(BindError::PastEnd { end: chunk.tokens.end, request_tokens: chunk.request_tokens });
    }
    Ok(())
}

fn count_maps(side: Side, maps: &[BlockMap], groups: &[GroupSlots]) -> Result<(), BindError> {
    if maps.len() == groups.len() {
        Ok(())
    } else {
        Err(BindError::MapCount { side, groups: groups.len(), maps: maps.len() })
    }
}
