//! Memory that a worker sets aside for peers to write, and both ends of its use.
//!
//! A source describes a transfer once: strided pieces and slots, never a list of runs. The target grants chunks of its
//! inbox, a few at a time; the source fills each with the next bytes of the transfer and says so; the target scatters it
//! and grants it anew, to whichever peer's turn it is. Memory is bounded on both sides, whatever the transfer's size, and
//! the slots that the caller named are written by their own process only.

use crate::cuda::expand::UNIT_BYTES;

pub(crate) mod message;
pub(crate) mod outbox;
pub(crate) mod source;
pub(crate) mod target;
pub(crate) mod units;

/// From the start of one chunk to that of the next, if a chunk has so many bytes: in whole units, since a GPU copies words, and
/// takes none that is not aligned.
pub(crate) fn chunk_stride(chunk_bytes: u32) -> u64 {
    u64::from(chunk_bytes).next_multiple_of(UNIT_BYTES)
}

/// Where a chunk starts, from the first.
pub(crate) fn chunk_offset(chunk: u32, chunk_bytes: u32) -> u64 {
    u64::from(chunk) * chunk_stride(chunk_bytes)
}

#[cfg(test)]
mod tests;
