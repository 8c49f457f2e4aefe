//! Every model of the examples: what it caches, how much of it, and how its ranks share it.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_layout::{
    Cut, Dtype, GroupKind, Layer, LayoutError, ModelFacts, PageTable, Role, Row, TableOptions, build,
};
use serde::Deserialize;

use crate::golden::golden;
use crate::tables::config_of;

fn facts_of(model: &str) -> ModelFacts {
    ModelFacts::from_config(&config_of(model)).unwrap_or_else(|error| panic!("{model}: {error}"))
}

fn options(dtype: Dtype, mtp: bool) -> TableOptions {
    TableOptions { mtp, ..TableOptions::new(128, dtype, 16) }
}

fn table_of(model: &str, cut: &str, rank: u32, options: &TableOptions) -> PageTable {
    build(&facts_of(model), &cut.parse().unwrap(), rank, options).unwrap()
}

#[derive(Deserialize)]
struct Models {
    models: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    model: String,
    architecture: String,
    hidden_layers: u32,
    mtp_layers: u32,
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    window: Option<serde_json::Value>,
    /// By role, or by role and something to tell two rows of it apart: layers, and planes.
    roles: BTreeMap<String, (String, Vec<PlaneShape>)>,
}

/// Units, cells of each in a slot, bytes of a cell.
type PlaneShape = (u32, u32, u64);

/// Layers as half-open ranges.
fn ranges(layers: &BTreeSet<u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &layer in layers {
        match ranges.last_mut() {
            Some((_, end)) if *end == layer => *end += 1,
            _ => ranges.push((layer, layer + 1)),
        }
    }
    ranges.iter().map(|(start, end)| format!("{start}..{end}")).collect::<Vec<_>>().join(",")
}

type Described = BTreeSet<(String, String, Vec<PlaneShape>)>;

fn describe(rows: &[Row]) -> Described {
    let shape = |row: &Row| {
        let planes = row.planes.iter().map(|plane| (plane.units_total, plane.tokens, plane.cell_bytes));
        (row.role.to_string(), planes.collect::<Vec<_>>())
    };
    let layers_of = |wanted: &(String, Vec<PlaneShape>)| {
        ranges(&rows.iter().filter(|row| shape(row) == *wanted).map(|row| row.layer.0).collect())
    };
    rows.iter().map(shape).map(|shape| (shape.0.clone(), layers_of(&shape), shape.1)).collect()
}

#[test]
fn every_architecture_has_the_groups_roles_and_masks_expected() {
    let models = golden::<Models>("models.json").models;
    let mut architectures: BTreeSet<String> = BTreeSet::new();
    for model in &models {
        let name = &model.model;
        let facts = facts_of(name);
        assert_eq!((facts.hidden_layers(), facts.mtp_layers()), (model.hidden_layers, model.mtp_layers), "{name}");
        let table = table_of(name, "tp1", 0, &options(Dtype::Fp8E4m3, true));
        let kinds = model.groups.iter().map(|group| match &group.window {
            None => GroupKind::paged(128),
            Some(serde_json::Value::Number(tokens)) => {
                GroupKind::windowed(128, u32::try_from(tokens.as_u64().unwrap()).unwrap())
            }
            Some(_) => GroupKind::State,
        });
        assert_eq!(
            table.groups.iter().map(|group| group.kind).collect::<Vec<_>>(),
            kinds.collect::<Vec<_>>(),
            "{name}"
        );
        for (group, expected) in table.groups.iter().zip(&model.groups) {
            let role = |name: &str| name.split('/').next().unwrap_or_default().to_owned();
            let expected: Described = expected
                .roles
                .iter()
                .map(|(name, (layers, planes))| (role(name), layers.clone(), planes.clone()))
                .collect();
            assert_eq!(describe(&group.rows), expected, "{name}");
        }
        architectures.insert(model.architecture.clone());
    }
    assert_eq!(models.len(), 24);
    let known: BTreeSet<String> = ModelFacts::architectures().map(str::to_owned).collect();
    assert!(known.is_superset(&architectures), "{architectures:?}");
    // Those without an example are text-only or older siblings of those with one.
    let others: Vec<_> = known.difference(&architectures).collect();
    assert_eq!(
        others,
        [
            "Gemma3ForCausalLM",
            "Gemma4ForCausalLM",
            "KimiLinearForCausalLM",
            "MiniMaxM3SparseForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3_5MoeForCausalLM",
        ]
    );
}

