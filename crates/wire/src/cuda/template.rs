//! What of a transfer does not depend on its slots, on the device.
//!
//! # Safety
//!
//! The memory is given back in the order of the stream that it was filled on, and when no kernel that reads it is left: whoever
//! has launched one holds the template until it has ended.
#![allow(unsafe_code, reason = "calls the driver")]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use zerocopy::IntoBytes;

use crate::cuda::driver::{CudaError, DeviceAddress};
use crate::cuda::expand::{Expansion, Mode, Placed};
use crate::cuda::stream::Stream;
use crate::inbox::message::Bytes;
use crate::pieces::Piece;
use crate::region::RegionId;

/// The pieces of transfers between the same regions, on the device.
pub(crate) struct Template {
    pub(crate) mode: Mode,
    pub(crate) expansion: Expansion,
    pub(crate) entries: DeviceAddress,
    pub(crate) starts: DeviceAddress,
    /// What a peer is told of the parts, with the regions there.
    pub(crate) described: RefCell<Option<(Vec<RegionId>, Rc<Bytes>)>>,
    /// What the key names by address, so that no other can get it.
    _pieces: Vec<Arc<[Piece]>>,
    stream: Rc<Stream>,
}

impl Template {
    /// Uploads an expansion of `placed`, in the order of the stream.
    pub(crate) fn new(
        stream: &Rc<Stream>,
        mode: Mode,
        expansion: Expansion,
        placed: &[Placed<'_>],
    ) -> Result<Self, CudaError> {
        let pieces = placed.iter().map(|placed| placed.shape.pieces.clone()).collect();
        let (entries, starts) = (expansion.entries.as_bytes(), expansion.starts.as_bytes());
        let bytes = entries.len() + starts.len();
        let image = [entries, starts].concat();
        let starts_offset = entries.len() as u64;
        let described = RefCell::default();
        let mut template =
            Self { mode, expansion, entries: 0, starts: 0, described, _pieces: pieces, stream: stream.clone() };
        if bytes > 0 {
            let Stream { gpu, raw } = &**stream;
            let _entered = gpu.enter()?;
            // SAFETY: `entries` receives memory that the template frees, on the same stream.
            unsafe { gpu.driver.alloc_async(&raw mut template.entries, bytes, *raw) }?;
            // SAFETY: both are `bytes` long. The image is pageable, so the driver has read it when the call returns.
            unsafe { gpu.driver.copy_to_device(template.entries, image.as_ptr().cast(), bytes, *raw) }?;
            template.starts = template.entries + starts_offset;
        }
        Ok(template)
    }
}

/// All that a template depends on. Many pieces go by address: a template holds them, so that no others can be there. One goes
/// by what it is, as those of a list do, which are made anew each time, and those that a peer has described.
pub(crate) fn key(mode: Mode, placed: &[Placed<'_>]) -> Vec<u64> {
    let mut key = Vec::with_capacity(1 + placed.len() * 15);
    key.push(mode as u64);
    for Placed { shape, from, to, set } in placed {
        let (local, remote) = (&shape.local, &shape.remote);
        key.extend([
            from.wrapping_add(local.base),
            local.slot_stride,
            to.wrapping_add(remote.base),
            remote.slot_stride,
        ]);
        key.extend([*set as u64, shape.pieces.len() as u64]);
        if mode == Mode::Scatter || shape.pieces.len() == 1 {
            key.extend(shape.pieces.iter().flat_map(numbers));
        } else {
            key.push(Arc::as_ptr(&shape.pieces).addr() as u64);
        }
    }
    key
}

fn numbers(piece: &Piece) -> [u64; 9] {
    let [outer, inner] = piece.dims.map(|dim| [dim.count, dim.local_stride, dim.remote_stride]);
    let [a, b, c] = [piece.local_offset, piece.remote_offset, piece.run_bytes];
    [a, b, c, outer[0], outer[1], outer[2], inner[0], inner[1], inner[2]]
}

impl Drop for Template {
    fn drop(&mut self) {
        let Stream { gpu, raw } = &*self.stream;
        if self.entries != 0
            && let Ok(_entered) = gpu.enter()
        {
            // SAFETY: allocated on this stream; no kernel that reads it is left.
            let _ = unsafe { gpu.driver.free_async(self.entries, *raw) };
        }
    }
}
