//! Lists of runs at addresses, as connectors that exist today hand them over: checked once, then made into parts.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use crate::endpoint::RemoteRegion;
use crate::pieces::{Dim, Piece, SlotPair};
use crate::region::{MemoryKind, Region};
use crate::side::{Place, Side};
use crate::transfer::Part;

/// Distances that are tried as the period of a list.
const PERIODS_TRIED: usize = 4;

/// A run of bytes at an address of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// First byte, in the address space of the process that the run is in.
    pub address: u64,
    /// Length. A run of none moves nothing.
    pub bytes: u64,
}

/// Why two lists are no transfer. Nothing of them is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ListError {
    /// The lists are of different length. Pair every run.
    #[error("{local} local runs and {remote} remote ones")]
    Count {
        /// Local runs.
        local: usize,
        /// Remote runs.
        remote: usize,
    },
    /// The two runs of a pair are of different length.
    #[error("entry {index}: {local} B here and {remote} B there")]
    Bytes {
        /// The first such entry.
        index: usize,
        /// Length of the local run.
        local: u64,
        /// Length of the remote run.
        remote: u64,
    },
    /// A local run is in none of the regions. Register the memory around it.
    #[error("entry {index}: {} B at local address {:#x} are in no region", run.bytes, run.address)]
    Local {
        /// The first such entry.
        index: usize,
        /// The run.
        run: Run,
    },
    /// A remote run is in none of the imported regions. Import the region around it.
    #[error("entry {index}: {} B at remote address {:#x} are in no imported region", run.bytes, run.address)]
    Remote {
        /// The first such entry.
        index: usize,
        /// The run.
        run: Run,
    },
    /// A selection names an entry that is not there: of the list, or of the local side.
    #[error("place {place} of the selection: entry {index} of {entries}")]
    Index {
        /// Place in the selection.
        place: usize,
        /// The entry that it names.
        index: usize,
        /// Entries of the list.
        entries: usize,
    },
    /// A selection names an entry of the remote side that is not there.
    #[error("place {place} of the remote selection: entry {index} of {entries}")]
    RemoteIndex {
        /// Place in the selection.
        place: usize,
        /// The entry that it names.
        index: usize,
        /// Entries of the side.
        entries: usize,
    },
}

/// Pairs of runs, each inside of a local and of an imported region. Kept by its caller, who makes [`Part`]s of all or of some
/// of it as often as it likes: what is checked here is not looked up again.
#[derive(Clone, Debug)]
pub struct List {
    local: Side<Region>,
    remote: Side<RemoteRegion>,
}

/// A pair of runs, as offsets into the regions of these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    local: u32,
    remote: u32,
    bytes: u64,
    from: u64,
    to: u64,
}

impl List {
    /// Pairs `from[i]`, local, with `to[i]`, remote. Where regions overlap, any that contains the run will do.
    ///
    /// # Errors
    ///
    /// [`ListError`] names the first entry that is wrong.
    pub fn new(locals: Vec<Region>, remotes: Vec<RemoteRegion>, from: &[Run], to: &[Run]) -> Result<Self, ListError> {
        if from.len() != to.len() {
            return Err(ListError::Count { local: from.len(), remote: to.len() });
        }
        if let Some(index) = from.iter().zip(to).position(|(local, remote)| local.bytes != remote.bytes) {
            return Err(ListError::Bytes { index, local: from[index].bytes, remote: to[index].bytes });
        }
        let local = Side::new(locals, from).map_err(|index| ListError::Local { index, run: from[index] })?;
        let remote = Side::new(remotes, to).map_err(|index| ListError::Remote { index, run: to[index] })?;
        Ok(Self { local, remote })
    }

    /// Pairs run `from[i]` of `local` with run `to[i]` of `remote`, each as often and in whatever order it is named.
    ///
    /// # Errors
    ///
    /// [`ListError`] names the first place of the selections that is wrong.
    pub fn pair(
        local: &Side<Region>,
        from: &[usize],
        remote: &Side<RemoteRegion>,
        to: &[usize],
    ) -> Result<Vec<Part>, ListError> {
        if from.len() != to.len() {
            return Err(ListError::Count { local: from.len(), remote: to.len() });
        }
        let (here, there) = (local.places(), remote.places());
        if let Some((place, index)) = from.iter().copied().enumerate().find(|(_, index)| *index >= here.len()) {
            return Err(ListError::Index { place, index, entries: here.len() });
        }
        if let Some((place, index)) = to.iter().copied().enumerate().find(|(_, index)| *index >= there.len()) {
            return Err(ListError::RemoteIndex { place, index, entries: there.len() });
        }
        if let Some(part) = alike(local, remote, |here, there| {
            from.iter().zip(to).map(|(from, to)| SlotPair { local: here[*from], remote: there[*to] }).collect()
        }) {
            return Ok(vec![part]);
        }
        let pairs = || from.iter().zip(to).map(|(from, to)| (here[*from], there[*to]));
        if let Some((index, (local, remote))) =
            pairs().enumerate().find(|(_, (local, remote))| local.bytes != remote.bytes)
        {
            return Err(ListError::Bytes { index, local: local.bytes, remote: remote.bytes });
        }
        Ok(make(local, remote, pairs()))
    }

