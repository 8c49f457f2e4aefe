//! Two instances in one thread, over a network and a wire that do the worst: the very state machines that engines run, under
//! a scheduler that follows from a seed.
//!
//! Frames are lost, late, doubled and out of order. Ranks are killed, frozen, continued and restarted; connections fail on one
//! side; engines stop, and hear for a while longer; users cancel at any step and use slots again the moment that they are
//! quiet. Writes land a slot at a time, some straight from the source's process, some from a network that goes on delivering
//! after the source has died. Some worlds make checksums and compare them, which takes its time. What must hold is checked at
//! every step (`check.rs`); a seed that fails is printed, and `KVFERRY_SIMULATION_SEED` replays it alone.

mod check;
mod fixture;
mod network;
mod random;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use world::World;

/// The seed to run alone, with everything that happens printed.
const SEED: &str = "KVFERRY_SIMULATION_SEED";

/// How many seeds to run, from 0 on or from `first:count`.
const SEEDS: &str = "KVFERRY_SIMULATION_SEEDS";

const SEEDS_IN_CI: u64 = 10_000;

fn run(seed: u64, talk: bool) {
    let mut world = World::new(seed, talk);
    world.trouble();
    world.heal();
}

#[test]
fn rules_hold_whatever_happens() {
    if let Ok(seed) = std::env::var(SEED) {
        return run(seed.parse().expect("a number"), true);
    }
    let seeds = std::env::var(SEEDS).unwrap_or_else(|_| SEEDS_IN_CI.to_string());
    let (first, count) = seeds.split_once(':').unwrap_or(("0", &seeds));
    let (first, count): (u64, u64) = (first.parse().expect("a number"), count.parse().expect("a number"));
    let next = AtomicU64::new(first);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let failed = thread::scope(|scope| {
        let search = || {
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + count {
                    return None;
                }
                if catch_unwind(AssertUnwindSafe(|| run(seed, false))).is_err() {
                    return Some(seed);
                }
            }
        };
        let searches: Vec<_> = (0..threads).map(|_| scope.spawn(search)).collect();
        searches.into_iter().filter_map(|search| search.join().unwrap()).min()
    });
    if let Some(seed) = failed {
        panic!("seed {seed} fails: run again with {SEED}={seed}");
    }
}
