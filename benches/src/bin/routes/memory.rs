//! Memory that the library did not allocate, and plain copies of it.

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_wire::{Context, Region};

use crate::ask::Error;

/// Anonymous private memory, as a serving framework allocates it.
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length; accesses go through raw copies.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(bytes: u64) -> Result<Arc<Self>, Error> {
        use rustix::mm::{MapFlags, ProtFlags};
        let bytes = usize::try_from(bytes)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping replaces nothing.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }?;
        let base = NonNull::new(base.cast()).ok_or("mapped at address 0")?;
        Ok(Arc::new(Self { base, bytes }))
    }

    pub(crate) fn register(self: &Arc<Self>, context: &Context) -> Result<Region, Error> {
        // SAFETY: the mapping lives as long as the owner that goes with it, and nobody has a reference into it.
        Ok(unsafe { context.register(self.base, self.bytes as u64, self.clone()) }?)
    }

    pub(crate) fn base(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// Copies pieces of `size` from `source` to here, one by one, with the copy that every program has.
    pub(crate) fn copy_pieces(&self, source: &Region, size: u64, from: &[u32], to: &[u32]) {
        let bytes = usize::try_from(size).expect("a piece fits in memory");
        let source = std::ptr::with_exposed_provenance::<u8>(usize::try_from(source.base()).expect("an address"));
        for (from, to) in from.iter().zip(to) {
            let (from, to) = (source.wrapping_add(*from as usize * bytes), *to as usize * bytes);
            assert!(to + bytes <= self.bytes, "blocks are inside of the pool");
            // SAFETY: both pools have room for all blocks, which the caller has numbered from it.
            unsafe { std::ptr::copy_nonoverlapping(from, self.base.as_ptr().wrapping_add(to), bytes) };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` and is undone only here.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A region of `context` over the memory of `region`, which was registered with another.
pub(crate) fn register_again(context: &Context, region: &Region) -> Result<Region, Error> {
    let base = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(region.base())?);
    let base = NonNull::new(base).ok_or("a region at address 0")?;
    // SAFETY: the memory lives as long as `region`, which is the owner here.
    Ok(unsafe { context.register(base, region.bytes(), Arc::new(region.clone())) }?)
}

/// Writes pieces into another process by one system call for 1024 of them.
pub(crate) fn write_pieces(
    process: i32,
    source: &Region,
    target: u64,
    size: u64,
    from: &[u32],
    to: &[u32],
) -> Result<(), Error> {
    const BATCH: usize = 1024;
    let length = usize::try_from(size)?;
    let vector = |base: u64, blocks: &[u32]| -> Vec<libc::iovec> {
        let address = |block: &u32| usize::try_from(base + u64::from(*block) * size).expect("an address");
        let entry =
            |block| libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address(block)), iov_len: length };
        blocks.iter().map(entry).collect()
    };
    for (from, to) in from.chunks(BATCH).zip(to.chunks(BATCH)) {
        let (local, remote) = (vector(source.base(), from), vector(target, to));
        let (count, expected) = (from.len() as u64, from.len() * length);
        // SAFETY: both lists are live and as long as said; the local ranges are inside of the pool.
        let written = unsafe { libc::process_vm_writev(process, local.as_ptr(), count, remote.as_ptr(), count, 0) };
        if usize::try_from(written) != Ok(expected) {
            return Err(format!("process_vm_writev wrote {written} of {expected} B").into());
        }
    }
    Ok(())
}
