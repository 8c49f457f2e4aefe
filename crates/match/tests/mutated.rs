//! Block maps that were right and then had a few entries changed: they are bound to what a scan of the tokens finds, or
//! refused where it finds something wrong.
#![allow(clippy::cast_possible_truncation, reason = "the models of the tests are small")]

mod common;

use std::collections::BTreeSet;

use common::{cases, shuffled};
use kvferry_layout::{
    Dtype, GroupKind, GroupSpec, Layer, LayerMask, Ordinals, PageTable, RankSpec, Role, RowSpec, Slot, block_major,
};
use kvferry_match::{BindError, BlockMap, Chunk, Template, assign};
use proptest::prelude::*;

const SLOTS: u32 = 64;

/// One side of a request.
#[derive(Clone, Debug)]
struct Blocks {
    block_tokens: u32,
    ordinals: Ordinals,
    first: u64,
    slots: Vec<Option<Slot>>,
}

#[derive(Clone, Debug)]
enum Mutation {
    /// This entry becomes that.
    Entry(prop::sample::Index, Option<u32>),
    /// This entry becomes what that one is.
    Copy(prop::sample::Index, prop::sample::Index),
    /// The map begins so much earlier or later.
    Shift(i64),
    /// Entries are lost at the end.
    Truncate(prop::sample::Index),
}

impl Blocks {
    fn table(&self, ordinals: Ordinals, window_tokens: Option<u32>) -> PageTable {
        let kind = GroupKind::Paged { tokens_per_block: self.block_tokens, window_tokens, ordinals };
        let latent = RowSpec::single(Role::Latent, Dtype::U8, LayerMask::all(2), 1, 3).expect("whole bytes");
        block_major(&RankSpec {
            hidden_layers: 2,
            layers: vec![Layer(0), Layer(1)],
            tp_rank: 0,
            tp_size: 1,
            groups: vec![GroupSpec { kind, slot_count: SLOTS, pools: vec![vec![latent]] }],
        })
        .expect("a sound table")
    }

    /// One table for each rank that blocks are dealt to, first the one whose blocks these are.
    fn ranks(&self, window_tokens: Option<u32>) -> Vec<PageTable> {
        let Ordinals { step, first } = self.ordinals;
        (0..step).map(|hand| self.table(Ordinals { step, first: (first + hand) % step }, window_tokens)).collect()
    }

    fn mutate(&mut self, mutation: &Mutation) {
        let count = self.slots.len();
        match mutation {
            Mutation::Shift(by) => self.first = self.first.saturating_add_signed(*by),
            Mutation::Truncate(at) if count > 0 => self.slots.truncate(at.index(count)),
            Mutation::Entry(at, slot) if count > 0 => self.slots[at.index(count)] = slot.map(Slot),
            Mutation::Copy(at, from) if count > 0 => self.slots[at.index(count)] = self.slots[from.index(count)],
            _ => {}
        }
    }

    fn map(&self) -> [BlockMap; 1] {
        [BlockMap::new(self.first, self.slots.clone())]
    }

    /// Slot of a block; `None` if it is not there or not one of the pool's.
    fn slot(&self, ordinal: u64) -> Option<Slot> {
        let slot = self.entry(ordinal)?;
        (slot.0 < SLOTS).then_some(slot)
    }

    fn entry(&self, ordinal: u64) -> Option<Slot> {
        let index = usize::try_from(ordinal.checked_sub(self.first)?).ok()?;
        self.slots.get(index).copied().flatten()
    }

    fn of(&self, token: u64) -> u64 {
        token / u64::from(self.block_tokens)
    }

    fn holds(&self, ordinal: u64) -> bool {
        ordinal % u64::from(self.ordinals.step) == u64::from(self.ordinals.first)
    }
}

