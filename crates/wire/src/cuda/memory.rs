//! GPU memory that a region may name: allocated by this crate so that peers can map it, or lent by the caller.
//!
//! What this crate allocates is virtual memory management's: an allocation that is exported as a file descriptor and
//! outlives its owner where a peer has imported it. Memory of `cudaMalloc` has only CUDA IPC, which is deadly: measured on
//! two H200s, 200 ms after the owner was killed the next kernel of the process that had mapped it failed, and its context was
//! lost. Hence such memory is never mapped by a peer; it is reached through a slab. Memory of the caller's that is made of such
//! allocations too (PyTorch's expandable segments, pools of inference engines) is exported as ours is, if it was created for it.
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
    /// The caller; held, not used. What peers are given, if the memory is made of allocations that can be.
    Caller { _owner: Arc<dyn Any + Send + Sync>, export: Option<Export> },
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
        let allocations = [(handle, whole)];
        let mapping = Mapping::new(gpu, &allocations)?;
        let file = allocations[0].0.export()?;
        drop((allocations, entered)); // the mapping and the descriptor keep the allocation
        let base = mapping.base;
        // SAFETY: the range was mapped above, for this device to write.
        gpu.wait_for(|driver, stream| unsafe { driver.fill(base, 0, length, stream) })?;
        let export = export::offer(vec![(file, whole as u64)], 0);
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
        let export = segments(gpu, base, end).and_then(|(first, files)| export::offer(files, base - first));
        Ok(Self { gpu: gpu.clone(), base, bytes, owner: Owner::Caller { _owner: owner, export } })
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
            Owner::Mapping { export, .. } | Owner::Caller { export, .. } => export.as_ref().and_then(Export::card),
        };
        DeviceCard { gpu: self.gpu.uuid, export }
    }

    /// Tells peers that map the memory that it is no longer registered.
    pub(crate) fn withdraw(&self) {
        let (Owner::Mapping { export, .. } | Owner::Caller { export, .. }) = &self.owner;
        export.iter().for_each(Export::withdraw);
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

/// The allocations that the caller has mapped from the one that holds `base` up to `end`, and where the first is mapped. `None`
/// unless all of them can be exported: memory of `cudaMalloc` cannot, nor what was created without asking for it.
fn segments(gpu: &Arc<Gpu>, base: DeviceAddress, end: DeviceAddress) -> Option<(DeviceAddress, Vec<(OwnedFd, u64)>)> {
    let _entered = gpu.enter().ok()?;
    let mut found: Option<(DeviceAddress, Vec<(OwnedFd, u64)>)> = None;
    let mut next = base;
    while next < end {
        let handle = Handle::of(gpu, next).ok()?;
        let attribute = |which| {
            let mut value = 0u64;
            // SAFETY: a number of 64 bits is what the attribute is.
            let asked = unsafe { gpu.driver.pointer_attribute((&raw mut value).cast(), which, next) };
            asked.ok().map(|()| value)
        };
        let (first, bytes) = (attribute(constant::POINTER_MAPPING_BASE)?, attribute(constant::POINTER_MAPPING_BYTES)?);
        let behind = first.checked_add(bytes).filter(|behind| first <= next && *behind > next)?;
        let (_, segments) = found.get_or_insert_with(|| (first, Vec::new()));
        if segments.len() >= export::ALLOCATIONS_MAX {
            return None;
        }
        segments.push((handle.export().ok()?, bytes));
        next = behind;
    }
    found
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

    /// The one that is mapped at an address.
    fn of(gpu: &Arc<Gpu>, address: DeviceAddress) -> Result<Self, CudaError> {
        let _entered = gpu.enter()?;
        let mut handle = 0;
        let at = std::ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0));
        // SAFETY: the driver looks the address up, and refuses what is not mapped so; `handle` receives a count of the allocation.
        unsafe { gpu.driver.memory_retain(&raw mut handle, at) }?;
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

/// Allocations at addresses of this process that follow each other, for its device to read and write.
#[derive(Debug)]
pub(crate) struct Mapping {
    gpu: Arc<Gpu>,
    pub(crate) base: DeviceAddress,
    bytes: usize,
    /// Lengths of those that are mapped.
    mapped: Vec<usize>,
}

impl Mapping {
    /// Maps all bytes of each allocation, multiples of the granularity that are no more than an address space.
    pub(crate) fn new(gpu: &Arc<Gpu>, allocations: &[(Handle, usize)]) -> Result<Self, CudaError> {
        let _entered = gpu.enter()?;
        let bytes = allocations.iter().map(|(_, bytes)| *bytes).sum();
        let mut base = 0;
        // SAFETY: `base` receives a range of addresses that nothing else has.
        unsafe { gpu.driver.address_reserve(&raw mut base, bytes, 0, 0, 0) }?;
        let mut mapping = Self { gpu: gpu.clone(), base, bytes, mapped: Vec::new() };
        let mut at = base;
        for (handle, bytes) in allocations {
            // SAFETY: inside of the range that was reserved above; the driver checks that the allocation has so many bytes.
            unsafe { gpu.driver.memory_map(at, *bytes, 0, handle.handle, 0) }?;
            mapping.mapped.push(*bytes);
            at += *bytes as u64;
        }
        let access = Access { location: gpu.location(), flags: constant::ACCESS_READ_WRITE };
        // SAFETY: the range was mapped above.
        unsafe { gpu.driver.memory_set_access(base, bytes, &raw const access, 1) }?;
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        let mut at = self.base;
        for bytes in &self.mapped {
            // SAFETY: mapped in `new`. Whoever copies through the range holds the mapping until its kernels have ended.
            let _ = unsafe { self.gpu.driver.memory_unmap(at, *bytes) };
            at += *bytes as u64;
        }
        // SAFETY: reserved in `new`, and nothing is mapped there any more.
        let _ = unsafe { self.gpu.driver.address_free(self.base, self.bytes) };
    }
}
