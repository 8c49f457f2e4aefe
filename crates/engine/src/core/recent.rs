//! A memory of what is over, of bounded size: the oldest is forgotten first.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Entries kept, unless it was asked for more. What is forgotten is told from what is new by other means: serials that only
/// grow.
pub(super) const RECENT_MAX: usize = 8192;

#[derive(Debug)]
pub(crate) struct Recent<K, V> {
    entries: HashMap<K, V>,
    order: VecDeque<K>,
    entries_max: usize,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self::of(0)
    }
}

impl<K, V> Recent<K, V> {
    /// Keeps so many entries at least.
    pub(crate) fn of(entries: usize) -> Self {
        Self { entries: HashMap::new(), order: VecDeque::new(), entries_max: entries.max(RECENT_MAX) }
    }
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    /// Remembers an entry; the first word about it stays. Returns what is forgotten for it.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<K> {
        if self.entries.contains_key(&key) {
            return None;
        }
        self.entries.insert(key, value);
        self.order.push_back(key);
        let forgotten = (self.order.len() > self.entries_max).then(|| self.order.pop_front()).flatten()?;
        self.entries.remove(&forgotten);
        Some(forgotten)
    }

    /// From the oldest.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &K> {
        self.order.iter()
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key)
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_and_the_first_word_stays() {
        let mut recent = Recent::default();
        assert_eq!((0..RECENT_MAX).find_map(|key| recent.insert(key, 'a')), None);
        assert_eq!(recent.insert(1, 'b'), None);
        assert_eq!(recent.insert(RECENT_MAX, 'c'), Some(0));
        assert_eq!((recent.get(&0), recent.get(&1), recent.get(&RECENT_MAX)), (None, Some(&'a'), Some(&'c')));
        let mut more = Recent::of(RECENT_MAX + 1);
        assert_eq!((0..=RECENT_MAX).find_map(|key| more.insert(key, 'a')), None);
        assert_eq!(more.insert(RECENT_MAX + 1, 'b'), Some(0));
    }
}
