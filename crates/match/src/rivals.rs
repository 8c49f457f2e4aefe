//! Groups of one table that use the same bytes of a pool's slots, so that a slot can belong to one of them only.

use kvferry_layout::{GroupId, PageTable};

/// The groups of the table, in sets: two groups whose rows overlap in a pool are in the same one. Most sets have one
/// member; where an allocator hands the pages of one pool to several groups, they have more.
pub(crate) fn sets(table: &PageTable) -> Vec<Vec<GroupId>> {
    let mut sets: Vec<Vec<GroupId>> = (0..=u16::MAX).map(GroupId).zip(&table.groups).map(|(id, _)| vec![id]).collect();
    if sets.len() < 2 {
        return sets;
    }
    // A checked row ends inside its slot, so the end fits.
    let mut rows: Vec<_> =
        table.rows().map(|(group, row)| (row.pool, row.offset, row.offset + row.bytes, group)).collect();
    rows.sort_unstable();
    for of_pool in rows.chunk_by(|a, b| a.0 == b.0) {
        // The row that reaches furthest so far. Whoever starts before its end overlaps it.
        let mut furthest: Option<(u64, GroupId)> = None;
        for &(_, start, end, group) in of_pool {
            if let Some((reach, other)) = furthest
                && start < reach
            {
                unite(&mut sets, group, other);
            }
            furthest = furthest.max(Some((end, group)));
        }
    }
    sets
}

fn unite(sets: &mut Vec<Vec<GroupId>>, a: GroupId, b: GroupId) {
    let find = |sets: &[Vec<GroupId>], group| sets.iter().position(|set| set.contains(&group));
    if let (Some(into), Some(from)) = (find(sets, a), find(sets, b))
        && into != from
    {
        let members = sets.remove(into.max(from));
        let set = &mut sets[into.min(from)];
        set.extend(members);
        set.sort_unstable();
    }
}
