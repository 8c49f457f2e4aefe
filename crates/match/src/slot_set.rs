//! A set of slots that are to be distinct.

/// Slots of one stretch, a bit each. Empty between uses, and keeps its memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotSet {
    words: Vec<u64>,
}

/// Slots of a stretch: 4 MiB of bits. More slots are taken a stretch at a time, so that a slot number, which a peer may
/// have made up, does not decide how much memory is taken.
const STRETCH_SLOTS: u32 = 1 << 25;

impl SlotSet {
    /// Index of the first item whose slot an earlier one has too.
    pub(crate) fn first_repeated(&mut self, slots: impl Iterator<Item = u32> + Clone) -> Option<usize> {
        let highest = slots.clone().max()?;
        (0..=highest / STRETCH_SLOTS).filter_map(|stretch| self.first_repeated_in(stretch, slots.clone())).min()
    }

    /// The same for the slots of one stretch. Iterates inside the iterator, which is the faster way for a chain of maps.
    fn first_repeated_in(&mut self, stretch: u32, slots: impl Iterator<Item = u32> + Clone) -> Option<usize> {
        let place = |slot: u32| ((slot % STRETCH_SLOTS / u64::BITS) as usize, 1 << (slot % u64::BITS));
        let of_stretch = |slot: &u32| slot / STRETCH_SLOTS == stretch;
        let words = &mut self.words;
        let repeated = slots.clone().position(|slot| {
            if !of_stretch(&slot) {
                return false;
            }
            let (word, bit) = place(slot);
            if word >= words.len() {
                words.resize(word + 1, 0);
            }
            let seen = words[word] & bit != 0;
            words[word] |= bit;
            seen
        });
        slots.filter(of_stretch).for_each(|slot| {
            // Past a repeated slot there may be some that never had a word.
            if let Some(word) = words.get_mut(place(slot).0) {
                *word = 0;
            }
        });
        repeated
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_repeated() {
        let mut set = SlotSet::default();
        let mut check = |slots: &[u32], expected: Option<usize>| {
            // Twice: nothing may be left over from the first time.
            for _ in 0..2 {
                assert_eq!(set.first_repeated(slots.iter().copied()), expected, "{slots:?}");
            }
        };
        check(&[], None);
        check(&[5, 0, 64, 128], None);
        check(&[5, 0, 64, 5, 0], Some(3));
        check(&[STRETCH_SLOTS, 0, STRETCH_SLOTS + 1], None);
        check(&[0, u32::MAX, 7, u32::MAX, 7], Some(3));
        check(&[STRETCH_SLOTS + 1, 7, STRETCH_SLOTS + 1, 7], Some(2));
        assert!(set.words.len() <= (STRETCH_SLOTS / u64::BITS) as usize);
    }
}
