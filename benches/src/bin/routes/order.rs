//! Which blocks of a pool move, and in which order: the same on both sides, and in the benchmarks of other engines.

use kvferry_wire::SlotPair;
use serde::{Deserialize, Serialize};

use crate::ask::Blocks;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Order {
    Contiguous,
    Strided,
    Shuffled,
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// `count` of `pool_blocks` blocks.
pub(crate) fn blocks(order: Order, pool_blocks: u64, count: u64, seed: u64) -> Vec<u32> {
    let index = |block: u64| u32::try_from(block).expect("a pool of fewer than 2^32 blocks");
    match order {
        Order::Contiguous => (0..count).map(index).collect(),
        Order::Strided => {
            let step = (pool_blocks / count.max(1)).max(1);
            (0..count).map(|block| index(block * step)).collect()
        }
        Order::Shuffled => {
            let mut all: Vec<u32> = (0..pool_blocks).map(index).collect();
            let mut random = Random(seed);
            for top in (1..all.len()).rev() {
                let other = random.next() % (top as u64 + 1);
                all.swap(top, usize::try_from(other).expect("at most top"));
            }
            all.truncate(usize::try_from(count).expect("at most the number of blocks"));
            all
        }
    }
}

/// The blocks of both sides that belong together.
pub(crate) fn pairs(wanted: &Blocks) -> Vec<SlotPair> {
    let Blocks { order, pool_blocks, count, seed, .. } = *wanted;
    let from = blocks(order, pool_blocks, count, seed);
    let to = blocks(order, pool_blocks, count, seed + 1);
    from.iter().zip(&to).map(|(&local, &remote)| SlotPair { local, remote }).collect()
}

/// A number of bytes with an optional `k`, `m` or `g` behind it.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let lower = text.to_ascii_lowercase();
    let (digits, shift) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 10),
        Some(b'm') => (&lower[..lower.len() - 1], 20),
        Some(b'g') => (&lower[..lower.len() - 1], 30),
        _ => (&lower[..], 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text} is no size"))?;
    number
        .checked_mul(1 << shift)
        .filter(|bytes| bytes.is_multiple_of(16) && *bytes > 0)
        .ok_or(format!("{text}: not 16 bytes, or 32"))
}

pub(crate) fn size_text(bytes: u64) -> String {
    match bytes {
        _ if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}
