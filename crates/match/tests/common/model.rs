//! Models of a few layers, and page tables of instances of them: any cut, any strides.

use std::ops::Range;

use kvferry_layout::{
    Dtype, GroupKind, Layer, LayerGroup, MemoryKind, Ordinals, PageTable, Plane, Pool, PoolId, Role, Row,
};
use proptest::prelude::*;

/// What a model keeps for a layer.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) hidden_layers: u32,
    pub(crate) attention: Attention,
    /// Which layers own an indexer row, if the model has them.
    pub(crate) indexer: Option<Vec<bool>>,
    /// Tokens that each indexer cell stands for.
    pub(crate) indexer_cell_tokens: u32,
    /// Layers of even number keep only so many of the last tokens.
    pub(crate) window_tokens: Option<u32>,
    /// Units of the three sections of the conv state and of the ssm state, kept by the layers of odd number.
    pub(crate) state: Option<[u32; 4]>,
    /// Cells of a unit of conv state.
    pub(crate) conv_columns: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Attention {
    Grouped { heads: u32, key_bytes: u64, value_bytes: u64 },
    Latent { bytes: u64 },
}

/// How an instance of a model is cut and stored.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    /// Layers of the stages but the last, which has the rest. Stages may be empty.
    pub(crate) stages: Vec<u32>,
    /// Ranks that the blocks of a sequence are dealt out to.
    pub(crate) cp_size: u32,
    pub(crate) tp_size: u32,
    /// Ranks hold one unit more than their share, where there is one: they are replicas in part.
    pub(crate) wide: bool,
    pub(crate) mtp: bool,
    pub(crate) block_tokens: u32,
    /// Cells of a block of the indexer rows, if they are a group of their own.
    pub(crate) indexer_block_tokens: Option<u32>,
    pub(crate) storage: Storage,
}

#[derive(Clone, Debug)]
pub(crate) struct Storage {
    /// Tokens inside units, else units inside tokens.
    pub(crate) tokens_inside: bool,
    /// The planes of a row are interleaved token by token, where they all have one unit.
    pub(crate) interleaved: bool,
    /// A pool for each layer, else one for each group and kind of row.
    pub(crate) pool_a_layer: bool,
    /// All rows of one role before those of the next, else all roles of a layer before the next layer.
    pub(crate) role_by_role: bool,
    pub(crate) cell_padding: u64,
    pub(crate) line_padding: u64,
    pub(crate) row_padding: u64,
    pub(crate) slot_padding: u64,
}

/// Tokens inside heads, and no gaps.
pub(crate) const PLAIN: Storage = Storage {
    tokens_inside: true,
    interleaved: false,
    pool_a_layer: false,
    role_by_role: false,
    cell_padding: 0,
    line_padding: 0,
    row_padding: 0,
    slot_padding: 0,
};

/// One row before it has a place.
struct Kept {
    layer: Layer,
    role: Role,
    group: usize,
    /// Pool within the group.
    pool: u32,
    /// Units of the model, units held here, bytes of a cell.
    planes: Vec<(u32, Range<u32>, u64)>,
    /// Cells along the token axis.
    cells: u32,
}

/// Most tokens of a request.
pub(crate) const TOKENS_MAX: u64 = 110;

/// Slots of a pool beyond those that the longest request needs.
pub(crate) const SLOTS_SPARE: u32 = 8;

impl Model {
    pub(crate) fn tables(&self, instance: &Instance) -> Vec<PageTable> {
        let pp_size = instance.stages.len() as u32 + 1;
        let (cp_size, tp_size) = (instance.cp_size, instance.tp_size);
        (0..pp_size * cp_size * tp_size)
            .map(|rank| self.table(instance, rank / tp_size / cp_size, rank / tp_size % cp_size, rank % tp_size))
            .collect()
    }

