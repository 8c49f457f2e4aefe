//! The CUDA driver, opened at run time: a table of the functions that are used, and their results.
//!
//! The table is this crate's own rather than a binding's. A binding that opens the driver itself panics where a function is
//! missing, and makes the results a Rust enum, which is undefined behaviour with the first code of a newer driver.
//!
//! # Safety
//!
//! The signatures are those of `cuda.h`, which a driver keeps for good: a function that changed got a new symbol. The driver
//! is never closed.
#![allow(unsafe_code, reason = "opens the driver and calls it")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

use libloading::Library;
use thiserror::Error;

/// What the driver is called, in the order in which it is looked for.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Addresses of device memory. Nothing on the host may follow one.
pub(crate) type DeviceAddress = u64;
pub(crate) type DeviceOrdinal = c_int;
pub(crate) type AllocationHandle = u64;

/// Handles of the driver, by what they point to there.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) struct $name(pub(crate) *mut c_void);

        // SAFETY: a name, which the driver takes from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            pub(crate) const NONE: Self = Self(std::ptr::null_mut());
        }
    )*};
}

handles! {
    /// `CUcontext`.
    RawContext
    /// `CUmodule`.
    RawModule
    /// `CUfunction`.
    RawFunction
    /// `CUstream`.
    RawStream
    /// `CUevent`.
    RawEvent
}

/// `CUresult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaCode(pub c_int);

impl CudaCode {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const UNKNOWN: Self = Self(999);
    pub(crate) const ALREADY_REGISTERED: Self = Self(712);
}

impl fmt::Display for CudaCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match driver().ok().and_then(|driver| driver.name_of(*self)) {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "CUDA error {}", self.0),
        }
    }
}

/// The driver refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{call}: {code}")]
pub struct CudaError {
    /// The call.
    pub call: &'static str,
    /// The driver's reason.
    pub code: CudaCode,
}

