//! Block maps: where the blocks of one request are.

use std::ops::Range;

use kvferry_layout::Slot;
use serde::{Deserialize, Serialize};

/// The slots of a request's blocks in one group: block ordinal to slot, or hole.
///
/// It is positional: the entry at index `i` is block `first + i` of the sequence, so that a block is found by its ordinal
/// on either side, whatever else is or is not there. A state group has one entry, ordinal 0.
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

    /// The blocks of some ordinals that are in the map and no holes.
    pub(crate) fn present(&self, ordinals: &Range<u64>) -> impl Iterator<Item = (u64, Slot)> + Clone + use<'_> {
        let index = |ordinal: u64| {
            let index = usize::try_from(ordinal.saturating_sub(self.first)).unwrap_or(usize::MAX);
            index.min(self.slots.len())
        };
        let (start, end) = (index(ordinals.start), index(ordinals.end));
        let entries = self.slots.get(start..end).unwrap_or_default();
        // Entries first: the ordinals must not be asked for one past the last.
        let ordinals = self.first.max(ordinals.start)..;
        entries.iter().zip(ordinals).filter_map(|(slot, ordinal)| Some((ordinal, (*slot)?)))
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
            assert_eq!(map.present(&ordinals).collect::<Vec<_>>(), expected);
        };
        check(0..u64::MAX, &[(7, Slot(3)), (9, Slot(1))]);
        check(8..10, &[(9, Slot(1))]);
        check(8..9, &[]);
        check(0..7, &[]);
        check(10..90, &[]);
        check(Range { start: 90, end: 3 }, &[]);
    }

    #[test]
    fn last_ordinals_do_not_overflow() {
        let map = BlockMap::dense(u64::MAX, [Slot(0), Slot(1)]);
        assert_eq!(map.end(), u64::MAX);
        assert_eq!(map.entry(u64::MAX), Some(Some(Slot(0))));
        assert_eq!(map.present(&(0..u64::MAX)).count(), 0);
    }
}
