//! Replicas: who sends what several source ranks hold. And parts of instances, which hold other requests.
#![allow(clippy::cast_possible_truncation, reason = "the models of the tests are small")]

mod common;

use std::collections::BTreeMap;

use common::cases;
use common::model::{Attention, Instance, Model, PLAIN, instance, model};
use kvferry_layout::{Cut, Dtype, ModelFacts, PageTable, TableOptions, build};
use kvferry_match::{Assignment, MatchError, Matrix, Templates, assign};
use proptest::prelude::*;

const GLM_5_2: &str = include_str!("../../../examples/models/glm-5.2.json");

fn assigned(sources: &[PageTable], destinations: &[PageTable]) -> Vec<Assignment> {
    assign((0..).zip(sources), (0..).zip(destinations)).expect("one model")
}

/// Bytes of a block that each source rank sends, to all destinations.
fn sent(assignments: &[Assignment]) -> BTreeMap<u32, u64> {
    let matrix = Matrix::new(assignments, 0..1).expect("block sizes fit");
    matrix.sent().into_iter().map(|(rank, amount)| (rank, amount.bytes)).collect()
}

fn largest_row(tables: &[PageTable]) -> u64 {
    let row = |row: &kvferry_layout::Row| -> u64 {
        row.planes.iter().map(|plane| plane.cells_bytes().expect("small rows")).sum()
    };
    tables.iter().flat_map(PageTable::rows).map(|(_, of)| row(of)).max().unwrap_or(0)
}

/// A model whose rows are all in groups of one kind: each is split on its own.
fn of_one_kind(model: Model) -> Model {
    Model { state: None, window_tokens: None, indexer_cell_tokens: 1, ..model }
}

fn tables(cut: &str) -> Vec<PageTable> {
    let facts = ModelFacts::from_config(GLM_5_2).expect("a known model");
    let cut: Cut = cut.parse().expect("a cut");
    let options = TableOptions::new(64, Dtype::Fp8E4m3, 4096);
    (0..cut.rank_count()).map(|rank| build(&facts, &cut, rank, &options).expect("the cut fits")).collect()
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn replicas_differ_from_the_even_split_by_less_than_a_row(
        model in model(),
        prefill in instance(),
        decode in instance(),
        count in 1..9_usize,
    ) {
        let model = of_one_kind(model);
        let prefill = Instance { indexer_block_tokens: None, mtp: true, cp_size: 1, ..prefill };
        let decode =
            Instance { indexer_block_tokens: None, block_tokens: prefill.block_tokens, cp_size: 1, ..decode };
        let whole = Instance { stages: Vec::new(), tp_size: 1, ..prefill };
        let sources = vec![model.tables(&whole).remove(0); count];
        let destinations = model.tables(&decode);
        let sent = sent(&assigned(&sources, &destinations));
        let (total, largest) = (sent.values().sum::<u64>(), largest_row(&destinations));
        for rank in 0..count as u32 {
            let bytes = sent.get(&rank).copied().unwrap_or(0);
            // Compared times `count`, so that nothing is rounded.
            prop_assert!((bytes * count as u64).abs_diff(total) <= largest * count as u64, "{sent:?}");
        }
    }

    /// Keys are sharded, a latent-like index is on all ranks: the best split is known, for any numbers of ranks.
    #[test]
    fn no_rank_sends_a_row_more_than_it_must(
        heads in 1..=8_u32,
        from in 1..=8_u32,
        to in 1..=8_u32,
        layers in 1..=5_u32,
    ) {
        let attention = Attention::Grouped { heads, key_bytes: 1, value_bytes: 1 };
        let model = Model {
            hidden_layers: layers,
            attention,
            indexer: Some(vec![true; layers as usize]),
            indexer_cell_tokens: 1,
            window_tokens: None,
            state: None,
            conv_columns: 1,
        };
        let instance = |tp_size| Instance {
            stages: Vec::new(),
            cp_size: 1,
            tp_size,
            wide: false,
            mtp: false,
            block_tokens: 4,
            indexer_block_tokens: None,
            storage: PLAIN,
        };
        let (sources, destinations) = (model.tables(&instance(from)), model.tables(&instance(to)));
        let sent = sent(&assigned(&sources, &destinations));
        // Whatever is done, some rank sends the mean, and each head is sent by one of those that hold it.
        let total: u64 = sent.values().sum();
        let of_head = |head: u32| {
            let holds = |table: &&PageTable| table.groups[0].rows[0].planes[0].units.contains(&head);
            let (holders, wanted) = (sources.iter().filter(holds).count(), destinations.iter().filter(holds).count());
            (wanted as u64 * u64::from(layers) * 2 * 4).div_ceil(holders as u64)
        };
        let of_rank = |table: &PageTable| -> u64 {
            let alone = |head: &u32| {
                sources.iter().filter(|other| other.groups[0].rows[0].planes[0].units.contains(head)).count() == 1
            };
            table.groups[0].rows[0].planes[0].units.clone().filter(alone).map(of_head).sum()
        };
        let must = sources.iter().map(of_rank).max().unwrap_or(0).max(total.div_ceil(u64::from(from)));
        let most = sent.values().copied().max().unwrap_or(0);
        prop_assert!(most <= must + largest_row(&destinations), "{sent:?}: {must}");
    }

    /// Parts of the destination serve other requests, so each splits what it wants over all replicas, each from another
    /// rank on.
    #[test]
    fn parts_begin_at_different_replicas(part in 0..1000_u32, count in 1..9_u32) {
        let mut destination = tables("pp1").remove(0);
        destination.groups[0].rows.truncate(1);
        destination.dp_rank = part;
        let sources = vec![PageTable { dp_rank: 7, ..destination.clone() }; count as usize];
        let assignments = assigned(&sources, std::slice::from_ref(&destination));
        prop_assert!(assignments[0].sources().eq([part % count]));
    }
}

