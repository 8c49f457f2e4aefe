//! Golden vectors: small enough to check by hand, each file with its source.

use kvferry_layout::{
    Cut, Dtype, GroupKind, Layer, LayerMask, ModelFacts, PageTable, PoolId, Role, TableOptions, build,
};
use serde::Deserialize;

use crate::tables::{config_of, mask_of, seed_table};

pub(crate) fn golden<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    let path = format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn options(dtype: Dtype, mtp: bool) -> TableOptions {
    TableOptions { mtp, ..TableOptions::new(64, dtype, 16) }
}

#[derive(Deserialize)]
struct Seed {
    hidden_layers: u32,
    tokens_per_block: u32,
    kv_heads: u32,
    head_dim: u64,
    index_head_dim: u64,
    quant_block: u64,
    cases: Vec<SeedCase>,
}

#[derive(Deserialize)]
struct SeedCase {
    mask: String,
    slot_bytes: Option<u64>,
    rows: Vec<(u32, u64, u64)>,
}

#[test]
fn seed_cases_of_the_masked_indexer() {
    let seed: Seed = golden("seed.json");
    for case in &seed.cases {
        let table = seed_table(mask_of(&case.mask));
        assert_eq!(table.hidden_layers, seed.hidden_layers);
        let kind = GroupKind::paged(seed.tokens_per_block);
        assert_eq!(table.groups.iter().map(|group| group.kind).collect::<Vec<_>>(), [kind]);

        let indexer_rows = table.rows().filter(|(_, row)| row.role == Role::IndexerKey);
        let found: Vec<_> = indexer_rows.map(|(_, row)| (row.layer.0, row.offset, row.bytes)).collect();
        assert_eq!(found, case.rows, "{}", case.mask);
        assert_eq!(table.pools.get(1).map(|pool| pool.slot_bytes), case.slot_bytes, "{}", case.mask);
        assert_eq!(table.pools.len(), if case.rows.is_empty() { 1 } else { 2 }, "{}", case.mask);

        let tokens = u64::from(seed.tokens_per_block);
        for (_, row) in table.rows() {
            let planes: Vec<_> = row.planes.iter().map(|plane| (plane.offset, plane.cell_bytes)).collect();
            let expected = match row.role {
                Role::IndexerKey => {
                    let keys = seed.index_head_dim;
                    vec![(0, keys), (tokens * keys, keys / seed.quant_block * 4)]
                }
                _ => vec![(0, seed.head_dim * 2)],
            };
            assert_eq!(planes, expected);
            assert!(row.planes.iter().all(|plane| plane.units == (0..seed.kv_heads) && plane.units_total == 1));
        }

        for layer in (0..seed.hidden_layers).map(Layer) {
            let owned = case.rows.iter().find(|row| row.0 == layer.0);
            match (table.row(layer, &Role::IndexerKey), owned) {
                (Ok((_, row)), Some(owned)) => assert_eq!((row.pool, row.offset), (PoolId(1), owned.1)),
                (Err(error), None) => {
                    assert_eq!(error.to_string(), format!("no indexer key row for layer {layer}"));
                }
                (found, _) => panic!("{}: layer {layer}: {found:?}", case.mask),
            }
        }
    }
}

/// The dense table is written down here with a multiplication and no mask.
#[test]
fn a_mask_of_ones_gives_the_dense_table_byte_for_byte() {
    let masked = seed_table(mask_of("TTTT"));
    let mut dense = seed_table(LayerMask::none(4));
    let mut pool = dense.pools[0].clone();
    (pool.slot_bytes, pool.slot_stride) = (4 * 4224, 4 * 4224);
    dense.pools.push(pool);
    let row = masked.row(Layer(0), &Role::IndexerKey).unwrap().1;
    for layer in 0..4 {
        let mut row = row.clone();
        (row.layer, row.offset) = (Layer(layer), u64::from(layer) * 4224);
        dense.groups[0].rows.push(row);
    }
    assert_eq!(masked.to_bytes(), dense.to_bytes());
    assert_eq!(masked, dense);

    // And from a config: no key that speaks of owners, or each that says "all".
    let plain = config_of("glm-5");
    let with = |key: &str, value: serde_json::Value| {
        let mut config: serde_json::Value = serde_json::from_str(&plain).unwrap();
        config[key] = value;
        table_of(&config.to_string())
    };
    let expected = table_of(&plain).to_bytes();
    assert_eq!(with("indexer_types", vec!["full"; 78].into()).to_bytes(), expected);
    assert_eq!(with("index_topk_pattern", "F".repeat(78).into()).to_bytes(), expected);
    assert_eq!(with("index_topk_freq", 1.into()).to_bytes(), expected);
}

