//! Properties of one step alone: masks are compared, any block maps at all are safe to bind.
#![allow(clippy::cast_possible_truncation, reason = "the models of the tests are small")]

mod common;

use std::collections::BTreeMap;

use common::cases;
use common::model::{Model, instance, model};
use kvferry_layout::{Layer, PageTable, Role, Slot};
use kvferry_match::{BlockMap, Chunk, MatchError, assign};
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
            let assigned = assign((0..).zip(&sources), [(rank, destination)]);
            match (assigned, first_one_sided(&sources, destination)) {
                (Ok(assignments), None) => {
                    for source in assignments[0].sources() {
                        prop_assert!(assignments[0].rows(source) > 0);
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
    fn any_maps_and_tokens_are_bound_or_refused(
        model in model(),
        instances in [instance(), instance()],
        source in proptest::collection::vec(block_map(), 4),
        destination in proptest::collection::vec(block_map(), 4),
        tokens in prop_oneof![0..60_u64, any::<u64>(), u64::MAX - 60..=u64::MAX],
        count in prop_oneof![3 => 0..40_u64, 1 => any::<u64>()],
        more in prop_oneof![1 => Just(0_u64), 2 => 0..40_u64],
    ) {
        let [prefill, decode] = instances.each_ref().map(|instance| model.tables(instance));
        let tokens = tokens..tokens.saturating_add(count);
        let chunk = Chunk::new(tokens.clone(), tokens.end.saturating_add(more));
        let assignments = assign((0..).zip(&prefill), (0..).zip(&decode)).expect("one model");
        for (table, assignment) in decode.iter().zip(assignments) {
            for template in assignment.sources().map(|rank| assignment.template(rank).expect("sizes fit")) {
                let bound = template.bind(&source, &destination, chunk.clone());
                let expected = template.expected_bytes(&destination, chunk.clone());
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
