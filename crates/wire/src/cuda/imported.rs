//! GPU memory of a peer, mapped here. It stays valid when the peer dies: the import holds the allocation.

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
        if bytes > card.mapped_bytes {
            return Err(NotImported::NotOffered);
        }
        let control = Mapped::open(&card.control, CONTROL_BYTES).ok_or(NotImported::NotOffered)?;
        let file = export::fetch(card).ok_or(NotImported::NotOffered)?;
        let handle = Handle::import(gpu, &file).map_err(NotImported::Refused)?;
        let length = usize::try_from(card.mapped_bytes).map_err(|_| NotImported::NotOffered)?;
        let mapping = Mapping::new(gpu, &handle, length).map_err(NotImported::Refused)?;
        let imported = Arc::new(Self { mapping, gpu: owner, bytes, control });
        let mut imports = gpu.imports.lock();
        imports.retain(|_, import| import.strong_count() > 0);
        imports.insert(cookie, Arc::downgrade(&imported));
        Ok(imported)
    }

    pub(crate) fn base(&self) -> DeviceAddress {
        self.mapping.base
    }

    /// Whether the owner still has the memory registered.
    pub(crate) fn is_offered(&self) -> bool {
        self.control.is_offered()
    }
}
