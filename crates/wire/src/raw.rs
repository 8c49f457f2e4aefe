//! UCX's worker, endpoints, keys and requests with owners, for whoever makes a worker's turns.
//!
//! # Safety
//!
//! What UCX still uses cannot be freed from here: an operation that UCX has accepted holds its own count of everything it
//! reads or writes (`Rc::into_raw` when posted, `Rc::from_raw` in its callback), an endpoint holds its worker, a key is
//! used only through the endpoint it was unpacked on. None of these types is `Send`: they go from thread to thread only as parts
//! of a `Progress`, which is under a lock, as `UCS_THREAD_MODE_SERIALIZED` asks.
#![allow(unsafe_code, reason = "calls UCX on the handles it owns")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use ucx_sys::{Status, Ucx, Version};

use crate::context::{Context, environment};
use crate::endpoint::{KeyId, Lane};
use crate::error::OpenError;
use crate::frame::{FRAME_BYTES_MAX, Tag};
use crate::region::Region;
use crate::transfer::Direction;

/// The first release whose endpoints say which transports they use.
const LANES_SINCE: Version = Version::new(1, 14, 0);

/// The first release that can let go of a peer in the middle of its connecting. Releases before it abort the process where
/// they give up an endpoint that has yet to send its answer to the peer's request to be connected.
const LETS_GO_SINCE: Version = Version::new(1, 14, 0);

/// Lanes that are asked for: more than UCX gives an endpoint.
const LANES_MAX: usize = 64;

/// A UCX worker. Used by one thread at a time.
pub(crate) struct RawWorker {
    context: Context,
    raw: NonNull<ucx_sys::ucp_worker>,
    /// A message was sent since UCX last made progress; and since it was last armed. One that has completed at once may need both,
    /// and nothing else tells of it.
    sent_since_progress: Cell<bool>,
    sent_since_armed: Cell<bool>,
}

impl RawWorker {
    pub(crate) fn create(context: Context) -> Result<Rc<Self>, OpenError> {
        let params = ucx_sys::ucp_worker_params_t {
            field_mask: ucx_sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE,
            thread_mode: ucx_sys::UCS_THREAD_MODE_SERIALIZED,
            ..Default::default()
        };
        let mut raw = ptr::null_mut();
        let _as_wanted = environment(context.options());
        // SAFETY: the context lives as long as `context`; `raw` receives the worker.
        let status = unsafe { context.ucx().ucp_worker_create(context.raw(), &raw const params, &raw mut raw) };
        match NonNull::new(raw) {
            Some(raw) if status == Status::OK => {
                let (sent_since_progress, sent_since_armed) = (Cell::new(false), Cell::new(false));
                Ok(Rc::new(Self { context, raw, sent_since_progress, sent_since_armed }))
            }
            _ => Err(OpenError::Start { call: "ucp_worker_create", source: status }),
        }
    }

