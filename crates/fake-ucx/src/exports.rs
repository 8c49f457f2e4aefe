//! The functions of `ucp.h`, as far as kvferry calls them.
//!
//! # Safety
//!
//! Callers keep the contract that the header states for each. Handles are numbers and never followed.
#![allow(unsafe_code, clippy::missing_safety_doc, reason = "C functions, under the contract of ucp.h")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ucx_sys::{
    Status, Version, ucp_address_t, ucp_config_t, ucp_context_h, ucp_ep_h, ucp_ep_params_t, ucp_mem_h,
    ucp_mem_map_params_t, ucp_params_t, ucp_request_param_t, ucp_rkey_h, ucp_tag_message_h, ucp_tag_recv_info_t,
    ucp_worker_attr_t, ucp_worker_h, ucp_worker_params_t,
};

use crate::control::VERSION_VARIABLE;
use crate::request::{Callback, handle, immediate, number};
use crate::world::{Range, Start, World};

/// In front of addresses and keys.
const MAGIC: u64 = u64::from_le_bytes(*b"fake-ucx");

/// The world of the library that is opened. The copy of this crate in a test binary has one too, which nobody uses.
pub(crate) static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// Locks the world, makes it if there is none, and works on it. What an earlier panic left is as good as any.
pub(crate) fn with<T>(world: &Mutex<Option<World>>, work: impl FnOnce(&mut World) -> T) -> T {
    let mut locked: MutexGuard<'_, Option<World>> = world.lock().unwrap_or_else(PoisonError::into_inner);
    work(locked.get_or_insert_default())
}

fn world<T>(work: impl FnOnce(&mut World) -> T) -> T {
    with(&WORLD, work)
}

fn answer(start: Start) -> *mut c_void {
    match start {
        Start::Now(status) => immediate(status),
        Start::Request(request) => handle(request),
    }
}

