use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn pool(frames: u32) -> Pool {
    Pool::new(frames, Key::new(1))
}

fn blocks(ids: impl IntoIterator<Item = u64>) -> Vec<Block> {
    ids.into_iter().zip(0..).map(|(id, ordinal)| Block { id, ordinal, tokens: 512 }).collect()
}

/// Takes, publishes and gives back.
fn serve(pool: &mut Pool, ids: impl IntoIterator<Item = u64>) -> usize {
    let mut lease = pool.take(&blocks(ids), 0).unwrap();
    let reused = lease.reused();
    pool.publish(&mut lease);
    pool.give_back(lease);
    reused
}

fn held(pool: &Pool) -> Vec<u64> {
    pool.held().map(|(block, _)| block.id).collect::<BTreeSet<_>>().into_iter().collect()
}

#[test]
fn a_prefix_is_used_again_and_the_rest_is_new() {
    let mut pool = pool(8);
    assert_eq!(serve(&mut pool, 0..4), 0);
    assert_eq!(serve(&mut pool, [0, 1, 9, 3]), 2, "what follows a block that is not held is not used");
    let lease = pool.take(&blocks([0, 1, 2]), 0).unwrap();
    assert_eq!(lease.reused(), 3);
    let frames: BTreeMap<Block, Frame> = pool.held().collect();
    assert_eq!(lease.frames(), blocks([0, 1, 2]).iter().map(|block| frames[block]).collect::<Vec<_>>());
    pool.give_back(lease);
}

/// A block of fewer tokens, or in another place, is another one, whatever its name.
#[test]
fn blocks_are_told_apart_by_their_tokens_and_their_place() {
    let mut pool = pool(8);
    serve(&mut pool, 0..2);
    let shorter = [blocks([0])[0], Block { tokens: 7, ..blocks([0, 1])[1] }];
    let lease = pool.take(&shorter, 0).unwrap();
    assert_eq!(lease.reused(), 1);
    pool.give_back(lease);
    assert_eq!(serve(&mut pool, [1]), 0);
}

#[test]
fn what_has_not_arrived_is_nobody_elses_prefix() {
    let mut pool = pool(8);
    let mut first = pool.take(&blocks(0..2), 0).unwrap();
    let mut second = pool.take(&blocks(0..2), 0).unwrap();
    assert_eq!(second.reused(), 0);
    pool.publish(&mut second);
    pool.publish(&mut first);
    pool.give_back(first);
    assert_eq!(pool.free.len(), 6, "the frames of the one that came second are free");
    pool.give_back(second);
    assert_eq!((pool.free.len(), held(&pool)), (6, vec![0, 1]));
}

#[test]
fn the_block_used_longest_ago_goes_first_and_a_prompts_last_block_before_its_first() {
    let mut pool = pool(6);
    serve(&mut pool, 0..3);
    serve(&mut pool, 10..13);
    serve(&mut pool, 0..3);
    serve(&mut pool, [20]);
    assert_eq!(held(&pool), [0, 1, 2, 10, 11, 20]);
    serve(&mut pool, 30..33);
    assert_eq!(held(&pool), [0, 1, 20, 30, 31, 32]);
}

#[test]
fn what_is_in_use_is_not_forgotten() {
    let mut pool = pool(4);
    serve(&mut pool, 0..2);
    let lease = pool.take(&blocks(0..2), 1).unwrap();
    assert!(!pool.has_room(&blocks(5..7), 0));
    assert_eq!(pool.take(&blocks(5..7), 0), None);
    let other = pool.take(&blocks([5]), 0).unwrap();
    pool.give_back(lease);
    pool.give_back(other);
    assert_eq!(held(&pool), [0, 1]);
}

#[test]
fn frames_that_somebody_may_still_write_to_are_never_used_again() {
    let mut pool = pool(5);
    serve(&mut pool, 0..2);
    let lease = pool.take(&blocks(0..3), 1).unwrap();
    let exposed = [lease.frames[2], lease.frames[3]];
    pool.quarantine(lease);
    assert_eq!((pool.capacity(), pool.quarantined()), (3, 2));
    let all = pool.take(&blocks(5..8), 0).unwrap();
    assert!(all.frames.iter().all(|frame| !exposed.contains(frame)));
    assert!(!pool.has_room(&blocks([9]), 0));
    pool.give_back(all);
}

