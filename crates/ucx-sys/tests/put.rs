//! The table against a real library: a context, a worker, an endpoint to itself, a put, and a clean end.
//!
//! Needs UCX: without one it fails.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may fail it")]

use std::ffi::{CStr, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use ucx_sys::*;

/// Owns what UCX gave out, to release it in order.
struct Loopback {
    ucx: &'static Ucx,
    context: ucp_context_h,
    worker: ucp_worker_h,
    endpoint: ucp_ep_h,
}

impl Loopback {
    fn new() -> Self {
        let ucx = load().unwrap();
        let context = context(ucx);

        let params = ucp_worker_params_t {
            field_mask: UCP_WORKER_PARAM_FIELD_THREAD_MODE,
            thread_mode: UCS_THREAD_MODE_SINGLE,
            ..Default::default()
        };
        let mut worker = ptr::null_mut();
        // SAFETY: the context is valid and the parameters are initialised; the worker stays on this thread.
        unsafe { ucx.ucp_worker_create(context, &params, &mut worker) }.check().unwrap();

        let mut attributes = ucp_worker_attr_t { field_mask: UCP_WORKER_ATTR_FIELD_ADDRESS, ..Default::default() };
        // SAFETY: the worker is valid and the mask says which fields are written.
        unsafe { ucx.ucp_worker_query(worker, &mut attributes) }.check().unwrap();
        assert!(attributes.address_length > 0);

        let params = ucp_ep_params_t {
            field_mask: UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
            address: attributes.address,
            ..Default::default()
        };
        let mut endpoint = ptr::null_mut();
        // SAFETY: the address came from the query above and is released after this call.
        unsafe { ucx.ucp_ep_create(worker, &params, &mut endpoint) }.check().unwrap();
        // SAFETY: released once, with the worker that it came from.
        unsafe { ucx.ucp_worker_release_address(worker, attributes.address) };
        Self { ucx, context, worker, endpoint }
    }

    /// Progresses until the request is done and frees it. Fails the test if that takes absurdly long.
    fn wait(&self, posted: ucs_status_ptr_t) -> Result<(), Status> {
        let Some(request) = ucs_ptr_request(posted)? else {
            return Ok(());
        };
        let posted = Instant::now();
        let status = loop {
            assert!(posted.elapsed() < Duration::from_secs(60), "UCX makes no progress");
            // SAFETY: the request is not freed before the loop ends.
            let status = unsafe { self.ucx.ucp_request_check_status(request.as_ptr()) };
            if status != Status::INPROGRESS {
                break status;
            }
            // SAFETY: the worker is valid and used by this thread only.
            unsafe { self.ucx.ucp_worker_progress(self.worker) };
        };
        // SAFETY: the request is complete and not used again.
        unsafe { self.ucx.ucp_request_free(request.as_ptr()) };
        status.check()
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        let param = ucp_request_param_t::default();
        // SAFETY: the endpoint is valid and closed once; its keys are destroyed by now.
        let closing = unsafe { self.ucx.ucp_ep_close_nbx(self.endpoint, &param) };
        self.wait(closing).unwrap();
        // SAFETY: no endpoint is left.
        unsafe { self.ucx.ucp_worker_destroy(self.worker) };
        // SAFETY: no worker and no registration is left.
        unsafe { self.ucx.ucp_cleanup(self.context) };
    }
}

fn context(ucx: &Ucx) -> ucp_context_h {
    let mut config = ptr::null_mut();
    // SAFETY: null stands for no prefix and no file; the configuration is written to `config`.
    unsafe { ucx.ucp_config_read(ptr::null(), ptr::null(), &mut config) }.check().unwrap();
    let params = ucp_params_t {
        field_mask: UCP_PARAM_FIELD_FEATURES,
        features: UCP_FEATURE_RMA | UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP,
        ..Default::default()
    };
    let mut context = ptr::null_mut();
    // SAFETY: both structures are initialised.
    unsafe { ucx.ucp_init(&params, config, &mut context) }.check().unwrap();
    // SAFETY: came from `ucp_config_read` and is not used again.
    unsafe { ucx.ucp_config_release(config) };
    context
}

#[test]
fn a_put_to_oneself_arrives() {
    let loopback = Loopback::new();
    let ucx = loopback.ucx;
    let source: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    let mut destination = vec![0_u8; 10_000];

    let params = ucp_mem_map_params_t {
        field_mask: UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        address: destination.as_mut_ptr().cast(),
        length: destination.len(),
        ..Default::default()
    };
    let mut memory = ptr::null_mut();
    // SAFETY: the destination outlives its registration and does not move.
    unsafe { ucx.ucp_mem_map(loopback.context, &params, &mut memory) }.check().unwrap();
    let (mut packed, mut packed_bytes) = (ptr::null_mut(), 0);
    // SAFETY: the handle is valid; the buffer is released below.
    unsafe { ucx.ucp_rkey_pack(loopback.context, memory, &mut packed, &mut packed_bytes) }.check().unwrap();
    assert!(packed_bytes > 0);
    let mut key = ptr::null_mut();
    // SAFETY: the buffer is a packed key.
    unsafe { ucx.ucp_ep_rkey_unpack(loopback.endpoint, packed, &mut key) }.check().unwrap();
    // SAFETY: came from `ucp_rkey_pack`.
    unsafe { ucx.ucp_rkey_buffer_release(packed) };

    let param = ucp_request_param_t::default();
    let address = destination.as_ptr().addr() as u64;
    let (bytes, count) = (source.as_ptr().cast::<c_void>(), source.len());
    // SAFETY: both buffers live until the flush below has completed.
    let put = unsafe { ucx.ucp_put_nbx(loopback.endpoint, bytes, count, address, key, &param) };
    loopback.wait(put).unwrap();
    // SAFETY: the endpoint is valid.
    let flush = unsafe { ucx.ucp_ep_flush_nbx(loopback.endpoint, &param) };
    loopback.wait(flush).unwrap();
    assert_eq!(source, destination);

    // SAFETY: nothing is outstanding on the key, and its endpoint is still open.
    unsafe { ucx.ucp_rkey_destroy(key) };
    // SAFETY: nothing is outstanding on the memory.
    unsafe { ucx.ucp_mem_unmap(loopback.context, memory) }.check().unwrap();
}

#[test]
fn the_built_in_texts_are_those_of_the_library() {
    let ucx = load().unwrap();
    for status in (i8::MIN..=1).map(Status) {
        // SAFETY: takes any value.
        let theirs = unsafe { ucx.ucs_status_string(status) };
        // SAFETY: a string that the library does not change until the next call, from this thread.
        let theirs = unsafe { CStr::from_ptr(theirs) }.to_str().unwrap();
        let expected = status.text().map_or_else(|| format!("Unknown error {}", status.0), str::to_owned);
        assert_eq!(theirs, expected);
    }
}
