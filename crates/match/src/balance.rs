//! Which of several replicas sends what.

use std::collections::HashMap;

use kvferry_layout::GroupKind;

/// The cells that a destination instance wants of several source ranks alike, and who sends them.
///
/// Each rank of a set gets one stretch of what the set has to send, in the order in which it was added: destination after
/// destination, row after row. So rows that are neighbours mostly have one sender and merge, and ranks have few peers.
/// Stretches are such that the ranks end up with equal bytes, as far as that can be: a rank that alone holds other cells
/// gets less of those that it shares. Rows are not cut, so that a rank can be off by a part of one.
///
/// Bytes are counted for each life cycle apart: a request moves different numbers of slots of each.
#[derive(Default)]
pub(crate) struct Balance {
    sets: Vec<Set>,
    ids: HashMap<(Life, Vec<u32>), usize>,
}

/// What decides how many slots of a group a request moves.
type Life = (u32, Option<u32>, bool);

/// Source ranks that hold the same cells.
struct Set {
    life: Life,
    ranks: Vec<u32>,
    /// Bytes of what is to be sent, in order.
    bytes: Vec<u64>,
}

/// Who sends what was added to a [`Balance`].
pub(crate) struct Chosen {
    /// By set, in order.
    senders: Vec<std::vec::IntoIter<u32>>,
}

impl Balance {
    /// The set of some ranks, ascending, at least one, for cells of groups of this kind.
    pub(crate) fn set(&mut self, kind: GroupKind, ranks: Vec<u32>) -> usize {
        let life = match kind {
            GroupKind::Paged { tokens_per_block, window_tokens, .. } => (tokens_per_block, window_tokens, true),
            GroupKind::State => (1, None, false),
        };
        *self.ids.entry((life, ranks)).or_insert_with_key(|(life, ranks)| {
            self.sets.push(Set { life: *life, ranks: ranks.clone(), bytes: Vec::new() });
            self.sets.len() - 1
        })
    }

    /// Adds bytes of a slot that one rank of the set is to send.
    pub(crate) fn add(&mut self, set: usize, bytes: u64) {
        self.sets[set].bytes.push(bytes);
    }

    /// Chooses. `rotation` moves the first stretch of a set to another rank, so that parts of the destination instance, which
    /// serve different requests, do not all leave what is odd to the same source.
    pub(crate) fn choose(self, rotation: u32) -> Chosen {
        let mut loads = HashMap::<(Life, u32), u128>::new();
        let mut order: Vec<usize> = (0..self.sets.len()).collect();
        // Smaller sets have less choice.
        order.sort_by_key(|set| self.sets[*set].ranks.len());
        let mut senders = vec![Vec::new(); self.sets.len()];
        for index in order {
            let Set { life, ranks, bytes } = &self.sets[index];
            let rank = |place: usize| ranks[(place + rotation as usize) % ranks.len()];
            let load = |place| loads.get(&(*life, rank(place))).copied().unwrap_or(0);
            let before: Vec<u128> = (0..ranks.len()).map(load).collect();
            senders[index] = stretches(&before, bytes).into_iter().map(rank).collect();
            for (rank, bytes) in senders[index].iter().zip(bytes) {
                *loads.entry((*life, *rank)).or_default() += u128::from(*bytes);
            }
        }
        Chosen { senders: senders.into_iter().map(Vec::into_iter).collect() }
    }
}

impl Chosen {
    /// Who sends what was added next to the set. To be called once for each [`Balance::add`], in the same order.
    pub(crate) fn next(&mut self, set: usize) -> u32 {
        self.senders[set].next().expect("a sender for everything added")
    }
}

