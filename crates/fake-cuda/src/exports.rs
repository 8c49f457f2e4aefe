//! The functions of `cuda.h`, as far as kvferry calls them.
//!
//! # Safety
//!
//! Callers keep the contract that the header states for each. Handles are numbers, or what was leaked for them.
#![allow(unsafe_code, clippy::missing_safety_doc, reason = "C functions, under the contract of cuda.h")]

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use crate::kernel::{self, Job};
use crate::memory::{self, Allocation, GRANULARITY, Range, TOTAL_BYTES, pointer};
use crate::stream::{Event, Stream};

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const INVALID_CONTEXT: c_int = 201;
const NOT_READY: c_int = 600;
const ALREADY_REGISTERED: c_int = 712;
const NOT_REGISTERED: c_int = 713;
const MISALIGNED_ADDRESS: c_int = 716;

/// GPUs of the machine.
const DEVICES: c_int = 2;

type Place<T> = *mut T;

/// Why a kernel has failed. Contexts in which one has are of no use any more, as the driver's.
static FAILED: AtomicI32 = AtomicI32::new(SUCCESS);

/// What a call answers that has nothing else to say.
fn health() -> c_int {
    FAILED.load(Ordering::Relaxed)
}

thread_local! {
    /// Contexts that are current, the last on top. A context is the number of its device, plus one.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The GPUs that this process sees, by their number in the machine.
fn visible() -> Vec<c_int> {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => list.split(',').map_while(|name| name.parse().ok()).filter(|device| *device < DEVICES).collect(),
        Err(_) => (0..DEVICES).collect(),
    }
}

/// The machine's number of one of this process's devices.
fn machine(device: c_int) -> c_int {
    usize::try_from(device).ok().and_then(|device| visible().get(device).copied()).unwrap_or(-1)
}

fn current() -> Option<c_int> {
    let context = CONTEXTS.with_borrow(|contexts| contexts.last().copied())?;
    c_int::try_from(context).ok().map(|context| context - 1)
}

/// Writes a result of the driver's.
///
/// # Safety
///
/// `to` is a place for a `T`.
unsafe fn put<T>(to: Place<T>, value: T) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    SUCCESS
}

/// What a handle was leaked for.
///
/// # Safety
///
/// The handle came from [`leak`] and has not been given back.
unsafe fn open<'a, T>(handle: *mut c_void) -> &'a Arc<T> {
    // SAFETY: the caller's promise.
    unsafe { &*handle.cast::<Arc<T>>() }
}

fn leak<T>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(Arc::new(value))).cast()
}

