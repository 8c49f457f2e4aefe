//! Small models in random storage, and an oracle that copies their caches cell by cell.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod memory;
pub(crate) mod model;

use proptest::test_runner::Config;

/// `normally` cases, unless `PROPTEST_CASES` in the environment says otherwise; next to none under Miri.
///
/// All properties with a hundred times their cases, as for a night:
/// `PROPTEST_CASES=100000 cargo test --release --package kvferry-match`
pub(crate) fn cases(normally: u32) -> Config {
    let config = Config::default();
    if cfg!(miri) {
        return Config { cases: 4, failure_persistence: None, ..config };
    }
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { config.cases } else { normally };
    Config { cases, ..config }
}

/// A permutation of the numbers below `count`, one for each seed.
pub(crate) fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count).collect();
    numbers.sort_by_cached_key(|number| {
        let mut mixed = (u64::from(*number) + 1).wrapping_mul(seed.wrapping_mul(2).wrapping_add(0x9E37_79B9_7F4A_7C15));
        mixed ^= mixed >> 29;
        mixed.wrapping_mul(0xBF58_476D_1CE4_E5B9)
    });
    numbers
}
