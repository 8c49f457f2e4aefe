//! Which of several replicas sends a row.

use std::collections::HashMap;

use kvferry_layout::GroupId;

/// Sets of source ranks that hold the same cells, numbered in the order in which they were first seen. Cells of
/// different groups are counted apart: a request moves different numbers of slots of each.
#[derive(Default)]
pub(crate) struct ReplicaSets {
    ids: HashMap<(GroupId, Vec<u32>), usize>,
    sets: Vec<ReplicaSet>,
}

struct ReplicaSet {
    ranks: usize,
    bytes_total: u128,
    bytes_before: u128,
}

impl ReplicaSets {
    /// Counts `bytes` a slot of `group`, held by each of `ranks` (ascending, at least one). Returns the set's number.
    pub(crate) fn add(&mut self, group: GroupId, ranks: Vec<u32>, bytes: u64) -> usize {
        let id = *self.ids.entry((group, ranks)).or_insert_with_key(|(_, ranks)| {
            self.sets.push(ReplicaSet { ranks: ranks.len(), bytes_total: 0, bytes_before: 0 });
            self.sets.len() - 1
        });
        self.sets[id].bytes_total += u128::from(bytes);
        id
    }

    /// Who sends the next `bytes` of a set, as an index into its ranks. To be called once for each [`Self::add`], in the same order, when
    /// all are added.
    ///
    /// Each rank gets one stretch of the set's bytes: the cells that start in its n-th part of them. So no two ranks
    /// differ from the even split by a whole row, and rows that are neighbours mostly have one sender and merge.
    /// `rotation` moves the first stretch to another rank, so that destinations do not all begin at the same source.
    pub(crate) fn next(&mut self, id: usize, bytes: u64, rotation: u32) -> usize {
        let set = &mut self.sets[id];
        // Bytes of some thousand rows, each below 2^64, times ranks, below 2^32. All bytes are not before the last ones,
        // so that the part is below the number of ranks.
        let part = (set.bytes_before * set.ranks as u128).checked_div(set.bytes_total).unwrap_or(0);
        set.bytes_before += u128::from(bytes);
        (usize::try_from(part).unwrap_or(0) + rotation as usize % set.ranks) % set.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_into_even_stretches() {
        let check = |ranks: u32, rotation: u32, bytes: &[u64], expected: &[usize]| {
            let mut sets = ReplicaSets::default();
            let ids: Vec<_> = bytes.iter().map(|bytes| sets.add(GroupId(0), (0..ranks).collect(), *bytes)).collect();
            let found: Vec<_> = ids.iter().zip(bytes).map(|(id, bytes)| sets.next(*id, *bytes, rotation)).collect();
            assert_eq!(found, expected);
        };
        check(1, 3, &[10, 10], &[0, 0]);
        check(2, 0, &[10, 10, 10, 10], &[0, 0, 1, 1]);
        check(2, 1, &[10, 10, 10, 10], &[1, 1, 0, 0]);
        check(2, 0, &[10, 10, 10], &[0, 0, 1]);
        check(3, 4, &[1, 1, 1], &[1, 2, 0]);
        check(2, 0, &[100, 1, 1, 1], &[0, 1, 1, 1]);
    }

    #[test]
    fn counts_groups_and_sets_apart() {
        let mut sets = ReplicaSets::default();
        let ids =
            [(0, 2), (1, 2), (0, 3), (0, 2)].map(|(group, ranks)| sets.add(GroupId(group), (0..ranks).collect(), 8));
        assert_eq!(ids, [0, 1, 2, 0]);
        assert_eq!(ids.map(|id| sets.next(id, 8, 0)), [0, 0, 0, 1]);
    }
}
