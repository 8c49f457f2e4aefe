//! What a framework in the same process does: memory, streams and events of its own, in the GPU's primary context.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

/// The driver, with the primary context current on this thread.
pub(crate) struct Framework(libloading::Library);

impl Framework {
    pub(crate) fn on(device: u32) -> Self {
        // SAFETY: the driver is loaded by now.
        let framework = Self(unsafe { libloading::Library::new("libcuda.so.1") }.unwrap());
        let mut primary: *mut c_void = ptr::null_mut();
        let retain =
            framework.find::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>("cuDevicePrimaryCtxRetain");
        // SAFETY: `primary` receives the context, which is never released.
        assert_eq!(unsafe { retain(&raw mut primary, device as c_int) }, 0);
        let set_current = framework.find::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuCtxSetCurrent");
        // SAFETY: the context is retained.
        assert_eq!(unsafe { set_current(primary) }, 0);
        framework
    }

    /// `T` is the signature that `cuda.h` gives the function.
    fn find<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers are in this file and give the right signatures.
        *unsafe { self.0.get::<T>(name.as_bytes()) }.unwrap()
    }

    /// Memory that is never freed.
    pub(crate) fn allocate(&self, bytes: u64) -> u64 {
        let mut base = 0;
        let allocate = self.find::<unsafe extern "C" fn(*mut u64, usize) -> c_int>("cuMemAlloc_v2");
        // SAFETY: `base` receives the address.
        assert_eq!(unsafe { allocate(&raw mut base, bytes as usize) }, 0);
        base
    }

    /// Memory of allocations of the least size that can be exported, one behind the other. Never freed.
    pub(crate) fn allocate_segments(&self, bytes: u64) -> u64 {
        /// `CUmemAllocationProp` and `CUmemAccessDesc`, by their words: pinned, as descriptors, on a device.
        type Properties = [i32; 8];
        let mut device = 0;
        let current = self.find::<unsafe extern "C" fn(*mut c_int) -> c_int>("cuCtxGetDevice");
        // SAFETY: `device` receives the number.
        assert_eq!(unsafe { current(&raw mut device) }, 0);
        let properties: Properties = [1, 1, 1, device, 0, 0, 0, 0];
        let mut step = 0usize;
        let granularity = self.find::<unsafe extern "C" fn(*mut usize, *const Properties, c_int) -> c_int>(
            "cuMemGetAllocationGranularity",
        );
        // SAFETY: `step` receives the number.
        assert_eq!(unsafe { granularity(&raw mut step, &raw const properties, 1) }, 0);
        let whole = (bytes as usize).next_multiple_of(step);
        let mut base = 0u64;
        let reserve =
            self.find::<unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int>("cuMemAddressReserve");
        // SAFETY: `base` receives the address.
        assert_eq!(unsafe { reserve(&raw mut base, whole, 0, 0, 0) }, 0);
        let create = self.find::<unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> c_int>("cuMemCreate");
        let map = self.find::<unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int>("cuMemMap");
        let access = self.find::<unsafe extern "C" fn(u64, usize, *const [i32; 3], usize) -> c_int>("cuMemSetAccess");
        for at in (0..whole).step_by(step) {
            let mut handle = 0;
            // SAFETY: `handle` receives the allocation.
            assert_eq!(unsafe { create(&raw mut handle, step, &raw const properties, 0) }, 0);
            // SAFETY: inside of what was reserved.
            assert_eq!(unsafe { map(base + at as u64, step, 0, handle, 0) }, 0);
        }
        let description = [1, device, 3];
        // SAFETY: the range is mapped.
        assert_eq!(unsafe { access(base, whole, &raw const description, 1) }, 0);
        base
    }

    /// What the driver makes of allocations with handles that other hosts can import: the attribute of the GPU, and the codes of
    /// making one, exporting it, and importing it again, as far as it came.
    pub(crate) fn fabric(&self, device: u32) -> (c_int, Vec<(&'static str, c_int)>) {
        const HANDLE_FABRIC: i32 = 8;
        const ATTRIBUTE_FABRIC: c_int = 128;
        const BYTES: usize = 2 << 20;
        let attribute = self.find::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>("cuDeviceGetAttribute");
        let (mut supported, mut steps) = (0, Vec::new());
        // SAFETY: `supported` receives the number.
        steps.push(("attribute", unsafe { attribute(&raw mut supported, ATTRIBUTE_FABRIC, device as c_int) }));
        // `CUmemAllocationProp`: pinned, by a fabric handle, on the device.
        let properties: [i32; 8] = [1, HANDLE_FABRIC, 1, device as i32, 0, 0, 0, 0];
        let create = self.find::<unsafe extern "C" fn(*mut u64, usize, *const [i32; 8], u64) -> c_int>("cuMemCreate");
        let export =
            self.find::<unsafe extern "C" fn(*mut [u8; 64], u64, c_int, u64) -> c_int>("cuMemExportToShareableHandle");
        let import = self
            .find::<unsafe extern "C" fn(*mut u64, *mut [u8; 64], c_int) -> c_int>("cuMemImportFromShareableHandle");
        let release = self.find::<unsafe extern "C" fn(u64) -> c_int>("cuMemRelease");
        let (mut made, mut imported, mut handle) = (0, 0, [0; 64]);
        // SAFETY: `made` receives the allocation.
        let created = unsafe { create(&raw mut made, BYTES, &raw const properties, 0) };
        steps.push(("create", created));
        if created == 0 {
            // SAFETY: `handle` has the 64 bytes of a fabric handle.
            let exported = unsafe { export(&raw mut handle, made, HANDLE_FABRIC, 0) };
            steps.push(("export", exported));
            if exported == 0 {
                // SAFETY: `imported` receives the allocation.
                let again = unsafe { import(&raw mut imported, &raw mut handle, HANDLE_FABRIC) };
                steps.push(("import", again));
                if again == 0 {
                    // SAFETY: imported above.
                    steps.push(("release", unsafe { release(imported) }));
                }
            }
            // SAFETY: made above.
            steps.push(("release", unsafe { release(made) }));
        }
        (supported, steps)
    }

    /// A stream that waits for no other.
    pub(crate) fn stream(&self) -> *mut c_void {
        let mut stream = ptr::null_mut();
        let create = self.find::<unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int>("cuStreamCreate");
        // SAFETY: `stream` receives the stream.
        assert_eq!(unsafe { create(&raw mut stream, 1) }, 0);
        stream
    }

    /// Fills memory in the order of the stream.
    pub(crate) fn fill(&self, stream: *mut c_void, base: u64, bytes: u64, value: u8) {
        let fill = self.find::<unsafe extern "C" fn(u64, u8, usize, *mut c_void) -> c_int>("cuMemsetD8Async");
        // SAFETY: the range is the caller's.
        assert_eq!(unsafe { fill(base, value, bytes as usize, stream) }, 0);
    }

    /// An event, recorded now.
    pub(crate) fn event(&self, stream: *mut c_void) -> *mut c_void {
        let mut event = ptr::null_mut();
        let create = self.find::<unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int>("cuEventCreate");
        // SAFETY: `event` receives the event.
        assert_eq!(unsafe { create(&raw mut event, 2) }, 0);
        let record = self.find::<unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int>("cuEventRecord");
        // SAFETY: both are live.
        assert_eq!(unsafe { record(event, stream) }, 0);
        event
    }
}
