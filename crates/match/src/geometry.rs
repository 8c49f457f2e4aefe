//! What is kept of a page table once its rows are matched.

use kvferry_layout::{GroupId, GroupKind, LayerGroup, PageTable, Plane, PoolId, Row};

/// Groups and pools of one rank: what pieces, which speak of slots, do not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) groups: Vec<GroupSlots>,
    pub(crate) pools: Vec<PoolSlots>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupSlots {
    pub(crate) kind: GroupKind,
    /// The smallest of the group's pools, in each of which a slot of the group has to be, and how many slots it has.
    pub(crate) bound: (PoolId, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolSlots {
    pub(crate) count: u32,
    pub(crate) stride: u64,
}

/// Where an array of (unit, token) cells lies in a slot of one side: its first cell and the way to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) group: GroupId,
    pub(crate) pool: PoolId,
    pub(crate) offset: u64,
    pub(crate) unit_stride: u64,
    pub(crate) token_stride: u64,
}

impl Geometry {
    pub(crate) fn of(table: &PageTable) -> Self {
        let pools = table.pools.iter().map(|pool| PoolSlots { count: pool.slot_count, stride: pool.slot_stride });
        let pools: Vec<PoolSlots> = pools.collect();
        let bound = |group: &LayerGroup| {
            let slots = group.rows.iter().map(|row| (pools[usize::from(row.pool.0)].count, row.pool)).min();
            slots.map_or((PoolId(0), 0), |(count, pool)| (pool, count))
        };
        let groups = table.groups.iter().map(|group| GroupSlots { kind: group.kind, bound: bound(group) }).collect();
        Self { groups, pools }
    }

    /// `group` is one of the table's.
    pub(crate) fn group(&self, group: GroupId) -> GroupSlots {
        self.groups[usize::from(group.0)]
    }

    /// `group` is one of the table's.
    pub(crate) fn kind(&self, group: GroupId) -> GroupKind {
        self.group(group).kind
    }

    /// `pool` is one of the table's.
    pub(crate) fn pool(&self, pool: PoolId) -> PoolSlots {
        self.pools[usize::from(pool.0)]
    }
}

impl Place {
    /// The place of the units from `first_unit` on, which `plane` holds.
    pub(crate) fn new(group: GroupId, row: &Row, plane: &Plane, first_unit: u32) -> Self {
        // A checked table has every cell inside its slot, so the offset of one fits.
        let offset = row.offset + plane.offset + u64::from(first_unit - plane.units.start) * plane.unit_stride;
        Self { group, pool: row.pool, offset, unit_stride: plane.unit_stride, token_stride: plane.token_stride }
    }
}
