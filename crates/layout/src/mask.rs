//! Which layers own a row of a role, and where that row lies among the packed ones.

use std::fmt;

use crate::table::Layer;

const WORD_BITS: u32 = u64::BITS;

/// A bitmap over model layers: set for the layers that own a row of some role.
///
/// A pool that only some layers own stores their rows side by side; the place of a layer's row is the number of owners
/// before it. A dense pool is the mask of all ones.
///
/// ```
/// use kvferry_layout::{Layer, LayerMask};
///
/// let mask = LayerMask::from_bools([true, true, false, false, false, true]);
/// assert_eq!(mask.packed_row(Layer(5)), Some(2));
/// assert_eq!(mask.packed_row(Layer(3)), None);
/// assert_eq!(mask.layer_of(2), Some(Layer(5)));
/// assert_eq!(mask.to_string(), "TTFFFT");
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LayerMask {
    layer_count: u32,
    /// Bit `i % 64` of word `i / 64` is layer `i`. Bits at and past `layer_count` are 0, so that equality is the derived one.
    words: Vec<u64>,
}

impl LayerMask {
    /// The mask of `layer_count` layers in which the layers of `owners` are set. An owner past the end makes the mask longer.
    pub fn new(layer_count: u32, owners: impl IntoIterator<Item = Layer>) -> Self {
        let mut mask = Self::none(layer_count);
        for owner in owners {
            mask.set(owner);
        }
        mask
    }

    /// One entry a layer, from layer 0 on.
    pub fn from_bools(owns: impl IntoIterator<Item = bool>) -> Self {
        let mut mask = Self::none(0);
        for (layer, owns) in (0..u32::MAX).zip(owns) {
            if owns {
                mask.set(Layer(layer));
            } else {
                mask.grow(layer + 1);
            }
        }
        mask
    }

    /// Every one of `layer_count` layers owns a row.
    pub fn all(layer_count: u32) -> Self {
        Self::new(layer_count, (0..layer_count).map(Layer))
    }

    /// None of `layer_count` layers owns a row.
    pub fn none(layer_count: u32) -> Self {
        Self { layer_count, words: vec![0; word_count(layer_count)] }
    }

    /// Layers that the mask speaks of, owners or not.
    pub fn layer_count(&self) -> u32 {
        self.layer_count
    }

    /// Whether `layer` owns a row; `false` past the end.
    pub fn owns(&self, layer: Layer) -> bool {
        (self.word(layer) >> (layer.0 % WORD_BITS)) & 1 == 1
    }

    /// Place of `layer`'s row among the packed rows: the number of owners before it. `None` if it owns none.
    pub fn packed_row(&self, layer: Layer) -> Option<u32> {
        if !self.owns(layer) {
            return None;
        }
        let below = self.word(layer) & ((1 << (layer.0 % WORD_BITS)) - 1);
        let whole = self.words.iter().take(word_index(layer)).map(|word| word.count_ones()).sum::<u32>();
        Some(whole + below.count_ones())
    }

    /// The layer whose row is at place `row` of the packed rows: the inverse of [`Self::packed_row`].
    pub fn layer_of(&self, row: u32) -> Option<Layer> {
        let mut before = row;
        for (first, word) in (0..self.layer_count).step_by(WORD_BITS as usize).zip(&self.words) {
            let owners = word.count_ones();
            if before >= owners {
                before -= owners;
                continue;
            }
            // Clearing the lowest set bit once for each owner before it leaves the wanted one lowest.
            let wanted = (0..before).fold(*word, |word, _| word & (word - 1));
            return Some(Layer(first + wanted.trailing_zeros()));
        }
        None
    }

    /// Number of owners.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// The owners, ascending.
    pub fn owners(&self) -> impl Iterator<Item = Layer> {
        (0..self.layer_count).map(Layer).filter(|layer| self.owns(*layer))
    }

    /// The same mask with only those owners that `keep` lists: what a rank that holds the layers of `keep` owns.
    pub fn restricted_to(&self, keep: impl IntoIterator<Item = Layer>) -> Self {
        Self::new(self.layer_count, keep.into_iter().filter(|layer| self.owns(*layer)))
    }

