//! The owner's end of a slab, or of an inbox in host memory that the GPU reads: scatters the chunks that peers have filled.
//!
//! # Safety
//!
//! A kernel reads a chunk that nobody is granted meanwhile and writes slots of regions, both held until it has ended.
#![allow(unsafe_code, reason = "launches the kernel on memory that it holds")]

use std::cell::RefCell;
use std::rc::Rc;

use crate::context::Context;
use crate::cuda::description::{DeviceDescription, slot};
use crate::cuda::expand::UNIT_BYTES;
use crate::cuda::incoming::Incoming;
use crate::cuda::kernel::CHUNKS;
use crate::cuda::queue::{Prepared, Queue, Ticket};
use crate::cuda::slab::Slab;
use crate::inbox::chunk_offset;
use crate::inbox::message::Refusal;
use crate::region::Region;
use crate::stage::stage;

/// Where a transfer's chunks go.
pub(crate) struct Scatterer {
    prepared: Option<Prepared>,
    _regions: Vec<Region>,
    queue: Rc<RefCell<Queue>>,
    pub(crate) chunk_units: u32,
    /// Chunks of the inbox that the source has begun to fill.
    pub(crate) ahead: Vec<u32>,
}

/// Chunks that a kernel is scattering.
pub(crate) struct Scattering {
    ticket: Option<Ticket>,
    whose: Rc<Scatterer>,
    _inbox: Region,
}

impl Scatterer {
    /// Checks a peer's description against this side's regions, which are named by the peer.
    pub(crate) fn check(
        incoming: &Incoming,
        context: &Context,
        bytes: &[u8],
        chunk_bytes: u32,
    ) -> Result<Self, Refusal> {
        stage!("description heard");
        let description = DeviceDescription::parse(bytes).ok_or(Refusal::Unreadable)?;
        let chunk_units = description.chunk_units;
        if chunk_units == 0 || u64::from(chunk_units) * UNIT_BYTES > u64::from(chunk_bytes) {
            return Err(Refusal::Unreadable);
        }
        let (known, regions) = incoming.look_up(context, description.parts)?;
        let highest: Vec<Option<u32>> = description.sets.iter().map(|slots| slots.iter().map(slot).max()).collect();
        for (part, (limit, set)) in known.limits.iter().enumerate() {
            let highest = highest.get(*set).ok_or(Refusal::Unreadable)?;
            let inside = highest.is_none_or(|highest| limit.is_some_and(|limit| u64::from(highest) <= limit));
            inside.then_some(()).ok_or(Refusal::Outside { part })?;
        }
        let prepared = incoming.queue.borrow_mut().prepare(&known.template, &description.sets);
        let prepared = prepared.map_err(|_| Refusal::Busy)?.ok_or(Refusal::Unreadable)?;
        let (queue, ahead) = (incoming.queue.clone(), description.ahead);
        stage!("description checked");
        Ok(Self { prepared: Some(prepared), _regions: regions, queue, chunk_units, ahead })
    }

    pub(crate) fn units(&self) -> u32 {
        self.prepared.as_ref().map_or(0, Prepared::units)
    }

    /// Chunks that can be scattered at a time, of an inbox whose chunks have `chunk_bytes`.
    pub(crate) fn chunks_max(&self, chunk_bytes: u32) -> usize {
        let whole = u64::from(self.chunk_units) * UNIT_BYTES == u64::from(chunk_bytes);
        if whole && self.chunk_units.is_power_of_two() { CHUNKS } else { 1 }
    }

    /// Starts to scatter the parts from `index` on, a chunk each, from these chunks of `inbox`, which has so many and they are
    /// not too many at a time. `None` if the GPU refuses.
    pub(crate) fn scatter(
        self: &Rc<Self>,
        inbox: &Region,
        chunk_bytes: u32,
        chunks: &[u32],
        index: u64,
    ) -> Option<Scattering> {
        stage!("chunks heard");
        let prepared = self.prepared.as_ref()?;
        let first = u32::try_from(index * u64::from(self.chunk_units)).ok()?;
        let units = u32::try_from(chunks.len()).ok().and_then(|count| count.checked_mul(self.chunk_units));
        let left = prepared.units().checked_sub(first)?;
        let units = units.map_or(left, |units| units.min(left));
        let mut queue = self.queue.borrow_mut();
        let base = inbox.device_address(queue.gpu());
        let place = base.map(|base| match chunks {
            [chunk] => Slab::at(base + chunk_offset(*chunk, chunk_bytes)),
            chunks => Slab::of(base, self.chunk_units, chunks),
        });
        let ticket = place.and_then(|place| {
            // SAFETY: the slots were checked against their regions in `check`, the chunks are the inbox's; the value holds all
            // of it.
            unsafe { queue.launch(prepared, (first, units), place, 0) }
        });
        let ticket = ticket.inspect_err(|error| tracing::error!(%error, "a chunk was not scattered")).ok()?;
        stage!("scattering");
        Some(Scattering { ticket: Some(ticket), whose: self.clone(), _inbox: inbox.clone() })
    }
}

impl Drop for Scatterer {
    fn drop(&mut self) {
        // Each kernel holds a count of this, so all have ended.
        let mut queue = self.queue.borrow_mut();
        self.prepared.take().into_iter().for_each(|prepared| queue.release(prepared));
    }
}

impl Scattering {
    /// Whether the kernel has ended, and well.
    pub(crate) fn poll(&mut self) -> Option<bool> {
        let Some(ticket) = self.ticket.take() else { return Some(false) };
        let mut queue = self.whose.queue.borrow_mut();
        match queue.poll(&ticket) {
            None => {
                drop(queue);
                self.ticket = Some(ticket);
                None
            }
            Some(result) => {
                stage!("scattered");
                Some(result.inspect_err(|error| tracing::error!(%error, "a chunk was not scattered")).is_ok())
            }
        }
    }
}

impl Drop for Scattering {
    fn drop(&mut self) {
        if self.ticket.take().is_some() {
            let _ = self.whose.queue.borrow_mut().drain();
        }
    }
}
