//! Host memory that a region may name: mapped by this crate, or lent by the caller.
//!
//! # Safety
//!
//! The memory is reached by raw pointer only, and stays mapped while its `HostMemory` lives. Never a reference: a peer
//! may write it at any time.
#![allow(unsafe_code, reason = "maps memory and copies through raw pointers")]

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use parking_lot::RwLock;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::copy::{self, Stores};
use crate::error::RegionError;
use crate::options::Pages;
use crate::share::{Share, ShareCard};

/// A live range of host memory.
#[derive(Debug)]
pub(crate) struct HostMemory {
    base: NonNull<u8>,
    bytes: usize,
    owner: Owner,
    /// Orders this process's own copies. What a peer writes is ordered by the engine's messages, not by this.
    copies: RwLock<()>,
}

/// Who unmaps the memory.
#[derive(Debug)]
enum Owner {
    /// The memory file.
    Share(Share),
    /// `HostMemory`, on drop.
    Mapping,
    /// The caller; held, not used.
    Caller { _owner: Arc<dyn Any + Send + Sync> },
}

// SAFETY: `base` is an address; every access through it is a bounds-checked raw copy under `copies`.
unsafe impl Send for HostMemory {}
// SAFETY: as above: two threads that copy into the same bytes exclude each other through `copies`.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Maps `bytes` of zeroed memory that peers on this host can map too, or, where the system has no memory files, that
    /// they cannot. Pages are taken when first touched.
    pub(crate) fn allocate(bytes: u64, pages: Pages) -> Result<Self, RegionError> {
        let length = length(bytes)?;
        if let Some(share) = Share::create(length, pages) {
            return Ok(Self { base: share.base(), bytes: length, owner: Owner::Share(share), copies: RwLock::new(()) });
        }
        if pages == Pages::Huge {
            return Err(RegionError::HugePages { bytes });
        }
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice replaces nothing.
        let mapping =
            unsafe { mmap_anonymous(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let base = mapping.ok().and_then(|base| NonNull::new(base.cast())).ok_or(RegionError::Allocation { bytes })?;
        Ok(Self { base, bytes: length, owner: Owner::Mapping, copies: RwLock::new(()) })
    }

    /// Names memory of the caller's.
    ///
    /// # Safety
    ///
    /// As [`Context::register`](crate::Context::register).
    pub(crate) unsafe fn borrow(
        base: NonNull<u8>,
        bytes: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, RegionError> {
        let length = length(bytes)?;
        if base.addr().get().checked_add(length).is_none() {
            return Err(RegionError::Allocation { bytes });
        }
        Ok(Self { base, bytes: length, owner: Owner::Caller { _owner: owner }, copies: RwLock::new(()) })
    }

    /// How peers on this host find the memory, if they can.
    pub(crate) fn share(&self) -> Option<ShareCard> {
        match &self.owner {
            Owner::Share(share) => share.card(),
            Owner::Mapping | Owner::Caller { .. } => None,
        }
    }

    /// Tells peers that map the memory that it is no longer registered.
    pub(crate) fn withdraw(&self) {
        if let Owner::Share(share) = &self.owner {
            share.withdraw();
        }
    }

    pub(crate) fn base(&self) -> *mut c_void {
        self.base.as_ptr().cast()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of byte `offset`, with `length` bytes behind it inside the range.
    fn at(&self, offset: u64, length: usize) -> Result<*mut u8, RegionError> {
        let outside = RegionError::Outside { offset, bytes: length as u64, region_bytes: self.bytes as u64 };
        match usize::try_from(offset) {
            Ok(start) if start.checked_add(length).is_some_and(|end| end <= self.bytes) => {
                // SAFETY: `start` is at most `self.bytes`, and the range is one allocation.
                Ok(unsafe { self.base.as_ptr().add(start) })
            }
            _ => Err(outside),
        }
    }

    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> Result<(), RegionError> {
        let to = self.at(offset, from.len())?;
        let _alone = self.copies.write();
        // SAFETY: `at` checked the range; `from` is a live reference, so nobody may have registered its memory.
        unsafe { copy::copy(from.as_ptr(), to, from.len(), Stores::Cached) };
        Ok(())
    }

    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), RegionError> {
        let from = self.at(offset, to.len())?;
        let _no_writer = self.copies.read();
        // SAFETY: as in `write`, the other way round.
        unsafe { copy::copy(from, to.as_mut_ptr(), to.len(), Stores::Cached) };
        Ok(())
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Owner::Mapping = self.owner {
            // SAFETY: `base` and `bytes` are the mapping made in `allocate`; the registration that named it is gone, because
            // `Region` unregisters before it drops its memory.
            let unmapped = unsafe { munmap(self.base(), self.bytes) };
            debug_assert!(unmapped.is_ok(), "a mapping of our own can be unmapped");
        }
    }
}

fn length(bytes: u64) -> Result<usize, RegionError> {
    match usize::try_from(bytes) {
        Ok(0) => Err(RegionError::Empty),
        Ok(length) if isize::try_from(length).is_ok() => Ok(length),
        _ => Err(RegionError::Allocation { bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_bounded() {
        let memory = HostMemory::allocate(10, Pages::Normal).unwrap();
        memory.write(2, b"abc").unwrap();
        let mut bytes = [1; 10];
        memory.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0\0abc\0\0\0\0\0");
        assert!(matches!(memory.write(8, b"abc"), Err(RegionError::Outside { offset: 8, bytes: 3, region_bytes: 10 })));
        assert!(matches!(memory.read(u64::MAX, &mut bytes), Err(RegionError::Outside { .. })));
        memory.write(10, b"").unwrap();
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(matches!(HostMemory::allocate(0, Pages::Normal), Err(RegionError::Empty)));
        assert!(matches!(HostMemory::allocate(u64::MAX, Pages::Normal), Err(RegionError::Allocation { .. })));
        assert!(matches!(HostMemory::allocate(1 << 60, Pages::Normal), Err(RegionError::Allocation { .. })));
    }

    #[test]
    fn borrowed_memory_keeps_its_owner() {
        let mut bytes = vec![0u8; 16].into_boxed_slice();
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap();
        let owner = Arc::new(());
        // SAFETY: `bytes` outlives `memory` and is read only after it is gone.
        let memory = unsafe { HostMemory::borrow(base, 16, owner.clone()) }.unwrap();
        memory.write(0, b"x").unwrap();
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(memory);
        assert_eq!((Arc::strong_count(&owner), bytes[0]), (1, b'x'));
    }
}
