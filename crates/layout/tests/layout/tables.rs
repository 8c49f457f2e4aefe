//! Tables to test with: hand-made, drawn at random, and spoilt.

use kvferry_layout::{
    Dtype, GroupKind, GroupSpec, Layer, LayerGroup, LayerMask, MemoryKind, Ordinals, PageTable, Plane, Pool, PoolId,
    RankSpec, Role, Row, RowSpec, block_major,
};
use proptest::prelude::*;
use serde_json::Value;

/// The facts of one of the models that the examples use.
pub(crate) fn config_of(model: &str) -> String {
    let path = format!("{}/../../examples/models/{model}.json", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// One KV head of 64 elements, keys only, and an indexer on the layers of `mask`; 32 tokens a block.
pub(crate) fn seed_table(mask: LayerMask) -> PageTable {
    let key = RowSpec::single(Role::Key, Dtype::F16, LayerMask::all(4), 1, 64).unwrap();
    let indexer = RowSpec::indexer(Dtype::Fp8E4m3, mask, 128, 128).unwrap();
    let kind = GroupKind::paged(32);
    block_major(&RankSpec {
        hidden_layers: 4,
        layers: (0..4).map(Layer).collect(),
        tp_rank: 0,
        tp_size: 1,
        groups: vec![GroupSpec { kind, slot_count: 8, pools: vec![vec![key], vec![indexer]] }],
    })
    .unwrap()
}

pub(crate) fn mask_of(text: &str) -> LayerMask {
    LayerMask::from_bools(text.chars().map(|letter| letter == 'T'))
}

/// A small table with every feature: two pools, a windowed group and a state group that share a pool, keys beside their
/// scales, values of two tokens each, a named role, an MTP layer, a CUDA pool, padded slots, one of several data-parallel
/// and context-parallel ranks.
pub(crate) fn full_table() -> PageTable {
    let plane = |offset, cell_bytes, (unit_stride, token_stride), units: std::ops::Range<u32>, tokens| Plane {
        offset,
        cell_bytes,
        unit_stride,
        token_stride,
        units,
        units_total: 4,
        tokens,
    };
    let row = |layer, role, dtype, pool, offset, bytes, planes| Row {
        layer: Layer(layer),
        role,
        dtype,
        pool: PoolId(pool),
        offset,
        bytes,
        planes,
    };
    let interleaved = vec![plane(0, 8, (0, 12), 1..2, 4), plane(8, 4, (0, 12), 1..2, 4)];
    let heads = |unit_stride, token_stride| vec![plane(0, 4, (unit_stride, token_stride), 2..4, 4)];
    // Two columns of two sections, side by side.
    let sections = vec![plane(0, 2, (2, 8), 0..2, 2), plane(4, 1, (1, 8), 1..4, 2)];
    let table = PageTable {
        hidden_layers: 2,
        dp_rank: 1,
        pools: vec![
            Pool { memory: MemoryKind::Host, base: 4096, slot_count: 3, slot_stride: 128, slot_bytes: 112 },
            Pool {
                memory: MemoryKind::Cuda { device: 1 },
                base: 65536,
                slot_count: 2,
                slot_stride: 64,
                slot_bytes: 64,
            },
        ],
        groups: vec![
            LayerGroup {
                kind: GroupKind::Paged {
                    tokens_per_block: 4,
                    window_tokens: Some(100),
                    ordinals: Ordinals { step: 3, first: 2 },
                },
                rows: vec![
                    row(0, Role::Key, Dtype::Bf16, 0, 0, 32, heads(16, 4)),
                    row(0, Role::Value, Dtype::Bf16, 0, 32, 32, vec![plane(0, 8, (8, 16), 2..4, 2)]),
                    row(2, Role::IndexerKey, Dtype::Fp8E4m3, 0, 64, 48, interleaved),
                ],
            },
            LayerGroup {
                kind: GroupKind::State,
                rows: vec![
                    row(1, Role::ConvState, Dtype::Bf16, 0, 0, 15, sections),
                    row(1, Role::Named("gate".to_owned()), Dtype::F32, 1, 0, 64, vec![plane(0, 16, (16, 0), 0..4, 1)]),
                ],
            },
        ],
    };
    table.check().unwrap();
    table
}

/// Valid tables of up to three groups over up to three pools, with gaps, padding and rows in no order.
pub(crate) fn tables() -> impl Strategy<Value = PageTable> {
    let groups = prop::collection::vec(groups(), 0..4);
    let pools = prop::collection::vec((memory(), 0..1u64 << 40, 1..9u32, 0..3u64, 0..3u64), 3);
    (1..20u32, prop_oneof![4 => Just(0), 1 => 1..9u32], pools, groups).prop_map(
        |(hidden_layers, dp_rank, pools, mut groups)| {
            // Groups draw the roles of a layer independently of each other; keep the first row for each.
            let mut seen = std::collections::HashSet::new();
            for group in &mut groups {
                group.rows.retain(|row| seen.insert((row.layer, row.role.clone())));
            }
            let used = |pool| groups.iter().flat_map(|group| &group.rows).filter(move |row| row.pool == PoolId(pool));
            let sized = (0..).zip(pools).map(|(id, (memory, base, slot_count, spare, padding))| {
                let slot_bytes = used(id).map(|row| row.offset + row.bytes).max().unwrap_or(0) + spare + 1;
                Pool { memory, base, slot_count, slot_stride: slot_bytes + padding, slot_bytes }
            });
            let pools = sized.collect();
            PageTable { hidden_layers, dp_rank, pools, groups }
        },
    )
}

fn memory() -> impl Strategy<Value = MemoryKind> {
    prop_oneof![Just(MemoryKind::Host), (0..8u32).prop_map(|device| MemoryKind::Cuda { device })]
}

fn role() -> impl Strategy<Value = Role> {
    let named = "[a-z ]{1,8}".prop_map(Role::Named);
    prop_oneof![Just(Role::Key), Just(Role::Value), Just(Role::Latent), Just(Role::SsmState), named]
}

fn ordinals() -> impl Strategy<Value = Ordinals> {
    (1..4u32, 0..4u32).prop_map(|(step, first)| Ordinals { step, first: first % step })
}

fn groups() -> impl Strategy<Value = LayerGroup> {
    let kind = prop_oneof![
        Just(GroupKind::State),
        (1..5u32, prop::option::of(1..9u32), ordinals()).prop_map(|(tokens_per_block, window_tokens, ordinals)| {
            GroupKind::Paged { tokens_per_block, window_tokens, ordinals }
        })
    ];
    let row = (0..20u32, role(), 0..3u16, 0..3u64, prop::collection::vec(planes(), 1..4), any::<bool>());
    (kind, prop::collection::vec(row, 0..8)).prop_flat_map(|(kind, rows)| {
        let mut ends = [0; 3];
        let placed = rows.into_iter().map(|(layer, role, pool, gap, planes, wide)| {
            let offset = ends[usize::from(pool)] + gap;
            let mut bytes = 0;
            let planes = planes.iter().map(|shape| placed(shape, kind, &mut bytes)).collect();
            ends[usize::from(pool)] = offset + bytes;
            let dtype = if wide { Dtype::F32 } else { Dtype::Fp8E5m2 };
            Row { layer: Layer(layer), role, dtype, pool: PoolId(pool), offset, bytes, planes }
        });
        let rows = placed.collect::<Vec<_>>();
        Just(rows).prop_shuffle().prop_map(move |rows| LayerGroup { kind, rows })
    })
}

#[derive(Clone, Debug)]
struct PlaneShape {
    cell_bytes: u64,
    units: u32,
    first_unit: u32,
    gap: u64,
    units_outside: bool,
    cells: u32,
}

fn planes() -> impl Strategy<Value = PlaneShape> {
    (1..5u64, 1..4u32, 0..3u32, 0..3u64, any::<bool>(), 1..4u32).prop_map(
        |(cell_bytes, units, first_unit, gap, units_outside, cells)| PlaneShape {
            cell_bytes,
            units,
            first_unit,
            gap,
            units_outside,
            cells,
        },
    )
}

/// Places a plane behind the `bytes` that its row has so far, HND or NHD, with gaps between the outer lines.
fn placed(shape: &PlaneShape, kind: GroupKind, bytes: &mut u64) -> Plane {
    let &PlaneShape { cell_bytes, units, first_unit, gap, units_outside, cells } = shape;
    let tokens = match kind {
        GroupKind::State => cells,
        // Several tokens a cell where that goes evenly, one where not.
        GroupKind::Paged { tokens_per_block, .. } if tokens_per_block % cells == 0 => tokens_per_block / cells,
        GroupKind::Paged { tokens_per_block, .. } => tokens_per_block,
    };
    let (inner, outer) = if units_outside { (tokens, units) } else { (units, tokens) };
    let outer_stride = cell_bytes * u64::from(inner) + gap;
    let (unit_stride, token_stride) =
        if units_outside { (outer_stride, cell_bytes) } else { (cell_bytes, outer_stride) };
    let offset = *bytes + gap;
    *bytes = offset + outer_stride * u64::from(outer);
    let units = first_unit..first_unit + units;
    let units_total = units.end + first_unit;
    Plane { offset, cell_bytes, unit_stride, token_stride, units, units_total, tokens }
}

/// Every leaf of the table's JSON form, by its path.
pub(crate) fn leaves(table: &PageTable) -> Vec<String> {
    fn walk(value: &Value, path: &str, leaves: &mut Vec<String>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(key, value)| walk(value, &format!("{path}/{key}"), leaves)),
            Value::Array(list) => {
                list.iter().enumerate().for_each(|(index, value)| walk(value, &format!("{path}/{index}"), leaves));
            }
            _ => leaves.push(path.to_owned()),
        }
    }
    let mut leaves = Vec::new();
    walk(&serde_json::to_value(table).unwrap(), "", &mut leaves);
    leaves
}

/// The table with another value at one leaf: numbers become `number`, words another word that fits there.
pub(crate) fn with_leaf(table: &PageTable, path: &str, number: u64) -> PageTable {
    let mut json = serde_json::to_value(table).unwrap();
    let leaf = json.pointer_mut(path).unwrap();
    *leaf = match leaf {
        Value::Number(_) | Value::Null => number.into(),
        Value::String(word) => match word.as_str() {
            "Host" => serde_json::json!({ "Cuda": { "device": 0 } }),
            "State" => serde_json::json!({ "Paged": { "tokens_per_block": 1, "window_tokens": null } }),
            word if path.ends_with("/dtype") => if word == "U8" { "F16" } else { "U8" }.into(),
            word if path.ends_with("/role") => if word == "Latent" { "KeyScale" } else { "Latent" }.into(),
            word => format!("{word}x").into(),
        },
        _ => panic!("{path} is no leaf"),
    };
    serde_json::from_value(json).unwrap()
}
