//! The memory that takes the place of the side that a copy leaves out, as the kernel numbers it.

use crate::cuda::driver::DeviceAddress;
use crate::cuda::kernel::CHUNKS;

/// Where the units of one launch lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slab {
    pub(crate) base: DeviceAddress,
    pub(crate) chunk_shift: u32,
    pub(crate) chunks: [u32; CHUNKS],
}

impl Slab {
    /// Of a direct copy, which has none.
    pub(crate) const NONE: Self = Self::at(0);

    /// Units one behind the other from `base` on.
    pub(crate) const fn at(base: DeviceAddress) -> Self {
        Self { base, chunk_shift: 31, chunks: [0; CHUNKS] }
    }

    /// Units in chunks of `chunk_units`, a power of two, of the memory at `base`. `chunks` are at most [`CHUNKS`].
    pub(crate) fn of(base: DeviceAddress, chunk_units: u32, chunks: &[u32]) -> Self {
        debug_assert!(chunk_units.is_power_of_two());
        let mut slab = Self { base, chunk_shift: chunk_units.trailing_zeros(), chunks: [0; CHUNKS] };
        slab.chunks[..chunks.len()].copy_from_slice(chunks);
        slab
    }
}
