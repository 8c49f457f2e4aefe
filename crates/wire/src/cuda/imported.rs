//! GPU memory of a peer, mapped here. It stays valid when the peer dies: the import holds the allocation.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use crate::cuda::card::ExportCard;
use crate::cuda::driver::{CudaError, DeviceAddress};
use crate::cuda::export;
use crate::cuda::gpu::Gpu;
use crate::cuda::memory::{Handle, Mapping};
use crate::share::Mapped;

/// A mapping of a peer's memory.
#[derive(Debug)]
pub(crate) struct Imported {
    mapping: Mapping,
    /// Where in it the region starts.
    offset: u64,
    /// Whose memory it is.
    pub(crate) gpu: [u8; 16],
    bytes: u64,
    control: Mapped,
}

/// Why GPU memory of a peer cannot be mapped here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotImported {
    /// This side has no GPU.
    NoGpu,
    /// It is not offered: it is the caller's own, or the peer is on another host or gone.
    NotOffered,
    /// The driver refuses: no access between the two GPUs, as a rule.
    Refused(CudaError),
}

/// Bytes of the file that says whether memory is registered, without its control page.
pub(crate) const CONTROL_BYTES: u64 = 1;

impl Imported {
    /// Maps `bytes` of what `card` offers, or finds the mapping that there is. Waits for the peer, within a deadline.
    pub(crate) fn open(
        gpu: &Arc<Gpu>,
        owner: [u8; 16],
        card: &ExportCard,
        bytes: u64,
    ) -> Result<Arc<Self>, NotImported> {
        let cookie = card.control.cookie();
        // Not locked while the peer is waited for: two threads that import the same memory at once map it twice, no harm.
        let known = gpu.imports.lock().get(&cookie).and_then(Weak::upgrade);
        if let Some(known) = known.filter(|known| known.bytes == bytes) {
            return Ok(known);
        }
        let whole = card.mapped_bytes.iter().try_fold(0u64, |sum, bytes| sum.checked_add(*bytes));
        if card.offset.checked_add(bytes).zip(whole).is_none_or(|(end, whole)| end > whole) {
            return Err(NotImported::NotOffered);
        }
        let control = Mapped::open(&card.control, CONTROL_BYTES).ok_or(NotImported::NotOffered)?;
        let files = export::fetch(card).ok_or(NotImported::NotOffered)?;
        let allocation = |(file, bytes): (&OwnedFd, &u64)| {
            let bytes = usize::try_from(*bytes).map_err(|_| NotImported::NotOffered)?;
            Ok((Handle::import(gpu, file).map_err(NotImported::Refused)?, bytes))
        };
        let allocations = files.iter().zip(&card.mapped_bytes).map(allocation).collect::<Result<Vec<_>, _>>()?;
        let mapping = Mapping::new(gpu, &allocations).map_err(NotImported::Refused)?;
        let imported = Arc::new(Self { mapping, offset: card.offset, gpu: owner, bytes, control });
        let mut imports = gpu.imports.lock();
        imports.retain(|_, import| import.strong_count() > 0);
        imports.insert(cookie, Arc::downgrade(&imported));
        Ok(imported)
    }

    pub(crate) fn base(&self) -> DeviceAddress {
        self.mapping.base + self.offset
    }

    /// Whether the owner still has the memory registered.
    pub(crate) fn is_offered(&self) -> bool {
        self.control.is_offered()
    }
}
