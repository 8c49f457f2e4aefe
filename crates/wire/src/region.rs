//! Registered memory.
//!
//! # Safety
//!
//! A registration is undone once, when the last clone of its region is gone, and before the memory is. Transfers hold a
//! clone until they have completed.
#![allow(unsafe_code, reason = "registers memory with UCX")]

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use serde::{Deserialize, Serialize};
use ucx_sys::Status;

use crate::context::Context;
use crate::copy::Window;
use crate::cuda::card::DeviceCard;
use crate::cuda::driver::{CudaError, DeviceAddress};
use crate::cuda::gpu::Gpu;
use crate::cuda::memory::DeviceMemory;
use crate::error::RegionError;
use crate::memory::HostMemory;
use crate::share::ShareCard;

/// Registered memory, of the host or of a GPU. Cheap to clone; the registration is undone when the last clone is gone, and transfers in
/// flight hold one.
#[derive(Clone, Debug)]
pub struct Region {
    inner: Arc<Registration>,
}

/// What a peer needs to reach a region: a claim, until it has been imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionCard {
    /// First address in the owner's address space.
    pub base: u64,
    /// Length.
    pub bytes: u64,
    /// UCX's packed key.
    pub key: Vec<u8>,
    /// The process that registered it.
    pub(crate) owner: OwnerId,
    /// The owner's name for the region.
    pub(crate) id: RegionId,
    /// Where a peer on the same host finds the memory, if it can be mapped.
    pub(crate) share: Option<ShareCard>,
    /// Set for GPU memory, which has no key.
    pub(crate) device: Option<Box<DeviceCard>>,
}

impl RegionCard {
    /// The owner's name for the region.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Where the memory is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        if self.device.is_some() { MemoryKind::Cuda } else { MemoryKind::Host }
    }
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The host's.
    Host,
    /// A GPU's. Its addresses mean nothing on the host.
    Cuda,
}

/// The name of a registration in its process, by which its owner and its peers can speak of it. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RegionId(pub(crate) u64);

/// One life of a process: random, so that what is left of an earlier one on the same host is told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnerId(u64);

impl OwnerId {
    pub(crate) fn of_this_process() -> Self {
        static THIS: OnceLock<OwnerId> = OnceLock::new();
        *THIS.get_or_init(|| {
            let mut random = [0; 8];
            let flags = rustix::rand::GetRandomFlags::empty();
            if rustix::rand::getrandom(&mut random, flags) != Ok(random.len()) {
                // A kernel without a source of randomness: the process and its start are the next best.
                let started = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.subsec_nanos());
                random = (u64::from(std::process::id()) << 32 | u64::from(started)).to_ne_bytes();
            }
            Self(u64::from_ne_bytes(random))
        })
    }
}

impl RegionId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed)) // only uniqueness is asked of it
    }
}

/// A region that has been looked up by its name or not at all: what a context keeps of it.
#[derive(Debug)]
pub(crate) struct WeakRegion(Weak<Registration>);

impl WeakRegion {
    /// The region, unless its registration is being undone.
    pub(crate) fn upgrade(&self) -> Option<Region> {
        self.0.upgrade().map(|inner| Region { inner })
    }
}

/// A registration with the memory it names.
#[derive(Debug)]
struct Registration {
    context: Context,
    id: RegionId,
    memory: Memory, // after `Drop` has undone the registration
}

/// What is registered.
#[derive(Debug)]
enum Memory {
    Host {
        memory: HostMemory,
        raw: NonNull<ucx_sys::ucp_mem>,
        key: Vec<u8>,
    },
    /// UCX does not know of it: what moves is moved by kernels, straight or through host memory.
    Device(DeviceMemory),
}

