//! The one check for tables that were built and tables that arrived.

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cut::RANKS_MAX;
use crate::error::{Counted, LayoutError, RowName};
use crate::strides::Comb;
use crate::table::{GroupId, GroupKind, LayerGroup, Ordinals, PageTable, Plane, Pool, PoolId, Role, Row};

/// Most pools of a table: one a layer and role would need a few hundred.
pub const POOLS_MAX: usize = 4096;
/// Most groups of a table. The models seen need one to four.
pub const GROUPS_MAX: usize = 256;
/// Most rows of a table. The largest seen has some five hundred.
pub const ROWS_MAX: usize = 8192;
/// Most planes of a row. The models seen need one to three.
pub const PLANES_MAX: usize = 8;
/// Most pairs of planes of different rows whose bytes run through each other. A slot of 94 layers with the heads outermost
/// has some 18,000.
pub const INTERLEAVED_PLANES_MAX: usize = 1 << 18;
/// Most layers of a model, MTP and draft layers included.
pub const LAYERS_MAX: u32 = 65_536;
/// Most bytes of a [`Role::Named`].
pub const ROLE_NAME_BYTES_MAX: usize = 64;

/// A run of addresses: `base..base + bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// First address.
    pub base: u64,
    /// Length.
    pub bytes: u64,
}

impl Extent {
    /// The address after the last one; `None` past `u64`.
    pub fn end(&self) -> Option<u64> {
        self.base.checked_add(self.bytes)
    }

    /// Whether all of `other` lies in here. False if either runs past `u64`.
    pub fn contains(&self, other: &Extent) -> bool {
        match (self.end(), other.end()) {
            (Some(end), Some(other_end)) => self.base <= other.base && other_end <= end,
            _ => false,
        }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{} B", self.base, self.bytes)
    }
}

impl PageTable {
    /// Checks everything that a table must hold by itself. Builders and decoders have called this already.
    ///
    /// Pools: not empty, slots not overlapping, inside the address space. Rows: inside their slot, `(layer, role)` given
    /// once, no byte in cells of two rows of a group; rows may interleave if their strides prove that. Rows of *different*
    /// groups may use the same bytes of a pool's slots: a slot belongs to one group at a time. Planes: inside their row, units inside the model's, cells that divide
    /// the tokens of a block, kept apart by the strides, planes of a row not overlapping.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), LayoutError> {
        let row_count = self.groups.iter().map(|group| group.rows.len()).fold(0, usize::saturating_add);
        at_most(Counted::Pools, self.pools.len(), POOLS_MAX)?;
        at_most(Counted::Groups, self.groups.len(), GROUPS_MAX)?;
        at_most(Counted::Rows, row_count, ROWS_MAX)?;
        if self.hidden_layers == 0 {
            return Err(LayoutError::NoLayers);
        }
        at_most(Counted::Layers, self.hidden_layers as usize, LAYERS_MAX as usize)?;

        let mut seen = HashSet::with_capacity(row_count);
        if let Some((_, row)) = self.rows().find(|(_, row)| !seen.insert((row.layer, &row.role))) {
            return Err(LayoutError::DuplicateRow { row: row.into() });
        }
        for (id, group) in (0..=u16::MAX).map(GroupId).zip(&self.groups) {
            check_kind(id, group.kind)?;
        }
        for (id, pool) in (0..=u16::MAX).map(PoolId).zip(&self.pools) {
            check_pool(id, pool)?;
        }
        for group in &self.groups {
            for row in &group.rows {
                check_row(row, group.kind, &self.pools)?;
            }
            check_rows_apart(group)?;
        }
        Ok(())
    }

    /// [`Self::check`], and that each pool lies inside the registered region of the same index.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong; [`LayoutError::OutsideRegion`] for a pool that names memory nobody registered.
    pub fn check_regions(&self, regions: &[Extent]) -> Result<(), LayoutError> {
        self.check()?;
        if regions.len() != self.pools.len() {
            return Err(LayoutError::RegionCount { pool_count: self.pools.len(), region_count: regions.len() });
        }
        for ((id, pool), region) in (0..=u16::MAX).map(PoolId).zip(&self.pools).zip(regions) {
            let bytes = pool.extent_bytes().ok_or(LayoutError::PoolExtent { pool: id })?;
            let pool_extent = Extent { base: pool.base, bytes };
            if !region.contains(&pool_extent) {
                return Err(LayoutError::OutsideRegion { pool: id, pool_extent, region: *region });
            }
        }
        Ok(())
    }
}

fn at_most(what: Counted, found: usize, max: usize) -> Result<(), LayoutError> {
    if found > max { Err(LayoutError::TooMany { what, found, max }) } else { Ok(()) }
}

fn check_pool(id: PoolId, pool: &Pool) -> Result<(), LayoutError> {
    let &Pool { slot_count, slot_stride, slot_bytes, .. } = pool;
    if slot_count == 0 || slot_bytes == 0 {
        return Err(LayoutError::EmptyPool { pool: id, slot_count, slot_bytes });
    }
    if slot_stride < slot_bytes {
        return Err(LayoutError::SlotStride { pool: id, slot_stride, slot_bytes });
    }
    pool.extent_bytes()
        .and_then(|bytes| pool.base.checked_add(bytes))
        .map(|_| ())
        .ok_or(LayoutError::PoolExtent { pool: id })
}