#[derive(Deserialize)]
struct BytesPerToken {
    cases: Vec<BytesCase>,
}

#[derive(Deserialize)]
struct BytesCase {
    model: String,
    full: [u64; 2],
    window: Option<[u64; 2]>,
    state: Option<[u64; 6]>,
}

#[test]
fn bytes_per_token_and_request() {
    let cases = golden::<BytesPerToken>("bytes_per_token.json").cases;
    assert_eq!(cases.len(), 23, "all but DeepSeek-V4, whose rows depend on the engine");
    for case in cases {
        let facts = facts_of(&case.model);
        for (nth, dtype) in [Dtype::Fp8E4m3, Dtype::Bf16].into_iter().enumerate() {
            // What is kept whole, what is in a window, and state, over all ranks.
            let sums = |cut: &str| {
                let cut: Cut = cut.parse().unwrap();
                let mut sums = (0, 0, 0);
                for rank in 0..cut.rank_count() {
                    for group in build(&facts, &cut, rank, &options(dtype, false)).unwrap().groups {
                        match group.kind {
                            GroupKind::Paged { window_tokens: None, .. } => sums.0 += group.bytes_per_token(),
                            GroupKind::Paged { .. } => sums.1 += group.bytes_per_token(),
                            GroupKind::State => sums.2 += group.bytes_per_slot(),
                        }
                    }
                }
                sums
            };
            let state = case.state.map_or(0, |[layers, channels, columns, heads, elements, width]| {
                layers * (channels * columns * 2 + heads * elements * width)
            });
            let expected = (case.full[nth], case.window.map_or(0, |window| window[nth]), state);
            assert_eq!(sums("tp1"), expected, "{} {dtype}", case.model);
            assert_eq!(sums("pp5"), expected, "{} {dtype}: stages add up", case.model);
        }
    }
}

/// Half a byte an element, and one for 16 of them: 0.5625 of the 8-bit cache.
#[test]
fn four_bit_keys_and_values_have_block_scales() {
    let table = table_of("qwen3-235b-a22b", "tp2", 1, &options(Dtype::Fp4E2m1, false));
    assert_eq!(table.bytes_per_token() * 2, 96_256 * 9 / 16);
    let (_, key) = table.row(Layer(3), &Role::Key).unwrap();
    let (_, scale) = table.row(Layer(3), &Role::KeyScale).unwrap();
    assert_eq!((key.dtype, key.planes[0].cell_bytes), (Dtype::Fp4E2m1, 64));
    assert_eq!((scale.dtype, scale.planes[0].cell_bytes), (Dtype::Fp8E4m3, 8));
    assert_eq!((&key.planes[0].units, &scale.planes[0].units), (&(2..4), &(2..4)));
    assert_ne!(key.pool, scale.pool);
    assert!(table.row(Layer(3), &Role::ValueScale).is_ok());
    // The indexer key of MiniMax-M3 stays as it is.
    let table = table_of("minimax-m3", "tp2", 1, &options(Dtype::Fp4E2m1, false));
    assert_eq!(table.row(Layer(3), &Role::IndexerKey).unwrap().1.dtype, Dtype::Bf16);
    let facts = facts_of("deepseek-v3");
    let error = build(&facts, &"tp1".parse().unwrap(), 0, &options(Dtype::Fp4E2m1, false)).unwrap_err();
    assert_eq!(error, LayoutError::CacheDtype { role: Role::Latent, dtype: Dtype::Fp4E2m1 });
}

