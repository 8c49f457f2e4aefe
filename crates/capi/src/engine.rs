//! The engine.
//!
//! # Safety
//!
//! The contract of the crate.
#![allow(unsafe_code, reason = "reads what C's pointers point to")]

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;

use kvferry::{EngineOptions, RequestKey};
use kvferry_layout::Slot;
use kvferry_wire::CudaOptions;

use crate::bytes::{Bytes, array, handles, text};
use crate::card::Instance;
use crate::own::Own;
use crate::region::{Region, Released, register};
use crate::status::{Failure, Status, give, guard, handle, out};
use crate::table::Table;
use crate::transfer::{Handle, Transfer};

/// One rank's engine. Freed by kvf_engine_free.
pub struct Engine {
    engine: Own<kvferry::Engine>,
}

impl Engine {
    /// The engine, in its own process.
    fn of(engine: Option<&Self>) -> Result<&kvferry::Engine, Failure> {
        handle(engine, "engine")?.engine.get()
    }
}

/// One pair of connected instances. Freed by kvf_link_free, which does not disconnect.
pub struct Link {
    link: kvferry::Link,
}

/// The slots of a request's blocks in one group of a page table.
#[repr(C)]
pub struct BlockMap {
    /// Ordinal of the block that the first slot is of.
    pub first: u64,
    /// The slots, in the order of blocks; -1 for a block that is not there.
    pub slots: *const i64,
    /// How many.
    pub count: usize,
}

/// Starts an engine.
///
/// - `options`: JSON with the keys of the library's EngineOptions ("rank", "instance", "transports", "route", "patience_ms", ..);
///   what is not given is at its default. NULL: all.
/// - `gpu`: for pools in memory of a GPU, JSON with the keys of the library's CudaOptions ("device", and what is to be other than its
///   default); NULL for none.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_start(
    options: *const c_char,
    gpu: *const c_char,
    engine: Option<&mut MaybeUninit<*mut Engine>>,
) -> Status {
    guard(|| {
        // SAFETY: text by the contract.
        let options = unsafe { text(options) }?;
        let options = options.map(EngineOptions::from_json).transpose()?.unwrap_or_default();
        // SAFETY: text by the contract.
        let gpu = unsafe { text(gpu) }?.map(serde_json::from_str::<CudaOptions>).transpose()?;
        let started = match gpu {
            Some(gpu) => kvferry::Engine::start_on_gpu(options, gpu),
            None => kvferry::Engine::start(options),
        };
        give(engine, Engine { engine: Own::new(started?) })
    })
}

/// Allocates zeroed memory for each pool of `table`, writes its address into the table, and a region to each place of `regions`,
/// of which there must be kvf_table_pools. Peers on this host can map such memory.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_allocate(
    engine: Option<&Engine>,
    table: Option<&Table>,
    regions: *mut *mut Region,
    count: usize,
) -> Status {
    guard(|| {
        let (engine, mut table) = (Engine::of(engine)?, handle(table, "table")?.table.lock());
        if count != table.pools.len() || (regions.is_null() && count > 0) {
            return Err(Failure::argument(format!("{count} places for the regions of {} pools", table.pools.len())));
        }
        let allocated = engine.allocate(&mut table)?;
        for (index, region) in allocated.into_iter().enumerate() {
            let place = regions.wrapping_add(index);
            // SAFETY: `count` writable places by the contract, and one a pool.
            unsafe { place.write(Box::into_raw(Box::new(Region::new(region)))) };
        }
        Ok(())
    })
}

/// Registers memory of the caller's: `bytes` from `base` on, of the host or of the engine's GPU. It has to stay until `released`
/// is called, which may be NULL if the memory stays for ever. It is called only if this returns KVF_OK.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_register(
    engine: Option<&Engine>,
    base: u64,
    bytes: u64,
    on_gpu: bool,
    released: Released,
    context: *mut c_void,
    region: Option<&mut MaybeUninit<*mut Region>>,
) -> Status {
    guard(|| {
        let engine = Engine::of(engine)?;
        let place = out(region)?;
        // SAFETY: it stays, by the contract.
        let registered = unsafe { register(engine.context(), (base, bytes, on_gpu), (released, context)) }?;
        give(Some(place), Region::new(registered))
    })
}

/// Offers this rank's pools to its peers: pool i of `table` lies in `regions[i]`. Once in the engine's life.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_publish(
    engine: Option<&Engine>,
    table: Option<&Table>,
    regions: *const Option<&Region>,
    count: usize,
) -> Status {
    guard(|| {
        let engine = Engine::of(engine)?;
        let mut table = handle(table, "table")?.table.lock().clone();
        // SAFETY: an array of handles by the contract.
        let regions = unsafe { handles(regions, count, "region") }?;
        let regions = regions.into_iter().map(|region| region.get().cloned()).collect::<Result<Vec<_>, _>>()?;
        for (pool, region) in table.pools.iter_mut().zip(&regions).filter(|(pool, _)| pool.base == 0) {
            pool.base = region.base();
        }
        Ok(engine.publish(table, regions)?)
    })
}

/// This rank's card, once it has published a table: with those of the other ranks it makes a kvf_instance.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_engine_card(engine: Option<&Engine>, card: Option<&mut MaybeUninit<Bytes>>) -> Status {
    guard(|| {
        let unpublished = || Failure::new(Status::KvfPublish, "Unpublished", "no page table has been published");
        let made = Engine::of(engine)?.card().ok_or_else(unpublished)?;
        out(card)?.write(Bytes::new(made));
        Ok(())
    })
}

