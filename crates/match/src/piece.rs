//! Strided pieces: what is copied for a pair of slots.

/// One dimension of a piece: how often the run is repeated, and how far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dim {
    /// Repetitions, at least 1.
    pub count: u64,
    /// Bytes from one repetition to the next in the source's slot.
    pub source_stride: u64,
    /// Bytes from one repetition to the next in the destination's slot.
    pub destination_stride: u64,
}

impl Dim {
    /// No dimension: one repetition.
    pub const UNUSED: Self = Self { count: 1, source_stride: 0, destination_stride: 0 };

    fn has_strides_of(&self, other: &Self) -> bool {
        (self.source_stride, self.destination_stride) == (other.source_stride, other.destination_stride)
    }
}

/// A run of bytes, repeated over up to two dimensions.
///
/// For each `i < dims[0].count` and `j < dims[1].count`, `run_bytes` bytes go from
/// `source_offset + i * dims[0].source_stride + j * dims[1].source_stride` of the source's slot to the same expression
/// of the destination's. All of them lie inside the slots.
///
/// The form is canonical, so that equal pieces compare equal: `dims[0]` is the dimension with the larger destination
/// stride, a piece with one dimension has it in `dims[0]`, and nothing that is contiguous on both sides is a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece {
    /// First byte, from the start of the source's slot.
    pub source_offset: u64,
    /// First byte, from the start of the destination's slot.
    pub destination_offset: u64,
    /// Bytes that are contiguous on both sides.
    pub run_bytes: u64,
    /// Repetitions.
    pub dims: [Dim; 2],
}

impl Piece {
    /// The piece in canonical form.
    pub(crate) fn new(source_offset: u64, destination_offset: u64, run_bytes: u64, dims: [Dim; 2]) -> Self {
        let mut run_bytes = run_bytes;
        let mut dims = dims.map(|dim| if dim.count == 1 { Dim::UNUSED } else { dim });
        while let Some((into, from)) = foldable(run_bytes, &dims) {
            match into {
                // Repetitions side by side are one run. Its bytes lie in one slot, so they fit.
                None => run_bytes *= dims[from].count,
                Some(into) => dims[into].count *= dims[from].count,
            }
            dims[from] = Dim::UNUSED;
        }
        dims.sort_unstable_by_key(|dim| std::cmp::Reverse((dim.destination_stride, dim.source_stride)));
        Self { source_offset, destination_offset, run_bytes, dims }
    }

    /// Runs of the piece.
    pub(crate) fn runs(&self) -> u64 {
        // Each run holds a byte of its own of one slot, so their number fits.
        self.dims[0].count * self.dims[1].count
    }

    /// The dimensions in use, outer first.
    pub(crate) fn used_dims(&self) -> impl Iterator<Item = Dim> + use<> {
        self.dims.into_iter().filter(|dim| *dim != Dim::UNUSED)
    }

    /// Whether another dimension fits.
    pub(crate) fn has_room(&self) -> bool {
        self.dims[1] == Dim::UNUSED
    }

    /// This piece and `other`, which lies above it in the destination, as one piece, if they make one: by lying side by
    /// side, or by `other` going on where a dimension of this one ends.
    pub(crate) fn joined(&self, other: &Self) -> Option<Self> {
        let source_step = other.source_offset.checked_sub(self.source_offset)?;
        let destination_step = other.destination_offset.checked_sub(self.destination_offset)?;
        if self.dims == other.dims && source_step == self.run_bytes && destination_step == self.run_bytes {
            let run_bytes = self.run_bytes + other.run_bytes;
            return Some(Self::new(self.source_offset, self.destination_offset, run_bytes, self.dims));
        }
        if self.run_bytes != other.run_bytes {
            return None;
        }
        self.used_dims().chain(other.used_dims()).find_map(|along| {
            let (ours, rest) = self.split(&along);
            let (theirs, other_rest) = other.split(&along);
            let goes_on = along.source_stride.checked_mul(ours) == Some(source_step)
                && along.destination_stride.checked_mul(ours) == Some(destination_step);
            if rest != other_rest || rest[1] != Dim::UNUSED || !goes_on {
                return None;
            }
            let dims = [rest[0], Dim { count: ours + theirs, ..along }];
            Some(Self::new(self.source_offset, self.destination_offset, self.run_bytes, dims))
        })
    }

