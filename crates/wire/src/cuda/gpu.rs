//! One GPU of this process, through its primary context: the one that the framework in the same process uses.
//!
//! # Safety
//!
//! The primary context is retained while a `Gpu` lives, and everything that was made in it holds the `Gpu`. Calls that use
//! the current context are made between [`Gpu::enter`] and the drop of what it returns.
#![allow(unsafe_code, reason = "calls the driver")]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::marker::PhantomData;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::cuda::driver::{
    self, AllocationProperties, CudaError, CudaOpenError, DeviceOrdinal, Driver, Location, RawContext, RawFunction,
    RawModule, RawStream, constant,
};
use crate::cuda::imported::Imported;
use crate::cuda::kernel;
use crate::cuda::options::CudaOptions;

/// A GPU.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) driver: &'static Driver,
    pub(crate) options: CudaOptions,
    device: DeviceOrdinal,
    context: RawContext,
    module: RawModule,
    pub(crate) kernel: RawFunction,
    /// Of allocations that can be shared.
    pub(crate) granularity: usize,
    gpu_direct: bool,
    /// Multiprocessors.
    pub(crate) processors: u32,
    pub(crate) name: String,
    /// What tells the GPU from all others, whatever its number in this process.
    pub(crate) uuid: [u8; 16],
    /// Memory of peers that is mapped here, by its cookie.
    pub(crate) imports: Mutex<BTreeMap<u128, Weak<Imported>>>,
    /// For copies that a caller waits for.
    copies: Mutex<RawStream>,
}

/// The context is current on this thread until this is dropped.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    driver: &'static Driver,
    gpu: PhantomData<&'a Gpu>,
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = RawContext::NONE;
        // SAFETY: pops what `enter` pushed on this thread; the guards of a thread end in the order of a stack, being scoped.
        let result = unsafe { self.driver.context_pop(&raw mut popped) };
        debug_assert!(result.is_ok(), "{result:?}");
    }
}

