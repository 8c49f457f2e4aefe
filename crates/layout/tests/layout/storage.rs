//! Orders of storage, by hand and by an oracle that counts cells off one by one.

use std::collections::HashMap;

use kvferry_layout::{
    CellOrder, Dtype, GroupKind, GroupSpec, Layer, LayerMask, LayoutError, PageTable, PlaneSpec, PoolId, Pooling,
    RankSpec, Role, RowSpec, Slot, Storage, lay_out,
};
use proptest::prelude::*;

const POOLINGS: [Pooling; 4] =
    [Pooling::BlockMajor, Pooling::LayerTogether, Pooling::LayerStacked, Pooling::LayerSplit];

/// Two layers, two heads of 8 B keys and values, four tokens a block, three slots.
fn keys_and_values(pooling: Pooling, cells: CellOrder) -> PageTable {
    let row = |role| RowSpec::single(role, Dtype::Bf16, LayerMask::all(2), 2, 4).unwrap();
    let spec = RankSpec {
        hidden_layers: 2,
        layers: vec![Layer(0), Layer(1)],
        tp_rank: 0,
        tp_size: 1,
        groups: vec![GroupSpec {
            kind: GroupKind::paged(4),
            slot_count: 3,
            pools: vec![vec![row(Role::Key), row(Role::Value)]],
        }],
    };
    lay_out(&spec, Storage { pooling, cells, ..Storage::default() }).unwrap()
}

#[test]
fn pools_of_each_kind_of_storage() {
    // A row is 2 heads * 4 tokens * 8 B = 64 B.
    let check = |pooling, slot_bytes: &[u64], bases: &[u64], rows: [(u32, Role, u16, u64); 4]| {
        let table = keys_and_values(pooling, CellOrder::Hnd);
        let pools = &table.pools;
        assert_eq!(pools.iter().map(|pool| pool.slot_bytes).collect::<Vec<_>>(), slot_bytes);
        assert_eq!(pools.iter().map(|pool| pool.base).collect::<Vec<_>>(), bases);
        assert!(pools.iter().all(|pool| pool.slot_stride == pool.slot_bytes && pool.slot_count == 3));
        let found = table.rows().map(|(_, row)| (row.layer.0, row.role.clone(), row.pool.0, row.offset));
        assert_eq!(found.collect::<Vec<_>>(), rows);
    };
    use Role::{Key, Value};
    let rows = [(0, Key, 0, 0), (0, Value, 0, 64), (1, Key, 0, 128), (1, Value, 0, 192)];
    check(Pooling::BlockMajor, &[256], &[0], rows);
    let rows = [(0, Key, 0, 0), (0, Value, 0, 64), (1, Key, 1, 0), (1, Value, 1, 64)];
    check(Pooling::LayerTogether, &[128, 128], &[0, 0], rows);
    let rows = [(0, Key, 0, 0), (1, Key, 1, 0), (0, Value, 2, 0), (1, Value, 3, 0)];
    check(Pooling::LayerSplit, &[64; 4], &[0; 4], rows.clone());
    // Values behind the three slots of keys.
    check(Pooling::LayerStacked, &[64; 4], &[0, 0, 192, 192], rows);
}

#[test]
fn strides_of_each_order() {
    let strides = |cells| {
        let table = keys_and_values(Pooling::BlockMajor, cells);
        let plane = &table.row(Layer(1), &Role::Value).unwrap().1.planes[0];
        (plane.unit_stride, plane.token_stride)
    };
    assert_eq!(strides(CellOrder::Hnd), (32, 8));
    assert_eq!(strides(CellOrder::Nhd), (8, 16));
}

/// Sections of 2 heads of 2 channels and of 3 groups of 1, 2 B each, 3 columns.
fn convolution(state_cells: CellOrder, tp_rank: u32) -> Vec<(u64, u64, u64, std::ops::Range<u32>)> {
    let section = |units_total, units_together| PlaneSpec {
        units_total,
        units_together,
        cell_bytes: 2,
        tokens_per_cell: 1,
        columns: 3,
    };
    let row = RowSpec {
        role: Role::ConvState,
        dtype: Dtype::Bf16,
        owners: LayerMask::all(1),
        planes: vec![section(4, 2), section(3, 1)],
    };
    let spec = RankSpec {
        hidden_layers: 1,
        layers: vec![Layer(0)],
        tp_rank,
        tp_size: 2,
        groups: vec![GroupSpec { kind: GroupKind::State, slot_count: 1, pools: vec![vec![row]] }],
    };
    let table = lay_out(&spec, Storage { state_cells, ..Storage::default() }).unwrap();
    let (_, row) = table.row(Layer(0), &Role::ConvState).unwrap();
    assert!(row.planes.iter().all(|plane| plane.tokens == 3));
    row.planes.iter().map(|plane| (plane.offset, plane.unit_stride, plane.token_stride, plane.units.clone())).collect()
}