#[test]
fn replicas_share_what_all_destinations_want() {
    // Four replicas of all rows, eight destinations that want all: two for each, whole.
    let assignments = assigned(&tables("tp4"), &tables("tp8"));
    let sources: Vec<Vec<u32>> = assignments.iter().map(|assignment| assignment.sources().collect()).collect();
    assert_eq!(sources, [[0], [0], [1], [1], [2], [2], [3], [3]]);
    // Of two stages each destination takes from the replicas at its own point.
    let assignments = assigned(&tables("pp2tp2"), &tables("tp4"));
    let sources: Vec<Vec<u32>> = assignments.iter().map(|assignment| assignment.sources().collect()).collect();
    assert_eq!(sources, [[0, 2], [0, 2], [1, 3], [1, 3]]);
    // One destination, split four ways by bytes.
    let assignments = assigned(&tables("tp4"), &tables("pp1"));
    let sent = sent(&assignments);
    let total = 64 * (78 * 576 + 21 * 132);
    assert_eq!(sent.values().sum::<u64>(), total);
    assert!(sent.values().all(|bytes| bytes.abs_diff(total / 4) <= 64 * 576), "{sent:?}");
}

#[test]
fn a_request_is_in_one_part_of_the_source() {
    let (sources, destinations) = (tables("pp2dp3tp2"), tables("tp4"));
    let error = assign((0..).zip(&sources), (0..).zip(&destinations)).expect_err("three parts hold other requests");
    assert_eq!(error, MatchError::SourceParts { source_rank: 0, dp_rank: 0, other_rank: 2, other_dp_rank: 1 });
    // The ranks of part 1 are those of its two stages.
    let part = (0..).zip(&sources).filter(|(_, table)| table.dp_rank == 1);
    let assignments = assign(part, (0..).zip(&destinations)).expect("one part");
    let sources: Vec<Vec<u32>> = assignments.iter().map(|assignment| assignment.sources().collect()).collect();
    assert_eq!(sources, [[2, 8], [2, 8], [3, 9], [3, 9]]);
}

#[test]
fn each_part_of_the_destination_is_served_by_all_replicas() {
    let assignments = assigned(&tables("tp2"), &tables("dp4"));
    for assignment in &assignments {
        assert!(assignment.sources().eq([0, 1]));
    }
    // The first layers come from another rank for every other part.
    let first = |assignment: &Assignment| assignment.layers(0).layers()[0].0;
    let firsts: Vec<u32> = assignments.iter().map(first).collect();
    assert_eq!(firsts[0], 0);
    assert!(firsts[1] > 30 && firsts[2] == firsts[0] && firsts[3] == firsts[1], "{firsts:?}");
}

#[test]
fn equal_layouts_share_their_templates() {
    let mut templates = Templates::default();
    let mut talking = 0;
    for part in 0..4 {
        let mut sources = tables("pp4dp4tp4");
        // How many slots a rank has is its own business.
        sources.iter_mut().zip(1..).for_each(|(table, count)| table.pools[0].slot_count = count);
        let of_part = (0..).zip(&sources).filter(|(_, table)| table.dp_rank == part);
        for assignment in assign(of_part, (0..).zip(&tables("pp2tp16"))).expect("one model") {
            for source in assignment.sources() {
                let shared = templates.template(&assignment, source).expect("sizes fit");
                let alone = assignment.template(source).expect("sizes fit");
                assert_eq!((shared.digest(), shared.sections()), (alone.digest(), alone.sections()));
                let slot_count = sources[source as usize].pools[0].slot_count;
                let map = |slot| [kvferry_match::BlockMap::dense(0, [kvferry_layout::Slot(slot)])];
                assert!(shared.bind(&map(slot_count - 1), &map(0), 0..1).is_ok());
                assert!(shared.bind(&map(slot_count), &map(0), 0..1).is_err());
                talking += 1;
            }
        }
    }
    // Layer 39 is the last of the second prefill stage and the first of the second decode stage.
    assert_eq!((talking, templates.len()), (4 * 5 * 16, 5));
}