#[test]
fn indexer_keys_of_either_width() {
    let bytes = |indexer_dtype| {
        let options = TableOptions { indexer_dtype, ..options(Dtype::Fp8E4m3, false) };
        let table = table_of("glm-5.2", "tp1", 0, &options);
        let (_, row) = table.row(Layer(6), &Role::IndexerKey).unwrap();
        row.planes.iter().map(|plane| plane.cell_bytes).collect::<Vec<_>>()
    };
    assert_eq!(bytes(Dtype::Fp8E4m3), [128, 4]);
    assert_eq!(bytes(Dtype::Fp4E2m1), [64, 4]);
    let options = TableOptions { indexer_dtype: Dtype::Bf16, ..options(Dtype::Fp8E4m3, false) };
    let error = build(&facts_of("glm-5.2"), &"tp1".parse().unwrap(), 0, &options).unwrap_err();
    assert_eq!(error.to_string(), "indexer key: no builder for a cache of bf16");
}

/// MiniMax-M3: 4 heads split over ranks, one index key on each of them, from layer 3 on.
#[test]
fn an_index_key_is_on_every_rank_beside_split_heads() {
    for rank in 0..4 {
        let table = table_of("minimax-m3", "tp4", rank, &options(Dtype::Fp8E4m3, true));
        let index = table.role_mask(&Role::IndexerKey);
        assert_eq!(index.owners().map(|layer| layer.0).collect::<Vec<_>>(), (3..60).collect::<Vec<_>>());
        let (_, row) = table.row(Layer(59), &Role::IndexerKey).unwrap();
        assert_eq!((row.dtype, row.planes.len(), row.planes[0].cell_bytes), (Dtype::Bf16, 1, 256));
        assert_eq!((&row.planes[0].units, row.planes[0].units_total), (&(0..1), 1));
        assert_eq!(table.row(Layer(59), &Role::Key).unwrap().1.planes[0].units, rank..rank + 1);
        // The MTP layer has keys and values only.
        assert!(table.row(Layer(60), &Role::Value).is_ok() && table.row(Layer(60), &Role::IndexerKey).is_err());
    }
}

/// Sections are split by themselves, each at its own heads: 64 heads of 64 channels, and 8 groups of 128 twice.
#[test]
fn convolution_sections_are_split_at_heads() {
    let units = |cut: &str, rank| {
        let table = table_of("nemotron-3-nano-30b-a3b", cut, rank, &options(Dtype::Fp8E4m3, true));
        let (_, conv) = table.row(Layer(0), &Role::ConvState).unwrap();
        let (_, ssm) = table.row(Layer(0), &Role::SsmState).unwrap();
        assert_eq!((conv.dtype, ssm.dtype), (Dtype::Bf16, Dtype::F32));
        assert!(conv.planes.iter().all(|plane| plane.tokens == 3 && plane.cell_bytes == 2));
        let mut units: Vec<_> = conv.planes.iter().map(|plane| plane.units.clone()).collect();
        units.push(ssm.planes[0].units.clone());
        units
    };
    assert_eq!(units("tp4", 1), [1024..2048, 256..512, 256..512, 16..32]);
    // Not an even split, but one at whole heads and groups.
    assert_eq!(units("tp3", 1), [1344..2688, 256..640, 256..640, 21..42]);
    // More ranks than groups: groups are held twice.
    assert_eq!(units("tp16", 5), [1280..1536, 256..384, 256..384, 20..24]);
}

#[test]
fn state_of_the_type_that_config_or_options_say() {
    let dtype = |model, ssm_dtype| {
        let options = TableOptions { ssm_dtype, ..options(Dtype::Fp8E4m3, false) };
        let table = table_of(model, "tp1", 0, &options);
        table.row(Layer(0), &Role::SsmState).unwrap().1.dtype
    };
    assert_eq!(dtype("qwen3-next-80b-a3b", None), Dtype::Bf16);
    assert_eq!(dtype("qwen3-next-80b-a3b", Some(Dtype::F32)), Dtype::F32);
    assert_eq!(dtype("nemotron-h-56b", None), Dtype::Bf16);
    assert_eq!(dtype("nemotron-3-nano-30b-a3b", Some(Dtype::Bf16)), Dtype::F32);
    assert_eq!(dtype("qwen3.5-397b-a17b", None), Dtype::F32);
    assert_eq!(dtype("kimi-k3", None), Dtype::F32);
}

