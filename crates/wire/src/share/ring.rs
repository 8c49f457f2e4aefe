//! A memory file as the memory of a ring of frames.
#![allow(unsafe_code, reason = "copies through a mapping")]

use crate::copy::{self, Stores};
use crate::frames::ring::{Memory, Words};
use crate::share::{Mapped, Share};

/// Somebody's mapping of a file.
pub(crate) trait Mapping {
    fn mapped(&self) -> &Mapped;
}

impl Mapping for Mapped {
    fn mapped(&self) -> &Mapped {
        self
    }
}

impl Mapping for Share {
    fn mapped(&self) -> &Mapped {
        &self.mapped
    }
}

/// A file as the memory of a ring of frames: its words, then the bytes.
#[derive(Debug)]
pub(crate) struct RingMemory<M> {
    mapping: M,
    capacity: u64,
}

impl<M: Mapping> RingMemory<M> {
    /// `None` if the file is too small for any.
    pub(crate) fn new(mapping: M) -> Option<Self> {
        let bytes = mapping.mapped().bytes.checked_sub(size_of::<Words>())?;
        let capacity = bytes as u64 / 8 * 8;
        (capacity > 0).then_some(Self { mapping, capacity })
    }

    pub(crate) fn withdraw(&self) {
        self.mapping.mapped().withdraw();
    }

    pub(crate) fn is_offered(&self) -> bool {
        self.mapping.mapped().is_offered()
    }

    /// The address of byte `start` of the records, with `bytes` bytes behind it.
    fn at(&self, start: u64, bytes: usize) -> *mut u8 {
        let end = start.checked_add(bytes as u64);
        assert!(end.is_some_and(|end| end <= self.capacity), "a position is taken modulo the capacity");
        let start = usize::try_from(start).expect("inside the mapping, whose length is a usize");
        self.mapping.mapped().base.as_ptr().wrapping_add(size_of::<Words>() + start)
    }
}

impl RingMemory<Share> {
    /// Keeps the mapping: nobody can open the file any more.
    pub(crate) fn close_file(self) -> RingMemory<Mapped> {
        RingMemory { mapping: self.mapping.mapped, capacity: self.capacity }
    }
}

impl<M: Mapping> Memory for RingMemory<M> {
    fn words(&self) -> &Words {
        let words = self.mapping.mapped().base.cast::<Words>();
        // SAFETY: the mapping begins a page, holds at least the words (`new`), and lives as long as `self`; they are atomics, and
        // accessed as such in every process.
        unsafe { words.as_ref() }
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn write(&self, start: u64, from: &[u8]) {
        let to = self.at(start, from.len());
        // SAFETY: `at` has checked the range, which is mapped; `from` is a live reference, and not into the mapping, to which
        // none exists.
        unsafe { copy::copy(from.as_ptr(), to, from.len(), Stores::Cached) }
    }

    fn read(&self, start: u64, to: &mut [u8]) {
        let from = self.at(start, to.len());
        // SAFETY: as in `write`, the other way round.
        unsafe { copy::copy(from, to.as_mut_ptr(), to.len(), Stores::Cached) }
    }
}
