//! Local memory that chunks are gathered into before they are put over a network.

use std::collections::BTreeMap;

use crate::context::Context;
use crate::endpoint::EndpointId;
use crate::error::RegionError;
use crate::inbox::chunk_stride;
use crate::inbox::target::CHUNKS_PER_CONNECTION;
use crate::region::Region;

/// Slots that are allocated at a time.
const SLOTS: u32 = 16;

/// Slots that one connection may have: as many as chunks, so that none of its transfers is short of one. Nor is any other's: a peer
/// that is silent keeps what it has for a long time.
const SLOTS_PER_CONNECTION: usize = CHUNKS_PER_CONNECTION;

/// A worker's outbox. Takes memory as it needs it, and keeps it.
#[derive(Default)]
pub(crate) struct Outbox {
    /// Of [`SLOTS`] each.
    regions: Vec<Region>,
    free: Vec<u32>,
    /// Whose the others are.
    taken: BTreeMap<u32, EndpointId>,
}

impl Outbox {
    /// A slot of [`ContextOptions::chunk_bytes`](crate::ContextOptions), with the region that it is in and its offset there;
    /// `None` when the connection has all that it may have. Slots are laid out as chunks are.
    pub(crate) fn take(
        &mut self,
        context: &Context,
        endpoint: EndpointId,
    ) -> Result<Option<(u32, Region, u64)>, RegionError> {
        if self.taken.values().filter(|of| **of == endpoint).count() >= SLOTS_PER_CONNECTION {
            return Ok(None);
        }
        let slot_bytes = chunk_stride(context.options().chunk_bytes);
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let first = u32::try_from(self.regions.len()).expect("memory for so many") * SLOTS;
                self.regions.push(context.allocate(slot_bytes * u64::from(SLOTS))?);
                self.free.extend((first + 1..first + SLOTS).rev());
                first
            }
        };
        self.taken.insert(slot, endpoint);
        let region = self.regions[(slot / SLOTS) as usize].clone();
        Ok(Some((slot, region, u64::from(slot % SLOTS) * slot_bytes)))
    }

    pub(crate) fn put_back(&mut self, slot: u32) {
        if self.taken.remove(&slot).is_some() {
            self.free.push(slot);
        }
    }
}
