//! Tables that the builders make of GQA, latent and state specs, and input that they refuse.

use kvferry_layout::{
    Cut, CutError, Dtype, GroupId, GroupKind, GroupSpec, Layer, LayerMask, LayoutError, MemoryKind, ModelFacts,
    Ordinals, PageTable, Plane, PlaneSpec, Pool, PoolId, RankSpec, Role, Row, RowSpec, TableOptions, block_major,
    build,
};

use crate::tables::config_of;

fn options() -> TableOptions {
    TableOptions { mtp: true, ..TableOptions::new(16, Dtype::Bf16, 5) }
}

fn table_of(model: &str, cut: &str, rank: u32) -> PageTable {
    let facts = ModelFacts::from_config(&config_of(model)).unwrap();
    build(&facts, &cut.parse().unwrap(), rank, &options()).unwrap()
}

/// 32 layers of 8 heads of 128 bf16 elements: half of either is 16 layers of 4 heads, 4 * 16 * 256 B a row.
#[test]
fn keys_and_values_of_a_stage_and_shard() {
    let table = table_of("llama-3.1-8b", "pp2tp2", 3);
    let slot_bytes = 16 * 2 * 16_384;
    let pool = Pool { memory: MemoryKind::Host, base: 0, slot_count: 5, slot_stride: slot_bytes, slot_bytes };
    assert_eq!((table.hidden_layers, table.pools, table.groups.len()), (32, vec![pool], 1));
    let group = &table.groups[0];
    assert_eq!(group.kind, GroupKind::paged(16));
    let row = |layer: u32, role, offset| Row {
        layer: Layer(layer),
        role,
        dtype: Dtype::Bf16,
        pool: PoolId(0),
        offset,
        bytes: 16_384,
        planes: vec![Plane {
            offset: 0,
            cell_bytes: 256,
            unit_stride: 4096,
            token_stride: 256,
            units: 4..8,
            units_total: 8,
            tokens: 16,
        }],
    };
    let rows: Vec<Row> = (0..16)
        .flat_map(|nth| {
            let offset = u64::from(nth) * 32_768;
            [row(16 + nth, Role::Key, offset), row(16 + nth, Role::Value, offset + 16_384)]
        })
        .collect();
    assert_eq!(group.rows, rows);
}

#[test]
fn more_ranks_than_heads_are_replicas() {
    let units = |rank| {
        let table = table_of("llama-3.1-8b", "tp16", rank);
        table.row(Layer(31), &Role::Value).unwrap().1.planes[0].units.clone()
    };
    assert_eq!([units(0), units(1), units(2), units(15)], [0..1, 0..1, 1..2, 7..8]);
}

/// Ranks of another `dp_rank` differ in nothing else, and ranks of another `cp_rank` only in the blocks they hold.
#[test]
fn data_and_context_parallel_ranks() {
    let plain = table_of("llama-3.1-8b", "tp2", 1);
    let other_requests = table_of("llama-3.1-8b", "dp4tp2", 5);
    assert_eq!((plain.dp_rank, other_requests.dp_rank), (0, 2));
    assert_eq!(PageTable { dp_rank: 2, ..plain.clone() }, other_requests);
    assert_eq!(plain.shape_digest(), other_requests.shape_digest());

    let mut other_blocks = table_of("llama-3.1-8b", "cp4tp2", 5);
    let kind = &mut other_blocks.groups[0].kind;
    let GroupKind::Paged { ordinals, .. } = kind else { panic!("a paged group") };
    assert_eq!(*ordinals, Ordinals { step: 4, first: 2 });
    *ordinals = Ordinals::ALL;
    assert_eq!(other_blocks, plain);
}

#[test]
fn stages_by_lists_of_layers() {
    let layers = |rank| {
        let table = table_of("glm-5.2", "pp0..20,40..60+20..40,60..78", rank);
        table.role_mask(&Role::Latent).owners().map(|Layer(layer)| layer).collect::<Vec<_>>()
    };
    assert_eq!(layers(0), (0..20).chain(40..60).collect::<Vec<_>>());
    assert_eq!(layers(1), (20..40).chain(60..79).collect::<Vec<_>>());
}

#[test]
fn latents_and_indexer_keys_are_the_same_on_every_rank_of_a_stage() {
    let table = table_of("deepseek-v3.2", "pp2tp4", 4);
    for rank in 5..8 {
        assert_eq!(table_of("deepseek-v3.2", "pp2tp4", rank), table);
    }
    // Layers 31..61 and the MTP layer.
    assert_eq!(
        table.role_mask(&Role::Latent).owners().map(|layer| layer.0).collect::<Vec<_>>(),
        (31..62).collect::<Vec<_>>()
    );
    assert_eq!(table.role_mask(&Role::IndexerKey), table.role_mask(&Role::Latent));
    let slots: Vec<_> = table.pools.iter().map(|pool| pool.slot_bytes).collect();
    assert_eq!(slots, [31 * 16 * 1152, 31 * 16 * 132]);
}

