//! The property that all else is for: every cell that the destination wants is written once, with the source's bytes,
//! and nothing else is.
#![allow(clippy::cast_possible_truncation, reason = "the models of the tests are small")]

mod common;

use std::ops::Range;

use common::cases;
use common::memory::{Rank, Tag};
use common::model::{Instance, Model, TOKENS_MAX, instance, model};
use kvferry_layout::PageTable;
use kvferry_match::{Plan, assign};
use proptest::prelude::*;

/// What crosses the wire is a table's bytes: the other side works with what it reads from them.
fn sent(tables: &[PageTable]) -> Vec<PageTable> {
    tables.iter().map(|table| PageTable::from_bytes(&table.to_bytes()).expect("our own bytes")).collect()
}

/// Copies by plan, as each source rank would, and checks what both sides know of it. Returns the bytes copied.
fn transfer(sources: &[Rank], destinations: &mut [Rank], tokens: &Range<u64>) -> u64 {
    let tables: Vec<PageTable> = sources.iter().map(|rank| rank.table.clone()).collect();
    let tables_sent = sent(&tables);
    let mut plan = Plan::default();
    let mut total = 0;
    for (rank, destination) in (0..).zip(destinations) {
        let ours = assign(&tables, &destination.table, rank).expect("instances of one model match");
        let table_sent = &sent(std::slice::from_ref(&destination.table))[0];
        let theirs = assign(&tables_sent, table_sent, rank).expect("as ours");
        assert_eq!(ours.digest(), theirs.digest());
        assert!(ours.sources().eq(theirs.sources()));
        for source_rank in ours.sources() {
            let source = &sources[source_rank as usize];
            let template = ours.template(source_rank).expect("block sizes fit");
            template
                .bind_into(&source.maps, &destination.maps, tokens.clone(), &mut plan)
                .expect("all blocks are there");
            let at_receiver = theirs.template(source_rank).expect("as ours");
            let expected = at_receiver.expectation(&destination.maps, tokens.clone()).expect("all blocks are there");
            assert_eq!((expected.bytes, expected.digest), (plan.bytes(), plan.digest()));

            let (mut bytes, mut runs) = (0, 0);
            plan.for_each_run(|run| {
                let from = &source.pools[run.source_pool.0 as usize];
                let to = &mut destination.pools[run.destination_pool.0 as usize];
                for byte in 0..run.bytes {
                    let written = &mut to[(run.destination_offset + byte) as usize];
                    assert_eq!(*written, None, "a byte is written twice");
                    *written = from[(run.source_offset + byte) as usize];
                    assert_ne!(*written, None, "a byte is read that is no cell of the request");
                }
                bytes += run.bytes;
                runs += 1;
            });
            assert_eq!((bytes, runs), (plan.bytes(), plan.runs()));
            assert!(plan.pieces() <= plan.runs());
            total += bytes;
        }
    }
    total
}

fn ranks(model: &Model, instance: &Instance, tokens: &Range<u64>, seed: u64) -> Vec<Rank> {
    let tables = model.tables(instance).into_iter();
    (seed..).zip(tables).map(|(seed, table)| Rank::new(table, tokens, seed)).collect()
}

fn written(pools: &[Vec<Option<Tag>>]) -> u64 {
    pools.iter().flatten().flatten().count() as u64
}

fn tokens() -> impl Strategy<Value = Range<u64>> {
    (0..TOKENS_MAX, prop_oneof![1 => Just(0_u64), 8 => 1..60_u64])
        .prop_map(|(start, count)| start..(start + count).min(TOKENS_MAX))
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn every_cell_once_and_back(
        model in model(),
        prefill in instance(),
        decode in instance(),
        tokens in tokens(),
        seed in any::<u32>(),
    ) {
        let seed = u64::from(seed);
        let mut sources = ranks(&model, &prefill, &tokens, seed);
        let mut destinations = ranks(&model, &decode, &tokens, seed + 1000);
        sources.iter_mut().for_each(Rank::fill);

        let bytes = transfer(&sources, &mut destinations, &tokens);
        let mut bytes_expected = 0;
        for (rank, destination) in destinations.iter().enumerate() {
            let expected = destination.expected(&sources, &tokens);
            bytes_expected += written(&expected);
            prop_assert!(destination.pools == expected, "destination rank {}", rank);
        }
        prop_assert_eq!(bytes, bytes_expected);

        let mut returned = ranks(&model, &prefill, &tokens, seed + 2000);
        transfer(&destinations, &mut returned, &tokens);
        for (rank, back) in returned.iter().enumerate() {
            prop_assert!(back.pools == back.expected(&destinations, &tokens), "source rank {}", rank);
        }
    }
}