/// # Safety
///
/// As [`open`]; the handle is not used again.
unsafe fn take<T>(handle: *mut c_void) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(handle.cast::<Arc<T>>()) });
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(_code: c_int, _name: *mut *const c_char) -> c_int {
    INVALID_VALUE
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: Place<c_int>) -> c_int {
    // SAFETY: `count` is a place for it.
    unsafe { put(count, c_int::try_from(visible().len()).unwrap_or(0)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: Place<c_int>, ordinal: c_int) -> c_int {
    // SAFETY: `device` is a place for it.
    unsafe { put(device, ordinal) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: Place<c_int>, attribute: c_int, _device: c_int) -> c_int {
    // Multiprocessors; virtual memory management and its descriptors; no fabric.
    let found = match attribute {
        16 => 4,
        102 | 103 => 1,
        _ => 0,
    };
    // SAFETY: `value` is a place for it.
    unsafe { put(value, found) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, _bytes: c_int, _device: c_int) -> c_int {
    // SAFETY: `name` has room for the string and its end.
    unsafe { ptr::copy_nonoverlapping(c"Fake".as_ptr(), name, 5) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(uuid: Place<[u8; 16]>, device: c_int) -> c_int {
    // SAFETY: `uuid` is a place for 16 bytes.
    unsafe { put(uuid, [u8::try_from(machine(device) + 1).unwrap_or(0); 16]) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: Place<usize>, device: c_int) -> c_int {
    // SAFETY: `context` is a place for it.
    unsafe { put(context, device as usize + 1) };
    health()
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: Place<usize>) -> c_int {
    match CONTEXTS.with_borrow_mut(Vec::pop) {
        // SAFETY: `context` is a place for it.
        Some(popped) => unsafe { put(context, popped) },
        None => INVALID_CONTEXT,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: Place<c_int>) -> c_int {
    // SAFETY: `device` is a place for it.
    current().map_or(INVALID_CONTEXT, |current| unsafe { put(device, current) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    CONTEXTS.with_borrow_mut(|contexts| {
        contexts.pop();
        contexts.push(context);
    });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: Place<c_int>, greatest: Place<c_int>) -> c_int {
    // SAFETY: `least` is a place for it.
    let _ = unsafe { put(least, 0) };
    // SAFETY: so is `greatest`.
    unsafe { put(greatest, -5) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: Place<usize>, total: Place<usize>) -> c_int {
    let Some(device) = current() else { return INVALID_CONTEXT };
    // SAFETY: `total` is a place for it.
    let _ = unsafe { put(total, TOTAL_BYTES) };
    // SAFETY: so is `free`.
    unsafe { put(free, TOTAL_BYTES - memory::with(|memory| memory.used(device))) }
}

/// `CUmemAllocationProp`, the head of it.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_kinds: c_int,
    location_kind: c_int,
    device: c_int,
    rest: [u64; 2],
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    bytes: Place<usize>,
    _properties: *const Properties,
    _option: c_int,
) -> c_int {
    // SAFETY: `bytes` is a place for it.
    unsafe { put(bytes, GRANULARITY) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(
    handle: Place<u64>,
    bytes: usize,
    properties: *const Properties,
    _flags: u64,
) -> c_int {
    // SAFETY: the properties are complete.
    let properties = unsafe { &*properties };
    if !bytes.is_multiple_of(GRANULARITY) {
        return INVALID_VALUE;
    }
    match memory::create(bytes, properties.device, properties.handle_kinds & 1 != 0) {
        // SAFETY: `handle` is a place for it.
        Some(allocation) => unsafe { put(handle, memory::with(|memory| memory.add(allocation))) },
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> c_int {
    if memory::with(|memory| memory.handles.remove(&handle)).is_some() { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRetainAllocationHandle(handle: Place<u64>, address: *mut c_void) -> c_int {
    let address = address.addr() as u64;
    let retained = memory::with(|memory| {
        let allocation = memory.range_of(address)?.1.allocation.clone()?;
        Some(memory.add(allocation))
    });
    // SAFETY: `handle` is a place for it.
    retained.map_or(INVALID_VALUE, |retained| unsafe { put(handle, retained) })
}

/// UCX asks it.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(base: Place<u64>, bytes: Place<usize>, address: u64) -> c_int {
    let Some(found) = memory::with(|memory| memory.range_of(address).map(|(base, range)| (base, range.bytes))) else {
        return INVALID_VALUE;
    };
    // SAFETY: `base` is a place for it.
    let _ = unsafe { put(base, found.0) };
    // SAFETY: so is `bytes`.
    unsafe { put(bytes, found.1) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    address: Place<u64>,
    bytes: usize,
    _alignment: usize,
    _wish: u64,
    _flags: u64,
) -> c_int {
    // SAFETY: `address` is a place for it.
    memory::reserve(bytes).map_or(OUT_OF_MEMORY, |base| unsafe { put(address, base) })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, bytes: usize) -> c_int {
    memory::release(address, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) -> c_int {
    let Some(allocation) = memory::with(|memory| memory.handles.get(&handle).cloned()) else { return INVALID_VALUE };
    if offset != 0 || bytes != allocation.bytes || !memory::map(address, &allocation, bytes) {
        return INVALID_VALUE;
    }
    let range = Range { bytes, device: allocation.device, allocation: Some(allocation) };
    memory::with(|memory| memory.ranges.insert(address, range));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, bytes: usize) -> c_int {
    memory::with(|memory| memory.ranges.remove(&address));
    if memory::unmap(address, bytes) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(address: u64, bytes: usize, _access: *const c_void, _count: usize) -> c_int {
    if memory::give_access(address, bytes) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemExportToShareableHandle(
    exported: Place<c_int>,
    handle: u64,
    kind: c_int,
    _flags: u64,
) -> c_int {
    let allocation = memory::with(|memory| memory.handles.get(&handle).cloned());
    let exportable = allocation.filter(|allocation| allocation.exportable && kind == 1);
    let Some(file) = exportable.and_then(|allocation| allocation.file.try_clone().ok()) else { return INVALID_VALUE };
    // SAFETY: `exported` is a place for a descriptor, which is the caller's from now on.
    unsafe { put(exported, file.into_raw_fd()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemImportFromShareableHandle(handle: Place<u64>, exported: *mut c_void, kind: c_int) -> c_int {
    let Ok(descriptor) = c_int::try_from(exported.addr()) else { return INVALID_VALUE };
    // SAFETY: the caller's descriptor is open during the call.
    let file = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned();
    let (1, Ok(file), Some(device)) = (kind, file, current()) else { return INVALID_VALUE };
    let size = rustix::fs::fstat(&file).ok().and_then(|stat| usize::try_from(stat.st_size).ok());
    let Some(bytes) = size else { return INVALID_VALUE };
    let allocation = Allocation { file: Arc::new(file), bytes, device, exportable: true };
    // SAFETY: `handle` is a place for it.
    unsafe { put(handle, memory::with(|memory| memory.add(allocation))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(value: *mut c_void, attribute: c_int, address: u64) -> c_int {
    let found = memory::with(|memory| memory.range_of(address).map(|(base, range)| (base, range.clone())));
    let Some((base, Range { bytes, device, .. })) = found else { return INVALID_VALUE };
    match attribute {
        // SAFETY: a place for a kind of memory: a device's.
        2 => unsafe { put(value.cast::<c_uint>(), 2) },
        // SAFETY: a place for the number of a device.
        9 => unsafe { put(value.cast::<c_int>(), device) },
        // SAFETY: a place for the length of a mapping.
        18 => unsafe { put(value.cast::<usize>(), bytes) },
        // SAFETY: a place for an address.
        19 => unsafe { put(value.cast::<u64>(), base) },
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(memory: Place<*mut c_void>, bytes: usize, _flags: c_uint) -> c_int {
    let Some(base) = memory::allocate(bytes) else { return OUT_OF_MEMORY };
    memory::with(|known| known.locked.insert(base, bytes));
    // SAFETY: `memory` is a place for it.
    unsafe { put(memory, pointer(base)) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(memory: *mut c_void) -> c_int {
    let base = memory.addr() as u64;
    let Some(bytes) = memory::with(|known| known.locked.remove(&base)) else { return INVALID_VALUE };
    memory::release(base, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(address: Place<u64>, memory: *mut c_void, _flags: c_uint) -> c_int {
    let base = memory.expose_provenance() as u64;
    if !memory::with(|known| known.is_locked(base)) {
        return INVALID_VALUE;
    }
    // SAFETY: `address` is a place for it.
    unsafe { put(address, base) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(memory: *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
    let base = memory.expose_provenance() as u64;
    memory::with(|known| {
        if known.is_locked(base) {
            return ALREADY_REGISTERED;
        }
        known.locked.insert(base, bytes);
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(memory: *mut c_void) -> c_int {
    let removed = memory::with(|known| known.locked.remove(&(memory.addr() as u64)));
    if removed.is_some() { SUCCESS } else { NOT_REGISTERED }
}

fn allocate(address: Place<u64>, bytes: usize) -> c_int {
    let Some(device) = current() else { return INVALID_CONTEXT };
    let Some(base) = memory::allocate(bytes) else { return OUT_OF_MEMORY };
    memory::with(|memory| memory.ranges.insert(base, Range { bytes, device, allocation: None }));
    // SAFETY: the callers' promise: `address` is a place for it.
    unsafe { put(address, base) }
}

fn free(address: u64) {
    if let Some(range) = memory::with(|memory| memory.ranges.remove(&address)) {
        memory::release(address, range.bytes);
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(address: Place<u64>, bytes: usize) -> c_int {
    allocate(address, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    free(address);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocAsync(address: Place<u64>, bytes: usize, _stream: *mut c_void) -> c_int {
    allocate(address, bytes)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> c_int {
    // SAFETY: a live stream.
    unsafe { open::<Stream>(stream) }.give(move || free(address));
    SUCCESS
}

/// Copies in the order of the stream. What is not locked is read in the call, as the driver does.
///
/// # Safety
///
/// Both ranges can be reached until the stream has got there.
unsafe fn copy(stream: *mut c_void, to: u64, from: u64, bytes: usize) -> c_int {
    // SAFETY: a live stream.
    let stream = unsafe { open::<Stream>(stream) };
    let known = |address| memory::with(|memory| memory.is_locked(address) || memory.range_of(address).is_some());
    let kept = (!known(from)).then(|| {
        let mut kept = vec![0u8; bytes];
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(pointer(from).cast::<u8>(), kept.as_mut_ptr(), bytes) };
        kept
    });
    stream.give(move || {
        let from = kept.as_ref().map_or(pointer(from).cast_const().cast::<u8>(), |kept| kept.as_ptr());
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, pointer(to).cast::<u8>(), bytes) };
    });
    if !known(to) {
        stream.wait();
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void) -> c_int {
    // SAFETY: the contract of the function.
    unsafe { copy(stream, to, from.expose_provenance() as u64, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void) -> c_int {
    // SAFETY: the contract of the function.
    unsafe { copy(stream, to.expose_provenance() as u64, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: *mut c_void) -> c_int {
    // SAFETY: a live stream.
    unsafe { open::<Stream>(stream) }.give(move || {
        // SAFETY: the range is there until the stream has got here.
        unsafe { ptr::write_bytes(pointer(address).cast::<u8>(), value, bytes) };
    });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD32Async(address: u64, value: c_uint, count: usize, stream: *mut c_void) -> c_int {
    // SAFETY: a live stream.
    unsafe { open::<Stream>(stream) }.give(move || {
        for index in 0..count {
            // SAFETY: the range is there until the stream has got here.
            unsafe { pointer(address + index as u64 * 4).cast::<u32>().write_volatile(value) };
        }
    });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: Place<*mut c_void>, _flags: c_uint, _priority: c_int) -> c_int {
    // SAFETY: `stream` is a place for it.
    unsafe { put(stream, leak(Stream::new())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: Place<*mut c_void>, _flags: c_uint) -> c_int {
    // SAFETY: `stream` is a place for it.
    unsafe { put(stream, leak(Stream::new())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    // SAFETY: a live stream, which is not used again.
    unsafe { take::<Stream>(stream) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    // SAFETY: a live stream.
    unsafe { open::<Stream>(stream) }.wait();
    health()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamQuery(stream: *mut c_void) -> c_int {
    // SAFETY: a live stream.
    if unsafe { open::<Stream>(stream) }.is_idle() { health() } else { NOT_READY }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> c_int {
    // SAFETY: a live event.
    let event = unsafe { open::<Event>(event) };
    // SAFETY: a live stream.
    event.hold(unsafe { open::<Stream>(stream) });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: Place<*mut c_void>, _flags: c_uint) -> c_int {
    // SAFETY: `event` is a place for it.
    unsafe { put(event, leak(Event::default())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
    // SAFETY: a live event, which is not used again.
    unsafe { take::<Event>(event) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    // SAFETY: a live event.
    let event = unsafe { open::<Event>(event) };
    // SAFETY: a live stream.
    event.record(unsafe { open::<Stream>(stream) });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    // SAFETY: a live event.
    if unsafe { open::<Event>(event) }.has_happened() { health() } else { NOT_READY }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: Place<usize>, _image: *const c_void) -> c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    // SAFETY: `module` is a place for it.
    unsafe { put(module, NEXT.fetch_add(1, Ordering::Relaxed)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(function: Place<usize>, module: usize, _name: *const c_char) -> c_int {
    // SAFETY: `function` is a place for it.
    unsafe { put(function, module) }
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(_module: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's own")]
unsafe extern "C" fn cuLaunchKernel(
    _function: usize,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared_bytes: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    // SAFETY: the kernel has one parameter.
    let parameter = unsafe { parameters.read() };
    // SAFETY: it is a job, which is copied in the call.
    let job = unsafe { parameter.cast::<Job>().read() };
    let run = move || {
        // SAFETY: what the job names can be reached until the stream has got there, as the caller promised.
        if unsafe { kernel::run(&job) }.is_err() {
            FAILED.store(MISALIGNED_ADDRESS, Ordering::Relaxed);
        }
    };
    // SAFETY: a live stream.
    unsafe { open::<Stream>(stream) }.give(run);
    health()
}
