//! Where the chunks of a stream belong that the target's GPU scatters. Its chunks are units of the kernel, so that both ends
//! expand it alike. Everything received is a claim.

use std::sync::Arc;

use zerocopy::IntoBytes;

use crate::inbox::message::{Bytes, PartDescription};
use crate::pieces::{Shape, SlotPair};
use crate::region::RegionId;

/// A description, as the target reads it, in the bytes that have arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceDescription<'a> {
    /// Units of a chunk.
    pub(crate) chunk_units: u32,
    /// Chunks that hold the first parts of the stream, or will: granted ahead.
    pub(crate) ahead: Vec<u32>,
    /// See [`parts`]: the same for all transfers between the same regions.
    pub(crate) parts: &'a [u8],
    /// The slots of each set, as the target sees them, in little-endian order.
    pub(crate) sets: Vec<&'a [[u8; 4]]>,
}

/// The parts of a transfer, without slots, each with the number of the set that has them.
pub(crate) fn parts(shapes: &[Shape], regions: &[RegionId], of_shape: &[usize]) -> Bytes {
    let none: Arc<[SlotPair]> = Arc::new([]);
    let part = |((shape, region), set): ((&Shape, &RegionId), &usize)| {
        (PartDescription::without_slots(*region, shape, &none), u32::try_from(*set).unwrap_or(u32::MAX))
    };
    let parts: Vec<(PartDescription, u32)> = shapes.iter().zip(regions).zip(of_shape).map(part).collect();
    Bytes(postcard::to_allocvec(&parts).expect("a plain structure has an encoding"))
}

/// Reads what [`parts`] has written.
pub(crate) fn parse_parts(bytes: &[u8]) -> Option<Vec<(PartDescription, u32)>> {
    postcard::from_bytes(bytes).ok()
}

/// A description as bytes. `sets` are the pairs of each set.
pub(crate) fn encode(chunk_units: u32, ahead: &[u32], parts: &Bytes, sets: &[Arc<[SlotPair]>]) -> Vec<u8> {
    let slots = |pairs: &Arc<[SlotPair]>| {
        let slots: Vec<u32> = pairs.iter().map(|pair| pair.remote.to_le()).collect();
        Bytes(slots.as_bytes().to_vec())
    };
    let sets: Vec<Bytes> = sets.iter().map(slots).collect();
    postcard::to_allocvec(&(chunk_units, ahead, parts, sets)).expect("a plain structure has an encoding")
}

impl<'a> DeviceDescription<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (chunk_units, ahead, parts, sets): (u32, Vec<u32>, &[u8], Vec<&[u8]>) = postcard::from_bytes(bytes).ok()?;
        let slots = |slots: &'a [u8]| match slots.as_chunks::<4>() {
            (slots, []) => Some(slots),
            _ => None,
        };
        Some(Self { chunk_units, ahead, parts, sets: sets.into_iter().map(slots).collect::<Option<_>>()? })
    }
}

/// The slot of a set, as it is sent.
pub(crate) fn slot(bytes: &[u8; 4]) -> u32 {
    u32::from_le_bytes(*bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pieces::{Dim, Piece, Span};

    #[test]
    fn a_description_is_itself_after_the_way() {
        let dims = [Dim { count: 3, local_stride: 7, remote_stride: 1000 }, Dim::ONE];
        let piece = Piece { local_offset: 5, remote_offset: 70_000, run_bytes: 512, dims };
        let span = Span { base: 1 << 40, slot_stride: 4096, region_bytes: u64::MAX };
        let pairs: Arc<[SlotPair]> = [(0, 9), (1, u32::MAX)].map(|(local, remote)| SlotPair { local, remote }).into();
        let shape = Shape { local: span, remote: span, pieces: Arc::new([piece]), pairs: pairs.clone() };
        let parts = parts(&[shape.clone(), shape], &[RegionId(3), RegionId(4)], &[1, 0]);
        let bytes = encode(8, &[2, 600], &parts, &[pairs, Arc::new([])]);
        let found = DeviceDescription::parse(&bytes).unwrap();
        assert_eq!((found.chunk_units, &found.ahead[..], found.parts), (8, &[2, 600][..], &parts.0[..]));
        let remotes: Vec<Vec<u32>> = found.sets.iter().map(|set| set.iter().map(slot).collect()).collect();
        assert_eq!(remotes, [vec![9, u32::MAX], vec![]]);
        let read = parse_parts(found.parts).unwrap();
        assert_eq!(
            read.iter().map(|(part, set)| (part.region, *set)).collect::<Vec<_>>(),
            [(RegionId(3), 1), (RegionId(4), 0)]
        );
        let claimed = read[0].0.shape(99);
        assert_eq!(claimed.remote, Span { region_bytes: 99, ..span });
        assert_eq!((claimed.pieces[0].remote_offset, claimed.pieces[0].dims[0].remote_stride), (70_000, 1000));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_and_never_a_panic(bytes: Vec<u8>) {
            let _ = DeviceDescription::parse(&bytes);
            let _ = parse_parts(&bytes);
        }
    }
}