/// CUDA cannot be used here. Nothing is left behind; fix the setup, or do without GPU memory.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CudaOpenError {
    /// There is no driver, or the loader does not find it. Install it, or let the container have it.
    #[error("no CUDA driver: {}", .tried.iter().map(|(name, why)| format!("{name}: {why}")).collect::<Vec<_>>().join("; "))]
    NoDriver {
        /// The names tried, each with the loader's reason.
        tried: Vec<(&'static str, String)>,
    },
    /// The driver is older than 11.4. Install a newer one.
    #[error("the CUDA driver has no {symbol}")]
    OldDriver {
        /// What it lacks.
        symbol: &'static str,
    },
    /// No such GPU, as this process sees them (`CUDA_VISIBLE_DEVICES`).
    #[error("there is no CUDA device {device}, of {count} that this process sees")]
    NoDevice {
        /// The device asked for.
        device: u32,
        /// Devices that there are.
        count: u32,
    },
    /// The GPU cannot have memory that is shared by file descriptors.
    #[error("CUDA device {device} has no virtual memory management with file descriptors")]
    NoVirtualMemory {
        /// The device.
        device: u32,
    },
    /// See the source.
    #[error("CUDA does not start")]
    Call(#[from] CudaError),
}

macro_rules! functions {
    ($($name:ident = $symbol:literal($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The driver's functions. Each keeps the contract that `cuda.h` gives it, threads and contexts included.
        #[derive(Debug)]
        pub(crate) struct Driver {
            $($name: unsafe extern "C" fn($($type),*) -> CudaCode,)*
            get_error_name: unsafe extern "C" fn(CudaCode, *mut *const c_char) -> CudaCode,
        }

        impl Driver {
            fn load(library: &'static Library) -> Result<Self, CudaOpenError> {
                Ok(Self {
                    // SAFETY: the signature is that of `cuda.h`.
                    $($name: unsafe { symbol(library, $symbol) }?,)*
                    // SAFETY: as above.
                    get_error_name: unsafe { symbol(library, "cuGetErrorName") }?,
                })
            }

            $(
                #[allow(clippy::too_many_arguments, reason = "the driver's own")]
                pub(crate) unsafe fn $name(&self, $($argument: $type),*) -> Result<(), CudaError> {
                    // SAFETY: the caller keeps the contract of `cuda.h`.
                    let code = unsafe { (self.$name)($($argument),*) };
                    if code == CudaCode::SUCCESS { Ok(()) } else { Err(CudaError { call: $symbol, code }) }
                }
            )*
        }
    };
}

functions! {
    init = "cuInit"(flags: c_uint);
    device_get_count = "cuDeviceGetCount"(count: *mut c_int);
    device_get = "cuDeviceGet"(device: *mut DeviceOrdinal, ordinal: c_int);
    device_get_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: DeviceOrdinal);
    device_get_name = "cuDeviceGetName"(name: *mut c_char, bytes: c_int, device: DeviceOrdinal);
    device_get_uuid = "cuDeviceGetUuid"(uuid: *mut u8, device: DeviceOrdinal);
    primary_context_retain = "cuDevicePrimaryCtxRetain"(context: *mut RawContext, device: DeviceOrdinal);
    primary_context_release = "cuDevicePrimaryCtxRelease_v2"(device: DeviceOrdinal);
    context_push = "cuCtxPushCurrent_v2"(context: RawContext);
    context_pop = "cuCtxPopCurrent_v2"(context: *mut RawContext);
    context_stream_priorities = "cuCtxGetStreamPriorityRange"(least: *mut c_int, greatest: *mut c_int);
    memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    granularity = "cuMemGetAllocationGranularity"(bytes: *mut usize, properties: *const AllocationProperties, option: c_int);
    memory_create = "cuMemCreate"(handle: *mut AllocationHandle, bytes: usize, properties: *const AllocationProperties, flags: u64);
    memory_release = "cuMemRelease"(handle: AllocationHandle);
    address_reserve = "cuMemAddressReserve"(address: *mut DeviceAddress, bytes: usize, alignment: usize, wish: DeviceAddress, flags: u64);
    address_free = "cuMemAddressFree"(address: DeviceAddress, bytes: usize);
    memory_map = "cuMemMap"(address: DeviceAddress, bytes: usize, offset: usize, handle: AllocationHandle, flags: u64);
    memory_unmap = "cuMemUnmap"(address: DeviceAddress, bytes: usize);
    memory_set_access = "cuMemSetAccess"(address: DeviceAddress, bytes: usize, access: *const Access, count: usize);
    memory_retain = "cuMemRetainAllocationHandle"(handle: *mut AllocationHandle, address: *mut c_void);
    memory_export = "cuMemExportToShareableHandle"(exported: *mut c_void, handle: AllocationHandle, kind: c_int, flags: u64);
    memory_import = "cuMemImportFromShareableHandle"(handle: *mut AllocationHandle, exported: *mut c_void, kind: c_int);
    pointer_attribute = "cuPointerGetAttribute"(value: *mut c_void, attribute: c_int, address: DeviceAddress);
    host_alloc = "cuMemHostAlloc"(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    host_free = "cuMemFreeHost"(memory: *mut c_void);
    host_address = "cuMemHostGetDevicePointer_v2"(address: *mut DeviceAddress, memory: *mut c_void, flags: c_uint);
    host_register = "cuMemHostRegister_v2"(memory: *mut c_void, bytes: usize, flags: c_uint);
    host_unregister = "cuMemHostUnregister"(memory: *mut c_void);
    alloc_async = "cuMemAllocAsync"(address: *mut DeviceAddress, bytes: usize, stream: RawStream);
    free_async = "cuMemFreeAsync"(address: DeviceAddress, stream: RawStream);
    copy_to_device = "cuMemcpyHtoDAsync_v2"(to: DeviceAddress, from: *const c_void, bytes: usize, stream: RawStream);
    copy_to_host = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: DeviceAddress, bytes: usize, stream: RawStream);
    fill_words = "cuMemsetD32Async"(address: DeviceAddress, value: c_uint, count: usize, stream: RawStream);
    fill = "cuMemsetD8Async"(address: DeviceAddress, value: u8, bytes: usize, stream: RawStream);
    stream_create = "cuStreamCreateWithPriority"(stream: *mut RawStream, flags: c_uint, priority: c_int);
    stream_destroy = "cuStreamDestroy_v2"(stream: RawStream);
    stream_synchronize = "cuStreamSynchronize"(stream: RawStream);
    stream_wait = "cuStreamWaitEvent"(stream: RawStream, event: RawEvent, flags: c_uint);
    event_create = "cuEventCreate"(event: *mut RawEvent, flags: c_uint);
    event_destroy = "cuEventDestroy_v2"(event: RawEvent);
    event_record = "cuEventRecord"(event: RawEvent, stream: RawStream);
    stream_query = "cuStreamQuery"(stream: RawStream);
    module_load = "cuModuleLoadData"(module: *mut RawModule, image: *const c_void);
    module_function = "cuModuleGetFunction"(function: *mut RawFunction, module: RawModule, name: *const c_char);
    module_unload = "cuModuleUnload"(module: RawModule);
    launch = "cuLaunchKernel"(
        function: RawFunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: RawStream, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
}

impl Driver {
    fn name_of(&self, code: CudaCode) -> Option<&'static str> {
        let mut name = std::ptr::null();
        // SAFETY: `name` receives a string of the driver's own, or stays null.
        let found = unsafe { (self.get_error_name)(code, &raw mut name) };
        if found != CudaCode::SUCCESS || name.is_null() {
            return None;
        }
        // SAFETY: a constant of the driver, which is never closed.
        unsafe { CStr::from_ptr(name) }.to_str().ok()
    }
}

/// # Safety
///
/// `T` is the signature of the function.
unsafe fn symbol<T: Copy>(library: &'static Library, name: &'static str) -> Result<T, CudaOpenError> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| CudaOpenError::OldDriver { symbol: name })
}