    fn ucx(&self) -> &'static Ucx {
        self.context.ucx()
    }

    /// What peers connect to.
    pub(crate) fn address(&self) -> Result<Vec<u8>, OpenError> {
        let mut attr =
            ucx_sys::ucp_worker_attr_t { field_mask: ucx_sys::UCP_WORKER_ATTR_FIELD_ADDRESS, ..Default::default() };
        // SAFETY: the worker is live; UCX fills the field that the mask names.
        let status = unsafe { self.ucx().ucp_worker_query(self.raw.as_ptr(), &raw mut attr) };
        if status != Status::OK || attr.address.is_null() {
            return Err(OpenError::Start { call: "ucp_worker_query", source: status });
        }
        // SAFETY: UCX allocated `address_length` bytes at `address`, released only below.
        let address = unsafe { std::slice::from_raw_parts(attr.address.cast::<u8>(), attr.address_length) }.to_vec();
        // SAFETY: `address` came from the query above and is released only here.
        unsafe { self.ucx().ucp_worker_release_address(self.raw.as_ptr(), attr.address) };
        Ok(address)
    }

    /// The descriptor that becomes readable when an armed worker has work.
    pub(crate) fn event_fd(&self) -> Result<BorrowedFd<'_>, OpenError> {
        let mut fd: RawFd = -1;
        // SAFETY: the worker is live; the context was made with the wakeup feature.
        let status = unsafe { self.ucx().ucp_worker_get_efd(self.raw.as_ptr(), &raw mut fd) };
        if status != Status::OK || fd < 0 {
            return Err(OpenError::Start { call: "ucp_worker_get_efd", source: status });
        }
        // SAFETY: the descriptor belongs to the worker, which outlives the borrow.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Whether UCX did anything.
    pub(crate) fn progress(&self) -> bool {
        self.sent_since_progress.set(false);
        // SAFETY: the worker is live, and callbacks do not call progress.
        unsafe { self.ucx().ucp_worker_progress(self.raw.as_ptr()) != 0 }
    }

    /// Whether the thread may sleep on the event descriptor: `false` if there is work left.
    pub(crate) fn arm(&self) -> bool {
        // SAFETY: the worker is live.
        let armed = unsafe { self.ucx().ucp_worker_arm(self.raw.as_ptr()) == Status::OK };
        if armed {
            self.sent_since_armed.set(false);
        }
        armed
    }

    /// Whether a message was sent since UCX last made progress.
    pub(crate) fn has_sent(&self) -> bool {
        self.sent_since_progress.get()
    }

    /// Arms anew if messages were sent since: `false` if there is work left, of which who sleeps on the event descriptor is not told.
    pub(crate) fn arm_for_sent(&self) -> bool {
        !self.sent_since_armed.get() || self.arm()
    }

    /// Whether the worker can be destroyed, as far as connections of peers go: those that are being made stand in the way where
    /// UCX cannot let go of them. They are UCX's own endpoints, of which nothing else tells.
    pub(crate) fn is_settled(&self) -> bool {
        if self.ucx().version() >= LETS_GO_SINCE {
            return true;
        }
        let param = ucx_sys::ucp_request_param_t::default();
        // SAFETY: the worker is live; no field of `param` is set.
        let flush = unsafe { self.ucx().ucp_worker_flush_nbx(self.raw.as_ptr(), &raw const param) };
        // Complete at once only if no transport has anything outstanding, connections over tcp included (read in UCX 1.13).
        // A flush that is not is given up here, and ends by itself.
        Operation::new(self.ucx(), flush).result() == Some(Status::OK)
    }

    /// Starts to receive the next message, whatever its tag, if there is one.
    pub(crate) fn receive(&self) -> Option<Inbound> {
        let mut info = ucx_sys::ucp_tag_recv_info_t::default();
        // SAFETY: the worker is live; `info` receives the length.
        let message = NonNull::new(unsafe { self.ucx().ucp_tag_probe_nb(self.raw.as_ptr(), 0, 0, 1, &raw mut info) })?;
        // A message over the limit is taken off the queue into no buffer at all: UCX reports it as truncated.
        let room = if info.length > FRAME_BYTES_MAX { 0 } else { info.length };
        let buffer = Rc::new(Buffer {
            bytes: RefCell::new(vec![0; room]),
            ucx: self.ucx(),
            status: Cell::new(Status::INPROGRESS),
        });
        let mut param = request_param(ucx_sys::UCP_OP_ATTR_FIELD_CALLBACK, &buffer);
        param.cb = ucx_sys::ucp_request_param_t__bindgen_ty_1 { recv: Some(message_received) };
        let into = buffer.bytes.borrow_mut().as_mut_ptr().cast::<c_void>();
        // SAFETY: `into` has room for `room` bytes and lives until the callback, through the count given away in `param`.
        let pointer = unsafe {
            self.ucx().ucp_tag_msg_recv_nbx(self.raw.as_ptr(), into, room, message.as_ptr(), &raw const param)
        };
        match ucx_sys::ucs_ptr_request(pointer) {
            Ok(Some(_)) => {}
            Ok(None) => finish_now(&param, |buffer: &Buffer| buffer.status.set(Status::OK)),
            Err(status) => finish_now(&param, |buffer: &Buffer| buffer.status.set(status)),
        }
        Some(Inbound { tag: Tag(info.sender_tag), buffer, length: info.length as u64 })
    }

    /// Makes an endpoint. Nothing is sent yet.
    pub(crate) fn connect(self: &Rc<Self>, address: &[u8]) -> Result<RawEndpoint, Status> {
        let failure = Rc::new(Cell::new(Status::OK));
        let params = ucx_sys::ucp_ep_params_t {
            field_mask: ucx_sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | ucx_sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | ucx_sys::UCP_EP_PARAM_FIELD_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: ucx_sys::UCP_ERR_HANDLING_MODE_PEER,
            err_handler: ucx_sys::ucp_err_handler_t {
                cb: Some(endpoint_failed),
                arg: Rc::into_raw(failure.clone()).cast_mut().cast(),
            },
            ..Default::default()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: UCX copies what it needs of the address; the count of `failure` given away goes back in `Closing::finish`.
        let status = unsafe { self.ucx().ucp_ep_create(self.raw.as_ptr(), &raw const params, &raw mut raw) };
        match NonNull::new(raw) {
            Some(raw) if status == Status::OK => {
                let (keys, address) = (BTreeMap::new(), address.into());
                Ok(RawEndpoint { keys, raw, address, failure, worker: self.clone() })
            }
            _ => {
                release_failure(&failure);
                Err(status)
            }
        }
    }
}

