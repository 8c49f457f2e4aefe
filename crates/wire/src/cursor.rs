//! A transfer seen as one stream of bytes: the runs of its shapes, in order, each a contiguous copy. Any position of the
//! stream can be started from, so that chunks of it move independently; nothing is ever expanded into a list.

use crate::pieces::{Piece, Shape};

/// One contiguous copy of shape `part`, offsets from the start of both regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) part: usize,
    pub(crate) local_offset: u64,
    pub(crate) remote_offset: u64,
    pub(crate) bytes: u64,
}

/// A position in the stream. Holds a few indices, whatever the transfer's size.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cursor {
    part: usize,
    pair: usize,
    piece: usize,
    outer: u64,
    inner: u64,
    /// Bytes of the current run that are behind.
    taken: u64,
}

impl Cursor {
    /// The position of byte `position` of the stream, in time of shapes plus pieces. Past the end it is the end.
    ///
    /// The shapes must have been checked, here and below: then nothing can overflow.
    pub(crate) fn at(shapes: &[Shape], mut position: u64) -> Self {
        for (part, shape) in shapes.iter().enumerate() {
            let pair_bytes: u64 = shape.pieces.iter().map(|piece| piece.bytes()).sum();
            let part_bytes = pair_bytes * shape.pairs.len() as u64;
            if position >= part_bytes {
                position -= part_bytes;
                continue;
            }
            let pair = usize::try_from(position / pair_bytes).expect("less than the number of pairs, a usize");
            position %= pair_bytes;
            for (index, piece) in shape.pieces.iter().enumerate() {
                if position >= piece.bytes() {
                    position -= piece.bytes();
                    continue;
                }
                return Self::in_piece(shapes, part, pair, index, position);
            }
        }
        Self { part: shapes.len(), ..Self::default() }
    }

    /// Byte `position` of a piece's stream for one pair of slots. There are the part, the pair and the byte.
    pub(crate) fn in_piece(shapes: &[Shape], part: usize, pair: usize, piece: usize, position: u64) -> Self {
        let Piece { run_bytes, dims: [_, inner], .. } = &shapes[part].pieces[piece];
        let (run, taken) = (position / run_bytes, position % run_bytes);
        Self { part, pair, piece, outer: run / inner.count, inner: run % inner.count, taken }
    }

    /// Whether it has come to the end of this piece, in which it was.
    pub(crate) fn has_left(&self, piece: usize) -> bool {
        self.piece != piece
    }

    /// The next run, cut to at most `bytes_max`; `None` at the end.
    pub(crate) fn next(&mut self, shapes: &[Shape], bytes_max: u64) -> Option<Run> {
        loop {
            let shape = shapes.get(self.part)?;
            let (Some(pair), false) = (shape.pairs.get(self.pair), shape.pieces.is_empty()) else {
                *self = Self { part: self.part + 1, ..Self::default() };
                continue;
            };
            let Some(piece) = shape.pieces.get(self.piece) else {
                (self.pair, self.piece) = (self.pair + 1, 0);
                continue;
            };
            let [outer, inner] = &piece.dims;
            let bytes = (piece.run_bytes - self.taken).min(bytes_max);
            let run = Run {
                part: self.part,
                local_offset: shape.local.base
                    + u64::from(pair.local) * shape.local.slot_stride
                    + piece.local_offset
                    + self.outer * outer.local_stride
                    + self.inner * inner.local_stride
                    + self.taken,
                remote_offset: shape.remote.base
                    + u64::from(pair.remote) * shape.remote.slot_stride
                    + piece.remote_offset
                    + self.outer * outer.remote_stride
                    + self.inner * inner.remote_stride
                    + self.taken,
                bytes,
            };
            self.taken += bytes;
            if self.taken == piece.run_bytes {
                (self.inner, self.taken) = (self.inner + 1, 0);
            }
            if self.inner == inner.count {
                (self.outer, self.inner) = (self.outer + 1, 0);
            }
            if self.outer == outer.count {
                (self.piece, self.outer) = (self.piece + 1, 0);
            }
            return Some(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::pieces::{Dim, SlotPair, Span};

    fn span() -> Span {
        Span { base: 1000, slot_stride: 500, region_bytes: u64::MAX }
    }

    fn shape() -> impl Strategy<Value = Shape> {
        let dim = || (1..4u64, 0..50u64, 0..50u64);
        let dims = (dim(), dim()).prop_map(|dims| {
            [dims.0, dims.1].map(|(count, local_stride, remote_stride)| Dim { count, local_stride, remote_stride })
        });
        let piece = (0..20u64, 0..20u64, 1..30u64, dims).prop_map(|(local_offset, remote_offset, run_bytes, dims)| {
            Piece { local_offset, remote_offset, run_bytes, dims }
        });
        let pair = (0..9u32, 0..9u32).prop_map(|(local, remote)| SlotPair { local, remote });
        (prop::collection::vec(piece, 0..4), prop::collection::vec(pair, 0..4)).prop_map(|(pieces, pairs)| Shape {
            local: span(),
            remote: span(),
            pieces: Arc::from(pieces),
            pairs: Arc::from(pairs),
        })
    }

    /// The stream byte by byte, by plain loops.
    fn bytes_of(shapes: &[Shape]) -> Vec<(usize, u64, u64)> {
        let mut bytes = Vec::new();
        for (part, shape) in shapes.iter().enumerate() {
            for pair in shape.pairs.iter() {
                for piece in shape.pieces.iter() {
                    for outer in 0..piece.dims[0].count {
                        for inner in 0..piece.dims[1].count {
                            for byte in 0..piece.run_bytes {
                                let place = |slot: u32, offset, strides: [u64; 2]| {
                                    1000 + u64::from(slot) * 500
                                        + offset
                                        + outer * strides[0]
                                        + inner * strides[1]
                                        + byte
                                };
                                let local = piece.dims.map(|dim| dim.local_stride);
                                let remote = piece.dims.map(|dim| dim.remote_stride);
                                let local = place(pair.local, piece.local_offset, local);
                                bytes.push((part, local, place(pair.remote, piece.remote_offset, remote)));
                            }
                        }
                    }
                }
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn from_any_position_the_rest_of_the_stream_follows(
            shapes in prop::collection::vec(shape(), 0..3),
            position: prop::sample::Index,
            bytes_max in 1..40u64,
        ) {
            let expected = bytes_of(&shapes);
            let start = position.index(expected.len() + 1);
            let mut cursor = Cursor::at(&shapes, start as u64);
            let mut found = Vec::new();
            while let Some(run) = cursor.next(&shapes, bytes_max) {
                prop_assert!(run.bytes <= bytes_max && run.bytes > 0);
                found.extend((0..run.bytes).map(|i| (run.part, run.local_offset + i, run.remote_offset + i)));
            }
            prop_assert_eq!(&found[..], &expected[start..]);
        }
    }
}
