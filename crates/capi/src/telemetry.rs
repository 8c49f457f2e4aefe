//! How transfers went.
//!
//! # Safety
//!
//! The contract of the crate.
#![allow(unsafe_code, reason = "writes where C's pointers point to")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, UNIX_EPOCH};

use kvferry::Times;
use kvferry_wire::TransferStats;
use parking_lot::Mutex;

use crate::list::Move;
use crate::status::{Failure, Status, guard, handle, out};
use crate::transfer::{Handle, Transfer};

/// One way that bytes took to or from a peer of a request.
#[repr(C)]
pub struct Way {
    /// direct, landing, staged or runs. Lasts for ever.
    pub route: *const c_char,
    /// Why that way, in words. Lasts for ever.
    pub reason: *const c_char,
    /// Bytes.
    pub bytes: u64,
    /// Contiguous runs.
    pub runs: u64,
    /// On the wire, in nanoseconds.
    pub elapsed_ns: u64,
}

/// Where the time of a request with one peer went, in nanoseconds.
#[repr(C)]
pub struct PeerTimes {
    /// In the call that posted it.
    pub posting_ns: u64,
    /// From then on, until it was known where to write to, or the first bytes came.
    pub queued_ns: u64,
    /// From the end of the last write until both sides had agreed.
    pub settling_ns: u64,
    /// From the post to the end.
    pub total_ns: u64,
}

/// How the last post of an agent's transfer went.
#[repr(C)]
pub struct MoveTelemetry {
    /// When it was posted: microseconds of Unix time.
    pub started_us: u64,
    /// How long the call that posted it took, in nanoseconds.
    pub posting_ns: u64,
    /// From the post until it was known to have ended, in nanoseconds.
    pub total_ns: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Entries paired.
    pub entries: u64,
    /// The way that they took, as in kvf_way; NULL if the peer was asked to push them, or they went in a message.
    pub route: *const c_char,
    /// Why that way, in words; NULL with the route. Lasts for ever.
    pub reason: *const c_char,
}

/// The ways that bytes took to or from one peer of a request that has ended well, which is `peer` of kvf_transfer_peers: `*count` of
/// them, of which the first `capacity` are written.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_ways(
    transfer: Option<&Transfer>,
    peer: usize,
    ways: *mut Way,
    capacity: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard(|| {
        let (found, _) = told(handle(transfer, "transfer")?, peer)?;
        if ways.is_null() && capacity > 0 {
            return Err(Failure::argument("no place for ways: NULL"));
        }
        out(count)?.write(found.len());
        for (index, way) in found.iter().take(capacity).enumerate() {
            let (route, reason) = (lasting(&way.route), lasting(&way.reason));
            let way = Way { route, reason, bytes: way.bytes, runs: way.runs, elapsed_ns: nanos(way.elapsed) };
            let place = ways.wrapping_add(index);
            // SAFETY: `capacity` writable places by the contract, and `index` is below it.
            unsafe { place.write(way) };
        }
        Ok(())
    })
}

/// Where the time of a request that has ended well went, with one peer, which is `peer` of kvf_transfer_peers.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_transfer_times(
    transfer: Option<&Transfer>,
    peer: usize,
    times: Option<&mut MaybeUninit<PeerTimes>>,
) -> Status {
    guard(|| {
        let (_, Times { posting, queued, settling, total }) = told(handle(transfer, "transfer")?, peer)?;
        let [posting_ns, queued_ns, settling_ns, total_ns] = [posting, queued, settling, total].map(nanos);
        out(times)?.write(PeerTimes { posting_ns, queued_ns, settling_ns, total_ns });
        Ok(())
    })
}

/// How the last post of a transfer that has ended well went. KVF_PENDING: it has not.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_move_telemetry(
    transfer: Option<&Move>,
    telemetry: Option<&mut MaybeUninit<MoveTelemetry>>,
) -> Status {
    guard(|| {
        let told = Move::of(transfer)?.telemetry().ok_or_else(Failure::pending)?;
        let started = told.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (route, reason) = match told.route {
            Some((route, reason)) => (lasting(&route), lasting(&reason)),
            None => (ptr::null(), ptr::null()),
        };
        out(telemetry)?.write(MoveTelemetry {
            started_us: u64::try_from(started.as_micros()).unwrap_or(u64::MAX),
            posting_ns: nanos(told.posting),
            total_ns: nanos(told.total),
            bytes: told.bytes,
            entries: told.entries,
            route,
            reason,
        });
        Ok(())
    })
}

/// Ways and times with one peer of a request that has ended well.
fn told(transfer: &Transfer, peer: usize) -> Result<(Vec<TransferStats>, Times), Failure> {
    transfer.ended(Duration::ZERO)?;
    let found = match transfer.get()? {
        Handle::Receive(receive) => {
            let peers = receive.poll().and_then(Result::ok);
            peers.as_deref().and_then(|peers| peers.get(peer).map(|told| (told.carried.clone(), told.times)))
        }
        Handle::Send(send) => {
            let peers = send.poll().and_then(Result::ok);
            peers.as_deref().and_then(|peers| peers.get(peer).map(|told| (told.carried.clone(), told.times)))
        }
    };
    found.ok_or_else(|| Failure::argument(format!("no peer {peer}")))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// One of the library's few words for something, as text that lasts for ever.
fn lasting(word: &impl ToString) -> *const c_char {
    static WORDS: Mutex<BTreeMap<String, CString>> = Mutex::new(BTreeMap::new());
    let word = word.to_string();
    let mut words = WORDS.lock();
    // What a `CString` points to stays where it is when the map moves it.
    words.entry(word.clone()).or_insert_with(|| CString::new(word).unwrap_or_default()).as_ptr()
}
