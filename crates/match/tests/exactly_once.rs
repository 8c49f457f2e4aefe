//! The property that all else is for: every cell that the destination wants is written once, with the source's bytes,
//! and nothing else is.
#![allow(clippy::cast_possible_truncation, reason = "the models of the tests are small")]

mod common;

use std::ops::Range;

use common::cases;
use common::memory::{Rank, Tag};
use common::model::{Instance, Model, TOKENS_MAX, instance, model};
use kvferry_layout::PageTable;
use kvferry_match::{Chunk, Plan, Templates, assign};
use proptest::prelude::*;

/// What crosses the wire is a table's bytes: the other side works with what it reads from them.
fn sent(tables: &[PageTable]) -> Vec<PageTable> {
    tables.iter().map(|table| PageTable::from_bytes(&table.to_bytes()).expect("our own bytes")).collect()
}

/// Copies by plan, as each source rank would, chunk after chunk, and checks what both sides know of it. Returns the bytes
/// copied.
fn transfer(sources: &[Rank], destinations: &mut [Rank], chunks: &[Chunk]) -> u64 {
    let tables = |ranks: &[Rank]| -> Vec<PageTable> { ranks.iter().map(|rank| rank.table.clone()).collect() };
    let tables = (tables(sources), tables(destinations));
    let ours = assign((0..).zip(&tables.0), (0..).zip(&tables.1)).expect("instances of one model match");
    let tables = (sent(&tables.0), sent(&tables.1));
    let theirs = assign((0..).zip(&tables.0), (0..).zip(&tables.1)).expect("as ours");
    let mut templates = Templates::default();
    let mut plan = Plan::default();
    let mut total = 0;
    for ((ours, theirs), destination) in ours.iter().zip(&theirs).zip(destinations) {
        assert_eq!(ours.digest(), theirs.digest());
        assert!(ours.sources().eq(theirs.sources()));
        for source_rank in ours.sources() {
            let source = &sources[source_rank as usize];
            let template = templates.template(ours, source_rank).expect("block sizes fit");
            let at_receiver = theirs.template(source_rank).expect("as ours");
            assert_eq!(template.digest(), at_receiver.digest());
            for chunk in chunks {
                template
                    .bind_into(&source.maps, &destination.maps, chunk.clone(), &mut plan)
                    .expect("all blocks are there");
                let expected = at_receiver.expectation(&destination.maps, chunk.clone()).expect("all blocks are there");
                assert_eq!((expected.bytes, expected.digest), (plan.bytes(), plan.digest()));
                let amount = template.amount(chunk.clone()).expect("small pools");
                assert_eq!((amount.bytes, amount.pieces, amount.runs), (plan.bytes(), plan.pieces(), plan.runs()));
                total += copy(&plan, source, destination);
            }
        }
    }
    total
}

/// Copies the runs of a plan. Returns the bytes copied.
fn copy(plan: &Plan, source: &Rank, destination: &mut Rank) -> u64 {
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
    bytes
}

fn ranks(model: &Model, instance: &Instance, tokens: &Range<u64>, seed: u64) -> Vec<Rank> {
    let tables = model.tables(instance).into_iter();
    (seed..).zip(tables).map(|(seed, table)| Rank::new(table, tokens, seed)).collect()
}

fn written(pools: &[Vec<Option<Tag>>]) -> u64 {
    pools.iter().flatten().flatten().count() as u64
}

/// The last tokens of a request, those that the destination does not hold already, in chunks.
fn chunks() -> impl Strategy<Value = Vec<Chunk>> {
    let tokens = (0..TOKENS_MAX, prop_oneof![1 => Just(0_u64), 8 => 1..60_u64]);
    let cuts = prop_oneof![1 => Just(Vec::new()), 1 => proptest::collection::vec(0..60_u64, 1..5)];
    (tokens, cuts).prop_map(|((start, count), cuts)| {
        let end = (start + count).min(TOKENS_MAX);
        let mut bounds: Vec<u64> = cuts.into_iter().map(|cut| start + cut).filter(|cut| *cut < end).collect();
        bounds.extend([start, end]);
        bounds.sort_unstable();
        bounds.dedup();
        if bounds.len() == 1 {
            return vec![Chunk::from(start..end)];
        }
        bounds.windows(2).map(|bounds| Chunk::new(bounds[0]..bounds[1], end)).collect()
    })
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn every_cell_once_and_back(
        model in model(),
        prefill in instance(),
        decode in instance(),
        chunks in chunks(),
        seed in any::<u32>(),
    ) {
        let seed = u64::from(seed);
        let tokens = chunks[0].tokens.start..chunks[0].request_tokens;
        let mut sources = ranks(&model, &prefill, &tokens, seed);
        let mut destinations = ranks(&model, &decode, &tokens, seed + 1000);
        sources.iter_mut().for_each(Rank::fill);

        let bytes = transfer(&sources, &mut destinations, &chunks);
        let mut bytes_expected = 0;
        for (rank, destination) in destinations.iter().enumerate() {
            let expected = destination.expected(&sources, &tokens);
            bytes_expected += written(&expected);
            prop_assert!(destination.pools == expected, "destination rank {}", rank);
        }
        prop_assert_eq!(bytes, bytes_expected);

        let mut returned = ranks(&model, &prefill, &tokens, seed + 2000);
        transfer(&destinations, &mut returned, &[Chunk::from(tokens.clone())]);
        for (rank, back) in returned.iter().enumerate() {
            prop_assert!(back.pools == back.expected(&destinations, &tokens), "source rank {}", rank);
        }
    }
}