impl Drop for RawWorker {
    fn drop(&mut self) {
        // SAFETY: `raw` came from `ucp_worker_create` and is released only here; endpoints hold an `Rc` of the worker.
        unsafe { self.ucx().ucp_worker_destroy(self.raw.as_ptr()) }
    }
}

/// A message on its way in.
pub(crate) struct Inbound {
    pub(crate) tag: Tag,
    buffer: Rc<Buffer>,
    length: u64,
}

/// Where a message is received to. UCX writes the bytes by pointer between the post and the callback; they are borrowed by
/// nobody in that time.
struct Buffer {
    bytes: RefCell<Vec<u8>>,
    ucx: &'static Ucx,
    status: Cell<Status>,
}

impl Inbound {
    pub(crate) fn is_complete(&self) -> bool {
        self.buffer.status.get() != Status::INPROGRESS
    }

    /// The message, or the length of one that could not be received. Call it when complete.
    pub(crate) fn take(self) -> Result<Vec<u8>, u64> {
        match self.buffer.status.get() {
            Status::OK => Ok(self.buffer.bytes.take()),
            _ => Err(self.length),
        }
    }
}

/// One endpoint with the keys that were unpacked on it.
pub(crate) struct RawEndpoint {
    keys: BTreeMap<KeyId, NonNull<ucx_sys::ucp_rkey>>,
    raw: NonNull<ucx_sys::ucp_ep>,
    /// What it was made with.
    address: Box<[u8]>,
    failure: Rc<Cell<Status>>,
    worker: Rc<RawWorker>, // last: the endpoint and its keys are its
}

impl RawEndpoint {
    /// Where the worker is that it leads to.
    pub(crate) fn address(&self) -> &[u8] {
        &self.address
    }

    /// [`Status::OK`] until UCX reports the peer as failed.
    pub(crate) fn failure(&self) -> Status {
        self.failure.get()
    }

    pub(crate) fn import(&mut self, key: KeyId, packed: &[u8]) -> Result<(), Status> {
        let mut raw = ptr::null_mut();
        let ucx = self.worker.ucx();
        // SAFETY: the endpoint is live. UCX does not check the bytes: the caller's card had a digest over them.
        let status = unsafe { ucx.ucp_ep_rkey_unpack(self.raw.as_ptr(), packed.as_ptr().cast(), &raw mut raw) };
        match NonNull::new(raw) {
            Some(raw) if status == Status::OK => {
                self.keys.insert(key, raw);
                Ok(())
            }
            _ => Err(status),
        }
    }

