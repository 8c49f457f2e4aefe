//! What is moved. Both processes make the same of a job's name.

use std::sync::Arc;

use kvferry_layout::{CellOrder, Cut, Dtype, ModelFacts, PageTable, Pooling, Slot, Storage, TableOptions, build};
use kvferry_match::{BlockMap, Plan, Template, assign};
use kvferry_wire::{Dim, List, Part, Piece, Region, RemoteRegion, Run, SlotPair};

use crate::ask::Error;

const BLOCK_TOKENS: u32 = 64;

/// What the runs of a list are scattered over.
const LIST_POOL_BYTES: u64 = 2 << 30;

/// What moves of a slot of many pieces.
const SLOT_BYTES: u64 = 1 << 20;

/// A request between two pools, and how to bind it.
pub(crate) struct Job {
    pub(crate) source_bytes: u64,
    pub(crate) target_bytes: u64,
    pub(crate) bytes: u64,
    pub(crate) runs: u64,
    what: What,
}

enum What {
    Blocks(Blocks),
    Runs(Runs),
    Request(Box<Request>),
}

/// Slots of equal pieces.
struct Blocks {
    slot_bytes: u64,
    pieces: Arc<[Piece]>,
    pairs: Vec<SlotPair>,
}

/// An explicit list of runs of one length.
struct Runs {
    run_bytes: u64,
    /// Where each run is from the start of both pools.
    places: Vec<(u64, u64)>,
    indices: Vec<usize>,
    /// The prepared list for each target region.
    prepared: Vec<(RemoteRegion, List)>,
}

/// A request of a model.
struct Request {
    template: Template,
    tables: [PageTable; 2],
    maps: [Vec<BlockMap>; 2],
    tokens: u64,
    /// The wire's form of the pieces of each section.
    pieces: Vec<Arc<[Piece]>>,
    plan: Plan,
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound as u64).expect("below a usize")
    }
}

/// `count` of `slots` slots, in shuffled order.
fn shuffled(slots: u64, count: u64, seed: u64) -> Result<Vec<u32>, Error> {
    let mut all: Vec<u32> = (0..u32::try_from(slots)?).collect();
    let mut random = Random(seed);
    for top in (1..all.len()).rev() {
        all.swap(top, random.below(top + 1));
    }
    all.truncate(usize::try_from(count)?);
    Ok(all)
}

impl Job {
    pub(crate) fn parse(name: &str, total_bytes: u64) -> Result<Self, Error> {
        match name {
            "glm" | "glm-block" => {
                let config = include_str!("../../../../examples/models/glm-5.2.json");
                let storage = Storage { pooling: Pooling::LayerSplit, ..Storage::default() };
                let tokens = if name == "glm" { 131_072 } else { BLOCK_TOKENS };
                Self::request(config, ["tp1", "tp1"], Dtype::Fp8E4m3, storage, tokens)
            }
            "llama" => {
                let config = include_str!("../../../../examples/models/llama-3.1-70b.json");
                let storage = Storage { cells: CellOrder::Nhd, ..Storage::default() };
                Self::request(config, ["tp4", "tp8"], Dtype::Bf16, storage, 32_768)
            }
            list if list.starts_with("list-") => Self::list(list),
            size => match size.strip_suffix('s') {
                Some(size) => Self::blocks(size.parse()?, 1, total_bytes),
                None => {
                    let size: u64 = size.parse()?;
                    Self::blocks(size, (SLOT_BYTES / size.max(1)).max(1), total_bytes)
                }
            },
        }
    }

    /// Slots of `count` pieces of `size` bytes, each followed by as many that do not move; of one piece, by none.
    fn blocks(size: u64, count: u64, total_bytes: u64) -> Result<Self, Error> {
        if size == 0 || !size.is_multiple_of(16) || size > total_bytes {
            return Err(format!("{size}: no multiple of 16 up to {total_bytes}").into());
        }
        let moved = total_bytes / (size * count);
        let (slots, stride) = (moved + moved / 16 + 1, if count == 1 { size } else { size * 2 });
        let (from, to) = (shuffled(slots, moved, 1)?, shuffled(slots, moved, 2)?);
        let pairs = from.iter().zip(&to).map(|(&local, &remote)| SlotPair { local, remote }).collect();
        let dims = [Dim::ONE, Dim { count, local_stride: stride, remote_stride: stride }];
        let pieces = [Piece { local_offset: 0, remote_offset: 0, run_bytes: size, dims }].into();
        let (slot_bytes, runs) = (count * stride, moved * count);
        let pool_bytes = slots * slot_bytes;
        let what = What::Blocks(Blocks { slot_bytes, pieces, pairs });
        Ok(Self { source_bytes: pool_bytes, target_bytes: pool_bytes, bytes: runs * size, runs, what })
    }