// SAFETY: `raw` is used with the context's own lock (see `Context`), and handed to `ucp_put_nbx` of any worker of that context,
// which only reads it.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Region {
    pub(crate) fn register(context: &Context, memory: HostMemory) -> Result<Self, RegionError> {
        let failed =
            |source| RegionError::Register { base: memory.base().addr() as u64, bytes: memory.bytes() as u64, source };
        let params = ucx_sys::ucp_mem_map_params_t {
            field_mask: ucx_sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | ucx_sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | ucx_sys::UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
            address: memory.base(),
            length: memory.bytes(),
            memory_type: ucx_sys::UCS_MEMORY_TYPE_HOST,
            ..Default::default()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: `params` names a live range; `raw` receives the registration.
        let status = unsafe { context.ucx().ucp_mem_map(context.raw(), &raw const params, &raw mut raw) };
        let raw = match NonNull::new(raw) {
            Some(raw) if status == Status::OK => raw,
            _ => return Err(failed(status)),
        };
        let key = pack(context, raw).map_err(|status| {
            // SAFETY: `raw` was registered above and nothing uses it.
            let _ = unsafe { context.ucx().ucp_mem_unmap(context.raw(), raw.as_ptr()) };
            failed(status)
        })?;
        Ok(Self::enter(context, Memory::Host { memory, raw, key }))
    }

    pub(crate) fn of_device(context: &Context, memory: DeviceMemory) -> Self {
        Self::enter(context, Memory::Device(memory))
    }

    fn enter(context: &Context, memory: Memory) -> Self {
        let id = RegionId::next();
        let inner = Arc::new(Registration { context: context.clone(), id, memory });
        context.add_region(id, WeakRegion(Arc::downgrade(&inner)));
        Self { inner }
    }

    /// Undoes the registration now, if this is its last clone. Once it has returned, this process reads and writes the memory no
    /// more, nor does any peer that goes by the routes that look at registrations. What a peer has posted as runs may still be
    /// written: see [`Worker`](crate::Worker).
    ///
    /// # Errors
    ///
    /// The region, still registered: a transfer or another owner has a clone of it.
    pub fn unregister(self) -> Result<(), Self> {
        Arc::try_unwrap(self.inner).map(drop).map_err(|inner| Self { inner })
    }

    /// Its name in this process.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.inner.id
    }

    /// Where the memory is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        match &self.inner.memory {
            Memory::Host { .. } => MemoryKind::Host,
            Memory::Device(_) => MemoryKind::Cuda,
        }
    }

    /// First address: of the host, or of the GPU.
    #[must_use]
    pub fn base(&self) -> u64 {
        match &self.inner.memory {
            Memory::Host { memory, .. } => memory.base().addr() as u64,
            Memory::Device(memory) => memory.base(),
        }
    }

    /// Length, at least 1.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match &self.inner.memory {
            Memory::Host { memory, .. } => memory.bytes() as u64,
            Memory::Device(memory) => memory.bytes(),
        }
    }

    /// What a peer needs to write here.
    #[must_use]
    pub fn card(&self) -> RegionCard {
        let Registration { id, memory, .. } = &*self.inner;
        let (key, share, device) = match memory {
            Memory::Host { memory, key, .. } => (key.clone(), memory.share(), None),
            Memory::Device(memory) => (Vec::new(), None, Some(Box::new(memory.card()))),
        };
        let (base, bytes, owner) = (self.base(), self.bytes(), OwnerId::of_this_process());
        RegionCard { base, bytes, key, owner, id: *id, share, device }
    }

    /// Copies `from` into the region, `offset` bytes from its start. Does not wait for transfers: writing what one of them
    /// moves gives it old or new bytes.
    ///
    /// # Errors
    ///
    /// [`RegionError::Outside`]; nothing is written. [`RegionError::Cuda`]: what is there now is unknown.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), RegionError> {
        match &self.inner.memory {
            Memory::Host { memory, .. } => memory.write(offset, from),
            Memory::Device(memory) => memory.write(offset, from),
        }
    }

    /// Fills `to` from the region, `offset` bytes from its start. Does not wait for transfers.
    ///
    /// # Errors
    ///
    /// [`RegionError::Outside`]; `to` is unchanged. [`RegionError::Cuda`]: what is in `to` is unknown.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), RegionError> {
        match &self.inner.memory {
            Memory::Host { memory, .. } => memory.read(offset, to),
            Memory::Device(memory) => memory.read(offset, to),
        }
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }

    /// UCX's registration; null for GPU memory, which UCX is never told to read.
    pub(crate) fn raw(&self) -> ucx_sys::ucp_mem_h {
        match &self.inner.memory {
            Memory::Host { raw, .. } => raw.as_ptr(),
            Memory::Device(_) => ptr::null_mut(),
        }
    }

    /// The address by which the GPU reads and writes the memory. Host memory is locked the first time.
    pub(crate) fn device_address(&self, gpu: &Arc<Gpu>) -> Result<DeviceAddress, CudaError> {
        match &self.inner.memory {
            Memory::Host { memory, .. } => memory.pin(gpu),
            Memory::Device(memory) => Ok(memory.base()),
        }
    }

    pub(crate) fn contains(&self, offset: u64, bytes: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes())
    }

    /// The memory, for copies by the host. Empty for GPU memory: nothing is inside of it then.
    pub(crate) fn window(&self) -> Window<'_> {
        let (base, bytes) = match &self.inner.memory {
            Memory::Host { memory, .. } => {
                (NonNull::new(memory.base().cast()).expect("memory is not at address 0"), memory.bytes())
            }
            Memory::Device(_) => (NonNull::dangling(), 0),
        };
        // SAFETY: the memory stays mapped while the region lives.
        unsafe { Window::new(base, bytes) }
    }

    /// Address of byte `offset` of host memory. The caller keeps it inside the region.
    pub(crate) fn address(&self, offset: u64) -> *mut u8 {
        let offset = usize::try_from(offset).expect("inside a region, whose length is a usize");
        match &self.inner.memory {
            Memory::Host { memory, .. } => memory.base().cast::<u8>().wrapping_add(offset),
            Memory::Device(_) => ptr::null_mut(),
        }
    }
}

/// The registration's key as bytes.
fn pack(context: &Context, raw: NonNull<ucx_sys::ucp_mem>) -> Result<Vec<u8>, Status> {
    let (mut buffer, mut bytes) = (ptr::null_mut(), 0);
    // SAFETY: `raw` is a live registration of this context; UCX allocates the buffer and says its length.
    let status = unsafe { context.ucx().ucp_rkey_pack(context.raw(), raw.as_ptr(), &raw mut buffer, &raw mut bytes) };
    if status != Status::OK || buffer.is_null() {
        return Err(status);
    }
    // SAFETY: UCX filled `buffer` with `bytes` bytes, and it is released only below.
    let key = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), bytes) }.to_vec();
    // SAFETY: `buffer` came from `ucp_rkey_pack` and is released only here.
    unsafe { context.ucx().ucp_rkey_buffer_release(buffer) };
    Ok(key)
}

impl Drop for Registration {
    fn drop(&mut self) {
        match &self.memory {
            Memory::Host { memory, .. } => memory.withdraw(),
            Memory::Device(memory) => memory.withdraw(),
        }
        self.context.remove_region(self.id);
        let Memory::Host { raw, .. } = &self.memory else { return };
        // SAFETY: `raw` came from `ucp_mem_map` with this context and is released only here; a transfer that uses it holds
        // a clone of the region.
        let status = unsafe { self.context.ucx().ucp_mem_unmap(self.context.raw(), raw.as_ptr()) };
        if status != Status::OK {
            tracing::warn!(%status, "UCX did not undo a registration");
        }
    }
}
