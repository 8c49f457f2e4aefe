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

/// The targets of a transfer's parts. Parts follow each other that have the same, so each is held once.
#[derive(Debug, Default)]
pub(crate) struct Targets {
    /// With the first part that has it.
    distinct: Vec<(usize, DeviceTarget)>,
    /// Of each part.
    addresses: Vec<DeviceAddress>,
}

impl Targets {
    /// Of parts that are told apart by `keys`; why not, if one of them is not there.
    pub(crate) fn new<K: PartialEq>(
        keys: impl Iterator<Item = K>,
        mut target: impl FnMut(&K) -> Result<DeviceTarget, NotImported>,
    ) -> Result<Self, NotImported> {
        let (mut targets, mut last) = (Self::default(), None);
        for (part, key) in keys.enumerate() {
            let address = match (&last, targets.addresses.last()) {
                (Some(last), Some(address)) if *last == key => *address,
                _ => {
                    let target = target(&key)?;
                    let address = target.address();
                    targets.distinct.push((part, target));
                    address
                }
            };
            targets.addresses.push(address);
            last = Some(key);
        }
        Ok(targets)
    }

    pub(crate) fn addresses(&self) -> &[DeviceAddress] {
        &self.addresses
    }

    /// The first part whose target its owner has no longer registered.
    pub(crate) fn withdrawn(&self) -> Option<usize> {
        self.distinct.iter().find(|(_, target)| !target.is_offered()).map(|(part, _)| *part)
    }

    /// Whether all of it is memory of this very GPU.
    pub(crate) fn are_on(&self, gpu: &Gpu) -> bool {
        self.distinct.iter().all(|(_, target)| target.is_on(gpu))
    }
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