fn table_of(config: &str) -> PageTable {
    let facts = ModelFacts::from_config(config).unwrap();
    build(&facts, &"pp2".parse().unwrap(), 1, &options(Dtype::Fp8E4m3, true)).unwrap()
}

/// Every pipeline degree of GLM-5.2, with layers dealt to the stages like cards and owners told by the rule of the model's
/// makers: 0, 1, 2, and every fourth from 6 on.
#[test]
fn stages_of_glm_5_2_at_every_degree() {
    let facts = ModelFacts::from_config(&config_of("glm-5.2")).unwrap();
    for pp_size in 1..=26usize {
        let cut = Cut::new(u32::try_from(pp_size).unwrap(), 1).unwrap();
        let mut sizes = vec![0; pp_size];
        (0..78).for_each(|card: usize| sizes[card % pp_size] += 1);
        let mut first = 0;
        let mut without = 0;
        for (rank, size) in (0..).zip(&sizes) {
            let mut layers: Vec<u32> = (first..first + size).collect();
            first += size;
            if rank + 1 == cut.rank_count() {
                layers.push(78);
            }
            let owners: Vec<u32> =
                layers.iter().copied().filter(|layer| [0, 1, 2, 78].contains(layer) || layer % 4 == 2).collect();
            let table = build(&facts, &cut, rank, &options(Dtype::Fp8E4m3, true)).unwrap();
            let held = |role| -> Vec<u32> { table.role_mask(&role).owners().map(|layer| layer.0).collect() };
            assert_eq!((held(Role::Latent), held(Role::IndexerKey)), (layers, owners.clone()), "{cut} {rank}");
            for (nth, owner) in (0..).zip(&owners) {
                let (_, row) = table.row(Layer(*owner), &Role::IndexerKey).unwrap();
                assert_eq!((row.pool, row.offset), (PoolId(1), nth * 64 * 132));
            }
            without += u32::from(owners.is_empty());
        }
        assert_eq!(without, if pp_size == 26 { 6 } else { without });
    }
}

#[derive(Deserialize)]
struct PackedRows {
    cases: Vec<PackedCase>,
}

#[derive(Deserialize)]
struct PackedCase {
    mask: String,
    rows: Vec<Option<u32>>,
}

#[test]
fn packed_rows() {
    for case in golden::<PackedRows>("packed_rows.json").cases {
        let mask = mask_of(&case.mask);
        let rows: Vec<_> = (0..mask.layer_count()).map(|layer| mask.packed_row(Layer(layer))).collect();
        assert_eq!(rows, case.rows, "{}", case.mask);
        assert_eq!(mask.to_string(), case.mask);
    }
}

#[derive(Deserialize)]
struct Stages {
    model: String,
    cases: Vec<StagesCase>,
}

#[derive(Deserialize)]
struct StagesCase {
    cut: String,
    rows: Vec<u32>,
}

#[test]
fn indexer_rows_of_glm_5_2_by_stage() {
    let stages: Stages = golden("glm_5_2_stages.json");
    let facts = ModelFacts::from_config(&config_of(&stages.model)).unwrap();
    for StagesCase { cut, rows } in stages.cases {
        let cut: Cut = cut.parse().unwrap();
        let tables = (0..cut.rank_count())
            .map(|rank| build(&facts, &cut, rank, &options(Dtype::Fp8E4m3, true)).unwrap())
            .collect::<Vec<_>>();
        let masks: Vec<_> = tables.iter().map(|table| table.role_mask(&Role::IndexerKey)).collect();
        assert_eq!(masks.iter().map(LayerMask::count).collect::<Vec<_>>(), rows, "{cut}");
        for (table, mask) in tables.iter().zip(&masks) {
            // A stage that owns none has no pool for it, one that does packs its rows from 0 on.
            assert_eq!(table.pools.len(), if mask.count() == 0 { 1 } else { 2 });
            for owner in mask.owners() {
                let (_, row) = table.row(owner, &Role::IndexerKey).unwrap();
                assert_eq!(row.offset, u64::from(mask.packed_row(owner).unwrap()) * 64 * 132);
            }
        }
        let mtp: Vec<_> = tables.iter().map(|table| table.row(Layer(78), &Role::Latent).is_ok()).collect();
        let last = tables.len() - 1;
        assert!(mtp.iter().enumerate().all(|(rank, held)| *held == (rank == last)), "{cut}");
    }
}
