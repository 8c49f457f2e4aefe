//! Registered memory.
//!
//! # Safety
//!
//! The contract of the crate: memory stays until it is released.
#![allow(unsafe_code, reason = "names memory of C's")]

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvferry_wire::{Context, RegionError};

use crate::bytes::array;
use crate::own::Own;
use crate::status::{Failure, Status, guard, handle};

/// Registered memory. Freed by kvf_region_free; what still uses it keeps it registered.
pub struct Region {
    region: Own<kvferry_wire::Region>,
}

impl Region {
    pub(crate) fn new(region: kvferry_wire::Region) -> Self {
        Self { region: Own::new(region) }
    }

    /// The region, in its own process.
    pub(crate) fn get(&self) -> Result<&kvferry_wire::Region, Failure> {
        self.region.get()
    }
}

/// Says that registered memory is not used any more, neither by this process nor for a request of any other's. Called once, by
/// any thread, with the context that was given. It must not call the library, and not take long. Not called if the memory was not
/// registered: then it is the caller's still; nor for memory that a peer may still write when the agent is freed: see
/// kvf_agent_free.
pub type Released = Option<extern "C" fn(context: *mut c_void)>;

/// Calls `Released` when it is dropped, if it has become the owner.
struct Owner {
    released: Released,
    context: *mut c_void,
    is_owner: AtomicBool,
}

// SAFETY: the context is C's, and is only handed back; `Released` is documented to be called by any thread.
unsafe impl Send for Owner {}
// SAFETY: nothing can be done with a shared one.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(released) = self.released.filter(|_| *self.is_owner.get_mut()) {
            released(self.context);
        }
    }
}

/// Registers memory of C's: of the host, or of the context's GPU. `released` is called for memory that was registered, and for no
/// other.
///
/// # Safety
///
/// The memory stays, readable and writable, until `released` is called.
pub(crate) unsafe fn register(
    context: &Context,
    (base, bytes, on_gpu): (u64, u64, bool),
    (released, of): (Released, *mut c_void),
) -> Result<kvferry_wire::Region, Failure> {
    let owner = Arc::new(Owner { released, context: of, is_owner: AtomicBool::new(false) });
    let held: Arc<dyn Any + Send + Sync> = owner.clone();
    let region = if on_gpu {
        // SAFETY: the caller's promise. `held` says that the memory is released when it is dropped, which is after the
        // registration.
        unsafe { context.register_device(base, bytes, held) }?
    } else {
        let address = usize::try_from(base).map(std::ptr::with_exposed_provenance_mut).unwrap_or(std::ptr::null_mut());
        let base = NonNull::new(address).ok_or_else(|| Failure::argument("no memory: NULL"))?;
        // SAFETY: as above. No references to the memory exist: what C reads and writes it orders after transfers.
        unsafe { context.register(base, bytes, held) }?
    };
    owner.is_owner.store(true, Ordering::Relaxed); // `Arc` orders it before the drop
    Ok(region)
}

/// First address, of the host or of the GPU. 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_region_base(region: Option<&Region>) -> u64 {
    region.and_then(|region| region.get().ok()).map_or(0, kvferry_wire::Region::base)
}

/// Length in bytes. 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_region_bytes(region: Option<&Region>) -> u64 {
    region.and_then(|region| region.get().ok()).map_or(0, kvferry_wire::Region::bytes)
}

/// Copies `length` bytes out of the region, from `offset` on, of the host or of the GPU. Does not wait for transfers.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_region_read(region: Option<&Region>, offset: u64, to: *mut u8, length: usize) -> Status {
    guard(|| {
        let region = handle(region, "region")?.get()?;
        if length == 0 {
            return Ok(());
        }
        let (bytes, region_bytes) = (length as u64, region.bytes());
        if bytes > region_bytes {
            // Before anything is written: it is no length of anything.
            return Err(RegionError::Outside { offset, bytes, region_bytes }.into());
        }
        if to.is_null() {
            return Err(Failure::argument("no place to read to: NULL"));
        }
        // SAFETY: `length` writable bytes by the contract. They need not have been written before.
        unsafe { to.write_bytes(0, length) };
        // SAFETY: as above; written in the line above, and used by nobody else during the call.
        let to = unsafe { std::slice::from_raw_parts_mut(to, length) };
        Ok(region.read(offset, to)?)
    })
}

/// Copies `length` bytes into the region, at `offset`. Does not wait for transfers.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_region_write(
    region: Option<&Region>,
    offset: u64,
    from: *const u8,
    length: usize,
) -> Status {
    guard(|| {
        // SAFETY: `length` bytes by the contract.
        let from = unsafe { array(from, length) }?;
        Ok(handle(region, "region")?.get()?.write(offset, from)?)
    })
}

/// Frees a handle. The registration is undone when nothing uses it any more.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_region_free(region: Option<Box<Region>>) {
    drop(region);
}
