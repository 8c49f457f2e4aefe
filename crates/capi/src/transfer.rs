//! Requests under way.
//!
//! # Safety
//!
//! The contract of the crate.
#![allow(unsafe_code, reason = "reads what C's pointers point to")]

use std::ffi::c_void;
use std::future::Future;
use std::mem::MaybeUninit;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake};
use std::time::Duration;

use kvferry::{PartSpec, Ready};
use parking_lot::Mutex;

use crate::bytes::{Bytes, Slice, slice};
use crate::engine::{BlockMap, block_maps};
use crate::own::Own;
use crate::status::{Failure, Status, give, guard, handle, out};

/// A send or a receive. Freed by kvf_transfer_free, which stops nothing.
pub struct Transfer {
    handle: Own<Handle>,
}

/// Which of the two.
pub(crate) enum Handle {
    /// This rank is a destination.
    Receive(kvferry::Receive),
    /// This rank is a source.
    Send(kvferry::Send),
}

/// What moved to or from one peer of a request that has ended well.
#[repr(C)]
pub struct Peer {
    /// Its rank.
    pub rank: u32,
    /// (layer, role) rows, whole or in part.
    pub rows: u64,
    /// Bytes, by this rank's own count.
    pub bytes: u64,
    /// Of a send, the time on the wire; of a receive, from the post to the source's report. In nanoseconds.
    pub elapsed_ns: u64,
}

/// A part of a send that was posted in parts. Zeroed but for the tokens, it has all layers.
#[repr(C)]
pub struct Part {
    /// Its first token. Parts follow each other.
    pub first_token: u64,
    /// The token after its last. The part that ends where the request ends is the last.
    pub end_token: u64,
    /// The first of the model's layers that it has.
    pub first_layer: u32,
    /// The layer after the last; 0: it has all layers.
    pub end_layer: u32,
    /// Block maps, if blocks have been added since the send was posted.
    pub maps: *const BlockMap,
    /// How many; 0: those that the send was posted with.
    pub map_count: usize,
    /// A few bytes for the destination, of the last part only.
    pub note: Slice,
}

/// Says when a part may be read. Freed by kvf_signal_set.
pub struct Signal {
    signal: Own<Mutex<Option<kvferry::Signal>>>,
}

/// Called when something has happened, by any thread, with the context that was given. It must not call the library, and not
/// take long: it is one of the engine's threads that calls.
pub type Callback = Option<extern "C" fn(context: *mut c_void)>;

/// Calls the same method of whichever it is.
macro_rules! either {
    ($transfer:expr, $handle:ident => $call:expr) => {
        match $transfer {
            Handle::Receive($handle) => $call,
            Handle::Send($handle) => $call,
        }
    };
}

impl Transfer {
    pub(crate) fn new(handle: Handle) -> Self {
        Self { handle: Own::new(handle) }
    }

    /// The handle, in its own process.
    pub(crate) fn get(&self) -> Result<&Handle, Failure> {
        self.handle.get()
    }

    /// Waits, and says what is wrong, or that it has not ended.
    pub(crate) fn ended(&self, timeout: Duration) -> Result<(), Failure> {
        let outcome = either!(self.get()?, handle => handle.wait(timeout).map(|outcome| outcome.map(drop)));
        outcome.ok_or_else(Failure::pending)?.map_err(|error| Failure::from(&*error))
    }
}

/// Waits until a request has ended, `timeout_ms` at most; 0 only asks. KVF_OK: it has ended well. KVF_PENDING: not yet. Anything
/// else says how it failed, and so it does whenever it is asked.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_transfer_wait(transfer: Option<&Transfer>, timeout_ms: u64) -> Status {
    guard(|| handle(transfer, "transfer")?.ended(Duration::from_millis(timeout_ms)))
}

/// Waits until the slots of a request are quiet, `timeout_ms` at most: nobody reads or writes them for it, now or later. KVF_OK
/// says so, once; KVF_PENDING: not yet. A peer that is frozen keeps them for as long as it is.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_transfer_quiet(transfer: Option<&Transfer>, timeout_ms: u64) -> Status {
    guard(|| {
        let timeout = Duration::from_millis(timeout_ms);
        either!(handle(transfer, "transfer")?.get()?, handle => handle.wait_quiet(timeout).map(drop))?;
        Ok(())
    })
}

/// Gives a request up: it ends with KVF_CANCELLED, unless it has ended before.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_transfer_cancel(transfer: Option<&Transfer>) -> Status {
    guard(|| {
        either!(handle(transfer, "transfer")?.get()?, handle => handle.cancel());
        Ok(())
    })
}