    /// Posts one write of a batch, or one read into its regions. The batch learns of its end.
    pub(crate) fn put(&self, batch: &Rc<Batch>, put: &Put) {
        let known = self.keys.get(&put.key).zip(batch.held.get(put.held));
        let Some((key, region)) = known.filter(|(_, region)| region.contains(put.offset, put.bytes)) else {
            batch.first_error.set(Status::ERR_INVALID_PARAM);
            return;
        };
        let mut param = request_param(
            ucx_sys::UCP_OP_ATTR_FIELD_CALLBACK
                | ucx_sys::UCP_OP_ATTR_FIELD_MEMH
                | ucx_sys::UCP_OP_ATTR_FIELD_MEMORY_TYPE,
            batch,
        );
        param.cb = ucx_sys::ucp_request_param_t__bindgen_ty_1 { send: Some(put_completed) };
        param.memh = region.raw();
        param.memory_type = ucx_sys::UCS_MEMORY_TYPE_HOST;
        let count = usize::try_from(put.bytes).expect("inside a region, whose length is a usize");
        let local = region.address(put.offset).cast::<c_void>();
        batch.outstanding.set(batch.outstanding.get() + 1);
        let ucx = self.worker.ucx();
        let (endpoint, key) = (self.raw.as_ptr(), key.as_ptr());
        let pointer = match batch.direction {
            // SAFETY: the range is inside the local region, which the batch holds until the callback, through the count given
            // away in `param`. The key was unpacked on this endpoint and lives until no put is outstanding on it.
            Direction::Put => unsafe { ucx.ucp_put_nbx(endpoint, local, count, put.to, key, &raw const param) },
            // SAFETY: as above; a region's memory may be written, and no reference into it exists.
            Direction::Get => unsafe { ucx.ucp_get_nbx(endpoint, local, count, put.to, key, &raw const param) },
        };
        match ucx_sys::ucs_ptr_request(pointer) {
            Ok(Some(_)) => {}
            Ok(None) => finish_now(&param, |batch: &Batch| batch.finished(Status::OK)),
            Err(status) => finish_now(&param, |batch: &Batch| batch.finished(status)),
        }
    }

    /// Sends one message. Its failure is the endpoint's.
    pub(crate) fn send(&self, tag: Tag, bytes: Vec<u8>, unsent: &Rc<Cell<u64>>) {
        self.worker.sent_since_progress.set(true);
        self.worker.sent_since_armed.set(true);
        let outgoing = Rc::new(Outgoing { bytes, ucx: self.worker.ucx(), _counted: Unsent::new(unsent) });
        let mut param = request_param(ucx_sys::UCP_OP_ATTR_FIELD_CALLBACK, &outgoing);
        param.cb = ucx_sys::ucp_request_param_t__bindgen_ty_1 { send: Some(message_sent) };
        let (from, count) = (outgoing.bytes.as_ptr().cast(), outgoing.bytes.len());
        let ucx = self.worker.ucx();
        // SAFETY: `from` lives until the callback, through the count given away in `param`.
        let pointer = unsafe { ucx.ucp_tag_send_nbx(self.raw.as_ptr(), from, count, tag.0, &raw const param) };
        if !matches!(ucx_sys::ucs_ptr_request(pointer), Ok(Some(_))) {
            finish_now(&param, |_: &Outgoing| {});
        }
    }

    /// The transports that carry the endpoint; `None` before UCX 1.14, which does not say.
    pub(crate) fn lanes(&self) -> Option<Vec<Lane>> {
        let query = self.worker.ucx().ucp_ep_query()?;
        if self.worker.ucx().version() < LANES_SINCE {
            return None;
        }
        let mut entries = [ucx_sys::ucp_transport_entry_t::default(); LANES_MAX];
        let transports = ucx_sys::ucp_transports_t {
            entries: entries.as_mut_ptr(),
            num_entries: u32::try_from(LANES_MAX).expect("a small constant"),
            entry_size: size_of::<ucx_sys::ucp_transport_entry_t>(),
        };
        let field_mask = ucx_sys::UCP_EP_ATTR_FIELD_TRANSPORTS;
        let mut attr = ucx_sys::ucp_ep_attr_t { field_mask, transports, ..Default::default() };
        // SAFETY: the endpoint is live, and `entries` has room for as many as are said.
        if unsafe { query(self.raw.as_ptr(), &raw mut attr) } != Status::OK {
            return None;
        }
        let filled = usize::try_from(attr.transports.num_entries).map_or(LANES_MAX, |count| count.min(LANES_MAX));
        let text = |name: *const std::ffi::c_char| {
            if name.is_null() {
                return String::new();
            }
            // SAFETY: UCX filled the entry with names that live as long as the endpoint; they are copied here.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        let lane = |entry: &ucx_sys::ucp_transport_entry_t| Lane {
            transport: text(entry.transport_name),
            device: text(entry.device_name),
        };
        Some(entries[..filled].iter().map(lane).collect())
    }

    /// Starts a flush: when it has succeeded, the peer can see the puts that had completed well before.
    pub(crate) fn flush(&self) -> Operation {
        let param = ucx_sys::ucp_request_param_t::default();
        let ucx = self.worker.ucx();
        // SAFETY: the endpoint is live; no field of `param` is set.
        Operation::new(ucx, unsafe { ucx.ucp_ep_flush_nbx(self.raw.as_ptr(), &raw const param) })
    }