/// The slot pairs that a scan of the tokens finds, in order; `None` if something is wrong.
fn scan(source: &Blocks, destination: &Blocks, chunk: &Chunk, window_tokens: Option<u32>) -> Option<Vec<(Slot, Slot)>> {
    let left_behind = window_tokens.map_or(0, |tokens| chunk.request_tokens.saturating_sub(tokens.into()));
    let tokens: Vec<u64> = chunk.tokens.clone().filter(|token| *token >= left_behind).collect();
    let written: BTreeSet<u64> = tokens.iter().map(|token| destination.of(*token)).collect();
    let named: Vec<Slot> = written
        .into_iter()
        .filter(|block| destination.holds(*block))
        .filter_map(|block| destination.entry(block))
        .collect();
    if named.iter().collect::<BTreeSet<_>>().len() < named.len() {
        return None;
    }
    let pair = |token: u64| (source.of(token), destination.of(token));
    let is_last = |token: &u64| token + 1 == chunk.request_tokens || pair(token + 1) != pair(*token);
    let pairs = tokens.into_iter().filter(is_last).map(pair);
    let pairs = pairs.filter(|(ours, theirs)| source.holds(*ours) && destination.holds(*theirs));
    pairs.map(|(ours, theirs)| Some((source.slot(ours)?, destination.slot(theirs)?))).collect()
}

fn template(source: &Blocks, destination: &Blocks, window_tokens: Option<u32>) -> Option<Template> {
    let sources = source.ranks(window_tokens);
    let destination = destination.table(destination.ordinals, window_tokens);
    let assignments = assign((0..).zip(&sources), [(0, &destination)]).expect("one model");
    // Blocks of rank 0 and of the destination may never meet.
    assignments[0].template(0).ok()
}

fn blocks() -> impl Strategy<Value = Blocks> {
    let ordinals = (1..=3_u32).prop_flat_map(|step| (0..step).prop_map(move |first| Ordinals { step, first }));
    let tokens = prop::sample::select(vec![4_u32, 6, 8, 12, 16]);
    (tokens, ordinals, 0..3_u64, 10..20_usize, any::<u32>()).prop_map(|(block_tokens, ordinals, first, count, seed)| {
        let slots = shuffled(SLOTS, seed.into()).into_iter().take(count).map(|slot| Some(Slot(slot))).collect();
        Blocks { block_tokens, ordinals, first, slots }
    })
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        (at(), proptest::option::of(0..SLOTS + 2)).prop_map(|(at, slot)| Mutation::Entry(at, slot)),
        (at(), any::<u32>()).prop_map(|(at, slot)| Mutation::Entry(at, Some(slot))),
        (at(), at()).prop_map(|(at, from)| Mutation::Copy(at, from)),
        (-3..4_i64).prop_map(Mutation::Shift),
        at().prop_map(Mutation::Truncate),
    ]
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn changed_maps_are_bound_to_what_a_scan_finds(
        sides in [blocks(), blocks()],
        mutations in [proptest::collection::vec(mutation(), 0..3), proptest::collection::vec(mutation(), 0..3)],
        bounds in [0..80_u64, 0..80, 0..80],
        window_tokens in proptest::option::weighted(0.3, 1..60_u32),
    ) {
        let [mut source, mut destination] = sides;
        let Some(template) = template(&source, &destination, window_tokens) else { return Ok(()) };
        mutations[0].iter().for_each(|mutation| source.mutate(mutation));
        mutations[1].iter().for_each(|mutation| destination.mutate(mutation));
        let mut bounds = bounds;
        bounds.sort_unstable();
        let chunk = Chunk::new(bounds[0]..bounds[1], bounds[2]);

        let bound = template.bind(&source.map(), &destination.map(), chunk.clone());
        let expected = scan(&source, &destination, &chunk, window_tokens);
        let found = bound.as_ref().ok().map(|plan| {
            let pairs = plan.sections().flat_map(|(_, pairs)| pairs);
            let mut pairs: Vec<(Slot, Slot)> = pairs.map(|pair| (pair.source, pair.destination)).collect();
            pairs.sort_unstable();
            pairs
        });
        let expected = expected.map(|mut pairs| {
            pairs.sort_unstable();
            pairs
        });
        prop_assert_eq!(&found, &expected, "{:?}", bound);

        let expectation = template.expectation(&destination.map(), chunk);
        match (bound, expectation) {
            (Ok(plan), Ok(expected)) => prop_assert_eq!((plan.bytes(), plan.digest()), (expected.bytes, expected.digest)),
            (Ok(plan), Err(error)) => prop_assert!(false, "{plan:?}, but {error}"),
            // Only the source's maps are wrong, which the receiver does not see.
            (Err(_), Ok(_)) => {}
            (Err(BindError::SlotTwice { slot, .. }), Err(error)) => {
                prop_assert!(matches!(error, BindError::SlotTwice { slot: other, .. } if other == slot), "{}", error);
            }
            (Err(_), Err(_)) => {}
        }
    }
}