/// The driver, opened and initialised once. A failure is not kept: a driver may be installed later.
pub(crate) fn driver() -> Result<&'static Driver, CudaOpenError> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let driver = Driver::load(open(&NAMES)?)?;
    // SAFETY: 0 is the only flag there is.
    unsafe { driver.init(0) }?;
    Ok(DRIVER.get_or_init(|| driver))
}

/// CUDA devices that this process sees.
///
/// # Errors
///
/// [`CudaOpenError`]: there is no driver that can be used.
pub fn cuda_devices() -> Result<u32, CudaOpenError> {
    let mut count = 0;
    // SAFETY: `count` receives a number.
    unsafe { driver()?.device_get_count(&raw mut count) }?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn open(names: &[&'static str]) -> Result<&'static Library, CudaOpenError> {
    let mut tried = Vec::new();
    for &name in names {
        // SAFETY: the driver's initialisers are what every program with CUDA runs; the loader finds them under these names.
        match unsafe { Library::new(name) } {
            // Never closed: its functions are reached through `&'static`, and it has threads.
            Ok(library) => return Ok(Box::leak(Box::new(library))),
            Err(error) => tried.push((name, reason(&error))),
        }
    }
    Err(CudaOpenError::NoDriver { tried })
}

/// The loader's own words, which are behind its error.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AllocationProperties {
    pub(crate) kind: c_int,
    pub(crate) handle_kinds: c_int,
    pub(crate) location: Location,
    pub(crate) windows: usize,
    pub(crate) compression: u8,
    pub(crate) gpu_direct: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Access {
    pub(crate) location: Location,
    pub(crate) flags: c_int,
}

const _: () = assert!(size_of::<AllocationProperties>() == 32 && size_of::<Access>() == 12);

/// Constants of `cuda.h`.
pub(crate) mod constant {
    use std::ffi::{c_int, c_uint};

    pub(crate) const ALLOCATION_PINNED: c_int = 1;
    pub(crate) const HANDLE_POSIX: c_int = 1;
    pub(crate) const LOCATION_DEVICE: c_int = 1;
    pub(crate) const ACCESS_READ_WRITE: c_int = 3;
    pub(crate) const GRANULARITY_RECOMMENDED: c_int = 1;
    pub(crate) const ATTRIBUTE_PROCESSORS: c_int = 16;
    pub(crate) const ATTRIBUTE_VIRTUAL_MEMORY: c_int = 102;
    pub(crate) const ATTRIBUTE_HANDLE_POSIX: c_int = 103;
    pub(crate) const ATTRIBUTE_GPU_DIRECT: c_int = 110;
    pub(crate) const POINTER_MEMORY_KIND: c_int = 2;
    pub(crate) const POINTER_DEVICE: c_int = 9;
    pub(crate) const POINTER_MAPPING_BYTES: c_int = 18;
    pub(crate) const POINTER_MAPPING_BASE: c_int = 19;
    pub(crate) const MEMORY_DEVICE: u32 = 2;
    pub(crate) const HOST_PORTABLE_MAPPED: c_uint = 1 | 2;
    pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
    pub(crate) const EVENT_NO_TIMING: c_uint = 2;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_an_error_that_lists_the_names_tried() {
        let error = open(&["libno-such-driver.so.1", "libnor-this.so"]).unwrap_err();
        let CudaOpenError::NoDriver { tried } = &error else { panic!("{error:?}") };
        assert_eq!(
            tried.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            ["libno-such-driver.so.1", "libnor-this.so"]
        );
        assert!(error.to_string().contains("libnor-this.so: "), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_is_an_old_driver() {
        let library = open(&["libc.so.6"]).unwrap();
        assert!(matches!(Driver::load(library), Err(CudaOpenError::OldDriver { symbol: "cuInit" })));
    }

    #[test]
    fn a_code_has_a_number_where_there_is_no_driver_to_name_it() {
        let error = CudaError { call: "cuInit", code: CudaCode(123_456) };
        assert_eq!(error.to_string(), "cuInit: CUDA error 123456");
    }
}