    /// Entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.local.len()
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.local.is_empty()
    }

    /// All of it, for [`Worker::put`](crate::Worker::put). Time and memory grow with the entries.
    #[must_use]
    pub fn parts(&self) -> Vec<Part> {
        if let Some(part) = alike(&self.local, &self.remote, |here, there| {
            here.iter().zip(there).map(|(local, remote)| SlotPair { local: *local, remote: *remote }).collect()
        }) {
            return vec![part];
        }
        let pairs = self.local.places().iter().copied().zip(self.remote.places().iter().copied());
        make(&self.local, &self.remote, pairs)
    }

    /// The entries of these numbers, in any order.
    ///
    /// # Errors
    ///
    /// [`ListError::Index`].
    pub fn select(&self, indices: &[usize]) -> Result<Vec<Part>, ListError> {
        Self::pair(&self.local, indices, &self.remote, indices)
    }
}

/// Pairs of runs that are all of one length, each side in one region, for a GPU: one part, whose pairs of slots are made of the
/// slots of both sides. A kernel gains nothing from neighbours that are joined or rows that are found, so nothing is looked for.
fn alike(
    local: &Side<Region>,
    remote: &Side<RemoteRegion>,
    pairs: impl FnOnce(&[u32], &[u32]) -> Arc<[SlotPair]>,
) -> Option<Part> {
    let (here, there) = (local.alike()?, remote.alike()?);
    let (from, to) = (&local.regions()[here.region as usize], &remote.regions()[there.region as usize]);
    if here.bytes != there.bytes || (from.kind() != MemoryKind::Cuda && to.kind() != MemoryKind::Cuda) {
        return None;
    }
    Some(Part {
        local: from.clone(),
        local_base: 0,
        local_slot_stride: here.stride,
        remote: *to,
        remote_base: 0,
        remote_slot_stride: there.stride,
        pieces: Arc::new([Piece { local_offset: 0, remote_offset: 0, run_bytes: here.bytes, dims: [Dim::ONE; 2] }]),
        pairs: pairs(&here.slots, &there.slots),
    })
}

/// Makes parts of pairs of runs that are of one length each.
fn make(local: &Side<Region>, remote: &Side<RemoteRegion>, pairs: impl Iterator<Item = (Place, Place)>) -> Vec<Part> {
    let entries = pairs.map(|(from, to)| Entry {
        local: from.region,
        remote: to.region,
        bytes: from.bytes,
        from: from.offset,
        to: to.offset,
    });
    let mut parts = Vec::new();
    for ((here, there, bytes), starts) in group(entries) {
        let (dims, starts) = structure(starts);
        for Slots { base, stride, pairs } in slots(&starts) {
            parts.push(Part {
                local: local.regions()[here as usize].clone(),
                local_base: base.0,
                local_slot_stride: stride.0,
                remote: remote.regions()[there as usize],
                remote_base: base.1,
                remote_slot_stride: stride.1,
                pieces: Arc::new([Piece { local_offset: 0, remote_offset: 0, run_bytes: bytes, dims }]),
                pairs: pairs.into(),
            });
        }
    }
    parts
}

/// Where runs start: offset in the local and in the remote region.
type Start = (u64, u64);

/// Joins entries that are one run on both sides, and sorts what is left by regions and length, each in its order.
fn group(entries: impl Iterator<Item = Entry>) -> BTreeMap<(u32, u32, u64), Vec<Start>> {
    let mut groups: BTreeMap<_, Vec<Start>> = BTreeMap::new();
    // Entries of one kind come in long rows, whose list is at hand.
    let mut open: Option<((u32, u32, u64), Vec<Start>)> = None;
    let mut add = |entry: Entry| {
        let key = (entry.local, entry.remote, entry.bytes);
        match &mut open {
            Some((kind, starts)) if *kind == key => starts.push((entry.from, entry.to)),
            _ => {
                let starts = groups.remove(&key).unwrap_or_default();
                if let Some((kind, starts)) = open.replace((key, starts)) {
                    groups.insert(kind, starts);
                }
                open.iter_mut().for_each(|(_, starts)| starts.push((entry.from, entry.to)));
            }
        }
    };
    let mut run: Option<Entry> = None;
    for entry in entries.filter(|entry| entry.bytes > 0) {
        match &mut run {
            Some(run)
                if (run.local, run.remote) == (entry.local, entry.remote)
                    && run.from + run.bytes == entry.from
                    && run.to + run.bytes == entry.to =>
            {
                run.bytes += entry.bytes;
            }
            _ => run.replace(entry).into_iter().for_each(&mut add),
        }
    }
    run.into_iter().for_each(&mut add);
    groups.extend(open);
    groups
}