#[test]
fn convolution_state_of_each_order() {
    // Rank 0 has 2 of 4 channels and 1 of 3, rank 1 the other 2 and 2.
    assert_eq!(convolution(CellOrder::Hnd, 0), [(0, 6, 2, 0..2), (12, 6, 2, 0..1)]);
    assert_eq!(convolution(CellOrder::Hnd, 1), [(0, 6, 2, 2..4), (12, 6, 2, 1..3)]);
    // A column is 3 or 4 channels.
    assert_eq!(convolution(CellOrder::Nhd, 0), [(0, 2, 6, 0..2), (4, 2, 6, 0..1)]);
    assert_eq!(convolution(CellOrder::Nhd, 1), [(0, 2, 8, 2..4), (4, 2, 8, 1..3)]);
}

#[test]
fn planes_that_do_not_fit_their_group() {
    let refused = |kind, planes: Vec<PlaneSpec>| {
        let row = RowSpec { role: Role::Key, dtype: Dtype::U8, owners: LayerMask::all(1), planes };
        let groups = vec![GroupSpec { kind, slot_count: 1, pools: vec![vec![row]] }];
        let spec = RankSpec { hidden_layers: 1, layers: vec![Layer(0)], tp_rank: 0, tp_size: 2, groups };
        lay_out(&spec, Storage::default()).unwrap_err().to_string()
    };
    let plane = PlaneSpec::of(6, 1);
    let compressed = |tokens_per_cell| PlaneSpec { tokens_per_cell, ..plane.clone() };
    let columns = |columns| PlaneSpec { columns, ..plane.clone() };
    let together = |units_together| PlaneSpec { units_together, ..plane.clone() };
    let (block, state) = (GroupKind::paged(64), GroupKind::State);
    assert_eq!(
        refused(block, vec![compressed(128)]),
        "key: cells of 128 tokens in 1 columns do not fit a slot of 64 tokens"
    );
    assert_eq!(
        refused(block, vec![compressed(0)]),
        "key: cells of 0 tokens in 1 columns do not fit a slot of 64 tokens"
    );
    assert_eq!(refused(block, vec![columns(2)]), "key: cells of 1 tokens in 2 columns do not fit a slot of 64 tokens");
    assert_eq!(refused(state, vec![columns(0)]), "key: cells of 1 tokens in 0 columns do not fit a slot of 1 tokens");
    assert_eq!(
        refused(state, vec![compressed(2)]),
        "key: cells of 2 tokens in 1 columns do not fit a slot of 1 tokens"
    );
    let uneven = vec![columns(2), columns(3)];
    assert_eq!(refused(state, uneven), "key: cells of 1 tokens in 3 columns do not fit a slot of 1 tokens");
    assert_eq!(refused(block, vec![together(4)]), "key: 6 units do not divide into 4 that belong together");
    assert_eq!(refused(block, vec![together(0)]), "key: 6 units do not divide into 0 that belong together");
    let no_rank = RankSpec { hidden_layers: 1, layers: vec![], tp_rank: 1, tp_size: 1, groups: vec![] };
    assert_eq!(lay_out(&no_rank, Storage::default()), Err(LayoutError::TpRank { tp_rank: 1, tp_size: 1 }));
}

#[test]
fn more_pools_than_a_table_has() {
    let row = |role| RowSpec::single(role, Dtype::U8, LayerMask::all(3000), 1, 1).unwrap();
    let groups = vec![GroupSpec {
        kind: GroupKind::paged(1),
        slot_count: 1,
        pools: vec![vec![row(Role::Key), row(Role::Value)]],
    }];
    let layers = (0..3000).map(Layer).collect();
    let spec = RankSpec { hidden_layers: 3000, layers, tp_rank: 0, tp_size: 1, groups };
    let storage = Storage { pooling: Pooling::LayerSplit, ..Storage::default() };
    let error = lay_out(&spec, storage).unwrap_err();
    assert!(matches!(error, LayoutError::TooMany { found: 6000, max: 4096, .. }), "{error}");
}

