//! `kernels/move.cu`, unit by unit.
//!
//! # Safety
//!
//! Whoever launches the kernel promises that all that the job names can be reached; here that it is memory of the host's.
#![allow(unsafe_code, reason = "follows the addresses of a job")]
#![allow(clippy::cast_possible_truncation, reason = "as the kernel computes")]

use std::mem::size_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::memory::pointer;

const UNIT_BYTES: u64 = 512;
const INLINE_BYTES: usize = 768;
const CHUNKS: usize = 8;

const GATHER: u32 = 1;
const SCATTER: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
struct Divisor {
    value: u32,
    multiplier: u32,
    shift: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    from: u64,
    to: u64,
    from_slot: u64,
    to_slot: u64,
    from_outer: u64,
    to_outer: u64,
    from_inner: u64,
    to_inner: u64,
    run_words: Divisor,
    inner: Divisor,
    words: u32,
    width_log2: u32,
    unused: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Set {
    pair_units: Divisor,
    first_unit: u32,
    first_entry: u32,
    entries: u32,
    first_pair: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Pair {
    from: u32,
    to: u32,
}

/// The parameters of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Job {
    entries: u64,
    starts: u64,
    sets: u64,
    pairs: u64,
    slab: u64,
    set_count: u32,
    first: u32,
    count: u32,
    mode: u32,
    progress: u64,
    done: u64,
    number: u64,
    tile: u32,
    entry_count: u32,
    chunk_shift: u32,
    chunks: [u32; CHUNKS],
    unused: u32,
    inline: [u8; INLINE_BYTES],
}

const _: () = assert!(size_of::<Job>() == 128 + INLINE_BYTES);

impl Divisor {
    fn divide(self, number: u32) -> u32 {
        match self.multiplier {
            0 => number,
            multiplier => ((u64::from(number) * u64::from(multiplier)) >> 32) as u32 >> self.shift,
        }
    }
}

/// Element `index` of an array.
///
/// # Safety
///
/// There is one.
unsafe fn element<T: Copy>(base: u64, index: u32) -> T {
    let address = base + u64::from(index) * size_of::<T>() as u64;
    // SAFETY: the caller's promise.
    unsafe { pointer(address).cast::<T>().read_unaligned() }
}

/// A word was to be read or written at no multiple of its width.
pub(crate) struct Misaligned;

/// Runs the kernel.
///
/// # Safety
///
/// As whoever launched it promised.
pub(crate) unsafe fn run(job: &Job) -> Result<(), Misaligned> {
    let here = job.inline.as_ptr().expose_provenance() as u64;
    let (sets, pairs) = if job.sets == 0 { (here, here + job.pairs) } else { (job.sets, job.pairs) };
    let stop = pointer(job.progress + 8).cast::<u32>();
    let mut set_index = 0;
    for nth in 0..job.count {
        // SAFETY: the third number of `progress`, which is written as a whole.
        let stopped = unsafe { AtomicU32::from_ptr(stop) }.load(Ordering::Relaxed);
        if stopped == job.number as u32 {
            break;
        }
        let unit = job.first + nth;
        let set = loop {
            // SAFETY: a set of the job.
            let set: Set = unsafe { element(sets, set_index) };
            if set_index + 1 == job.set_count {
                break set;
            }
            // SAFETY: as above.
            let next: Set = unsafe { element(sets, set_index + 1) };
            if next.first_unit > unit {
                break set;
            }
            set_index += 1;
        };
        let in_set = unit - set.first_unit;
        let pair_index = set.pair_units.divide(in_set);
        let in_pair = in_set - pair_index * set.pair_units.value;
        let mut low = set.first_entry;
        let mut high = low + set.entries;
        while high - low > 1 {
            let middle = u32::midpoint(low, high);
            // SAFETY: one of the set's entries.
            if unsafe { element::<u32>(job.starts, middle) } <= in_pair { low = middle } else { high = middle }
        }
        // SAFETY: as above.
        let start: u32 = unsafe { element(job.starts, low) };
        // SAFETY: as above.
        let entry: Entry = unsafe { element(job.entries, low) };
        // SAFETY: one of the set's pairs.
        let pair: Pair = unsafe { element(pairs, set.first_pair + pair_index) };
        let chunk = job.chunks[(nth >> job.chunk_shift) as usize];
        let in_chunk = nth & ((1 << job.chunk_shift) - 1);
        let slab = job.slab + (u64::from(chunk) << job.chunk_shift) * UNIT_BYTES + u64::from(in_chunk) * UNIT_BYTES;
        // SAFETY: the caller's promise.
        unsafe { copy(job.mode, &entry, pair, slab, in_pair - start) }?;
    }
    let done = pointer(job.done).cast::<u64>();
    // SAFETY: a number of the launcher's, which it reads as a whole.
    unsafe { AtomicU64::from_ptr(done) }.store(job.number, Ordering::Release); // pairs with the launcher's load
    Ok(())
}

/// Copies one unit of an entry, run by run.
///
/// # Safety
///
/// As [`run`].
unsafe fn copy(mode: u32, entry: &Entry, pair: Pair, slab: u64, in_entry: u32) -> Result<(), Misaligned> {
    let from = entry.from.wrapping_add(u64::from(pair.from) * entry.from_slot);
    let to = entry.to.wrapping_add(u64::from(pair.to) * entry.to_slot);
    let unit_words = UNIT_BYTES as u32 >> entry.width_log2;
    let first = in_entry * unit_words;
    let count = unit_words.min(entry.words - first);
    let mut word = 0;
    while word < count {
        let run = entry.run_words.divide(first + word);
        let in_run = first + word - run * entry.run_words.value;
        let words = (entry.run_words.value - in_run).min(count - word);
        let outer = entry.inner.divide(run);
        let inner = run - outer * entry.inner.value;
        let place = |base: u64, of_outer: u64, of_inner: u64| {
            let strides = u64::from(outer) * of_outer + u64::from(inner) * of_inner;
            base.wrapping_add(strides).wrapping_add(u64::from(in_run) << entry.width_log2)
        };
        let in_slab = slab + (u64::from(word) << entry.width_log2);
        let source = if mode == SCATTER { in_slab } else { place(from, entry.from_outer, entry.from_inner) };
        let target = if mode == GATHER { in_slab } else { place(to, entry.to_outer, entry.to_inner) };
        if !(source | target).is_multiple_of(1 << entry.width_log2) {
            return Err(Misaligned);
        }
        let (source, target) = (pointer(source).cast::<u8>(), pointer(target).cast::<u8>());
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(source, target, (words as usize) << entry.width_log2) };
        word += words;
    }
    Ok(())
}