/// Takes up to two loops out of the starts: what is left are those of the first iterations.
fn structure(starts: Vec<Start>) -> ([Dim; 2], Vec<Start>) {
    let (inner, starts) = take_loop(starts);
    let (outer, starts) = take_loop(starts);
    ([outer, inner], starts)
}

/// A loop that all of the starts are in, be it within each row of neighbours or from one row to the next.
fn take_loop(starts: Vec<Start>) -> (Dim, Vec<Start>) {
    let step = |from: &Start, to: &Start| Some((to.0.checked_sub(from.0)?, to.1.checked_sub(from.1)?));
    let dim =
        |count: usize, strides: Start| Dim { count: count as u64, local_stride: strides.0, remote_stride: strides.1 };
    let count = starts.len();
    // Rows of neighbours at one distance: the layers of a slot, slot by slot. Two are a row by chance.
    if let Some(first) = starts.get(..2).and_then(|pair| step(&pair[0], &pair[1])) {
        let in_step = |pair: &[Start]| step(&pair[0], &pair[1]) == Some(first);
        let row = 1 + starts.windows(2).take_while(|pair| in_step(pair)).count();
        if row > 2 && count.is_multiple_of(row) && starts.chunks(row).all(|row| row.windows(2).all(in_step)) {
            return (dim(row, first), starts.into_iter().step_by(row).collect());
        }
    }
    // Rows that repeat at one distance: the slots of a layer, layer by layer.
    let repeats = |period: &usize| {
        let by = step(&starts[0], &starts[*period]);
        by.is_some() && by == step(&starts[1], &starts[period + 1])
    };
    for period in divisors(count).into_iter().filter(repeats).take(PERIODS_TRIED) {
        let by = step(&starts[0], &starts[period]);
        if let Some(by) = by.filter(|_| starts.iter().zip(&starts[period..]).all(|(one, next)| step(one, next) == by)) {
            let rows = dim(count / period, by);
            return (rows, starts.into_iter().take(period).collect());
        }
    }
    (Dim::ONE, starts)
}

/// Starts as slots of a pool.
#[derive(Debug)]
struct Slots {
    base: Start,
    stride: Start,
    pairs: Vec<SlotPair>,
}

/// Numbers the starts in steps of the largest power of two that meets all of them; in several pools, if one would have too
/// many slots. A power of two, because dividing would take as long as all the rest.
fn slots(starts: &[Start]) -> Vec<Slots> {
    let bits = starts.iter().fold((0, 0), |bits, start| (bits.0 | start.0, bits.1 | start.1));
    // Without a bit, all in one place: any step will do.
    let shift = |bits: u64| if bits == 0 { 0 } else { bits.trailing_zeros() };
    let shift = (shift(bits.0), shift(bits.1));
    let stride = (1 << shift.0, 1 << shift.1);
    #[allow(clippy::cast_possible_truncation, reason = "the higher bits name the pool")]
    let pair = |start: &Start| SlotPair { local: (start.0 >> shift.0) as u32, remote: (start.1 >> shift.1) as u32 };
    let pool = |start: &Start| (start.0 >> shift.0 >> 32, start.1 >> shift.1 >> 32);
    if pool(&bits) == (0, 0) {
        return vec![Slots { base: (0, 0), stride, pairs: starts.iter().map(pair).collect() }];
    }
    let mut pools: BTreeMap<_, Vec<SlotPair>> = BTreeMap::new();
    for start in starts {
        pools.entry(pool(start)).or_default().push(pair(start));
    }
    let slots = |((local, remote), pairs): ((u64, u64), _)| {
        let base = (local << 32 << shift.0, remote << 32 << shift.1);
        Slots { base, stride, pairs }
    };
    pools.into_iter().map(slots).collect()
}

/// The divisors of `count` that are neither 1 nor itself, ascending.
fn divisors(count: usize) -> Vec<usize> {
    let small = (2..).take_while(|divisor| divisor * divisor <= count).filter(|divisor| count.is_multiple_of(*divisor));
    let small: Vec<usize> = small.collect();
    let large = small.iter().rev().map(|divisor| count / divisor);
    let mut all: Vec<usize> = small.iter().copied().chain(large).collect();
    all.dedup();
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