    /// `list-BYTES-COUNT`: so many runs of such a length.
    fn list(name: &str) -> Result<Self, Error> {
        let numbers: Vec<u64> = name.split('-').skip(1).map(str::parse).collect::<Result<_, _>>()?;
        let [run_bytes, count] = numbers[..] else { return Err(format!("{name} is no list").into()) };
        let slots = LIST_POOL_BYTES.checked_div(run_bytes).filter(|slots| *slots >= count);
        let slots = slots.ok_or_else(|| format!("{name} is not inside of 2 GiB"))?;
        let (from, to) = (shuffled(slots, count, 1)?, shuffled(slots, count, 2)?);
        let place = |(from, to)| (u64::from(from) * run_bytes, u64::from(to) * run_bytes);
        let places: Vec<(u64, u64)> = from.into_iter().zip(to).map(place).collect();
        let indices = (0..places.len()).collect();
        let what = What::Runs(Runs { run_bytes, places, indices, prepared: Vec::new() });
        let pool_bytes = slots * run_bytes;
        Ok(Self { source_bytes: pool_bytes, target_bytes: pool_bytes, bytes: count * run_bytes, runs: count, what })
    }

    fn request(config: &str, cuts: [&str; 2], dtype: Dtype, storage: Storage, tokens: u32) -> Result<Self, Error> {
        let facts = ModelFacts::from_config(config)?;
        let blocks = tokens / BLOCK_TOKENS;
        let slots = blocks + blocks / 16 + 1;
        let options = TableOptions { storage, ..TableOptions::new(BLOCK_TOKENS, dtype, slots) };
        let instance = |cut: &str| -> Result<Vec<PageTable>, Error> {
            let cut: Cut = cut.parse()?;
            Ok((0..cut.rank_count()).map(|rank| build(&facts, &cut, rank, &options)).collect::<Result<_, _>>()?)
        };
        let (sources, destinations) = (instance(cuts[0])?, instance(cuts[1])?);
        let template = assign((0..).zip(&sources), (0..).zip(&destinations))?[0].template(0)?;
        let tables = [&sources, &destinations].map(|tables| {
            let mut table = tables[0].clone();
            // All pools side by side in one region.
            let mut base = 0;
            for pool in &mut table.pools {
                pool.base = base;
                base += pool.extent_bytes().unwrap_or(u64::MAX).next_multiple_of(256);
            }
            (table, base)
        });
        let maps = [1, 2].map(|seed| {
            let slots = shuffled(u64::from(slots), u64::from(blocks), seed).map(|slots| slots.into_iter().map(Slot));
            slots.map(|slots| BlockMap::dense(0, slots))
        });
        let [from, to] = maps;
        let (from, to) = (from?, to?);
        let [(source, source_bytes), (target, target_bytes)] = tables;
        let maps = [vec![from; source.groups.len()], vec![to; target.groups.len()]];
        let pieces = template.sections().iter().map(|section| section.pieces.iter().map(piece).collect()).collect();
        let plan = template.bind(&maps[0], &maps[1], 0..u64::from(tokens))?;
        let (bytes, runs) = (plan.bytes(), plan.runs());
        let tables = [source, target];
        let request = Request { template, tables, maps, tokens: u64::from(tokens), pieces, plan };
        Ok(Self { source_bytes, target_bytes, bytes, runs, what: What::Request(Box::new(request)) })
    }

    /// Binds the request once more, for parts that were prepared: the pairs of each set of them. `None` if the parts are new
    /// each time.
    pub(crate) fn bind_slots(&mut self) -> Result<Option<Vec<Arc<[SlotPair]>>>, Error> {
        let What::Request(request) = &mut self.what else { return Ok(None) };
        let Request { template, maps, tokens, plan, .. } = &mut **request;
        template.bind_into(&maps[0], &maps[1], 0..*tokens, plan)?;
        let mut sets: Vec<(*const kvferry_match::SlotPair, Arc<[SlotPair]>)> = Vec::new();
        for (_, pairs) in plan.sections() {
            if !sets.iter().any(|(first, _)| *first == pairs.as_ptr()) {
                sets.push((pairs.as_ptr(), pairs.iter().map(slot_pair).collect()));
            }
        }
        Ok(Some(sets.into_iter().map(|(_, pairs)| pairs).collect()))
    }