    fn table(&self, instance: &Instance, stage: u32, cp_rank: u32, tp_rank: u32) -> PageTable {
        let ordinals = Ordinals { step: instance.cp_size, first: cp_rank };
        let paged = |tokens_per_block, window_tokens| GroupKind::Paged { tokens_per_block, window_tokens, ordinals };
        let indexer_cells = instance.indexer_block_tokens.unwrap_or(instance.block_tokens);
        let kinds = [
            paged(instance.block_tokens, None),
            paged(indexer_cells * self.indexer_cell_tokens, None),
            GroupKind::State,
            paged(instance.block_tokens, self.window_tokens),
        ];
        let mut table = PageTable {
            hidden_layers: self.hidden_layers,
            dp_rank: 0,
            pools: Vec::new(),
            groups: kinds.map(|kind| LayerGroup { kind, rows: Vec::new() }).into(),
        };
        let layers = self.layers(instance, stage);
        let mut kept: Vec<Kept> = layers.flat_map(|layer| self.kept(instance, layer, tp_rank)).collect();
        if instance.storage.role_by_role {
            kept.sort_by_key(|kept| kept.role.clone());
        }
        let mut pools: Vec<(usize, u32, u64)> = Vec::new();
        for kept in kept {
            let key = (kept.group, if instance.storage.pool_a_layer { 100 + kept.layer.0 } else { kept.pool });
            let index = pools.iter().position(|(group, pool, _)| (*group, *pool) == key).unwrap_or_else(|| {
                pools.push((key.0, key.1, 0));
                pools.len() - 1
            });
            let (.., cursor) = &mut pools[index];
            let row = instance.storage.row(kept, PoolId(index as u16), *cursor);
            *cursor = row.1.offset + row.1.bytes + instance.storage.row_padding;
            table.groups[row.0].rows.push(row.1);
        }
        table.pools = pools
            .into_iter()
            .map(|(group, _, slot_bytes)| Pool {
                memory: MemoryKind::Host,
                base: 0,
                slot_count: TOKENS_MAX as u32 / kinds[group].tokens() + SLOTS_SPARE,
                slot_stride: slot_bytes + instance.storage.slot_padding,
                slot_bytes,
            })
            .collect();
        table.check().expect("the tables of the tests are sound");
        table
    }

    fn layers(&self, instance: &Instance, stage: u32) -> impl Iterator<Item = Layer> + use<> {
        let before = |stage: u32| instance.stages.iter().take(stage as usize).sum::<u32>().min(self.hidden_layers);
        let last = stage as usize == instance.stages.len();
        let end = if last { self.hidden_layers + u32::from(instance.mtp) } else { before(stage + 1) };
        (before(stage)..end).map(Layer)
    }

    fn kept(&self, instance: &Instance, layer: Layer, tp_rank: u32) -> Vec<Kept> {
        let share = |units: u32| {
            let start = tp_rank * units / instance.tp_size;
            let end = ((tp_rank + 1) * units / instance.tp_size).max(start + 1);
            (units, start..(end + u32::from(instance.wide)).min(units))
        };
        let sharded = |units: u32, bytes: u64| (share(units).0, share(units).1, bytes);
        let window = if self.window_tokens.is_some() && layer.0.is_multiple_of(2) { 3 } else { 0 };
        let cells = |group| if group == 2 { 1 } else { instance.block_tokens };
        let row = |role, group, pool, planes| Kept { layer, role, group, pool, planes, cells: cells(group) };
        let mut rows = match self.attention {
            Attention::Grouped { heads, key_bytes, value_bytes } => vec![
                row(Role::Key, window, 0, vec![sharded(heads, key_bytes)]),
                row(Role::Value, window, 0, vec![sharded(heads, value_bytes)]),
            ],
            Attention::Latent { bytes } => vec![row(Role::Latent, window, 0, vec![(1, 0..1, bytes)])],
        };
        if let Some(owners) = &self.indexer
            && owners.get(layer.0 as usize).copied().unwrap_or(true)
        {
            let group = usize::from(instance.indexer_block_tokens.is_some() || self.indexer_cell_tokens > 1);
            let cells = instance.indexer_block_tokens.unwrap_or(instance.block_tokens);
            rows.push(Kept { cells, ..row(Role::IndexerKey, group, 1, vec![(1, 0..1, 3), (1, 0..1, 1)]) });
        }
        if let Some([x, b, c, heads]) = self.state
            && layer.0 % 2 == 1
        {
            let conv = row(Role::ConvState, 2, 0, vec![sharded(x, 2), sharded(b, 2), sharded(c, 1)]);
            rows.push(Kept { cells: self.conv_columns, ..conv });
            rows.push(row(Role::SsmState, 2, 0, vec![sharded(heads, 5)]));
        }
        rows
    }
}