/// The world, for tests of this process.
#[unsafe(no_mangle)]
extern "C" fn kvferry_fake_ucx() -> *const c_void {
    (&raw const WORLD).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_get_version(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint) {
    let text = std::env::var(VERSION_VARIABLE).unwrap_or_default();
    let mut parts = text.split('.').filter_map(|part| part.parse().ok());
    let mut next = |or| parts.next().unwrap_or(or);
    let version = Version::new(next(1), next(22), next(0));
    for (to, part) in [(major, version.major), (minor, version.minor), (release, version.release)] {
        // SAFETY: three places to write to.
        unsafe { to.write(part) }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucs_status_string(status: Status) -> *const c_char {
    let text: &'static CStr = if status == Status::OK { c"Success" } else { c"as scripted" };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_get_version_string() -> *const c_char {
    c"fake".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_config_read(_: *const c_char, _: *const c_char, config: *mut *mut ucp_config_t) -> Status {
    // SAFETY: a place for the result.
    unsafe { config.write(handle(1)) }
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_config_modify(_: *mut ucp_config_t, _: *const c_char, _: *const c_char) -> Status {
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_config_release(_: *mut ucp_config_t) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_init_version(
    _: c_uint,
    _: c_uint,
    _: *const ucp_params_t,
    _: *const ucp_config_t,
    context: *mut ucp_context_h,
) -> Status {
    // SAFETY: a place for the result.
    unsafe { context.write(handle(1)) }
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_cleanup(_: ucp_context_h) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_worker_create(
    _: ucp_context_h,
    _: *const ucp_worker_params_t,
    worker: *mut ucp_worker_h,
) -> Status {
    let Some(created) = world(World::create_worker) else { return Status::ERR_NO_RESOURCE };
    // SAFETY: a place for the result.
    unsafe { worker.write(handle(created)) }
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_worker_destroy(worker: ucp_worker_h) {
    world(|world| world.destroy_worker(number(worker)));
}

/// Leaks the words: they are few, and a test is short.
fn words(words: &[u64]) -> (*mut c_void, usize) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let bytes: &'static mut [u8] = bytes.leak();
    (bytes.as_mut_ptr().cast(), bytes.len())
}

/// # Safety
///
/// `from` names `N` words.
unsafe fn read_words<const N: usize>(from: *const c_void) -> [u64; N] {
    let mut index = 0;
    [0; N].map(|_| {
        let word = from.cast::<[u8; 8]>().wrapping_add(index);
        index += 1;
        // SAFETY: the caller's promise.
        u64::from_le_bytes(unsafe { word.read() })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_worker_query(worker: ucp_worker_h, attr: *mut ucp_worker_attr_t) -> Status {
    let (address, length) = words(&[MAGIC, number(worker)]);
    // SAFETY: a live structure to fill.
    let attr = unsafe { &mut *attr };
    (attr.address, attr.address_length) = (address.cast(), length);
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_worker_release_address(_: ucp_worker_h, _: *mut ucp_address_t) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_worker_progress(worker: ucp_worker_h) -> c_uint {
    let calls = world(|world| world.progress(number(worker)));
    let count = c_uint::try_from(calls.len()).unwrap_or(c_uint::MAX);
    for call in calls {
        // SAFETY: the program calls this on the thread of the worker, and nothing is locked.
        unsafe { call.make() }
    }
    count
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_worker_get_efd(worker: ucp_worker_h, fd: *mut c_int) -> Status {
    let Some(event) = world(|world| world.event(number(worker)).map(AsRawFd::as_raw_fd)) else {
        return Status::ERR_INVALID_PARAM;
    };
    // SAFETY: a place for the result.
    unsafe { fd.write(event) }
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_worker_arm(worker: ucp_worker_h) -> Status {
    world(|world| {
        if let Some(event) = world.event(number(worker)) {
            let _ = rustix::io::read(event, &mut [0; 8]); // empty is fine
        }
        if world.is_busy(number(worker)) { Status::ERR_BUSY } else { Status::OK }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_mem_map(
    _: ucp_context_h,
    params: *const ucp_mem_map_params_t,
    memory: *mut ucp_mem_h,
) -> Status {
    // SAFETY: live parameters.
    let params = unsafe { &*params };
    let base = params.address.expose_provenance() as u64;
    let registered = world(|world| world.register(base, params.length as u64));
    // SAFETY: a place for the result.
    unsafe { memory.write(handle(registered)) }
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_mem_unmap(_: ucp_context_h, memory: ucp_mem_h) -> Status {
    world(|world| world.unregister(number(memory)));
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_rkey_pack(
    _: ucp_context_h,
    memory: ucp_mem_h,
    buffer: *mut *mut c_void,
    bytes: *mut usize,
) -> Status {
    let (packed, length) = words(&[MAGIC, number(memory)]);
    // SAFETY: a place for each result.
    unsafe { buffer.write(packed) }
    // SAFETY: as above.
    unsafe { bytes.write(length) }
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_rkey_buffer_release(_: *mut c_void) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_ep_rkey_unpack(endpoint: ucp_ep_h, buffer: *const c_void, key: *mut ucp_rkey_h) -> Status {
    // SAFETY: the program passes on what `ucp_rkey_pack` gave it.
    let [magic, memory] = unsafe { read_words(buffer) };
    if magic != MAGIC {
        return Status::ERR_UNREACHABLE;
    }
    let unpacked = world(|world| world.unpack(number(endpoint), memory));
    // SAFETY: a place for the result.
    unsafe { key.write(handle(unpacked)) }
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_rkey_destroy(key: ucp_rkey_h) {
    world(|world| world.destroy_key(number(key)));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_ep_create(
    worker: ucp_worker_h,
    params: *const ucp_ep_params_t,
    endpoint: *mut ucp_ep_h,
) -> Status {
    // SAFETY: live parameters.
    let params = unsafe { &*params };
    // SAFETY: the program passes on the address of a worker.
    let [magic, peer] = unsafe { read_words(params.address.cast()) };
    if magic != MAGIC {
        return Status::ERR_UNREACHABLE;
    }
    let on_failure = (params.err_handler.cb, params.err_handler.arg.expose_provenance());
    let created = world(|world| world.connect(number(worker), peer, on_failure));
    // SAFETY: a place for the result.
    unsafe { endpoint.write(handle(created)) }
    Status::OK
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_ep_close_nbx(endpoint: ucp_ep_h, _: *const ucp_request_param_t) -> *mut c_void {
    answer(world(|world| world.close(number(endpoint))))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_ep_flush_nbx(endpoint: ucp_ep_h, _: *const ucp_request_param_t) -> *mut c_void {
    answer(world(|world| world.flush(number(endpoint))))
}

/// At once, always: nothing here is ever being connected, and nobody waits for more than that by it.
#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_worker_flush_nbx(_: ucp_worker_h, _: *const ucp_request_param_t) -> *mut c_void {
    immediate(Status::OK)
}

/// # Safety
///
/// As `ucp_put_nbx` and `ucp_get_nbx`.
unsafe fn copy(
    endpoint: ucp_ep_h,
    get: bool,
    local: usize,
    bytes: usize,
    remote: u64,
    key: ucp_rkey_h,
    param: *const ucp_request_param_t,
) -> *mut c_void {
    // SAFETY: live parameters, with a callback for what is sent.
    let callback = unsafe { Callback::of(param, false) };
    // SAFETY: as above.
    let local_memory = number(unsafe { (*param).memh });
    let range = Range { local_memory, local: local as u64, remote, key: number(key), bytes: bytes as u64 };
    answer(world(|world| world.copy(number(endpoint), get, &range, callback)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_put_nbx(
    endpoint: ucp_ep_h,
    from: *const c_void,
    bytes: usize,
    to: u64,
    key: ucp_rkey_h,
    param: *const ucp_request_param_t,
) -> *mut c_void {
    // SAFETY: the caller's contract.
    unsafe { copy(endpoint, false, from.expose_provenance(), bytes, to, key, param) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_get_nbx(
    endpoint: ucp_ep_h,
    to: *mut c_void,
    bytes: usize,
    from: u64,
    key: ucp_rkey_h,
    param: *const ucp_request_param_t,
) -> *mut c_void {
    // SAFETY: the caller's contract.
    unsafe { copy(endpoint, true, to.expose_provenance(), bytes, from, key, param) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_tag_send_nbx(
    endpoint: ucp_ep_h,
    from: *const c_void,
    bytes: usize,
    tag: u64,
    param: *const ucp_request_param_t,
) -> *mut c_void {
    // SAFETY: live parameters, with a callback for what is sent.
    let callback = unsafe { Callback::of(param, false) };
    // SAFETY: the caller's buffer, for the time of the call.
    let message = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
    answer(world(|world| world.send(number(endpoint), tag, message, callback)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_tag_probe_nb(
    worker: ucp_worker_h,
    tag: u64,
    mask: u64,
    _remove: c_int,
    info: *mut ucp_tag_recv_info_t,
) -> ucp_tag_message_h {
    let found = world(|world| world.probe(number(worker), tag, mask));
    let Some((message, sender_tag, length)) = found else { return ptr::null_mut() };
    // SAFETY: a place for the result.
    unsafe { info.write(ucp_tag_recv_info_t { sender_tag, length }) }
    handle(message)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_tag_msg_recv_nbx(
    worker: ucp_worker_h,
    to: *mut c_void,
    room: usize,
    message: ucp_tag_message_h,
    param: *const ucp_request_param_t,
) -> *mut c_void {
    // SAFETY: live parameters, with a callback for what is received.
    let callback = unsafe { Callback::of(param, true) };
    let to = to.expose_provenance() as u64;
    answer(world(|world| world.receive(number(worker), number(message), to, room, callback)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_request_check_status(request: *mut c_void) -> Status {
    world(|world| world.status(number(request)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ucp_request_free(request: *mut c_void) {
    world(|world| world.free(number(request)));
}

/// What kvferry looks up and never calls. The answer is the same as a status and as a pointer.
macro_rules! unsupported {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> isize {
            isize::from(Status::ERR_UNSUPPORTED.0)
        }
    )* };
}

unsupported! {
    ucp_context_query ucp_worker_signal ucp_rkey_ptr ucp_tag_recv_nbx ucp_worker_set_am_recv_handler
    ucp_am_send_nbx ucp_am_recv_data_nbx ucp_am_data_release ucp_request_cancel
}