    fn word(&self, layer: Layer) -> u64 {
        self.words.get(word_index(layer)).copied().unwrap_or(0)
    }

    fn set(&mut self, layer: Layer) {
        // The last id of all has no count after it; saturating only leaves it out of `layer_count`.
        self.grow(layer.0.saturating_add(1));
        if let Some(word) = self.words.get_mut(word_index(layer)) {
            *word |= 1 << (layer.0 % WORD_BITS);
        }
    }

    fn grow(&mut self, layer_count: u32) {
        self.layer_count = self.layer_count.max(layer_count);
        self.words.resize(word_count(self.layer_count), 0);
    }
}

/// One letter a layer: `T` owns a row, `F` does not.
impl fmt::Display for LayerMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for layer in (0..self.layer_count).map(Layer) {
            f.write_str(if self.owns(layer) { "T" } else { "F" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for LayerMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayerMask({self})")
    }
}

fn word_index(layer: Layer) -> usize {
    (layer.0 / WORD_BITS) as usize
}

fn word_count(layer_count: u32) -> usize {
    layer_count.div_ceil(WORD_BITS) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn packed_rows_of_a_ragged_mask() {
        let mask = LayerMask::from_bools([true, true, false, false, false, true]);
        let rows: Vec<_> = (0..7).map(|layer| mask.packed_row(Layer(layer))).collect();
        assert_eq!(rows, [Some(0), Some(1), None, None, None, Some(2), None]);
        assert_eq!(mask.owners().collect::<Vec<_>>(), [Layer(0), Layer(1), Layer(5)]);
        assert_eq!(mask.layer_of(3), None);
    }

    #[test]
    fn all_and_none() {
        for layer_count in [0, 1, 63, 64, 65, 128] {
            let (all, none) = (LayerMask::all(layer_count), LayerMask::none(layer_count));
            assert_eq!((all.count(), none.count()), (layer_count, 0));
            assert_eq!((all.layer_count(), none.layer_count()), (layer_count, layer_count));
            assert_eq!(all, LayerMask::from_bools(vec![true; layer_count as usize]));
            assert_eq!(none, LayerMask::from_bools(vec![false; layer_count as usize]));
        }
    }

    #[test]
    fn an_owner_past_the_end_makes_the_mask_longer() {
        let mask = LayerMask::new(2, [Layer(3)]);
        assert_eq!((mask.layer_count(), mask.to_string()), (4, "FFFT".to_owned()));
    }

    proptest! {
        /// A plain list of bools, scanned from the front each time, is the oracle.
        #[test]
        fn packed_rows_are_those_of_a_linear_scan(owns in prop::collection::vec(any::<bool>(), 0..200)) {
            let mask = LayerMask::from_bools(owns.iter().copied());
            let mut next_row = 0;
            for (layer, owned) in (0..).map(Layer).zip(&owns) {
                prop_assert_eq!(mask.owns(layer), *owned);
                prop_assert_eq!(mask.packed_row(layer), owned.then_some(next_row));
                if *owned {
                    prop_assert_eq!(mask.layer_of(next_row), Some(layer));
                    next_row += 1;
                }
            }
            prop_assert_eq!(mask.count(), next_row);
            prop_assert_eq!(mask.layer_of(next_row), None);
            prop_assert_eq!(LayerMask::new(mask.layer_count(), mask.owners()), mask);
        }

        #[test]
        fn restriction_keeps_the_owners_of_a_stage(
            owns in prop::collection::vec(any::<bool>(), 1..200),
            ends in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let (a, b) = (ends.0.index(owns.len()), ends.1.index(owns.len()));
            let stage = a.min(b)..a.max(b);
            let expected = owns.iter().enumerate().map(|(layer, owns)| *owns && stage.contains(&layer));
            let layers = (0..).map(Layer).take(stage.end).skip(stage.start);
            prop_assert_eq!(LayerMask::from_bools(owns.clone()).restricted_to(layers), LayerMask::from_bools(expected));
        }
    }
}
