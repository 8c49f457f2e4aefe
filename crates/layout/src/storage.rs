//! How a rank arranges its rows in memory, and the builder that follows it.

use crate::check::POOLS_MAX;
use crate::error::{Counted, LayoutError};
use crate::spec::{GroupSpec, PlaneSpec, RankSpec, RowSpec};
use crate::table::{GroupKind, Layer, LayerGroup, MemoryKind, PageTable, Plane, Pool, PoolId, Row};

/// Which rows share a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// All layers in one slot: in a slot the layers ascend and each has its roles in the order of the spec, without gaps.
    #[default]
    BlockMajor,
    /// A pool a layer, its roles side by side in a slot: `[slots, roles, ...]`, with keys and values `[slots, 2, ...]`.
    ///
    /// vLLM's FlashInfer backend allocates so: `(num_blocks, 2, block_size, num_kv_heads, head_size)`
    /// (`vllm/v1/attention/backends/flashinfer.py`, `get_kv_cache_shape`).
    LayerTogether,
    /// One allocation a layer, cut into a pool a role, one behind the other: `[roles, slots, ...]`, with keys and values
    /// `[2, slots, ...]`.
    ///
    /// vLLM's FlashAttention backend allocates so: `(2, num_blocks, block_size, num_kv_heads, head_size)`
    /// (`vllm/v1/attention/backends/flash_attn.py`, `get_kv_cache_shape`, vllm-project/vllm at commit 5704f34f361c). A
    /// pool's `base` is counted from the start of the layer's allocation; whoever makes the allocation adds its address.
    LayerStacked,
    /// A pool for each layer and role: `[slots, ...]`.
    ///
    /// SGLang allocates so: `k_buffer[layer]` and `v_buffer[layer]` of `(size + page_size, head_num, head_dim)`
    /// (`python/sglang/srt/mem_cache/memory_pool.py`, `MHATokenToKVPool._create_buffers`, sgl-project/sglang). Its slots are
    /// tokens, or pages of tokens with NHD order inside.
    LayerSplit,
}

/// Which of a plane's two axes is the outer one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CellOrder {
    /// Units outside: `[heads, tokens, head_dim]` (HND; vLLM's stride order `(0, 1, 3, 2, 4)`), and `[channels, columns]` for convolution state.
    #[default]
    Hnd,
    /// Tokens outside: `[tokens, heads, head_dim]` (NHD), and `[columns, channels]` for convolution state, the sections of
    /// a column side by side.
    Nhd,
}

/// How a rank arranges its rows in memory. The default is block-major, HND, channels outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Storage {
    /// Which rows share a pool.
    pub pooling: Pooling,
    /// Order inside the planes of paged groups.
    pub cells: CellOrder,
    /// Order inside the planes of state groups. vLLM calls them `DS` and `SD` (`VLLM_SSM_CONV_STATE_LAYOUT`; unset, it is
    /// `SD`: columns outside). SGLang puts channels outside.
    pub state_cells: CellOrder,
}

/// The table of a rank whose slots hold all layers of their pool side by side, units outside tokens: [`lay_out`] with the
/// default [`Storage`].
///
/// # Errors
///
/// Those of [`lay_out`].
pub fn block_major(rank: &RankSpec) -> Result<PageTable, LayoutError> {
    lay_out(rank, Storage::default())
}

/// The table of a rank that stores what `rank` says in the order that `storage` says.
///
/// Slots have no gaps. Planes of a row follow each other, but for state with columns outside. Rows of a group are listed
/// pool by pool. Pools are in host memory with base 0 (see [`Pooling::LayerStacked`] for the exception); whoever allocates
/// them sets `memory` and `base`.
///
/// # Errors
///
/// What is wrong with the spec, or what [`PageTable::check`] finds in the table.
pub fn lay_out(rank: &RankSpec, storage: Storage) -> Result<PageTable, LayoutError> {
    if let Some(pair) = rank.layers.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(LayoutError::LayerOrder { layer: pair[1] });
    }
    let RankSpec { tp_rank, tp_size, .. } = *rank;
    if tp_rank >= tp_size {
        return Err(LayoutError::TpRank { tp_rank, tp_size });
    }
    let mut pools = Vec::new();
    let mut groups = Vec::new();
    for group in &rank.groups {
        let mut builder = Builder { rank, group, storage, pools: &mut pools, rows: Vec::new() };
        for roles in &group.pools {
            builder.place(roles)?;
        }
        let rows = builder.rows;
        if !rows.is_empty() {
            groups.push(LayerGroup { kind: group.kind, rows });
        }
    }
    PageTable::new(rank.hidden_layers, pools, groups)
}

/// The rows of one group, and the pools of all groups so far.
struct Builder<'a> {
    rank: &'a RankSpec,
    group: &'a GroupSpec,
    storage: Storage,
    pools: &'a mut Vec<Pool>,
    rows: Vec<Row>,
}

