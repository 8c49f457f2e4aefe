//! Properties of one step alone: masks are compared, replicas share fairly, any block maps at all are safe to bind.
#![allow(clippy::cast_possible_truncation, reason = "the models of the tests are small")]

mod common;

use std::collections::BTreeMap;

use common::cases;
use common::model::{Attention, Instance, Model, instance, model};
use kvferry_layout::{Layer, PageTable, Role, Slot};
use kvferry_match::{BlockMap, MatchError, assign};
use proptest::prelude::*;

/// The first layer and role, if any, that only one of a destination rank and the source has, though both have the layer.
fn first_one_sided(sources: &[PageTable], destination: &PageTable) -> Option<(Layer, Role)> {
    let roles = |tables: &[PageTable]| {
        let mut roles = BTreeMap::<Layer, Vec<Role>>::new();
        for (_, row) in tables.iter().flat_map(PageTable::rows) {
            let roles = roles.entry(row.layer).or_default();
            roles.retain(|role| *role != row.role);
            roles.push(row.role.clone());
            roles.sort();
        }
        roles
    };
    let theirs = roles(sources);
    roles(std::slice::from_ref(destination)).into_iter().find_map(|(layer, ours)| {
        let theirs = theirs.get(&layer)?;
        let only_one = ours.iter().chain(theirs).filter(|role| ours.contains(role) != theirs.contains(role));
        only_one.min().map(|role| (layer, role.clone()))
    })
}

/// As many replicas of a one-rank instance as `instance` has ranks.
fn replicas(model: &Model, instance: &Instance, count: usize) -> Vec<PageTable> {
    let whole = Instance { stages: Vec::new(), tp_size: 1, ..instance.clone() };
    vec![model.tables(&whole).remove(0); count]
}

/// Block maps that a peer could make up.
fn block_map() -> impl Strategy<Value = BlockMap> {
    let first = prop_oneof![3 => 0..8_u64, 1 => any::<u64>(), 1 => u64::MAX - 8..=u64::MAX];
    let slot = prop_oneof![8 => (0..9_u32).prop_map(|slot| Some(Slot(slot))), 1 => any::<u32>().prop_map(|slot| Some(Slot(slot))), 1 => Just(None)];
    (first, proptest::collection::vec(slot, 0..9)).prop_map(|(first, slots)| BlockMap::new(first, slots))
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn masks_agree_or_the_first_difference_is_named(
        model in model(),
        masks in any::<[[bool; 5]; 2]>(),
        prefill in instance(),
        decode in instance(),
    ) {
        let masked = |mask: [bool; 5]| Model {
            indexer: Some(mask[..model.hidden_layers as usize].to_vec()),
            ..model.clone()
        };
        let [sources, destinations] = [masked(masks[0]).tables(&prefill), masked(masks[1]).tables(&decode)];
        for (rank, destination) in (0..).zip(&destinations) {
            match (assign(&sources, destination, rank), first_one_sided(&sources, destination)) {
                (Ok(assignment), None) => {
                    for source in assignment.sources() {
                        prop_assert!(assignment.rows(source) > 0);
                    }
                }
                (Err(MatchError::MissingRole { layer, role, source_mask, destination_mask, .. }), Some(first)) => {
                    prop_assert_ne!(source_mask.owns(layer), destination_mask.owns(layer));
                    prop_assert_eq!((layer, role), first);
                }
                (found, expected) => prop_assert!(false, "{found:?} where {expected:?}"),
            }
        }
    }

    #[test]
    fn replicas_differ_from_the_even_split_by_less_than_a_row(
        model in model(),
        prefill in instance(),
        decode in instance(),
        count in 1..9_usize,
    ) {
        // Of one group only: each group is split on its own.
        let model = Model { state: None, ..model };
        let prefill = Instance { indexer_block_tokens: None, mtp: true, ..prefill };
        let decode = Instance { indexer_block_tokens: None, block_tokens: prefill.block_tokens, ..decode };
        let sources = replicas(&model, &prefill, count);
        for (rank, destination) in (0..).zip(model.tables(&decode)) {
            let maps = vec![BlockMap::dense(0, [Slot(0)]); 3];
            let assignment = assign(&sources, &destination, rank).expect("one model");
            let bytes: Vec<u64> = (0..count as u32)
                .map(|source| assignment.template(source).map_or(0, |template| {
                    template.bind(&maps, &maps, 0..1).expect("block 0 is there").bytes()
                }))
                .collect();
            let total: u64 = bytes.iter().sum();
            let row = |row: &kvferry_layout::Row| -> u64 {
                row.planes.iter().map(|plane| plane.units.len() as u64 * plane.cell_bytes * u64::from(plane.tokens)).sum()
            };
            let largest = destination.rows().map(|(_, of)| row(of)).max().unwrap_or(0);
            for sent in bytes {
                // Compared times `count`, so that nothing is rounded.
                prop_assert!((sent * count as u64).abs_diff(total) <= largest * count as u64);
            }
        }
    }

    #[test]
    fn destinations_begin_at_different_replicas(rank in 0..1000_u32, count in 1..9_u32) {
        let model = Model { hidden_layers: 1, attention: Attention::Latent { bytes: 8 }, indexer: None, state: None };
        let instance = Instance {
            stages: Vec::new(),
            tp_size: count,
            wide: false,
            mtp: false,
            block_tokens: 4,
            indexer_block_tokens: None,
            storage: common::model::PLAIN,
        };
        let tables = model.tables(&instance);
        let assignment = assign(&tables, &tables[0], rank).expect("equal tables");
        prop_assert!(assignment.sources().eq([rank % count]));
    }

    #[test]
    fn any_maps_and_tokens_are_bound_or_refused(
        model in model(),
        instances in [instance(), instance()],
        source in proptest::collection::vec(block_map(), 3),
        destination in proptest::collection::vec(block_map(), 3),
        tokens in prop_oneof![0..60_u64, any::<u64>(), u64::MAX - 60..=u64::MAX],
        count in prop_oneof![3 => 0..40_u64, 1 => any::<u64>()],
    ) {
        let [prefill, decode] = instances.each_ref().map(|instance| model.tables(instance));
        let tokens = tokens..tokens.saturating_add(count);
        for (rank, table) in (0..).zip(&decode) {
            let assignment = assign(&prefill, table, rank).expect("one model");
            for template in assignment.sources().map(|rank| assignment.template(rank).expect("sizes fit")) {
                let bound = template.bind(&source, &destination, tokens.clone());
                let expected = template.expected_bytes(&destination, tokens.clone());
                let Ok(plan) = bound else { continue };
                prop_assert_eq!(Ok(plan.bytes()), expected);
                let mut bytes = 0;
                plan.for_each_run(|run| {
                    let pool = &table.pools[usize::from(run.destination_pool.0)];
                    assert!(run.destination_offset + run.bytes <= pool.extent_bytes().expect("small pools"));
                    bytes += run.bytes;
                });
                prop_assert_eq!(plan.bytes(), bytes);
            }
            let _ = assignment.explain();
        }
    }
}
