//! What a peer is told of GPU memory. Plain data: claims, until something has been mapped.

use serde::{Deserialize, Serialize};

use crate::share::ShareCard;

/// That a region is GPU memory, and how a peer on the same host can map it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceCard {
    /// The GPU, as the driver names it for good.
    pub(crate) gpu: [u8; 16],
    /// `None` if it cannot be mapped: it is the caller's.
    pub(crate) export: Option<ExportCard>,
}

/// Where a peer on the same host gets the descriptors of the allocations that a region is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExportCard {
    /// Name of the owner's socket.
    pub(crate) socket: u128,
    /// Length of each allocation, in the order in which they are mapped.
    pub(crate) mapped_bytes: Vec<u64>,
    /// Where in the first of them the region starts.
    pub(crate) offset: u64,
    /// The file that says whether the memory is still registered. Its cookie is the name of the allocations.
    pub(crate) control: ShareCard,
}