impl Storage {
    /// The row with its group, at `offset` of a slot of `pool`.
    fn row(&self, kept: Kept, pool: PoolId, offset: u64) -> (usize, Row) {
        let Kept { layer, role, group, planes, cells: tokens, .. } = kept;
        let interleaved = self.interleaved && planes.iter().all(|(_, units, _)| units.len() == 1);
        let line: u64 = planes.iter().map(|(.., bytes)| bytes + self.cell_padding).sum();
        let mut cursor = 0;
        let planes: Vec<Plane> = planes
            .into_iter()
            .map(|(units_total, units, cell_bytes)| {
                let cell = cell_bytes + self.cell_padding;
                let (unit_count, token_count) = (units.len() as u64, u64::from(tokens));
                let (mut unit_stride, mut token_stride) = if self.tokens_inside {
                    (token_count * cell + self.line_padding, cell)
                } else {
                    (cell, unit_count * cell + self.line_padding)
                };
                let plane_offset = cursor;
                if interleaved {
                    token_stride = line;
                    cursor += cell;
                } else if self.tokens_inside {
                    cursor += unit_count * unit_stride;
                } else {
                    cursor += token_count * token_stride;
                }
                // A stride that is never taken may be anything.
                if unit_count == 1 {
                    unit_stride = u64::MAX - 7;
                }
                if token_count == 1 {
                    token_stride = 0;
                }
                Plane { offset: plane_offset, cell_bytes, unit_stride, token_stride, units, units_total, tokens }
            })
            .collect();
        let bytes = if interleaved { line * u64::from(tokens) } else { cursor };
        (group, Row { layer, role, dtype: Dtype::U8, pool, offset, bytes, planes })
    }
}

pub(crate) fn model() -> impl Strategy<Value = Model> {
    (1..=5_u32).prop_flat_map(|hidden_layers| {
        let attention = prop_oneof![
            3 => (1..=8_u32, 1..=3_u64, 1..=3_u64)
                .prop_map(|(heads, key_bytes, value_bytes)| Attention::Grouped { heads, key_bytes, value_bytes }),
            1 => (1..=9_u64).prop_map(|bytes| Attention::Latent { bytes }),
        ];
        let indexer = proptest::option::of(proptest::collection::vec(any::<bool>(), hidden_layers as usize));
        let state = proptest::option::weighted(0.3, [1..=4_u32, 1..=4_u32, 1..=4_u32, 1..=6_u32]);
        let indexer_cell_tokens = prop_oneof![3 => Just(1_u32), 1 => Just(2), 1 => Just(4)];
        let window_tokens = proptest::option::weighted(0.3, 1..60_u32);
        let rest = (indexer_cell_tokens, window_tokens, 1..=3_u32);
        (attention, indexer, state, rest).prop_map(
            move |(attention, indexer, state, (indexer_cell_tokens, window_tokens, conv_columns))| Model {
                hidden_layers,
                attention,
                indexer,
                indexer_cell_tokens,
                window_tokens,
                state,
                conv_columns,
            },
        )
    })
}

fn block_tokens() -> impl Strategy<Value = u32> {
    let of = |sizes: &'static [u32]| prop::sample::select(sizes);
    prop_oneof![1 => 1..=48_u32, 2 => of(&[1, 2, 4, 8, 16, 32]), 1 => of(&[12, 24, 48])]
}

pub(crate) fn instance() -> impl Strategy<Value = Instance> {
    let tp_size = prop_oneof![8 => 1..=4_u32, 1 => 5..=9_u32];
    let cp_size = prop_oneof![4 => Just(1_u32), 1 => Just(2), 1 => Just(3)];
    let stages = proptest::collection::vec(0..=3_u32, 0..=2);
    let cut = (stages, cp_size, tp_size, prop::bool::weighted(0.2), any::<bool>());
    let tokens = (block_tokens(), proptest::option::of(block_tokens()));
    (cut, tokens, storage()).prop_map(
        |((stages, cp_size, tp_size, wide, mtp), (block_tokens, indexer_block_tokens), storage)| Instance {
            stages,
            cp_size,
            tp_size,
            wide,
            mtp,
            block_tokens,
            indexer_block_tokens,
            storage,
        },
    )
}

fn storage() -> impl Strategy<Value = Storage> {
    let padding = || prop_oneof![3 => Just(0_u64), 1 => 1..=3_u64];
    (any::<[bool; 4]>(), [padding(), padding(), padding(), padding()]).prop_map(|(choices, paddings)| {
        let [tokens_inside, interleaved, pool_a_layer, role_by_role] = choices;
        let [cell_padding, line_padding, row_padding, slot_padding] = paddings;
        Storage {
            tokens_inside,
            interleaved,
            pool_a_layer,
            role_by_role,
            cell_padding,
            line_padding,
            row_padding,
            slot_padding,
        }
    })
}
