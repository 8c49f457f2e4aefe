//! Block maps: where the blocks of one request are.

use std::ops::Range;

use kvferry_layout::Slot;
use serde::{Deserialize, Serialize};

/// The slots of a request's blocks in one group: block ordinal to slot, or hole.
///
/// It is positional: the entry at index `i` is block `first + i` of the sequence, so that a block is found by its ordinal
/// on either side, whatever else is or is not there. Where blocks are dealt out to context-parallel ranks, those of the other
/// ranks are entries too, which nobody looks at. A state group has one entry, ordinal 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockMap {
    first: u64,
    slots: Vec<Option<Slot>>,
}

impl BlockMap {
    /// The map of blocks `first..first + slots.len()`; `None` is a hole.
    pub fn new(first: u64, slots: Vec<Option<Slot>>) -> Self {
        Self { first, slots }
    }

    /// The map of blocks from `first` on, without holes.
    pub fn dense(first: u64, slots: impl IntoIterator<Item = Slot>) -> Self {
        Self::new(first, slots.into_iter().map(Some).collect())
    }

    /// Ordinal of the first entry.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The ordinal after that of the last entry. Saturates.
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.slots.len() as u64)
    }

    /// The entries, in order of ordinals.
    pub fn slots(&self) -> &[Option<Slot>] {
        &self.slots
    }

    /// The entry of a block; `None` outside of the map.
    pub(crate) fn entry(&self, ordinal: u64) -> Option<Option<Slot>> {
        let index = usize::try_from(ordinal.checked_sub(self.first)?).ok()?;
        self.slots.get(index).copied()
    }

    /// The entries from a block on; none if it is outside of the map.
    pub(crate) fn from(&self, ordinal: u64) -> &[Option<Slot>] {
        let index = ordinal.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        index.and_then(|index| self.slots.get(index..)).unwrap_or_default()
    }

    /// The blocks of every `step`-th of some ordinals that are in the map and no holes.
    pub(crate) fn present(
        &self,
        ordinals: &Range<u64>,
        step: u32,
    ) -> impl Iterator<Item = (u64, Slot)> + Clone + use<'_> {
        let step = u64::from(step);
        let index = |ordinal: u64| {
            let index = usize::try_from(ordinal.saturating_sub(self.first)).unwrap_or(usize::MAX);
            index.min(self.slots.len())
        };
        // The first of them that is in the map.
        let before = self.first.saturating_sub(ordinals.start).div_ceil(step);
        let first = ordinals.start.saturating_add(before.saturating_mul(step));
        let every = usize::try_from(step).unwrap_or(usize::MAX);
        let entry = |index: usize| Some((self.first + index as u64, self.slots[index]?));
        (index(first)..index(ordinals.end)).step_by(every).filter_map(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_by_ordinal() {
        let map = BlockMap::new(7, vec![Some(Slot(3)), None, Some(Slot(1))]);
        assert_eq!((map.first(), map.end()), (7, 10));
        let entries: Vec<_> = (6..11).map(|ordinal| map.entry(ordinal)).collect();
        assert_eq!(entries, [None, Some(Some(Slot(3))), Some(None), Some(Some(Slot(1))), None]);
        let check = |ordinals: Range<u64>, expected: &[(u64, Slot)]| {
            assert_eq!(map.present(&ordinals, 1).collect::<Vec<_>>(), expected);
        };
        check(0..u64::MAX, &[(7, Slot(3)), (9, Slot(1))]);
        check(8..10, &[(9, Slot(1))]);
        check(8..9, &[]);
        check(0..7, &[]);
        check(10..90, &[]);
        check(Range { start: 90, end: 3 }, &[]);
    }

    #[test]
    fn finds_every_other_one() {
        let map = BlockMap::dense(7, (0..5).map(Slot));
        let check = |ordinals: Range<u64>, step: u32, expected: &[u64]| {
            let found: Vec<u64> = map.present(&ordinals, step).map(|(ordinal, _)| ordinal).collect();
            assert_eq!(found, expected);
            assert!(map.present(&ordinals, step).all(|(ordinal, slot)| ordinal == 7 + u64::from(slot.0)));
        };
        check(8..100, 2, &[8, 10]);
        check(1..100, 2, &[7, 9, 11]);
        check(2..11, 4, &[10]);
        check(9..100, u32::MAX, &[9]);
        check(0..100, u32::MAX, &[]);
    }

    #[test]
    fn last_ordinals_do_not_overflow() {
        let map = BlockMap::dense(u64::MAX, [Slot(0), Slot(1)]);
        assert_eq!(map.end(), u64::MAX);
        assert_eq!(map.entry(u64::MAX), Some(Some(Slot(0))));
        assert_eq!(map.present(&(0..u64::MAX), 1).count(), 0);
    }
}