impl Builder<'_> {
    /// Adds the rows of one pool of the spec, and the pools that the storage makes of it.
    fn place(&mut self, roles: &[RowSpec]) -> Result<(), LayoutError> {
        let layers = &self.rank.layers;
        match self.storage.pooling {
            Pooling::BlockMajor => self.pool(0, layers, roles).map(|_| ()),
            Pooling::LayerTogether => layers.iter().try_for_each(|layer| {
                self.pool(0, std::slice::from_ref(layer), roles)?;
                Ok(())
            }),
            Pooling::LayerSplit | Pooling::LayerStacked => {
                // Pools of one role follow each other, as they repeat in fewer steps than roles by turns.
                let mut bases = vec![0; layers.len()];
                for role in roles {
                    for (layer, base) in layers.iter().zip(&mut bases) {
                        let end = self.pool(*base, std::slice::from_ref(layer), std::slice::from_ref(role))?;
                        if self.storage.pooling == Pooling::LayerStacked {
                            *base = end;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    /// Adds one pool with a row for each of the layers and roles, if there is any; returns the address after the pool.
    fn pool(&mut self, base: u64, layers: &[Layer], roles: &[RowSpec]) -> Result<u64, LayoutError> {
        let pool_count = self.pools.len();
        let no_more = LayoutError::TooMany { what: Counted::Pools, found: pool_count + 1, max: POOLS_MAX };
        let id = PoolId(u16::try_from(pool_count).map_err(|_| no_more)?);
        let rows_before = self.rows.len();
        let mut slot_bytes: u64 = 0;
        for &layer in layers {
            for spec in roles.iter().filter(|spec| spec.owners.owns(layer)) {
                let row = self.row(layer, spec, id, slot_bytes)?;
                let end = slot_bytes.checked_add(row.bytes);
                slot_bytes = end.ok_or_else(|| LayoutError::TooLarge { layer, role: spec.role.clone() })?;
                self.rows.push(row);
            }
        }
        if self.rows.len() == rows_before {
            return Ok(base);
        }
        let slot_count = self.group.slot_count;
        let pool = Pool { memory: MemoryKind::Host, base, slot_count, slot_stride: slot_bytes, slot_bytes };
        let end = pool.extent_bytes().and_then(|bytes| base.checked_add(bytes));
        self.pools.push(pool);
        end.ok_or(LayoutError::PoolExtent { pool: id })
    }

    fn row(&self, layer: Layer, spec: &RowSpec, pool: PoolId, offset: u64) -> Result<Row, LayoutError> {
        let RowSpec { role, dtype, .. } = spec.clone();
        let too_large = || LayoutError::TooLarge { layer, role: spec.role.clone() };
        let mut planes = self.planes(spec)?;
        // Lines of one place on the token axis through all planes, or through one of them.
        let line = |plane: &Plane| plane.cell_bytes.checked_mul(u64::from(plane.units.end - plane.units.start));
        let lines =
            planes.iter().map(line).try_fold(0, |sum: u64, line| sum.checked_add(line?)).ok_or_else(too_large)?;
        let state = self.group.kind == GroupKind::State;
        let order = if state { self.storage.state_cells } else { self.storage.cells };
        let mut bytes: u64 = 0;
        let mut in_line = 0;
        for plane in &mut planes {
            let line = line(plane).ok_or_else(too_large)?;
            let plane_bytes = line.checked_mul(u64::from(plane.tokens)).ok_or_else(too_large)?;
            let column = plane.cell_bytes.checked_mul(u64::from(plane.tokens)).ok_or_else(too_large)?;
            (plane.offset, plane.unit_stride, plane.token_stride) = match order {
                CellOrder::Hnd => (bytes, column, plane.cell_bytes),
                CellOrder::Nhd if state => (in_line, plane.cell_bytes, lines),
                CellOrder::Nhd => (bytes, plane.cell_bytes, line),
            };
            in_line += line;
            bytes = bytes.checked_add(plane_bytes).ok_or_else(too_large)?;
        }
        Ok(Row { layer, role, dtype, pool, offset, bytes, planes })
    }

    /// The planes of a row, still without place and strides.
    fn planes(&self, spec: &RowSpec) -> Result<Vec<Plane>, LayoutError> {
        let RankSpec { tp_rank, tp_size, .. } = *self.rank;
        let kind = self.group.kind;
        let role = || spec.role.clone();
        // A line runs through all planes, so they need as many lines each.
        let columns = spec.planes.first().map_or(1, |plane| plane.columns);
        let plane = |plane: &PlaneSpec| {
            let together = (plane.units_total, plane.units_together);
            let units = plane.share(tp_rank, tp_size).ok_or_else(|| LayoutError::UnitsTogether {
                role: role(),
                units_total: together.0,
                units_together: together.1,
            })?;
            let tokens = plane.cells(kind).filter(|_| plane.columns == columns).ok_or_else(|| LayoutError::Cells {
                role: role(),
                tokens: kind.tokens(),
                tokens_per_cell: plane.tokens_per_cell,
                columns: plane.columns,
            })?;
            let &PlaneSpec { units_total, cell_bytes, .. } = plane;
            Ok(Plane { offset: 0, cell_bytes, unit_stride: 0, token_stride: 0, units, units_total, tokens })
        };
        spec.planes.iter().map(plane).collect()
    }
}