/// Cuts `bytes` into a stretch for each rank, so that all ranks that get some end up with the same load; ranks that have
/// more than that before get none. Returns the rank's index for each item, which belongs to the stretch in which it begins.
fn stretches(loads: &[u128], bytes: &[u64]) -> Vec<usize> {
    let total: u128 = bytes.iter().map(|bytes| u128::from(*bytes)).sum();
    let mut ascending = loads.to_vec();
    ascending.sort_unstable();
    // The ranks that get some are the `count` with the least load; they end up with `sum / count` each. Rows are some
    // thousand, ranks some ten thousand, bytes of a row below 2^64: nothing comes near 2^128.
    let (mut count, mut sum) = (0, total);
    for load in ascending {
        if count > 0 && load * count >= sum {
            break;
        }
        (count, sum) = (count + 1, sum + load);
    }
    // In units of 1 / count bytes, so that nothing is rounded.
    let quotas = loads.iter().map(|load| sum.saturating_sub(load * count));
    let ends: Vec<u128> = quotas
        .scan(0, |end, quota| {
            *end += quota;
            Some(*end)
        })
        .collect();
    let (mut place, mut before) = (0, 0);
    let place_of = |bytes: &u64| {
        while place + 1 < ends.len() && ends[place] <= before * count {
            place += 1;
        }
        before += u128::from(*bytes);
        place
    };
    bytes.iter().map(place_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn balance(sets: &[(&[u32], &[u64])], rotation: u32) -> Vec<Vec<u32>> {
        let mut balance = Balance::default();
        let ids: Vec<usize> = sets
            .iter()
            .map(|(ranks, bytes)| {
                let set = balance.set(GroupKind::paged(16), ranks.to_vec());
                bytes.iter().for_each(|bytes| balance.add(set, *bytes));
                set
            })
            .collect();
        let mut chosen = balance.choose(rotation);
        ids.iter().zip(sets).map(|(set, (_, bytes))| bytes.iter().map(|_| chosen.next(*set)).collect()).collect()
    }

    #[test]
    fn splits_into_even_stretches() {
        let check = |ranks: &[u32], rotation: u32, bytes: &[u64], expected: &[u32]| {
            assert_eq!(balance(&[(ranks, bytes)], rotation), [expected]);
        };
        check(&[7], 3, &[10, 10], &[7, 7]);
        check(&[0, 1], 0, &[10, 10, 10, 10], &[0, 0, 1, 1]);
        check(&[0, 1], 1, &[10, 10, 10, 10], &[1, 1, 0, 0]);
        check(&[0, 1], 0, &[10, 10, 10], &[0, 0, 1]);
        check(&[3, 5, 9], 4, &[1, 1, 1], &[5, 9, 3]);
        check(&[0, 1], 0, &[100, 1, 1, 1], &[0, 1, 1, 1]);
        check(&[0, 1, 2], 0, &[100, 1], &[0, 2]);
    }

    #[test]
    fn who_sends_more_alone_sends_less_of_what_is_shared() {
        // Three ranks with four heads between them and an index each: the one with two heads sends none of the index.
        let heads: [(&[u32], &[u64]); 3] = [(&[0], &[8]), (&[1], &[8]), (&[2], &[16])];
        let index: (&[u32], &[u64]) = (&[0, 1, 2], &[2, 2, 2, 2]);
        let found = balance(&[index, heads[0], heads[1], heads[2]], 0);
        assert_eq!(found[0], [0, 0, 1, 1]);
        // More of it fills the gap, and the rest is for all.
        let index: (&[u32], &[u64]) = (&[0, 1, 2], &[2; 11]);
        let found = balance(&[index, heads[0], heads[1], heads[2]], 0);
        assert_eq!(found[0], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]);
    }

    #[test]
    fn counts_lives_and_sets_apart() {
        let mut balance = Balance::default();
        let kinds = [GroupKind::paged(16), GroupKind::State, GroupKind::windowed(16, 64), GroupKind::paged(16)];
        let sets = kinds.map(|kind| balance.set(kind, vec![0, 1]));
        assert_eq!(sets, [0, 1, 2, 0]);
        sets.iter().for_each(|set| balance.add(*set, 8));
        let mut chosen = balance.choose(0);
        assert_eq!(sets.map(|set| chosen.next(set)), [0, 0, 0, 1]);
    }
}
