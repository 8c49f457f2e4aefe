//! What the driver knows of memory: allocations that can be shared, where they are mapped, and ranges that it was told of.
//!
//! # Safety
//!
//! Mappings replace ranges that were reserved here, and nothing else.
#![allow(unsafe_code, reason = "maps memory files")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

/// Bytes that a GPU is said to have.
pub(crate) const TOTAL_BYTES: usize = 64 << 30;

/// What memory can be mapped and exported by.
pub(crate) const GRANULARITY: usize = 2 << 20;

/// An allocation of virtual memory management.
#[derive(Clone, Debug)]
pub(crate) struct Allocation {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) bytes: usize,
    pub(crate) device: i32,
    pub(crate) exportable: bool,
}

/// A range of addresses of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Range {
    pub(crate) bytes: usize,
    pub(crate) device: i32,
    /// The allocation that is mapped there, unless the range has memory of its own.
    pub(crate) allocation: Option<Allocation>,
}

#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) handles: BTreeMap<u64, Allocation>,
    next_handle: u64,
    /// By their first address.
    pub(crate) ranges: BTreeMap<u64, Range>,
    /// Host memory that is locked, by its first address.
    pub(crate) locked: BTreeMap<u64, usize>,
}

static MEMORY: Mutex<Option<Memory>> = Mutex::new(None);

pub(crate) fn with<T>(work: impl FnOnce(&mut Memory) -> T) -> T {
    let mut memory: MutexGuard<'_, Option<Memory>> = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    work(memory.get_or_insert_default())
}

fn containing<T>(ranges: &BTreeMap<u64, T>, address: u64, bytes: impl Fn(&T) -> usize) -> Option<(u64, &T)> {
    let (base, range) = ranges.range(..=address).next_back()?;
    (address - base < bytes(range) as u64).then_some((*base, range))
}

impl Memory {
    pub(crate) fn range_of(&self, address: u64) -> Option<(u64, &Range)> {
        containing(&self.ranges, address, |range| range.bytes)
    }

    pub(crate) fn is_locked(&self, address: u64) -> bool {
        containing(&self.locked, address, |bytes| *bytes).is_some()
    }

    pub(crate) fn add(&mut self, allocation: Allocation) -> u64 {
        self.next_handle += 1;
        self.handles.insert(self.next_handle, allocation);
        self.next_handle
    }

    pub(crate) fn used(&self, device: i32) -> usize {
        self.ranges.values().filter(|range| range.device == device).map(|range| range.bytes).sum()
    }
}

/// An allocation that no range has yet.
pub(crate) fn create(bytes: usize, device: i32, exportable: bool) -> Option<Allocation> {
    let file = rustix::fs::memfd_create("fake-cuda", MemfdFlags::CLOEXEC).ok()?;
    rustix::fs::ftruncate(&file, bytes as u64).ok()?;
    Some(Allocation { file: Arc::new(file), bytes, device, exportable })
}

/// Addresses behind which there is nothing.
pub(crate) fn reserve(bytes: usize) -> Option<u64> {
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
    let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE) };
    base.ok().map(|base| base.expose_provenance() as u64)
}

/// The address as the host has it.
pub(crate) fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}

/// Puts an allocation where addresses are reserved. Nobody can touch it yet.
pub(crate) fn map(address: u64, allocation: &Allocation, bytes: usize) -> bool {
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the caller of the driver has reserved the range.
    unsafe { rustix::mm::mmap(pointer(address), bytes, ProtFlags::empty(), flags, &*allocation.file, 0) }.is_ok()
}

pub(crate) fn give_access(address: u64, bytes: usize) -> bool {
    // SAFETY: the range is one that was mapped before.
    unsafe { rustix::mm::mprotect(pointer(address), bytes, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok()
}

pub(crate) fn unmap(address: u64, bytes: usize) -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: the range is one that was mapped before; it stays reserved.
    unsafe { rustix::mm::mmap_anonymous(pointer(address), bytes, ProtFlags::empty(), flags) }.is_ok()
}

pub(crate) fn release(address: u64, bytes: usize) {
    // SAFETY: the range was reserved here, and its owner gives it back.
    let _ = unsafe { rustix::mm::munmap(pointer(address), bytes) };
}

/// Memory of its own, zeroed.
pub(crate) fn allocate(bytes: usize) -> Option<u64> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: as in `reserve`.
    let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
    base.ok().map(|base| base.expose_provenance() as u64)
}
