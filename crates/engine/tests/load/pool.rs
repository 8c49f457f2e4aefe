//! One rank's engine, and the bytes of its slots.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use kvferry::{Engine, EngineOptions, RequestKey};
use kvferry_layout::{Dtype, GroupKind, GroupSpec, Layer, LayerMask, RankSpec, Role, RowSpec, Slot, block_major};
use kvferry_match::{BlockMap, Side};
use kvferry_wire::Region;

const BLOCK_TOKENS: u32 = 16;
const LAYERS: u32 = 4;
const HEADS: u32 = 4;
/// Bytes of a token, layer and head.
const CELL: u32 = 1024;
/// Those of a block lie together.
const SEGMENT: u64 = (BLOCK_TOKENS * CELL) as u64;

const SLOTS: u32 = 64;

/// What free slots hold, to which nothing may be written.
const CANARY: u8 = 0xa5;

/// Ranks of each instance.
pub(crate) const RANKS: u32 = 4;

pub(crate) struct Pool {
    pub(crate) engine: Engine,
    pub(crate) side: Side,
    region: Region,
    layers: Range<u32>,
    heads: Range<u32>,
    /// Those free for the longest time come first, to be watched for as long as there is.
    free: VecDeque<u32>,
}

impl Pool {
    pub(crate) fn start(side: Side, rank: u32, transports: Option<String>, patience: Duration) -> Self {
        let options = EngineOptions::new(rank).patience(patience);
        let options = match transports {
            Some(transports) => options.transports(transports),
            None => options,
        };
        let engine = Engine::start(options).unwrap();
        // Prefill: two stages of two ranks each.
        let (layers, tp_rank, tp_size) = match side {
            Side::Source => (rank / 2 * (LAYERS / 2)..(rank / 2 + 1) * (LAYERS / 2), rank % 2, 2),
            Side::Destination => (0..LAYERS, rank, 4),
        };
        let row = RowSpec::single(Role::Key, Dtype::U8, LayerMask::all(LAYERS), HEADS, CELL).unwrap();
        let groups =
            vec![GroupSpec { kind: GroupKind::paged(BLOCK_TOKENS), slot_count: SLOTS, pools: vec![vec![row]] }];
        let spec =
            RankSpec { hidden_layers: LAYERS, layers: layers.clone().map(Layer).collect(), tp_rank, tp_size, groups };
        let mut table = block_major(&spec).unwrap();
        let region = engine.allocate(&mut table).unwrap().remove(0);
        engine.publish(table, vec![region.clone()]).unwrap();
        let heads = tp_rank * HEADS / tp_size..(tp_rank + 1) * HEADS / tp_size;
        let mut pool = Self { engine, side, region, layers, heads, free: VecDeque::new() };
        assert_eq!(pool.region.bytes(), pool.slot_bytes() * u64::from(SLOTS), "layers and heads side by side");
        pool.give_back((0..SLOTS).collect());
        pool
    }

    fn slot_bytes(&self) -> u64 {
        (self.layers.len() * self.heads.len()) as u64 * SEGMENT
    }

    /// Takes slots for so many blocks, if there are. Nothing has been written to them since they were given back.
    pub(crate) fn take(&mut self, blocks: usize) -> Option<Vec<u32>> {
        if self.free.len() < blocks {
            return None;
        }
        let slots: Vec<u32> = self.free.drain(..blocks).collect();
        self.check_canaries(&slots);
        Some(slots)
    }

    pub(crate) fn give_back(&mut self, slots: Vec<u32>) {
        let canary = vec![CANARY; usize::try_from(self.slot_bytes()).unwrap()];
        for slot in &slots {
            self.region.write(u64::from(*slot) * self.slot_bytes(), &canary).unwrap();
        }
        self.free.extend(slots);
    }

    fn check_canaries(&self, slots: &[u32]) {
        let mut bytes = vec![0; usize::try_from(self.slot_bytes()).unwrap()];
        for slot in slots {
            self.region.read(u64::from(*slot) * self.slot_bytes(), &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == CANARY), "slot {slot} was written to after it was quiet");
        }
    }

    /// All that are free; how many are not.
    pub(crate) fn check_free(&self) -> usize {
        let free: Vec<u32> = self.free.iter().copied().collect();
        self.check_canaries(&free);
        SLOTS as usize - free.len()
    }

    /// What this rank holds of a block.
    fn content(&self, key: RequestKey, block: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for layer in self.layers.clone() {
            for head in self.heads.clone() {
                for token in 0..BLOCK_TOKENS {
                    let place =
                        [u64::from(key.attempt), block as u64, u64::from(layer), u64::from(head), u64::from(token)];
                    let mixed = place.iter().fold(key.request, |mixed, part| {
                        (mixed ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
                    });
                    bytes.resize(bytes.len() + CELL as usize, u8::try_from(mixed >> 56).unwrap());
                }
            }
        }
        bytes
    }

    pub(crate) fn fill(&self, key: RequestKey, slots: &[u32]) {
        for (block, slot) in slots.iter().enumerate() {
            self.region.write(u64::from(*slot) * self.slot_bytes(), &self.content(key, block)).unwrap();
        }
    }

    pub(crate) fn check(&self, key: RequestKey, slots: &[u32]) {
        let mut bytes = vec![0; usize::try_from(self.slot_bytes()).unwrap()];
        for (block, slot) in slots.iter().enumerate() {
            self.region.read(u64::from(*slot) * self.slot_bytes(), &mut bytes).unwrap();
            assert!(bytes == self.content(key, block), "{key:?} is said to be whole, block {block} is not");
        }
    }
}

pub(crate) fn map(slots: &[u32]) -> Vec<BlockMap> {
    vec![BlockMap::dense(0, slots.iter().copied().map(Slot))]
}

pub(crate) fn tokens(slots: &[u32]) -> Range<u64> {
    0..slots.len() as u64 * u64::from(BLOCK_TOKENS)
}
