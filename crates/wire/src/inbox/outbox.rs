//! Local memory that chunks are gathered into before they are put over a network.

use crate::context::Context;
use crate::error::RegionError;
use crate::inbox::chunk_stride;
use crate::region::Region;

/// Slots of a worker's outbox.
const SLOTS: u32 = 16;

/// A worker's outbox. Takes memory at its first use.
#[derive(Default)]
pub(crate) struct Outbox {
    region: Option<Region>,
    free: Vec<u32>,
}

impl Outbox {
    /// A slot of [`ContextOptions::chunk_bytes`](crate::ContextOptions), with the region that it is in and its offset there;
    /// `None` when all are in use. Slots are laid out as chunks are.
    pub(crate) fn take(&mut self, context: &Context) -> Result<Option<(u32, Region, u64)>, RegionError> {
        let slot_bytes = chunk_stride(context.options().chunk_bytes);
        let region = match &self.region {
            Some(region) => region.clone(),
            None => {
                let region = context.allocate(slot_bytes * u64::from(SLOTS))?;
                self.free = (0..SLOTS).rev().collect();
                self.region.insert(region).clone()
            }
        };
        Ok(self.free.pop().map(|slot| (slot, region, u64::from(slot) * slot_bytes)))
    }

    pub(crate) fn put_back(&mut self, slot: u32) {
        self.free.push(slot);
    }
}
