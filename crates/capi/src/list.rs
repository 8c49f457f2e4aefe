//! Lists of addresses, and transfers of them.
//!
//! # Safety
//!
//! The contract of the crate.
#![allow(unsafe_code, reason = "reads what C's pointers point to")]

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::time::Duration;

use kvferry_agent::{Indices, Operation, State, Transfer};
use kvferry_wire::MemoryKind;

use crate::agent::Agent;
use crate::bytes::{Slice, array, given, slice};
use crate::own::Own;
use crate::status::{Failure, Status, give, guard, handle, out};

/// A prepared list of runs of memory, local or remote. Freed by kvf_list_free.
pub struct List {
    list: Own<kvferry_agent::List>,
}

/// A transfer of an agent's. Freed by kvf_move_free.
pub struct Move {
    transfer: Own<Transfer>,
}

impl Move {
    /// The transfer, in its own process.
    pub(crate) fn of(transfer: Option<&Self>) -> Result<&Transfer, Failure> {
        handle(transfer, "transfer")?.transfer.get()
    }
}

/// Some memory, in the address space of the process that it is in.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Run {
    /// First byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
}

/// # Safety
///
/// An array by the contract.
unsafe fn read(runs: *const Run, count: usize) -> Result<Vec<kvferry_wire::Run>, Failure> {
    // SAFETY: the caller's promise, passed on.
    let runs = unsafe { array(runs, count) }?;
    Ok(runs.iter().map(|run| kvferry_wire::Run { address: run.address, bytes: run.bytes }).collect())
}

fn kind(on_gpu: bool) -> MemoryKind {
    if on_gpu { MemoryKind::Cuda } else { MemoryKind::Host }
}

/// Looks up runs in this agent's memory, of the host or of its GPU. The first that is in none is named.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_prepare_local(
    agent: Option<&Agent>,
    on_gpu: bool,
    runs: *const Run,
    count: usize,
    list: Option<&mut MaybeUninit<*mut List>>,
) -> Status {
    guard(|| {
        // SAFETY: an array by the contract.
        let runs = unsafe { read(runs, count) }?;
        give(list, List { list: Own::new(Agent::of(agent)?.prepare_local(kind(on_gpu), &runs)?) })
    })
}

/// Looks up runs in the memory that the remote agent has told of, and connects to it if that has not been done.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_prepare_remote(
    agent: Option<&Agent>,
    name: *const c_char,
    on_gpu: bool,
    runs: *const Run,
    count: usize,
    list: Option<&mut MaybeUninit<*mut List>>,
) -> Status {
    guard(|| {
        // SAFETY: text by the contract.
        let name = unsafe { given(name, "name") }?;
        // SAFETY: an array by the contract.
        let runs = unsafe { read(runs, count) }?;
        give(list, List { list: Own::new(Agent::of(agent)?.prepare_remote(name, kind(on_gpu), &runs)?) })
    })
}

/// Frees a list. Transfers that were made of it stay.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_list_free(list: Option<Box<List>>) {
    drop(list);
}

/// Pairs entry `from[i]` of a local list with entry `to[i]` of a remote one; NULL of a count of 0: all, in order. `read`: from
/// remote to local memory, else the other way. `notification`: what the remote agent hears when the bytes are there; NULL: it
/// hears nothing. Nothing is sent before kvf_move_post.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_make(
    agent: Option<&Agent>,
    read: bool,
    local: Option<&List>,
    from: *const u64,
    from_count: usize,
    remote: Option<&List>,
    to: *const u64,
    to_count: usize,
    notification: Option<&Slice>,
    transfer: Option<&mut MaybeUninit<*mut Move>>,
) -> Status {
    guard(|| {
        let agent = Agent::of(agent)?;
        let local = handle(local, "local list")?.list.get()?;
        let remote = handle(remote, "remote list")?.list.get()?;
        // SAFETY: an array by the contract.
        let from = unsafe { indices(from, from_count) }?;
        // SAFETY: an array by the contract.
        let to = unsafe { indices(to, to_count) }?;
        // SAFETY: an array by the contract.
        let notification = notification.map(|message| unsafe { slice(*message) }).transpose()?;
        let operation = if read { Operation::Read } else { Operation::Write };
        let place = out(transfer)?;
        let transfer = agent.make(operation, local, from, remote, to, notification)?;
        give(Some(place), Move { transfer: Own::new(transfer) })
    })
}

/// # Safety
///
/// An array by the contract.
unsafe fn indices<'a>(indices: *const u64, count: usize) -> Result<Indices<'a>, Failure> {
    if indices.is_null() && count == 0 {
        return Ok(Indices::All);
    }
    // SAFETY: the caller's promise, passed on.
    Ok(Indices::U64(unsafe { array(indices, count) }?))
}

/// Starts to move the bytes. A transfer may be posted again when it has ended.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_move_post(transfer: Option<&Move>) -> Status {
    guard(|| {
        Move::of(transfer)?.post(None)?;
        Ok(())
    })
}

/// Waits until what was posted last has ended, `timeout_ms` at most; 0 only asks. KVF_OK: the bytes are there. KVF_PENDING: not
/// yet, or not posted. Anything else says how it failed.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_move_wait(transfer: Option<&Move>, timeout_ms: u64) -> Status {
    guard(|| {
        let transfer = Move::of(transfer)?;
        let state = match timeout_ms {
            0 => transfer.state(),
            _ => transfer.wait(Duration::from_millis(timeout_ms)),
        };
        match state {
            State::Done => Ok(()),
            State::Made | State::Active => Err(Failure::pending()),
            State::Failed => Err(transfer.failure().map_or_else(Failure::pending, Failure::from)),
        }
    })
}

/// Gives a transfer up if it is under way, and waits until nothing of it reads or writes memory of this side any more,
/// `timeout_ms` at most: KVF_PENDING: it still does.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_move_quiet(transfer: Option<&Move>, timeout_ms: u64) -> Status {
    guard(|| {
        let quiet = Move::of(transfer)?.quiet(Duration::from_millis(timeout_ms));
        quiet.map_err(|_| Failure::pending())
    })
}

/// Frees a transfer. One that is under way is given up, without waiting: its memory stays registered until it has ended.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_move_free(transfer: Option<Box<Move>>) {
    drop(transfer);
}
