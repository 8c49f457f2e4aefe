//! The owner's end of a slab, or of an inbox in host memory that the GPU reads: scatters the chunks that peers have filled.
//!
//! # Safety
//!
//! A kernel reads a chunk that nobody is granted meanwhile and writes slots of regions, both held until it has ended.
#![allow(unsafe_code, reason = "launches the kernel on memory that it holds")]

use std::cell::RefCell;
use std::rc::Rc;

use crate::context::Context;
use crate::cuda::expand::{Mode, Placed, UNIT_BYTES};
use crate::cuda::queue::{Prepared, Queue, Ticket};
use crate::error::TransferError;
use crate::inbox::message::{DeviceDescription, Refusal};
use crate::pieces::HighestSlots;
use crate::region::{MemoryKind, Region};

/// Where a transfer's chunks go.
pub(crate) struct Scatterer {
    prepared: Option<Prepared>,
    _regions: Vec<Region>,
    queue: Rc<RefCell<Queue>>,
    pub(crate) chunk_units: u32,
}

/// A chunk that a kernel is scattering.
pub(crate) struct Scattering {
    ticket: Option<Ticket>,
    whose: Rc<Scatterer>,
    _slab: Region,
}

impl Scatterer {
    /// Checks a peer's description against this side's regions, which are named by the peer.
    pub(crate) fn check(
        queue: &Rc<RefCell<Queue>>,
        context: &Context,
        bytes: &[u8],
        chunk_bytes: u32,
    ) -> Result<Self, Refusal> {
        let description = DeviceDescription::parse(bytes).ok_or(Refusal::Unreadable)?;
        let chunk_units = description.chunk_units;
        if chunk_units == 0 || u64::from(chunk_units) * UNIT_BYTES > u64::from(chunk_bytes) {
            return Err(Refusal::Unreadable);
        }
        let highest: Vec<HighestSlots> = description.sets.iter().map(|pairs| HighestSlots::of(pairs)).collect();
        let (mut shapes, mut regions) = (Vec::new(), Vec::new());
        for (part, (claim, set)) in description.parts.iter().enumerate() {
            let region = context.region(claim.region).filter(|region| region.kind() == MemoryKind::Cuda);
            let region = region.ok_or(Refusal::Unregistered { part })?;
            let index = usize::try_from(*set).map_err(|_| Refusal::Unreadable)?;
            let pairs = description.sets.get(index).ok_or(Refusal::Unreadable)?;
            let mut shape = claim.shape(region.bytes());
            shape.pairs = pairs.clone();
            shape.check_with(part, highest[index]).map_err(|error| match error {
                TransferError::OutsideRemote { .. } => Refusal::Outside { part },
                _ => Refusal::Unreadable,
            })?;
            shapes.push((shape, index));
            regions.push(region);
        }
        let placed: Vec<Placed<'_>> = (shapes.iter().zip(&regions))
            .map(|((shape, set), region)| Placed { shape, from: 0, to: region.base(), set: *set })
            .collect();
        let sets: Vec<&[_]> = description.sets.iter().map(|pairs| &**pairs).collect();
        let prepared = queue.borrow_mut().prepare(Mode::Scatter, &placed, &sets);
        let prepared = prepared.map_err(|_| Refusal::Busy)?.ok_or(Refusal::Unreadable)?;
        Ok(Self { prepared: Some(prepared), _regions: regions, queue: queue.clone(), chunk_units })
    }

    pub(crate) fn units(&self) -> u32 {
        self.prepared.as_ref().map_or(0, Prepared::units)
    }

    /// Starts to scatter part `index` from the chunk at `offset` of `slab`. `None` if the GPU refuses.
    pub(crate) fn scatter(self: &Rc<Self>, slab: &Region, offset: u64, index: u64) -> Option<Scattering> {
        let prepared = self.prepared.as_ref()?;
        let first = u32::try_from(index * u64::from(self.chunk_units)).ok()?;
        let units = self.chunk_units.min(prepared.units().checked_sub(first)?);
        let mut queue = self.queue.borrow_mut();
        let place = slab.device_address(queue.gpu()).map(|base| base + offset);
        let ticket = place.and_then(|place| {
            // SAFETY: the slots were checked against their regions in `check`, the chunk is one of the slab's; the value holds
            // all of it.
            unsafe { queue.launch(prepared, first, units, place) }
        });
        let ticket = ticket.inspect_err(|error| tracing::error!(%error, "a chunk was not scattered")).ok()?;
        Some(Scattering { ticket: Some(ticket), whose: self.clone(), _slab: slab.clone() })
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
                queue.retire(ticket);
                Some(result.inspect_err(|error| tracing::error!(%error, "a chunk was not scattered")).is_ok())
            }
        }
    }
}

impl Drop for Scattering {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let mut queue = self.whose.queue.borrow_mut();
            let _ = queue.drain();
            queue.retire(ticket);
        }
    }
}