/// SGLang's pools: their slots are tokens, and pages of 4 tokens are the same bytes by another name.
#[test]
fn pages_of_tokens_are_runs_of_token_slots() {
    let spec = |tokens, slot_count| {
        let row = |role| RowSpec::single(role, Dtype::Bf16, LayerMask::all(2), 3, 4).unwrap();
        let pools = vec![vec![row(Role::Key), row(Role::Value)]];
        let groups = vec![GroupSpec { kind: GroupKind::paged(tokens), slot_count, pools }];
        RankSpec { hidden_layers: 2, layers: vec![Layer(0), Layer(1)], tp_rank: 0, tp_size: 1, groups }
    };
    let storage = Storage { pooling: Pooling::LayerSplit, cells: CellOrder::Nhd, ..Storage::default() };
    let (tokens, pages) = (lay_out(&spec(1, 20), storage).unwrap(), lay_out(&spec(4, 5), storage).unwrap());
    let address = |table: &PageTable, role: &Role, slot, unit: u64, token: u64| {
        let (_, row) = table.row(Layer(1), role).unwrap();
        let plane = &row.planes[0];
        let slot = table.pool(row.pool).unwrap().slot_offset(Slot(slot)).unwrap();
        (row.pool, slot + row.offset + unit * plane.unit_stride + token * plane.token_stride)
    };
    for token in 0..20 {
        for unit in 0..3 {
            let in_page = address(&pages, &Role::Value, token / 4, unit, u64::from(token % 4));
            assert_eq!(address(&tokens, &Role::Value, token, unit, 0), in_page);
        }
    }
    let bytes = |table: &PageTable| table.pools.iter().map(|pool| pool.extent_bytes()).collect::<Vec<_>>();
    assert_eq!(bytes(&tokens), bytes(&pages));
}

#[derive(Clone, Debug)]
struct Case {
    spec: RankSpec,
    storage: Storage,
}

fn cases() -> impl Strategy<Value = Case> {
    let order = || prop_oneof![Just(CellOrder::Hnd), Just(CellOrder::Nhd)];
    let storage = (prop::sample::select(POOLINGS.to_vec()), order(), order())
        .prop_map(|(pooling, cells, state_cells)| Storage { pooling, cells, state_cells });
    let owners = prop::collection::vec(any::<bool>(), 3).prop_map(LayerMask::from_bools);
    let plane = (1..4u32, 1..3u32, 1..5u64, 1..3u32)
        .prop_map(|(shares, together, cell_bytes, axis)| (shares * together, together, cell_bytes, axis));
    let row = (owners, prop::collection::vec(plane, 1..3));
    let group = (any::<bool>(), 1..4u32, prop::collection::vec(prop::collection::vec(row, 1..3), 1..3));
    (prop::collection::vec(group, 1..3), (0..4u32, 1..4u32), storage).prop_map(
        |(groups, (tp_rank, tp_size), storage)| {
            let mut name = 0;
            let groups = groups.into_iter().map(|(state, slot_count, pools)| {
                let row = |(owners, planes): (LayerMask, Vec<(u32, u32, u64, u32)>)| {
                    name += 1;
                    let axis = planes[0].3;
                    let plane = |(units_total, units_together, cell_bytes, _)| {
                        let (tokens_per_cell, columns) = if state { (1, axis) } else { (axis, 1) };
                        PlaneSpec { units_total, units_together, cell_bytes, tokens_per_cell, columns }
                    };
                    let planes = planes.into_iter().map(plane).collect();
                    RowSpec { role: Role::Named(format!("role {name}")), dtype: Dtype::U8, owners, planes }
                };
                let mut row = row;
                let pools = pools.into_iter().map(|rows| rows.into_iter().map(&mut row).collect()).collect();
                let kind = if state { GroupKind::State } else { GroupKind::paged(4) };
                GroupSpec { kind, slot_count, pools }
            });
            let groups = groups.collect();
            let layers = vec![Layer(0), Layer(1), Layer(2)];
            Case { spec: RankSpec { hidden_layers: 3, layers, tp_rank: tp_rank % tp_size, tp_size, groups }, storage }
        },
    )
}

type CellName = (u32, Role, usize, u32, u32);