/// What somebody does with a pool.
#[derive(Clone, Debug)]
enum Step {
    /// A prompt of a conversation, of so many blocks, with room for more.
    Take(u64, u64, usize),
    Publish(usize),
    GiveBack(usize),
    Quarantine(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4u64, 1..8u64, 0..3usize).prop_map(|(conversation, len, more)| Step::Take(conversation, len, more)),
        4 => any::<usize>().prop_map(Step::Publish),
        4 => any::<usize>().prop_map(Step::GiveBack),
        1 => any::<usize>().prop_map(Step::Quarantine),
    ]
}

const FRAMES: u32 = 16;

/// What must hold after every step, from the leases that are out.
fn check(pool: &Pool, leases: &[Lease]) {
    let mut users: BTreeMap<Frame, (Option<Block>, usize)> = BTreeMap::new();
    for lease in leases {
        for (index, frame) in lease.frames.iter().enumerate() {
            let name = lease.named.get(index).filter(|named| **named).map(|_| lease.blocks[index]);
            let (of, count) = users.entry(*frame).or_insert((name, 0));
            *count += 1;
            assert!(*count == 1 || (name.is_some() && *of == name), "{frame:?} is given to two");
        }
    }
    let held: BTreeMap<Frame, Block> = pool.held().map(|(block, frame)| (frame, block)).collect();
    assert_eq!(held.len(), pool.held.len(), "two blocks in one frame");
    for (block, Held { frame, users: count }) in &pool.held {
        let named = users.get(frame).filter(|(name, _)| *name == Some(*block)).map_or(0, |(_, count)| *count);
        assert_eq!(*count, named, "{block:?}");
        assert_eq!(pool.idle.contains(block), named == 0, "{block:?}");
    }
    assert_eq!(pool.idle.len(), pool.held.values().filter(|held| held.users == 0).count());
    // Every frame is in one place.
    let unnamed = users.iter().filter(|(_, (name, _))| name.is_none()).map(|(frame, _)| *frame);
    let mut places: Vec<Frame> = pool.free.iter().chain(&pool.quarantined).copied().collect();
    places.extend(held.keys());
    places.extend(unnamed);
    places.sort_unstable();
    assert_eq!(places, (0..FRAMES).map(Frame).collect::<Vec<_>>());
}

proptest! {
    /// No frame is ever given to two, counts are right, nothing is lost, and what is idle goes in the order of its last use.
    #[test]
    fn frames_are_never_lost_or_shared(steps in prop::collection::vec(step(), 0..80)) {
        let mut pool = pool(FRAMES);
        let mut leases: Vec<Lease> = Vec::new();
        // Names in the order in which they came to be idle, by an own account.
        let mut last_used: Vec<Block> = Vec::new();
        for step in steps {
            let pick = |index: usize, leases: &[Lease]| (!leases.is_empty()).then(|| index % leases.len());
            match step {
                Step::Take(conversation, len, more) => {
                    let prompt = blocks((0..len).map(|block| if block < 2 { block } else { 100 * conversation + block }));
                    let before: Vec<Block> = pool.held.keys().copied().collect();
                    let room = pool.has_room(&prompt, more);
                    let taken = pool.take(&prompt, more);
                    prop_assert_eq!(taken.is_some(), room);
                    if let Some(lease) = taken {
                        prop_assert_eq!(lease.frames.len(), prompt.len() + more);
                        last_used.retain(|block| !prompt[..lease.reused].contains(block));
                        let forgotten: BTreeSet<Block> =
                            before.into_iter().filter(|block| !pool.held.contains_key(block)).collect();
                        let oldest: BTreeSet<Block> = last_used.drain(..forgotten.len()).collect();
                        prop_assert_eq!(forgotten, oldest);
                        leases.push(lease);
                    }
                }
                Step::Publish(index) => {
                    if let Some(index) = pick(index, &leases) {
                        pool.publish(&mut leases[index]);
                    }
                }
                Step::GiveBack(index) | Step::Quarantine(index) => {
                    if let Some(index) = pick(index, &leases) {
                        let lease = leases.remove(index);
                        let others = |block: &Block| {
                            let named = |lease: &Lease| (0..lease.blocks.len()).any(|at| lease.named[at] && lease.blocks[at] == *block);
                            leases.iter().any(named)
                        };
                        let own = (0..lease.blocks.len()).rev().filter(|at| lease.named[*at]).map(|at| lease.blocks[at]);
                        last_used.extend(own.filter(|block| !others(block)));
                        match step {
                            Step::Quarantine(_) => pool.quarantine(lease),
                            _ => pool.give_back(lease),
                        }
                    }
                }
            }
            check(&pool, &leases);
        }
        for lease in leases.drain(..) {
            pool.give_back(lease);
        }
        check(&pool, &[]);
        prop_assert_eq!(pool.free.len() + pool.idle.len(), pool.capacity());
    }
}