/// One slot a request, however many blocks there are; and no part of it is dealt out to context-parallel ranks.
#[test]
fn state_has_slots_and_shares_of_its_own() {
    let options = TableOptions { state_slot_count: 5, ..options(Dtype::Bf16, false) };
    let table = table_of("qwen3-next-80b-a3b", "cp2", 1, &options);
    let slots = |role| {
        let (_, row) = table.row(Layer(if role == Role::Key { 3 } else { 0 }), &role).unwrap();
        table.pool(row.pool).unwrap().slot_count
    };
    assert_eq!((slots(Role::Key), slots(Role::SsmState)), (16, 5));
    assert!(matches!(table.groups[0].kind, GroupKind::Paged { ordinals, .. } if ordinals.first == 1));
    assert_eq!(table.groups[1].kind, GroupKind::State);
}

#[test]
fn compressed_cells_need_blocks_that_they_divide() {
    let facts = facts_of("deepseek-v4-pro");
    let with = |tokens_per_block| {
        let options = TableOptions::new(tokens_per_block, Dtype::Bf16, 4);
        build(&facts, &"tp2".parse().unwrap(), 1, &options)
    };
    let error = with(64).unwrap_err();
    let message = "compressed latent: cells of 128 tokens in 1 columns do not fit a slot of 64 tokens";
    assert_eq!(error.to_string(), message);
    let table = with(256).unwrap();
    let (group, row) = table.row(Layer(0), &Role::Named("compressed latent".to_owned())).unwrap();
    let plane = &row.planes[0];
    assert_eq!((plane.tokens, plane.cell_bytes), (2, 1024));
    assert_eq!(table.group(group).unwrap().kind.tokens_per_cell(plane), Some(128));
    assert_eq!(table.row(Layer(2), &Role::IndexerKey).unwrap().1.planes[0].tokens, 64);
}

/// A model of an example and a draft beside it: a group more, of layers behind the model's.
#[test]
fn draft_layers_are_rows_past_the_hidden_ones() {
    use kvferry_layout::{GroupSpec, LayerMask, RankSpec, RowSpec, block_major};

    let facts = facts_of("llama-3.1-8b");
    let mut groups = facts.groups(&options(Dtype::Bf16, false)).unwrap();
    let draft = LayerMask::new(32, [Layer(32)]);
    let row = |role| RowSpec::single(role, Dtype::F16, draft.clone(), 2, 64).unwrap();
    let pools = vec![vec![row(Role::Key), row(Role::Value)]];
    groups.push(GroupSpec { kind: GroupKind::windowed(128, 512), slot_count: 16, pools });
    let layers = (0..33).map(Layer).collect();
    let table = block_major(&RankSpec { hidden_layers: 32, layers, tp_rank: 0, tp_size: 1, groups }).unwrap();
    assert_eq!(table.hidden_layers, 32);
    let (group, row) = table.row(Layer(32), &Role::Key).unwrap();
    assert_eq!((table.group(group).unwrap().kind, row.dtype), (GroupKind::windowed(128, 512), Dtype::F16));
    assert_eq!(table.role_mask(&Role::Key).count(), 33);
}

#[test]
fn tables_of_every_model_and_cut_are_small_and_survive_the_wire() {
    for model in golden::<Models>("models.json").models {
        for (cut, rank) in [("tp1", 0), ("pp3tp4", 5), ("dp2cp2tp2", 7), ("tp16", 9)] {
            let table = table_of(&model.model, cut, rank, &options(Dtype::Fp8E4m3, true));
            let bytes = table.to_bytes();
            assert!(bytes.len() < 1000, "{} {cut}: {} B", model.model, bytes.len());
            assert_eq!(PageTable::from_bytes(&bytes).unwrap(), table, "{} {cut}", model.model);
        }
    }
}
