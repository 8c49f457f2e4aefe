//! GPU memory that a region may name: allocated by this crate so that peers can map it, or lent by the caller.
//!
//! What this crate allocates is virtual memory management's: an allocation that is exported as a file descriptor and
//! outlives its owner where a peer has imported it. Memory of `cudaMalloc` has only CUDA IPC, which is deadly: measured on
//! two H200s, 200 ms after the owner was killed the next kernel of the process that had mapped it failed, and its context was
//! lost. Hence such memory is never mapped by a peer; it is reached through a slab.
//!
//! # Safety
//!
//! The addresses are the device's. They go to the driver and to kernels only, within bounds that are checked here.
#![allow(unsafe_code, reason = "calls the driver")]

use std::any::Any;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::cuda::card::DeviceCard;
use crate::cuda::driver::{Access, AllocationHandle, CudaError, DeviceAddress, constant};
use crate::cuda::export::{self, Export};
use crate::cuda::gpu::Gpu;
use crate::error::RegionError;

/// A live range of GPU memory.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    gpu: Arc<Gpu>,
    base: DeviceAddress,
    bytes: u64,
    owner: Owner,
}

/// Who frees the memory.
#[derive(Debug)]
enum Owner {
    /// The mapping and, unless the system refused it, what peers are given.
    Mapping { _mapping: Mapping, export: Option<Export> },
    /// The caller; held, not used.
    Caller { _owner: Arc<dyn Any + Send + Sync> },
}

impl DeviceMemory {
    /// Allocates `bytes` of zeroed GPU memory that peers on this host can map.
    pub(crate) fn allocate(gpu: &Arc<Gpu>, bytes: u64) -> Result<Self, RegionError> {
        let no_memory = RegionError::Allocation { bytes };
        let length = usize::try_from(bytes).ok().filter(|length| *length > 0);
        let Some(length) = length else { return Err(if bytes == 0 { RegionError::Empty } else { no_memory }) };
        let whole = length.checked_next_multiple_of(gpu.granularity).ok_or(no_memory)?;
        let entered = gpu.enter()?;
        let mut handle = 0;
        let properties = gpu.allocation_properties();
        // SAFETY: `properties` is complete; `handle` receives the allocation.
        unsafe { gpu.driver.memory_create(&raw mut handle, whole, &raw const properties, 0) }?;
        let handle = Handle { gpu: gpu.clone(), handle };
        let mapping = Mapping::new(gpu, &handle, whole)?;
        let file = handle.export()?;
        drop((handle, entered)); // the mapping and the descriptor keep the allocation
        let base = mapping.base;
        // SAFETY: the range was mapped above, for this device to write.
        gpu.wait_for(|driver, stream| unsafe { driver.fill(base, 0, length, stream) })?;
        let export = export::offer(file, whole as u64);
        Ok(Self { gpu: gpu.clone(), base, bytes, owner: Owner::Mapping { _mapping: mapping, export } })
    }

    /// Names memory of the caller's.
    ///
    /// # Safety
    ///
    /// As [`Context::register_device`](crate::Context::register_device).
    pub(crate) unsafe fn borrow(
        gpu: &Arc<Gpu>,
        base: DeviceAddress,
        bytes: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, RegionError> {
        if bytes == 0 {
            return Err(RegionError::Empty);
        }
        let Some(end) = base.checked_add(bytes) else { return Err(RegionError::Allocation { bytes }) };
        let entered = gpu.enter()?;
        // Both ends, since the two could belong to different allocations: what lies between is the caller's promise.
        for address in [base, end - 1] {
            let (mut kind, mut device) = (0u32, -1i32);
            let kind_to = (&raw mut kind).cast();
            // SAFETY: a number of 32 bits is what the attribute is.
            unsafe { gpu.driver.pointer_attribute(kind_to, constant::POINTER_MEMORY_KIND, address) }?;
            let device_to = (&raw mut device).cast();
            // SAFETY: as above.
            unsafe { gpu.driver.pointer_attribute(device_to, constant::POINTER_DEVICE, address) }?;
            if kind != constant::MEMORY_DEVICE || device != gpu.ordinal() {
                return Err(RegionError::NotOfDevice { base, bytes, device: gpu.options.device });
            }
        }
        drop(entered);
        Ok(Self { gpu: gpu.clone(), base, bytes, owner: Owner::Caller { _owner: owner } })
    }

    pub(crate) fn base(&self) -> DeviceAddress {
        self.base
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How peers reach the memory.
    pub(crate) fn card(&self) -> DeviceCard {
        let export = match &self.owner {
            Owner::Mapping { export, .. } => export.as_ref().and_then(Export::card),
            Owner::Caller { .. } => None,
        };
        DeviceCard { gpu: self.gpu.uuid, export }
    }

    /// Tells peers that map the memory that it is no longer registered.
    pub(crate) fn withdraw(&self) {
        if let Owner::Mapping { export: Some(export), .. } = &self.owner {
            export.withdraw();
        }
    }

    fn at(&self, offset: u64, bytes: usize) -> Result<DeviceAddress, RegionError> {
        let outside = RegionError::Outside { offset, bytes: bytes as u64, region_bytes: self.bytes };
        let inside = offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes);
        if inside { Ok(self.base + offset) } else { Err(outside) }
    }

    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> Result<(), RegionError> {
        let to = self.at(offset, from.len())?;
        // SAFETY: `at` checked the range; `from` lives until the copy has ended, which is waited for.
        let copy = self
            .gpu
            .wait_for(|driver, stream| unsafe { driver.copy_to_device(to, from.as_ptr().cast(), from.len(), stream) });
        Ok(copy?)
    }

    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), RegionError> {
        let from = self.at(offset, to.len())?;
        // SAFETY: as in `write`, the other way round.
        let copy = self
            .gpu
            .wait_for(|driver, stream| unsafe { driver.copy_to_host(to.as_mut_ptr().cast(), from, to.len(), stream) });
        Ok(copy?)
    }
}

