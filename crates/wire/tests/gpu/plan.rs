//! Random transfers, and what they must do.

use std::sync::Arc;

use kvferry_wire::{Dim, Part, Piece, Region, RemoteRegion, SlotPair};

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn shuffled(&mut self, count: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count).collect();
        for top in (1..all.len()).rev() {
            all.swap(top, self.below(top as u64 + 1) as usize);
        }
        all
    }
}

/// A part without its regions.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    bases: (u64, u64),
    strides: (u64, u64),
    pieces: Arc<[Piece]>,
    pairs: Arc<[SlotPair]>,
}

impl Shape {
    pub(crate) fn part(&self, local: &Region, remote: RemoteRegion) -> Part {
        Part {
            local: local.clone(),
            local_base: self.bases.0,
            local_slot_stride: self.strides.0,
            remote,
            remote_base: self.bases.1,
            remote_slot_stride: self.strides.1,
            pieces: self.pieces.clone(),
            pairs: self.pairs.clone(),
        }
    }

    /// Does what the part must do, by plain loops.
    pub(crate) fn apply(&self, from: &[u8], to: &mut [u8]) {
        for pair in self.pairs.iter() {
            for piece in self.pieces.iter() {
                for outer in 0..piece.dims[0].count {
                    for inner in 0..piece.dims[1].count {
                        let source = self.bases.0
                            + u64::from(pair.local) * self.strides.0
                            + piece.local_offset
                            + outer * piece.dims[0].local_stride
                            + inner * piece.dims[1].local_stride;
                        let target = self.bases.1
                            + u64::from(pair.remote) * self.strides.1
                            + piece.remote_offset
                            + outer * piece.dims[0].remote_stride
                            + inner * piece.dims[1].remote_stride;
                        let (source, target, bytes) = (source as usize, target as usize, piece.run_bytes as usize);
                        to[target..target + bytes].copy_from_slice(&from[source..source + bytes]);
                    }
                }
            }
        }
    }

    /// Slots that nothing but these pieces is in, at the start of both regions.
    pub(crate) fn blocks(size: u64, count: u32, random: &mut Random) -> Self {
        let (from, to) = (random.shuffled(count), random.shuffled(count));
        let pairs = from.into_iter().zip(to).map(|(local, remote)| SlotPair { local, remote }).collect();
        let pieces = [Piece { local_offset: 0, remote_offset: 0, run_bytes: size, dims: [Dim::ONE; 2] }].into();
        Self { bases: (0, 0), strides: (size, size), pieces, pairs }
    }

    /// One plane of `[slots, units, tokens, cell]` on one side and `[slots, tokens, units, cell]` on the other.
    pub(crate) fn transposed(units: u64, tokens: u64, cell: u64, slots: u32, random: &mut Random) -> Self {
        let slot = units * tokens * cell;
        let dims = [
            Dim { count: units, local_stride: tokens * cell, remote_stride: cell },
            Dim { count: tokens, local_stride: cell, remote_stride: units * cell },
        ];
        let pieces = [Piece { local_offset: 0, remote_offset: 0, run_bytes: cell, dims }].into();
        Self { pieces, strides: (slot, slot), ..Self::blocks(slot, slots, random) }
    }
}

/// A transfer of a few parts, each in its own stretch of both regions, whose numbers are multiples of `align`. Destinations
/// do not overlap, sources may.
pub(crate) fn random(random: &mut Random, align: u64, region_bytes: u64) -> Vec<Shape> {
    let parts = 1 + random.below(4);
    let stretch = region_bytes / parts / align * align;
    let shared = 1 + random.below(40) as u32;
    let (shared_from, shared_to) = (random.shuffled(shared), random.shuffled(shared));
    let shared: Arc<[SlotPair]> =
        shared_from.into_iter().zip(shared_to).map(|(local, remote)| SlotPair { local, remote }).collect();
    let part = |part: u64, random: &mut Random| {
        let pairs = if random.below(2) == 0 { shared.clone() } else { random_pairs(random) };
        let slots = pairs.iter().map(|pair| pair.local.max(pair.remote)).max().map_or(1, |slot| u64::from(slot) + 1);
        // The target's slot is filled from below with gaps, the source's is picked from anywhere.
        let budget = stretch / slots / align;
        let (mut pieces, mut place) = (Vec::new(), random.below(3));
        for _ in 0..random.below(5) {
            let (run, outer, inner) = (1 + random.below(70), 1 + random.below(4), 1 + random.below(6));
            let inner_stride = run + random.below(3);
            let outer_stride = inner * inner_stride + random.below(5);
            let end = place + (outer - 1) * outer_stride + (inner - 1) * inner_stride + run;
            let strides = (random.below(90), random.below(20));
            let reach = (outer - 1) * strides.0 + (inner - 1) * strides.1 + run;
            if end > budget || reach >= budget {
                break;
            }
            pieces.push(Piece {
                local_offset: random.below(budget - reach) * align,
                remote_offset: place * align,
                run_bytes: run * align,
                dims: [
                    Dim { count: outer, local_stride: strides.0 * align, remote_stride: outer_stride * align },
                    Dim { count: inner, local_stride: strides.1 * align, remote_stride: inner_stride * align },
                ],
            });
            place = end + random.below(4);
        }
        let base = part * stretch;
        Shape { bases: (base, base), strides: (budget * align, budget * align), pieces: pieces.into(), pairs }
    };
    (0..parts).map(|index| part(index, random)).collect()
}

fn random_pairs(random: &mut Random) -> Arc<[SlotPair]> {
    let count = 1 + random.below(300) as u32;
    let (from, to) = (random.shuffled(count), random.shuffled(count));
    let taken = random.below(u64::from(count) + 1) as usize;
    from.into_iter().zip(to).take(taken).map(|(local, remote)| SlotPair { local, remote }).collect()
}