/// Pool of each cell and its offset in a slot, by walking through memory in the order of storage and counting bytes. A pool
/// is a key of its own making here: the number in the order in which the walk comes to it.
fn places_by_walk(Case { spec, storage }: &Case) -> HashMap<CellName, (usize, u64)> {
    let mut places = HashMap::new();
    let mut pool = 0;
    for group in &spec.groups {
        for roles in &group.pools {
            let all: Vec<_> =
                spec.layers.iter().flat_map(|layer| roles.iter().map(move |role| (*layer, role))).collect();
            let runs: Vec<Vec<(Layer, &RowSpec)>> = match storage.pooling {
                Pooling::BlockMajor => vec![all],
                Pooling::LayerTogether => spec
                    .layers
                    .iter()
                    .map(|layer| all.iter().filter(|row| row.0 == *layer).cloned().collect())
                    .collect(),
                Pooling::LayerStacked | Pooling::LayerSplit => {
                    roles.iter().flat_map(|role| spec.layers.iter().map(move |layer| vec![(*layer, role)])).collect()
                }
            };
            for run in runs {
                let mut next = 0;
                for (layer, role) in run {
                    if role.owners.owns(layer) {
                        walk_row(spec, group.kind, storage, layer, role, pool, &mut next, &mut places);
                    }
                }
                if next > 0 {
                    pool += 1;
                }
            }
        }
    }
    places
}

#[expect(clippy::too_many_arguments, reason = "a step of the walk, with all it has come through")]
fn walk_row(
    spec: &RankSpec,
    kind: GroupKind,
    storage: &Storage,
    layer: Layer,
    role: &RowSpec,
    pool: usize,
    next: &mut u64,
    places: &mut HashMap<CellName, (usize, u64)>,
) {
    // Units that come to this rank: shares are dealt out like ranges of equal length, as far as they go.
    let held = |plane: &PlaneSpec| -> Vec<u32> {
        let first = |rank: u32| rank * (plane.units_total / plane.units_together) / spec.tp_size;
        let start = first(spec.tp_rank);
        let shares = start..first(spec.tp_rank + 1).max(start + 1);
        (0..plane.units_total).filter(|unit| shares.contains(&(unit / plane.units_together))).collect()
    };
    let state = kind == GroupKind::State;
    let cells = |plane: &PlaneSpec| if state { plane.columns } else { 4 / plane.tokens_per_cell };
    let mut put = |plane: usize, unit, cell, bytes| {
        places.insert((layer.0, role.role.clone(), plane, unit, cell), (pool, *next));
        *next += bytes;
    };
    let order = if state { storage.state_cells } else { storage.cells };
    if state && order == CellOrder::Nhd {
        for column in 0..role.planes[0].columns {
            for (index, plane) in role.planes.iter().enumerate() {
                held(plane).into_iter().for_each(|unit| put(index, unit, column, plane.cell_bytes));
            }
        }
        return;
    }
    for (index, plane) in role.planes.iter().enumerate() {
        if order == CellOrder::Hnd {
            held(plane)
                .into_iter()
                .for_each(|unit| (0..cells(plane)).for_each(|cell| put(index, unit, cell, plane.cell_bytes)));
        } else {
            (0..cells(plane))
                .for_each(|cell| held(plane).into_iter().for_each(|unit| put(index, unit, cell, plane.cell_bytes)));
        }
    }
}

proptest! {
    #[test]
    fn every_cell_is_where_a_walk_finds_it(case in cases()) {
        let table = lay_out(&case.spec, case.storage).unwrap();
        let mut expected = places_by_walk(&case);
        let mut slot_bytes = vec![0; table.pools.len()];
        for (_, row) in table.rows() {
            for (index, plane) in row.planes.iter().enumerate() {
                for unit in plane.units.clone() {
                    for cell in 0..plane.tokens {
                        let in_row = u64::from(unit - plane.units.start) * plane.unit_stride
                            + u64::from(cell) * plane.token_stride
                            + plane.offset;
                        let place = expected.remove(&(row.layer.0, row.role.clone(), index, unit, cell));
                        let PoolId(pool) = row.pool;
                        prop_assert_eq!(place, Some((usize::from(pool), row.offset + in_row)));
                        let end = &mut slot_bytes[usize::from(pool)];
                        *end = (*end).max(row.offset + in_row + plane.cell_bytes);
                    }
                }
            }
        }
        prop_assert!(expected.is_empty());
        // No byte is left over, and only stacked pools have a base.
        let pools = table.pools.iter().map(|pool| pool.slot_bytes).collect::<Vec<_>>();
        prop_assert_eq!(pools, slot_bytes);
        let stacked = case.storage.pooling == Pooling::LayerStacked;
        prop_assert!(stacked || table.pools.iter().all(|pool| pool.base == 0));
    }
}
