//! What is in the blocks: every word says which block it belongs to, which side it comes from and where it stands.

use kvferry_wire::Region;

use crate::ask::{Blocks, Error};
use crate::order;

const OF_BLOCK: u64 = 0x9e37_79b9_7f4a_7c15;
const OF_WORD: u64 = 0xc2b2_ae3d_27d4_eb4f;
const OF_SOURCE: u64 = 0x1111_1111_1111_1111;
const SCRUBBED: u8 = 0xee;
const STEP_BYTES: u64 = 8 << 20;

/// Word `word` of block `block` of the source in round `tag`: the first and the last word change from round to round.
fn expected(block: u64, word: u64, words: u64, tag: u64) -> u64 {
    if word == 0 {
        tag
    } else if word == words - 1 {
        tag + 1
    } else {
        block.wrapping_mul(OF_BLOCK).wrapping_add(OF_SOURCE).wrapping_add(word.wrapping_mul(OF_WORD))
    }
}

/// Fills all blocks of the source.
pub(crate) fn fill(region: &Region, size: u64, pool_blocks: u64) -> Result<(), Error> {
    let step_blocks = (STEP_BYTES / size).max(1);
    let mut bytes = Vec::new();
    let mut first = 0;
    while first < pool_blocks {
        bytes.clear();
        for block in first..pool_blocks.min(first + step_blocks) {
            for word in 0..size / 8 {
                bytes.extend_from_slice(&expected(block, word, size / 8, 0).to_ne_bytes());
            }
        }
        region.write(first * size, &bytes)?;
        first += step_blocks;
    }
    Ok(())
}

/// Marks the blocks that move with the number of the round.
pub(crate) fn stamp(region: &Region, blocks: &Blocks, tag: u64) -> Result<(), Error> {
    for block in order::blocks(blocks.order, blocks.pool_blocks, blocks.count, blocks.seed) {
        let start = u64::from(block) * blocks.size;
        region.write(start, &tag.to_ne_bytes())?;
        region.write(start + blocks.size - 8, &(tag + 1).to_ne_bytes())?;
    }
    Ok(())
}

pub(crate) fn scrub(region: &Region, bytes: u64) -> Result<(), Error> {
    let step = vec![SCRUBBED; usize::try_from(STEP_BYTES)?];
    let mut start = 0;
    while start < bytes {
        let length = STEP_BYTES.min(bytes - start);
        region.write(start, &step[..usize::try_from(length)?])?;
        start += length;
    }
    Ok(())
}

/// Whether every byte of the target's blocks is what it must be after round `tag`.
pub(crate) fn check(region: &Region, blocks: &Blocks, tag: u64) -> Result<bool, Error> {
    let Blocks { order, size, pool_blocks, count, seed } = *blocks;
    let mut source_of = vec![None; usize::try_from(pool_blocks)?];
    let sources = order::blocks(order, pool_blocks, count, seed);
    for (source, target) in sources.into_iter().zip(order::blocks(order, pool_blocks, count, seed + 1)) {
        source_of[target as usize] = Some(u64::from(source));
    }
    let mut bytes = vec![0; usize::try_from(size)?];
    for (block, source) in (0..).zip(source_of) {
        region.read(block * size, &mut bytes)?;
        let right = match source {
            None => bytes.iter().all(|byte| *byte == SCRUBBED),
            Some(source) => (0..)
                .zip(bytes.chunks_exact(8))
                .all(|(word, bytes)| bytes == expected(source, word, size / 8, tag).to_ne_bytes()),
        };
        if !right {
            return Ok(false);
        }
    }
    Ok(true)
}