    /// Starts to close the endpoint, which takes no operation from then on. With `force`, those in flight end with an error;
    /// without, there must be none. `Closing` must be kept and the worker progressed until it is done.
    pub(crate) fn close(mut self, force: bool) -> Closing {
        if !force {
            self.destroy_keys();
        }
        let param = ucx_sys::ucp_request_param_t {
            op_attr_mask: ucx_sys::UCP_OP_ATTR_FIELD_FLAGS,
            flags: if force { ucx_sys::UCP_EP_CLOSE_FLAG_FORCE } else { 0 },
            ..Default::default()
        };
        let ucx = self.worker.ucx();
        // SAFETY: the endpoint is live and used by nobody after this: `self` goes into `Closing`, which offers no operation.
        let operation = Operation::new(ucx, unsafe { ucx.ucp_ep_close_nbx(self.raw.as_ptr(), &raw const param) });
        Closing { operation, endpoint: self }
    }

    /// Lets go of all keys. No put may be outstanding.
    pub(crate) fn destroy_keys(&mut self) {
        for (_, key) in std::mem::take(&mut self.keys) {
            // SAFETY: the key came from `ucp_ep_rkey_unpack` and is released only here, when no put uses it.
            unsafe { self.worker.ucx().ucp_rkey_destroy(key.as_ptr()) }
        }
    }
}

/// An endpoint that is going away, with everything UCX may still read of it: the cell that its error callback writes, and,
/// after a forced close, the keys that cancelled puts name. The header wants keys destroyed before their endpoint, but also
/// not before the operations that use them; a key belongs to its worker (`ucp_rkey_destroy`, read in UCX 1.22).
pub(crate) struct Closing {
    operation: Operation,
    endpoint: RawEndpoint,
}

impl Closing {
    pub(crate) fn is_closed(&self) -> bool {
        self.operation.result().is_some()
    }

    /// Releases what UCX no longer reads. Call it when closed and when no put of the endpoint is outstanding: dropping a
    /// `Closing` instead leaks that, which is what a worker that ran out of time to stop does.
    pub(crate) fn finish(mut self) {
        self.endpoint.destroy_keys();
        release_failure(&self.endpoint.failure);
    }
}

/// One write, or read the other way.
pub(crate) struct Put {
    /// Which of the batch's regions is read, or written.
    pub(crate) held: usize,
    pub(crate) offset: u64,
    pub(crate) key: KeyId,
    /// Address in the peer, inside of the region that `key` is for: nothing else checks it.
    pub(crate) to: u64,
    pub(crate) bytes: u64,
}

/// Writes, or reads, that are waited for together, with the local regions that they name.
pub(crate) struct Batch {
    direction: Direction,
    held: Vec<Region>,
    ucx: &'static Ucx,
    outstanding: Cell<u64>,
    first_error: Cell<Status>,
}

impl Batch {
    pub(crate) fn new(context: &Context, direction: Direction, held: Vec<Region>) -> Rc<Self> {
        let (outstanding, first_error) = (Cell::new(0), Cell::new(Status::OK));
        Rc::new(Self { direction, held, ucx: context.ucx(), outstanding, first_error })
    }

    /// Puts that UCX has accepted and not completed.
    pub(crate) fn outstanding(&self) -> u64 {
        self.outstanding.get()
    }

    /// [`Status::OK`] until a put fails.
    pub(crate) fn first_error(&self) -> Status {
        self.first_error.get()
    }

    fn finished(&self, status: Status) {
        self.outstanding.set(self.outstanding.get().saturating_sub(1));
        if status.is_err() && self.first_error.get() == Status::OK {
            self.first_error.set(status);
        }
    }
}

/// A message on its way out.
struct Outgoing {
    bytes: Vec<u8>,
    ucx: &'static Ucx,
    _counted: Unsent,
}

/// Counts as a frame that has not been sent, for as long as it lives.
#[derive(Debug)]
pub(crate) struct Unsent(Rc<Cell<u64>>);