/// An allocation, whatever maps it.
#[derive(Debug)]
pub(crate) struct Handle {
    gpu: Arc<Gpu>,
    handle: AllocationHandle,
}

impl Handle {
    /// Takes over what a peer has exported.
    pub(crate) fn import(gpu: &Arc<Gpu>, file: &OwnedFd) -> Result<Self, CudaError> {
        use std::os::fd::AsRawFd;
        let _entered = gpu.enter()?;
        let mut handle = 0;
        // The descriptor itself is passed in place of the pointer, sign-extended.
        let descriptor = std::ptr::without_provenance_mut(usize::try_from(file.as_raw_fd()).unwrap_or(usize::MAX));
        // SAFETY: the driver checks what the descriptor is and does not keep it.
        unsafe { gpu.driver.memory_import(&raw mut handle, descriptor, constant::HANDLE_POSIX) }?;
        Ok(Self { gpu: gpu.clone(), handle })
    }

    fn export(&self) -> Result<OwnedFd, CudaError> {
        let mut descriptor: i32 = -1;
        let to = (&raw mut descriptor).cast();
        // SAFETY: the handle is live; `descriptor` receives a file descriptor, as its kind says.
        unsafe { self.gpu.driver.memory_export(to, self.handle, constant::HANDLE_POSIX, 0) }?;
        // SAFETY: the driver made the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: made or imported by this process, released only here; mappings keep the memory.
            let _ = unsafe { self.gpu.driver.memory_release(self.handle) };
        }
    }
}

/// An allocation at an address of this process, for its device to read and write.
#[derive(Debug)]
pub(crate) struct Mapping {
    gpu: Arc<Gpu>,
    pub(crate) base: DeviceAddress,
    bytes: usize,
    mapped: bool,
}

impl Mapping {
    /// Maps all `bytes` of an allocation, a multiple of the granularity.
    pub(crate) fn new(gpu: &Arc<Gpu>, handle: &Handle, bytes: usize) -> Result<Self, CudaError> {
        let _entered = gpu.enter()?;
        let mut base = 0;
        // SAFETY: `base` receives a range of addresses that nothing else has.
        unsafe { gpu.driver.address_reserve(&raw mut base, bytes, 0, 0, 0) }?;
        let mut mapping = Self { gpu: gpu.clone(), base, bytes, mapped: false };
        // SAFETY: the range was reserved above; the driver checks that the allocation has so many bytes.
        unsafe { gpu.driver.memory_map(base, bytes, 0, handle.handle, 0) }?;
        mapping.mapped = true;
        let access = Access { location: gpu.location(), flags: constant::ACCESS_READ_WRITE };
        // SAFETY: the range was mapped above.
        unsafe { gpu.driver.memory_set_access(base, bytes, &raw const access, 1) }?;
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        if self.mapped {
            // SAFETY: mapped in `new`. Whoever copies through the range holds the mapping until its kernels have ended.
            let _ = unsafe { self.gpu.driver.memory_unmap(self.base, self.bytes) };
        }
        // SAFETY: reserved in `new`, and nothing is mapped there any more.
        let _ = unsafe { self.gpu.driver.address_free(self.base, self.bytes) };
    }
}
