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
        let (mut repeated, highest) = self.first_repeated_in(0, slots.clone());
        for stretch in 1..=highest / STRETCH_SLOTS {
            let (other, _) = self.first_repeated_in(stretch, slots.clone());
            repeated = other.into_iter().chain(repeated).min();
        }
        repeated
    }

    /// The same for the slots of one stretch, and the highest slot of all that were looked at. Iterates inside the iterator,
    /// which is the faster way for a chain of maps.
    fn first_repeated_in(&mut self, stretch: u32, slots: impl Iterator<Item = u32> + Clone) -> (Option<usize>, u32) {
        let words = &mut self.words;
        let mut highest = 0;
        let (mut first_word, mut last_word, mut count) = (usize::MAX, 0, 0);
        let repeated = slots.clone().position(|slot| {
            highest = slot.max(highest);
            if slot / STRETCH_SLOTS != stretch {
                return false;
            }
            let (word, bit) = ((slot % STRETCH_SLOTS / u64::BITS) as usize, 1 << (slot % u64::BITS));
            (first_word, last_word, count) = (word.min(first_word), word.max(last_word), count + 1);
            if word >= words.len() {
                words.resize(word + 1, 0);
            }
            let seen = words[word] & bit != 0;
            words[word] |= bit;
            seen
        });
        if let Some(touched) = words.get_mut(first_word..=last_word) {
            // The slots of a request are not far apart, as memory goes, unless they are few.
            if touched.len() / 8 <= count {
                touched.fill(0);
            } else {
                let of_stretch = slots.filter(|slot| slot / STRETCH_SLOTS == stretch);
                of_stretch.take(count).for_each(|slot| words[(slot % STRETCH_SLOTS / u64::BITS) as usize] = 0);
            }
        }
        (repeated, highest)
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
        check(&[0, 1 << 20, 1 << 24, 1 << 20], Some(3));
        check(&[1 << 20, 0, 1 << 24], None);
        assert!(set.words.len() <= (STRETCH_SLOTS / u64::BITS) as usize);
    }
}