impl Unsent {
    pub(crate) fn new(count: &Rc<Cell<u64>>) -> Self {
        count.set(count.get() + 1);
        Self(count.clone())
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A flush or a close, polled.
pub(crate) struct Operation {
    ucx: &'static Ucx,
    request: Result<NonNull<c_void>, Status>,
}

impl Operation {
    fn new(ucx: &'static Ucx, pointer: ucx_sys::ucs_status_ptr_t) -> Self {
        let request = match ucx_sys::ucs_ptr_request(pointer) {
            Ok(Some(request)) => Ok(request),
            Ok(None) => Err(Status::OK),
            Err(status) => Err(status),
        };
        Self { ucx, request }
    }

    /// How it ended, once it has.
    pub(crate) fn result(&self) -> Option<Status> {
        match self.request {
            Err(status) => Some(status),
            Ok(request) => {
                // SAFETY: the request is freed only when `self` drops.
                let status = unsafe { self.ucx.ucp_request_check_status(request.as_ptr()) };
                (status != Status::INPROGRESS).then_some(status)
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Ok(request) = self.request {
            // SAFETY: the request came from UCX and is freed only here. If it is not complete, UCX frees it when it is; it
            // names no memory of ours.
            unsafe { self.ucx.ucp_request_free(request.as_ptr()) }
        }
    }
}

/// Parameters with a count of `held` given away as user data: the callback or [`finish_now`] takes it back.
fn request_param<T>(fields: u32, held: &Rc<T>) -> ucx_sys::ucp_request_param_t {
    ucx_sys::ucp_request_param_t {
        op_attr_mask: fields | ucx_sys::UCP_OP_ATTR_FIELD_USER_DATA,
        user_data: Rc::into_raw(held.clone()).cast_mut().cast(),
        ..Default::default()
    }
}

/// UCX took no request: no callback will come, so the count goes back here.
fn finish_now<T>(param: &ucx_sys::ucp_request_param_t, finish: impl FnOnce(&T)) {
    // SAFETY: `user_data` came from `request_param` for the same `T`, and no callback takes it.
    let held = unsafe { Rc::from_raw(param.user_data.cast::<T>().cast_const()) };
    finish(&held);
}

/// Takes back the count that an endpoint's error callback held: the endpoint is gone, or was never made.
fn release_failure(failure: &Rc<Cell<Status>>) {
    // SAFETY: `connect` gave one count of this cell away, and UCX calls the callback no more.
    unsafe { Rc::decrement_strong_count(Rc::as_ptr(failure)) }
}

/// Ends a put.
unsafe extern "C" fn put_completed(request: *mut c_void, status: Status, user_data: *mut c_void) {
    // SAFETY: `put` gave this count away with its request, whose callback is called once, by who makes the turn.
    let batch = unsafe { Rc::from_raw(user_data.cast::<Batch>().cast_const()) };
    batch.finished(status);
    // SAFETY: UCX hands the completed request over; it is freed only here.
    unsafe { batch.ucx.ucp_request_free(request) }
}

/// Ends the sending of a message. A failure has also failed the endpoint, which says so.
unsafe extern "C" fn message_sent(request: *mut c_void, _status: Status, user_data: *mut c_void) {
    // SAFETY: as in `put_completed`, from `send`.
    let outgoing = unsafe { Rc::from_raw(user_data.cast::<Outgoing>().cast_const()) };
    // SAFETY: as in `put_completed`.
    unsafe { outgoing.ucx.ucp_request_free(request) }
}

/// Ends the receipt of a message.
unsafe extern "C" fn message_received(
    request: *mut c_void,
    status: Status,
    _info: *const ucx_sys::ucp_tag_recv_info_t,
    user_data: *mut c_void,
) {
    // SAFETY: as in `put_completed`, from `receive`.
    let buffer = unsafe { Rc::from_raw(user_data.cast::<Buffer>().cast_const()) };
    buffer.status.set(status);
    // SAFETY: as in `put_completed`.
    unsafe { buffer.ucx.ucp_request_free(request) }
}

/// Notes that a peer failed. Closing is left to the progress loop: UCX allows no call on the endpoint here.
unsafe extern "C" fn endpoint_failed(arg: *mut c_void, _endpoint: ucx_sys::ucp_ep_h, status: Status) {
    // SAFETY: `arg` holds a count of the endpoint's cell until the endpoint is closed; this runs in its worker's turn.
    let failure = unsafe { &*arg.cast::<Cell<Status>>() };
    failure.set(status);
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