impl Gpu {
    pub(crate) fn open(options: &CudaOptions) -> Result<Arc<Self>, CudaOpenError> {
        let driver = driver::driver()?;
        let (mut count, mut device) = (0, 0);
        // SAFETY: `count` receives a number.
        unsafe { driver.device_get_count(&raw mut count) }?;
        let count = u32::try_from(count).unwrap_or(0);
        let ordinal = c_int::try_from(options.device).ok().filter(|_| options.device < count);
        let ordinal = ordinal.ok_or(CudaOpenError::NoDevice { device: options.device, count })?;
        // SAFETY: `device` receives the device of an ordinal that there is.
        unsafe { driver.device_get(&raw mut device, ordinal) }?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the device is one, `value` receives a number.
            unsafe { driver.device_get_attribute(&raw mut value, which, device) }.map(|()| value)
        };
        if attribute(constant::ATTRIBUTE_VIRTUAL_MEMORY)? == 0 || attribute(constant::ATTRIBUTE_HANDLE_POSIX)? == 0 {
            return Err(CudaOpenError::NoVirtualMemory { device: options.device });
        }
        let gpu_direct = attribute(constant::ATTRIBUTE_GPU_DIRECT)? != 0;
        let processors = u32::try_from(attribute(constant::ATTRIBUTE_PROCESSORS)?).unwrap_or(1);
        let mut uuid = [0; 16];
        // SAFETY: `uuid` receives 16 bytes.
        unsafe { driver.device_get_uuid(uuid.as_mut_ptr(), device) }?;
        let mut context = RawContext::NONE;
        // SAFETY: `context` receives the context, released when the `Gpu` drops.
        unsafe { driver.primary_context_retain(&raw mut context, device) }?;
        let mut gpu = Self {
            driver,
            options: options.clone(),
            device,
            context,
            module: RawModule::NONE,
            kernel: RawFunction::NONE,
            granularity: 0,
            gpu_direct,
            processors,
            name: name_of(driver, device),
            uuid,
            imports: Mutex::default(),
            copies: Mutex::new(RawStream::NONE),
        };
        let entered = gpu.enter()?;
        let (module, kernel) = kernel::load(driver, &entered)?;
        let stream = create_stream(driver, &entered, 0)?;
        let mut granularity = 0;
        let properties = gpu.allocation_properties();
        // SAFETY: `properties` is complete, `granularity` receives a number.
        unsafe { driver.granularity(&raw mut granularity, &raw const properties, constant::GRANULARITY_RECOMMENDED) }?;
        drop(entered);
        (gpu.module, gpu.kernel, gpu.granularity) = (module, kernel, granularity.max(1));
        *gpu.copies.lock() = stream;
        Ok(Arc::new(gpu))
    }

    /// Makes the context current.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        // SAFETY: the context is retained while `self` lives.
        unsafe { self.driver.context_push(self.context) }?;
        Ok(Entered { driver: self.driver, gpu: PhantomData, thread: PhantomData })
    }

    /// The number of the device in this process.
    pub(crate) fn ordinal(&self) -> DeviceOrdinal {
        self.device
    }

    pub(crate) fn location(&self) -> Location {
        Location { kind: constant::LOCATION_DEVICE, id: self.device }
    }

    /// Memory of this device that another process can import by a file descriptor.
    pub(crate) fn allocation_properties(&self) -> AllocationProperties {
        AllocationProperties {
            kind: constant::ALLOCATION_PINNED,
            handle_kinds: constant::HANDLE_POSIX,
            location: self.location(),
            gpu_direct: u8::from(self.gpu_direct),
            ..AllocationProperties::default()
        }
    }

    /// A stream of its own, which waits for no other. `priority` as the driver counts: less is more urgent, 0 is the least.
    pub(crate) fn stream(&self, entered: &Entered<'_>, priority: c_int) -> Result<RawStream, CudaError> {
        create_stream(self.driver, entered, priority)
    }

    /// Does `work` on a stream and waits for it; for no other stream of the device.
    pub(crate) fn wait_for(
        &self,
        work: impl FnOnce(&Driver, RawStream) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let stream = self.copies.lock();
        let _entered = self.enter()?;
        let started = work(self.driver, *stream);
        // SAFETY: the stream lives as long as `self`. Waited for also after a failure: what did start names memory.
        let ended = unsafe { self.driver.stream_synchronize(*stream) };
        started.and(ended)
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory(&self) -> Result<(u64, u64), CudaError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both receive numbers.
        unsafe { self.driver.memory_info(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let driver = self.driver;
        if let Ok(entered) = self.enter() {
            let stream = *self.copies.lock();
            if stream != RawStream::NONE {
                // SAFETY: made in `open`, and nothing is left on it: whoever used it waited.
                let _ = unsafe { driver.stream_destroy(stream) };
            }
            if self.module != RawModule::NONE {
                // SAFETY: loaded in `open`. Who launches holds the `Gpu` until its kernels have ended.
                let _ = unsafe { driver.module_unload(self.module) };
            }
            drop(entered);
        }
        // SAFETY: retained in `open`, released only here.
        let _ = unsafe { driver.primary_context_release(self.device) };
    }
}

fn create_stream(driver: &Driver, _current: &Entered<'_>, priority: c_int) -> Result<RawStream, CudaError> {
    let mut stream = RawStream::NONE;
    // SAFETY: a context is current; `stream` receives the stream.
    unsafe { driver.stream_create(&raw mut stream, constant::STREAM_NON_BLOCKING, priority) }?;
    Ok(stream)
}

fn name_of(driver: &Driver, device: DeviceOrdinal) -> String {
    let mut name = [0 as c_char; 128];
    // SAFETY: `name` has room for 127 characters and the end of the string.
    if unsafe { driver.device_get_name(name.as_mut_ptr(), 128, device) }.is_err() {
        return String::new();
    }
    let bytes = name.iter().take_while(|byte| **byte != 0).map(|byte| byte.to_ne_bytes()[0]).collect();
    String::from_utf8(bytes).unwrap_or_default()
}
