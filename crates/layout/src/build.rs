//! Builders of page tables: from a description of what a rank stores, and from a model's facts and a cut.

use crate::check::POOLS_MAX;
use crate::cut::Cut;
use crate::error::{Counted, LayoutError};
use crate::facts::ModelFacts;
use crate::spec::{PlaneSpec, RankSpec, RowSpec, unit_share};
use crate::table::{Dtype, Layer, LayerGroup, MemoryKind, PageTable, Plane, Pool, PoolId, Row};

/// What an instance chooses for itself, whatever the model and the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableOptions {
    /// Tokens of a block.
    pub tokens_per_block: u32,
    /// Element type of keys, values and latents. Indexer keys are always 8-bit floats.
    pub dtype: Dtype,
    /// Slots of each pool.
    pub slot_count: u32,
    /// Whether the rank of the last stage holds the model's MTP layers too. Of no effect for a model without any.
    pub mtp: bool,
}

/// The table of one rank of an instance that stores block-major in host memory: see [`block_major`].
///
/// # Errors
///
/// [`LayoutError::Cut`] if the cut does not fit the model or has no such rank, others if the options are not usable.
pub fn build(facts: &ModelFacts, cut: &Cut, rank: u32, options: &TableOptions) -> Result<PageTable, LayoutError> {
    let (pp_rank, tp_rank) = cut.coordinates(rank)?;
    let mut layers = cut.stage_layers(pp_rank, facts.hidden_layers())?;
    if options.mtp && pp_rank + 1 == cut.pp_size() {
        layers.end += facts.mtp_layers();
    }
    block_major(&RankSpec {
        hidden_layers: facts.hidden_layers(),
        layers: layers.map(Layer).collect(),
        tp_rank,
        tp_size: cut.tp_size(),
        slot_count: options.slot_count,
        groups: facts.groups(options)?,
    })
}

/// The table of a rank whose slots hold all layers of their pool side by side.
///
/// In a slot the layers ascend and each has its roles in the order of the spec, without gaps. In a row, planes follow
/// each other; in a plane, the tokens of a unit are adjacent (HND). Rows of a group are listed pool by pool. Pools are
/// in host memory with base 0; whoever allocates them sets `memory` and `base`.
///
/// # Errors
///
/// What is wrong with the spec, or what [`PageTable::check`] finds in the table.
pub fn block_major(rank: &RankSpec) -> Result<PageTable, LayoutError> {
    if let Some(pair) = rank.layers.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(LayoutError::LayerOrder { layer: pair[1] });
    }
    let mut table = PageTable { hidden_layers: rank.hidden_layers, pools: Vec::new(), groups: Vec::new() };
    for group in &rank.groups {
        let mut rows = Vec::new();
        for roles in &group.pools {
            let pool_count = table.pools.len();
            let no_more = LayoutError::TooMany { what: Counted::Pools, found: pool_count + 1, max: POOLS_MAX };
            let id = PoolId(u16::try_from(pool_count).map_err(|_| no_more)?);
            let rows_before = rows.len();
            let slot_bytes = pack(rank, roles, group.kind.tokens(), id, &mut rows)?;
            if rows.len() > rows_before {
                let (memory, base, slot_count) = (MemoryKind::Host, 0, rank.slot_count);
                table.pools.push(Pool { memory, base, slot_count, slot_stride: slot_bytes, slot_bytes });
            }
        }
        if !rows.is_empty() {
            table.groups.push(LayerGroup { kind: group.kind, rows });
        }
    }
    table.check()?;
    Ok(table)
}

/// Appends the rows of one pool; returns the bytes of its slots.
fn pack(
    rank: &RankSpec,
    roles: &[RowSpec],
    tokens: u32,
    pool: PoolId,
    rows: &mut Vec<Row>,
) -> Result<u64, LayoutError> {
    let mut slot_bytes: u64 = 0;
    for &layer in &rank.layers {
        for spec in roles.iter().filter(|spec| spec.owners.owns(layer)) {
            let row = row(rank, layer, spec, tokens, pool, slot_bytes)?;
            let end = slot_bytes.checked_add(row.bytes);
            slot_bytes = end.ok_or_else(|| LayoutError::TooLarge { layer, role: spec.role.clone() })?;
            rows.push(row);
        }
    }
    Ok(slot_bytes)
}

fn row(
    rank: &RankSpec,
    layer: Layer,
    spec: &RowSpec,
    tokens: u32,
    pool: PoolId,
    offset: u64,
) -> Result<Row, LayoutError> {
    let RankSpec { tp_rank, tp_size, .. } = *rank;
    let RowSpec { role, dtype, .. } = spec.clone();
    let too_large = || LayoutError::TooLarge { layer, role: spec.role.clone() };
    let mut bytes: u64 = 0;
    let mut planes = Vec::with_capacity(spec.planes.len());
    for &PlaneSpec { units_total, cell_bytes } in &spec.planes {
        let units = unit_share(units_total, tp_rank, tp_size).ok_or(LayoutError::TpRank { tp_rank, tp_size })?;
        let unit_stride = cell_bytes.checked_mul(u64::from(tokens)).ok_or_else(too_large)?;
        let plane_bytes = unit_stride.checked_mul(u64::from(units.end - units.start)).ok_or_else(too_large)?;
        let plane =
            Plane { offset: bytes, cell_bytes, unit_stride, token_stride: cell_bytes, units, units_total, tokens };
        planes.push(plane);
        bytes = bytes.checked_add(plane_bytes).ok_or_else(too_large)?;
    }
    Ok(Row { layer, role, dtype, pool, offset, bytes, planes })
}