    /// Binds the request: what a transfer is posted with.
    pub(crate) fn bind(&mut self, local: &Region, remote: RemoteRegion) -> Result<Vec<Part>, Error> {
        match &mut self.what {
            What::Blocks(Blocks { slot_bytes, pieces, pairs }) => Ok(vec![Part {
                local: local.clone(),
                local_base: 0,
                local_slot_stride: *slot_bytes,
                remote,
                remote_base: 0,
                remote_slot_stride: *slot_bytes,
                pieces: pieces.clone(),
                pairs: Arc::from(&pairs[..]),
            }]),
            What::Runs(Runs { run_bytes, places, indices, prepared }) => {
                if !prepared.iter().any(|(known, _)| *known == remote) {
                    let run = |address| Run { address, bytes: *run_bytes };
                    let here: Vec<Run> = places.iter().map(|(from, _)| run(local.base() + from)).collect();
                    let there: Vec<Run> = places.iter().map(|(_, to)| run(remote.base() + to)).collect();
                    prepared.push((remote, List::new(vec![local.clone()], vec![remote], &here, &there)?));
                }
                let list = prepared.iter().find(|(known, _)| *known == remote).map(|(_, list)| list.select(indices));
                Ok(list.ok_or("prepared above")??)
            }
            What::Request(request) => {
                let Request { template, tables, maps, tokens, pieces, plan } = &mut **request;
                template.bind_into(&maps[0], &maps[1], 0..*tokens, plan)?;
                let mut known: Vec<(*const kvferry_match::SlotPair, Arc<[SlotPair]>)> = Vec::new();
                let parts = plan.sections().zip(pieces).map(|((section, pairs), pieces)| {
                    let from = &tables[0].pools[usize::from(section.source_pool.0)];
                    let to = &tables[1].pools[usize::from(section.destination_pool.0)];
                    let same = known.iter().find(|(first, _)| *first == pairs.as_ptr()).map(|(_, pairs)| pairs.clone());
                    let pairs = same.unwrap_or_else(|| {
                        let list: Arc<[SlotPair]> = pairs.iter().map(slot_pair).collect();
                        known.push((pairs.as_ptr(), list.clone()));
                        list
                    });
                    Part {
                        local: local.clone(),
                        local_base: from.base,
                        local_slot_stride: from.slot_stride,
                        remote,
                        remote_base: to.base,
                        remote_slot_stride: to.slot_stride,
                        pieces: pieces.clone(),
                        pairs,
                    }
                });
                Ok(parts.collect())
            }
        }
    }

    /// Every run: from, to, bytes.
    pub(crate) fn for_each_run(&self, mut run: impl FnMut(u64, u64, u64)) {
        match &self.what {
            What::Blocks(Blocks { slot_bytes, pairs, pieces }) => {
                for pair in pairs {
                    let (from, to) = (u64::from(pair.local) * slot_bytes, u64::from(pair.remote) * slot_bytes);
                    let (piece, inner) = (&pieces[0], &pieces[0].dims[1]);
                    let place = |index| (from + index * inner.local_stride, to + index * inner.remote_stride);
                    (0..inner.count).map(place).for_each(|(from, to)| run(from, to, piece.run_bytes));
                }
            }
            What::Runs(Runs { run_bytes, places, .. }) => {
                places.iter().for_each(|(from, to)| run(*from, *to, *run_bytes));
            }
            What::Request(request) => request.plan.for_each_run(|of| {
                let from = request.tables[0].pools[usize::from(of.source_pool.0)].base;
                let to = request.tables[1].pools[usize::from(of.destination_pool.0)].base;
                run(from + of.source_offset, to + of.destination_offset, of.bytes);
            }),
        }
    }
}

fn slot_pair(pair: &kvferry_match::SlotPair) -> SlotPair {
    SlotPair { local: pair.source.0, remote: pair.destination.0 }
}

fn piece(piece: &kvferry_match::Piece) -> Piece {
    let dims = piece.dims.map(|dim| Dim {
        count: dim.count,
        local_stride: dim.source_stride,
        remote_stride: dim.destination_stride,
    });
    let (local_offset, remote_offset) = (piece.source_offset, piece.destination_offset);
    Piece { local_offset, remote_offset, run_bytes: piece.run_bytes, dims }
}