fn check_kind(id: GroupId, kind: GroupKind) -> Result<(), LayoutError> {
    match kind {
        GroupKind::Paged { tokens_per_block: 0, .. } | GroupKind::Paged { window_tokens: Some(0), .. } => {
            Err(LayoutError::NoTokens { group: id })
        }
        GroupKind::Paged { ordinals: Ordinals { step, first }, .. } if first >= step || step > RANKS_MAX => {
            Err(LayoutError::Ordinals { group: id, step, first })
        }
        GroupKind::Paged { .. } | GroupKind::State => Ok(()),
    }
}

/// What bounds the memory that a row takes. A decoder asks this before it makes a row many times over.
pub(crate) fn check_row_limits(row: &Row) -> Result<(), LayoutError> {
    if let Role::Named(text) = &row.role {
        let printable = text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
        if text.is_empty() || text.len() > ROLE_NAME_BYTES_MAX || !printable {
            return Err(LayoutError::RoleName { pool: row.pool, layer: row.layer, bytes_max: ROLE_NAME_BYTES_MAX });
        }
    }
    if row.planes.is_empty() || row.planes.len() > PLANES_MAX {
        return Err(LayoutError::PlaneCount { row: row.into(), planes: row.planes.len(), planes_max: PLANES_MAX });
    }
    Ok(())
}

fn check_row(row: &Row, kind: GroupKind, pools: &[Pool]) -> Result<(), LayoutError> {
    let name = || RowName::from(row);
    check_row_limits(row)?;
    at_most(Counted::Layers, (row.layer.0 as usize).saturating_add(1), LAYERS_MAX as usize)?;
    let Some(pool) = pools.get(usize::from(row.pool.0)) else {
        return Err(LayoutError::RowPool { row: name(), pool_count: pools.len() });
    };
    if row.offset.checked_add(row.bytes).is_none_or(|end| end > pool.slot_bytes) {
        return Err(LayoutError::RowOutsideSlot {
            row: name(),
            offset: row.offset,
            bytes: row.bytes,
            slot_bytes: pool.slot_bytes,
        });
    }
    let mut combs = Vec::with_capacity(row.planes.len());
    for (index, plane) in row.planes.iter().enumerate() {
        let comb = check_plane(row, index, plane, kind)?;
        if let Some(first) = combs.iter().position(|other: &Comb| !other.is_apart_from(&comb)) {
            return Err(LayoutError::PlanesOverlap { row: name(), first, second: index });
        }
        combs.push(comb);
    }
    Ok(())
}

fn check_plane(row: &Row, index: usize, plane: &Plane, kind: GroupKind) -> Result<Comb, LayoutError> {
    let name = || RowName::from(row);
    if plane.cell_bytes == 0 {
        return Err(LayoutError::EmptyCell { row: name(), plane: index });
    }
    if plane.units.is_empty() || plane.units.end > plane.units_total {
        return Err(LayoutError::Units {
            row: name(),
            plane: index,
            units: plane.units.clone(),
            units_total: plane.units_total,
        });
    }
    let divides = match kind {
        GroupKind::Paged { .. } => kind.tokens_per_cell(plane).is_some(),
        GroupKind::State => plane.tokens > 0,
    };
    if !divides {
        return Err(LayoutError::Tokens {
            row: name(),
            plane: index,
            tokens: plane.tokens,
            group_tokens: kind.tokens(),
        });
    }
    let Some(comb) = Comb::of(plane) else {
        return Err(LayoutError::CellsOverlap {
            row: name(),
            plane: index,
            cell_bytes: plane.cell_bytes,
            unit_stride: plane.unit_stride,
            token_stride: plane.token_stride,
        });
    };
    if comb.end().is_none_or(|end| end > row.bytes) {
        return Err(LayoutError::PlaneOutsideRow { row: name(), plane: index, row_bytes: row.bytes });
    }
    Ok(comb)
}

/// That no two rows of a group in one pool have a byte of a cell in common.
///
/// Most rows lie side by side. Those that do not (`[slots, tokens, heads, 2 * head_dim]`, say, with the key and the value of
/// a head in turn) are compared plane by plane, each with all that its bytes run through. A peer can send rows that all run
/// through each other, so the number of comparisons is bounded.
fn check_rows_apart(group: &LayerGroup) -> Result<(), LayoutError> {
    let mut rows: Vec<&Row> = group.rows.iter().collect();
    rows.sort_by_key(|row| (row.pool, row.offset));
    let run_through = |row: &Row, next: &Row| row.pool == next.pool && next.offset - row.offset < row.bytes;
    if !rows.windows(2).any(|pair| run_through(pair[0], pair[1])) {
        return Ok(());
    }
    let mut compared = 0;
    // Rows are inside their slots already, so the offsets of their planes in a slot are inside a `u64`.
    let combs = |row: &Row| row.planes.iter().filter_map(Comb::of).map(|comb| comb.shifted(row.offset)).collect();
    let combs: Vec<Vec<Comb>> = rows.iter().map(|row| combs(row)).collect();
    for (at, (row, planes)) in rows.iter().zip(&combs).enumerate() {
        let behind = rows.iter().zip(&combs).skip(at + 1);
        for (next, next_planes) in behind.take_while(|(next, _)| run_through(row, next)) {
            compared += planes.len() * next_planes.len();
            at_most(Counted::InterleavedPlanes, compared, INTERLEAVED_PLANES_MAX)?;
            let apart = |plane: &Comb| next_planes.iter().all(|other| plane.is_apart_from(other));
            if !planes.iter().all(apart) {
                return Err(LayoutError::RowsOverlap { row: (*next).into(), other: (*row).into() });
            }
        }
    }
    Ok(())
}