/// Has `callback` called once, when the request has ended or its slots are quiet, or at once if it has ended: then
/// kvf_transfer_wait and kvf_transfer_quiet say which.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_transfer_notify(transfer: Option<&Transfer>, callback: Callback, context: *mut c_void) -> Status {
    guard(|| {
        let transfer = handle(transfer, "transfer")?.get()?;
        let callback = callback.ok_or_else(|| Failure::argument("no callback: NULL"))?;
        let waker = Arc::new(Call { callback, context }).into();
        let mut waiting = Context::from_waker(&waker);
        if either!(transfer, handle => pin!(handle.until_ended()).poll(&mut waiting).is_ready()) {
            callback(context);
        }
        Ok(())
    })
}

struct Call {
    callback: extern "C" fn(context: *mut c_void),
    context: *mut c_void,
}

// SAFETY: the context is C's, and is only handed back; the callback is documented to be called by any thread.
unsafe impl Send for Call {}
// SAFETY: as above. It is called once: a request forgets its wakers when it calls them.
unsafe impl Sync for Call {}

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        (self.callback)(self.context);
    }
}

/// What moved to or from each peer of a request that has ended well, in the order of ranks: `*count` of them, of which the first
/// `capacity` are written.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_peers(
    transfer: Option<&Transfer>,
    peers: *mut Peer,
    capacity: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard(|| {
        let transfer = handle(transfer, "transfer")?;
        transfer.ended(Duration::ZERO)?;
        let of = |rank, rows, bytes, elapsed: Duration| {
            let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
            Peer { rank, rows, bytes, elapsed_ns }
        };
        let found: Vec<Peer> = match transfer.get()? {
            Handle::Receive(receive) => {
                let outcome = receive.poll().and_then(Result::ok);
                outcome.iter().flat_map(|peers| &**peers).map(|it| of(it.rank, it.rows, it.bytes, it.elapsed)).collect()
            }
            Handle::Send(send) => {
                let outcome = send.poll().and_then(Result::ok);
                outcome.iter().flat_map(|peers| &**peers).map(|it| of(it.rank, it.rows, it.bytes, it.elapsed)).collect()
            }
        };
        out(count)?.write(found.len());
        if peers.is_null() && capacity > 0 {
            return Err(Failure::argument("no place for peers: NULL"));
        }
        for (index, peer) in found.into_iter().take(capacity).enumerate() {
            let place = peers.wrapping_add(index);
            // SAFETY: `capacity` writable places by the contract, and `index` is below it.
            unsafe { place.write(peer) };
        }
        Ok(())
    })
}

/// What the source that is `peer` of kvf_transfer_peers has added to the last part of a request that was received.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_transfer_note(
    transfer: Option<&Transfer>,
    peer: usize,
    note: Option<&mut MaybeUninit<Bytes>>,
) -> Status {
    guard(|| {
        let transfer = handle(transfer, "transfer")?;
        transfer.ended(Duration::ZERO)?;
        let Handle::Receive(receive) = transfer.get()? else { return Err(Failure::argument("a send has no notes")) };
        let outcome = receive.poll().and_then(Result::ok);
        let found = outcome.as_deref().and_then(|peers| peers.get(peer));
        let found = found.ok_or_else(|| Failure::argument(format!("no peer {peer}")))?;
        out(note)?.write(Bytes::new(found.note.clone()));
        Ok(())
    })
}

/// Adds a part to a send that was posted in parts. It leaves when it is ready and the destination has said where to: at once, or,
/// if `signal` is not NULL, when the signal that is written there is set.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_push(
    transfer: Option<&Transfer>,
    part: Option<&Part>,
    signal: Option<&mut MaybeUninit<*mut Signal>>,
) -> Status {
    guard(|| {
        let Handle::Send(send) = handle(transfer, "transfer")?.get()? else {
            return Err(Failure::argument("a receive has no parts"));
        };
        let part = handle(part, "part")?;
        // SAFETY: an array by the contract.
        let maps = unsafe { block_maps(part.maps, part.map_count) }?;
        // SAFETY: an array by the contract.
        let note = unsafe { slice(part.note) }?;
        let spec = PartSpec {
            tokens: part.first_token..part.end_token,
            layers: (part.end_layer > 0).then_some(part.first_layer..part.end_layer),
            block_maps: (part.map_count > 0).then_some(maps),
            note: note.to_vec(),
        };
        match signal {
            Some(place) => {
                let (later, ready) = Ready::later();
                send.push(spec, ready)?;
                give(Some(place), Signal { signal: Own::new(Mutex::new(Some(later))) })
            }
            None => Ok(send.push(spec, Ready::now())?),
        }
    })
}

/// The bytes of a part are there. Frees the signal. From any thread.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_signal_set(signal: Option<Box<Signal>>) -> Status {
    guard(|| {
        let Some(signal) = signal else { return Ok(()) };
        let signal = signal.signal.get()?.lock().take();
        if let Some(signal) = signal {
            signal.set();
        }
        Ok(())
    })
}

/// Frees the handle of a request, which goes on. Its slots cannot be asked after any more.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_transfer_free(transfer: Option<Box<Transfer>>) {
    drop(transfer);
}