/// Connects two instances, of one of which this engine is a rank. Every rank of both makes this call with the same cards, at the
/// same time: it waits for the others, up to the engine's patience.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_engine_connect(
    engine: Option<&Engine>,
    sources: Option<&Instance>,
    destinations: Option<&Instance>,
    link: Option<&mut MaybeUninit<*mut Link>>,
) -> Status {
    guard(|| {
        let engine = Engine::of(engine)?;
        let (sources, destinations) = (handle(sources, "sources")?, handle(destinations, "destinations")?);
        let place = out(link)?;
        give(Some(place), Link { link: engine.connect(&sources.card, &destinations.card)? })
    })
}

/// Forgets a link and tells its peers. Refused while a request of it is under way.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_engine_disconnect(engine: Option<&Engine>, link: Option<&Link>) -> Status {
    guard(|| Ok(Engine::of(engine)?.disconnect(handle(link, "link")?.link)?))
}

/// Asks the sources of `links` for the tokens `first_token` to `end_token - 1` of a request: of several links, the first whose
/// sources send it. `maps`: one a group of this rank's table. The slots are exposed until kvf_transfer_quiet says otherwise.
///
/// Each rank of this rank's instance chooses by itself: where there are several, only one group of sources may send an attempt.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_receive(
    engine: Option<&Engine>,
    links: *const Option<&Link>,
    link_count: usize,
    request: u64,
    attempt: u32,
    maps: *const BlockMap,
    map_count: usize,
    first_token: u64,
    end_token: u64,
    receive: Option<&mut MaybeUninit<*mut Transfer>>,
) -> Status {
    guard(|| {
        let engine = Engine::of(engine)?;
        // SAFETY: an array of handles by the contract.
        let links = unsafe { handles(links, link_count, "link") }?;
        let links: Vec<_> = links.into_iter().map(|link| link.link).collect();
        // SAFETY: an array by the contract.
        let maps = unsafe { block_maps(maps, map_count) }?;
        let (key, place) = (RequestKey { request, attempt }, out(receive)?);
        let posted = engine.receive_from_any(&links, key, &maps, tokens(first_token, end_token)?)?;
        give(Some(place), Transfer::new(Handle::Receive(posted)))
    })
}

/// Writes the tokens `first_token` to `end_token - 1` of a request to each destination of `link` that this rank serves, as soon
/// as it has said where to. `in_parts`: nothing leaves before it is pushed, by kvf_transfer_push. Without, the slots must hold the
/// bytes now. They must not change until they are quiet, which of a send that ended well they are.
///
/// # Safety
///
/// The contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_send(
    engine: Option<&Engine>,
    link: Option<&Link>,
    request: u64,
    attempt: u32,
    maps: *const BlockMap,
    map_count: usize,
    first_token: u64,
    end_token: u64,
    in_parts: bool,
    send: Option<&mut MaybeUninit<*mut Transfer>>,
) -> Status {
    guard(|| {
        let (engine, link) = (Engine::of(engine)?, handle(link, "link")?.link);
        // SAFETY: an array by the contract.
        let maps = unsafe { block_maps(maps, map_count) }?;
        let (key, place) = (RequestKey { request, attempt }, out(send)?);
        let tokens = tokens(first_token, end_token)?;
        let posted = match in_parts {
            false => engine.send(link, key, maps, tokens),
            true => engine.send_in_parts(link, key, maps, tokens),
        };
        give(Some(place), Transfer::new(Handle::Send(posted?)))
    })
}

/// Frees a link. Disconnects nothing.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_link_free(link: Option<Box<Link>>) {
    drop(link);
}

/// Ends every request of an engine, says goodbye to its peers, stops its threads, and frees it. Waits for that.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_engine_free(engine: Option<Box<Engine>>) {
    // A panic here has nobody to be told to.
    let _ = guard(|| {
        drop(engine);
        Ok(())
    });
}

/// Tokens, whose end is not before their first.
pub(crate) fn tokens(first: u64, end: u64) -> Result<Range<u64>, Failure> {
    if first > end {
        return Err(Failure::argument(format!("tokens {first} to {end}: the end is before the first")));
    }
    Ok(first..end)
}

/// # Safety
///
/// An array of maps, and of slots in each, by the contract.
pub(crate) unsafe fn block_maps(maps: *const BlockMap, count: usize) -> Result<Vec<kvferry_match::BlockMap>, Failure> {
    // SAFETY: the caller's promise, passed on.
    let maps = unsafe { array(maps, count) }?;
    let map = |map: &BlockMap| {
        // SAFETY: as above.
        let slots = unsafe { array(map.slots, map.count) }?;
        let slots = slots.iter().map(|slot| entry(*slot)).collect::<Result<Vec<_>, _>>()?;
        Ok(kvferry_match::BlockMap::new(map.first, slots))
    };
    maps.iter().map(map).collect()
}

fn entry(slot: i64) -> Result<Option<Slot>, Failure> {
    match slot {
        -1 => Ok(None),
        slot => match u32::try_from(slot) {
            Ok(slot) => Ok(Some(Slot(slot))),
            Err(_) => Err(Failure::argument(format!("slot {slot}: slots count from 0 to 2^32 - 1, and -1 is a hole"))),
        },
    }
}