    /// The count along a dimension of these strides, and the other dimensions.
    fn split(&self, along: &Dim) -> (u64, [Dim; 2]) {
        let [outer, inner] = self.dims;
        if outer != Dim::UNUSED && outer.has_strides_of(along) {
            (outer.count, [inner, Dim::UNUSED])
        } else if inner != Dim::UNUSED && inner.has_strides_of(along) {
            (inner.count, [outer, Dim::UNUSED])
        } else {
            (1, self.dims)
        }
    }
}

/// A dimension that needs not be one: it folds into the run (`None`) or into another dimension.
fn foldable(run_bytes: u64, dims: &[Dim; 2]) -> Option<(Option<usize>, usize)> {
    let used = || (0..dims.len()).filter(|index| dims[*index] != Dim::UNUSED);
    used().find_map(|from| {
        if dims[from].source_stride == run_bytes && dims[from].destination_stride == run_bytes {
            return Some((None, from));
        }
        let continues = |into: &usize| {
            *into != from
                && dims[*into].source_stride.checked_mul(dims[*into].count) == Some(dims[from].source_stride)
                && dims[*into].destination_stride.checked_mul(dims[*into].count) == Some(dims[from].destination_stride)
        };
        used().find(continues).map(|into| (Some(into), from))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dim(count: u64, source_stride: u64, destination_stride: u64) -> Dim {
        Dim { count, source_stride, destination_stride }
    }

    fn piece(source: u64, destination: u64, run: u64, dims: &[Dim]) -> Piece {
        let dims = std::array::from_fn(|index| dims.get(index).copied().unwrap_or(Dim::UNUSED));
        Piece::new(source, destination, run, dims)
    }

    #[test]
    fn folds_what_is_contiguous() {
        let check = |run: u64, dims: &[Dim], expected_run: u64, expected: [Dim; 2]| {
            let found = piece(0, 0, run, dims);
            assert_eq!((found.run_bytes, found.dims), (expected_run, expected));
        };
        check(4, &[dim(1, 9, 9), dim(3, 4, 4)], 12, [Dim::UNUSED; 2]);
        // Tokens then units, whole: units fold once tokens have.
        check(4, &[dim(2, 12, 12), dim(3, 4, 4)], 24, [Dim::UNUSED; 2]);
        check(4, &[dim(2, 4, 8), dim(5, 100, 50)], 4, [dim(5, 100, 50), dim(2, 4, 8)]);
        // Two dimensions of one step.
        check(4, &[dim(5, 32, 16), dim(2, 16, 8)], 4, [dim(10, 16, 8), Dim::UNUSED]);
        // A stride that overflows when multiplied folds into nothing.
        check(4, &[dim(2, u64::MAX / 2 + 1, 9), dim(2, 5, 18)], 4, [dim(2, 5, 18), dim(2, u64::MAX / 2 + 1, 9)]);
    }

    #[test]
    fn joins_what_goes_on() {
        let check = |a: Piece, b: Piece, expected: Option<Piece>| assert_eq!(a.joined(&b), expected);
        check(piece(0, 8, 4, &[]), piece(4, 12, 9, &[]), Some(piece(0, 8, 13, &[])));
        check(piece(0, 8, 4, &[]), piece(5, 12, 4, &[]), None);
        check(piece(4, 8, 4, &[]), piece(0, 12, 4, &[]), None);
        let row = [dim(3, 10, 20)];
        check(piece(0, 0, 4, &row), piece(4, 4, 6, &row), Some(piece(0, 0, 10, &row)));
        check(piece(0, 0, 4, &row), piece(30, 60, 4, &row), Some(piece(0, 0, 4, &[dim(6, 10, 20)])));
        check(piece(0, 0, 4, &row), piece(30, 60, 4, &[]), Some(piece(0, 0, 4, &[dim(4, 10, 20)])));
        check(piece(0, 0, 4, &[]), piece(10, 20, 4, &row), Some(piece(0, 0, 4, &[dim(4, 10, 20)])));
        check(piece(0, 0, 4, &row), piece(30, 61, 4, &[]), None);
        let grid = [dim(3, 10, 20), dim(2, 5, 7)];
        check(piece(0, 0, 4, &grid), piece(30, 60, 4, &[grid[1]]), Some(piece(0, 0, 4, &[dim(4, 10, 20), grid[1]])));
        check(piece(0, 0, 4, &grid), piece(30, 60, 4, &[dim(2, 5, 8)]), None);
    }
}