#[test]
fn mtp_layers_are_left_out_on_request() {
    let facts = ModelFacts::from_config(&config_of("glm-5.2")).unwrap();
    let with = |mtp| build(&facts, &Cut::new(1, 1).unwrap(), 0, &TableOptions { mtp, ..options() }).unwrap();
    assert!(with(true).row(Layer(78), &Role::IndexerKey).is_ok());
    assert!(with(false).row(Layer(78), &Role::Latent).is_err());
    // A model without any has none to leave out.
    assert_eq!(table_of("llama-3.1-8b", "tp1", 0).rows().count(), 64);
}

/// Sections x, B and C of a convolution, each split by itself: 128, 128 and 256 B over two ranks.
#[test]
fn sections_of_a_state_row_are_split_one_by_one() {
    let section = |units_total| PlaneSpec::of(units_total, 2);
    let conv = RowSpec {
        role: Role::ConvState,
        dtype: Dtype::Bf16,
        owners: LayerMask::all(1),
        planes: vec![section(64), section(64), section(128)],
    };
    let spec = RankSpec {
        hidden_layers: 1,
        layers: vec![Layer(0)],
        tp_rank: 1,
        tp_size: 2,
        groups: vec![GroupSpec { kind: GroupKind::State, slot_count: 1, pools: vec![vec![conv]] }],
    };
    let table = block_major(&spec).unwrap();
    let (_, row) = table.row(Layer(0), &Role::ConvState).unwrap();
    let planes: Vec<_> = row.planes.iter().map(|plane| (plane.offset, plane.units.clone(), plane.tokens)).collect();
    assert_eq!(planes, [(0, 32..64, 1), (64, 32..64, 1), (128, 64..128, 1)]);
    assert_eq!((row.bytes, table.bytes_per_token()), (256, 0));
}

#[test]
fn a_group_without_rows_does_not_come_to_be() {
    let spec = RankSpec {
        hidden_layers: 2,
        layers: vec![Layer(0)],
        tp_rank: 0,
        tp_size: 1,
        groups: vec![GroupSpec {
            kind: GroupKind::State,
            slot_count: 1,
            pools: vec![vec![
                RowSpec::single(Role::SsmState, Dtype::F32, LayerMask::new(2, [Layer(1)]), 1, 8).unwrap(),
            ]],
        }],
    };
    let table = block_major(&spec).unwrap();
    assert_eq!((table.pools.len(), table.groups.len()), (0, 0));
}

#[test]
fn unusable_input_to_the_builders() {
    let facts = ModelFacts::from_config(&config_of("llama-3.1-8b")).unwrap();
    let options = TableOptions::new(64, Dtype::Bf16, 4);
    let with = |cut: &str, rank, options: TableOptions| {
        build(&facts, &cut.parse::<Cut>().unwrap(), rank, &options).unwrap_err()
    };
    assert_eq!(with("tp2", 2, options).to_string(), "rank 2 is not one of the 2 of tp2");
    let coverage = LayoutError::Cut(CutError::Coverage { covered: 31, hidden_layers: 32 });
    assert_eq!(with("pp16+15", 0, options), coverage);
    let no_slots = TableOptions { slot_count: 0, ..options };
    assert!(matches!(with("tp2", 0, no_slots), LayoutError::EmptyPool { slot_count: 0, .. }));
    let no_tokens = TableOptions { tokens_per_block: 0, ..options };
    assert_eq!(with("tp2", 0, no_tokens), LayoutError::NoTokens { group: GroupId(0) });

    let row = |cell_bytes, units_total| RowSpec {
        role: Role::Key,
        dtype: Dtype::U8,
        owners: LayerMask::all(4),
        planes: vec![PlaneSpec::of(units_total, cell_bytes)],
    };
    let spec = |layers: &[u32], tp_rank, row| RankSpec {
        hidden_layers: 4,
        layers: layers.iter().copied().map(Layer).collect(),
        tp_rank,
        tp_size: 2,
        groups: vec![GroupSpec { kind: GroupKind::State, slot_count: 1, pools: vec![vec![row]] }],
    };
    let refused = |spec: RankSpec| block_major(&spec).unwrap_err();
    assert_eq!(refused(spec(&[0, 2, 2], 0, row(8, 2))), LayoutError::LayerOrder { layer: Layer(2) });
    assert_eq!(refused(spec(&[0], 2, row(8, 2))), LayoutError::TpRank { tp_rank: 2, tp_size: 2 });
    assert!(matches!(refused(spec(&[0], 0, row(8, 0))), LayoutError::Units { units_total: 0, .. }));
    let too_large = LayoutError::TooLarge { layer: Layer(1), role: Role::Key };
    assert_eq!(refused(spec(&[0, 1], 0, row(u64::MAX, 1))), too_large);
    assert_eq!(refused(spec(&[1], 0, row(u64::MAX / 2, 8))), too_large);
}
