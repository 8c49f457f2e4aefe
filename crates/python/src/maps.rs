//! Block maps, as Python hands them over.

use kvferry_layout::Slot;
use kvferry_match::BlockMap;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A block map: the ordinal of its first block, and the slots as little-endian 64-bit integers, -1 for a hole. The stable ABI
/// of Python 3.10 has no buffers; bytes it has.
#[derive(FromPyObject)]
pub(crate) struct RawMap(u64, Vec<u8>);

pub(crate) fn block_maps(maps: Vec<RawMap>) -> PyResult<Vec<BlockMap>> {
    maps.into_iter().map(|RawMap(first, bytes)| Ok(BlockMap::new(first, slots(&bytes)?))).collect()
}

fn slots(bytes: &[u8]) -> PyResult<Vec<Option<Slot>>> {
    let (slots, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(PyValueError::new_err("slots are 8 bytes each"));
    }
    let slot = |bytes: &[u8; 8]| match i64::from_le_bytes(*bytes) {
        -1 => Ok(None),
        slot => match u32::try_from(slot) {
            Ok(slot) => Ok(Some(Slot(slot))),
            Err(_) => {
                Err(PyValueError::new_err(format!("slot {slot}: slots count from 0 to 2^32 - 1, and -1 is a hole")))
            }
        },
    };
    slots.iter().map(slot).collect()
}
