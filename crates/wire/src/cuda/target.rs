//! Memory of a peer that a kernel of this side can write.

use std::sync::Arc;

use crate::cuda::driver::DeviceAddress;
use crate::cuda::gpu::Gpu;
use crate::cuda::imported::{Imported, NotImported};
use crate::cuda::pinned::PinnedMapping;
use crate::share::Mapped;

/// Where a kernel writes. Held until it has ended.
#[derive(Clone, Debug)]
pub(crate) enum DeviceTarget {
    Gpu(Arc<Imported>),
    Host(Arc<PinnedMapping>),
}

impl DeviceTarget {
    pub(crate) fn pin(gpu: &Arc<Gpu>, mapped: Arc<Mapped>) -> Result<Self, NotImported> {
        let pinned = PinnedMapping::new(gpu, mapped).map_err(NotImported::Refused)?;
        Ok(Self::Host(Arc::new(pinned)))
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        match self {
            Self::Gpu(imported) => imported.base(),
            Self::Host(pinned) => pinned.address(),
        }
    }

    /// Whether it is memory of this very GPU.
    pub(crate) fn is_on(&self, gpu: &Gpu) -> bool {
        matches!(self, Self::Gpu(imported) if imported.gpu == gpu.uuid)
    }

    /// Whether the owner still has the memory registered.
    pub(crate) fn is_offered(&self) -> bool {
        match self {
            Self::Gpu(imported) => imported.is_offered(),
            Self::Host(pinned) => pinned.is_offered(),
        }
    }
}
