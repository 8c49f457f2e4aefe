//! Which slots a request gets: a seeded shuffle, another one on each rank, out of pools with slots to spare.

use kvferry_layout::Slot;

use crate::pattern::Key;

/// Slots of a pool whose request takes `block_count` blocks: a quarter more, and at least one to spare.
///
/// `None` if that is more than slot ids reach.
pub fn slot_count(block_count: u64) -> Option<u32> {
    u32::try_from(block_count.checked_add(block_count / 4)?.checked_add(1)?).ok()
}

/// The first `block_count` slots of a shuffle of `slot_count`, decided by `key`.
///
/// # Panics
///
/// If `block_count` is over `slot_count`: pools are sized by [`slot_count`].
pub fn shuffled(key: Key, block_count: u32, slot_count: u32) -> Vec<Slot> {
    assert!(block_count <= slot_count, "{block_count} blocks into {slot_count} slots");
    let mut slots: Vec<Slot> = (0..slot_count).map(Slot).collect();
    for (index, taken) in (0..block_count).enumerate() {
        // The modulo favours low slots by less than 2^-32, which a shuffle for tests can bear.
        let step = key.word(u64::from(taken)) % u64::from(slot_count - taken);
        slots.swap(index, index + usize::try_from(step).expect("a step under a u32 fits"));
    }
    slots.truncate(usize::try_from(block_count).expect("a u32 fits"));
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_distinct_in_range_and_out_of_order() {
        let slots = shuffled(Key::new(1), 100, 126);
        let mut sorted = slots.clone();
        sorted.sort_unstable();
        assert_ne!(slots, sorted);
        sorted.dedup();
        assert_eq!(sorted.len(), 100);
        assert!(sorted.iter().all(|slot| slot.0 < 126));
    }

    #[test]
    fn keys_decide() {
        assert_eq!(shuffled(Key::new(1), 32, 41), shuffled(Key::new(1), 32, 41));
        assert_ne!(shuffled(Key::new(1), 32, 41), shuffled(Key::new(2), 32, 41));
    }

    #[test]
    fn pools_have_a_quarter_to_spare() {
        assert_eq!([slot_count(1), slot_count(128)], [Some(2), Some(161)]);
        assert_eq!([slot_count(u64::from(u32::MAX)), slot_count(u64::MAX)], [None, None]);
    }
}
