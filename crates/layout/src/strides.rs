//! Where the cells of a plane lie, and whether they can meet those of another.

use crate::table::Plane;

/// One repetition of a comb: how often, and how far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Teeth {
    count: u64,
    stride: u64,
}

/// The cells of a plane: `cell_bytes` at `offset`, repeated along up to two axes that nest.
#[derive(Clone, Debug)]
pub(crate) struct Comb {
    offset: u64,
    cell_bytes: u64,
    /// Outermost first, each with a count above 1 and a stride that clears all of what is inside it.
    axes: Vec<Teeth>,
}

impl Comb {
    /// `None` if the strides do not nest: the smaller one must clear a cell, the larger one a whole line of cells.
    ///
    /// Strides that interleave without nesting (2 and 3 for cells of 1 byte, say) can keep cells apart too. No cache is
    /// stored so, and telling those that do from those that do not is not worth its code.
    pub(crate) fn of(plane: &Plane) -> Option<Self> {
        let units = u64::from(plane.units.end.saturating_sub(plane.units.start));
        let mut axes = vec![
            Teeth { count: units, stride: plane.unit_stride },
            Teeth { count: u64::from(plane.tokens), stride: plane.token_stride },
        ];
        axes.retain(|teeth| teeth.count > 1);
        axes.sort_by_key(|teeth| std::cmp::Reverse(teeth.stride));
        let mut span = plane.cell_bytes;
        for teeth in axes.iter().rev() {
            if teeth.stride < span {
                return None;
            }
            // A line longer than `u64` is caught by `end`, which whoever made the comb asks for next.
            span = (teeth.count - 1).saturating_mul(teeth.stride).saturating_add(span);
        }
        Some(Self { offset: plane.offset, cell_bytes: plane.cell_bytes, axes })
    }

    /// The same cells, counted from `base` bytes before. The caller knows that they stay inside a `u64`.
    pub(crate) fn shifted(self, base: u64) -> Self {
        Self { offset: self.offset.saturating_add(base), ..self }
    }

    /// First byte after the last cell; `None` past `u64`.
    pub(crate) fn end(&self) -> Option<u64> {
        self.offset.checked_add(span(&self.axes, self.cell_bytes)?)
    }

    /// Whether no byte is in a cell of both. May say `false` of cells that do not meet but interleave in a way no cache
    /// uses; never says `true` of cells that do.
    pub(crate) fn is_apart_from(&self, other: &Self) -> bool {
        let (low, high) = if self.offset <= other.offset { (self, other) } else { (other, self) };
        apart(&low.axes, low.cell_bytes, high.offset - low.offset, &high.axes, high.cell_bytes)
    }
}

/// Bytes from the first to the last byte of a comb; `None` past `u64`.
fn span(axes: &[Teeth], cell_bytes: u64) -> Option<u64> {
    axes.iter().try_fold(cell_bytes, |span, teeth| (teeth.count - 1).checked_mul(teeth.stride)?.checked_add(span))
}

/// Whether two combs are apart, the second one starting `shift` bytes after the first.
fn apart(axes: &[Teeth], cell_bytes: u64, shift: u64, other_axes: &[Teeth], other_cell_bytes: u64) -> bool {
    if span(axes, cell_bytes).is_some_and(|span| span <= shift) {
        return true;
    }
    // They share a stretch of bytes. They can still be apart if they repeat in step, like the keys and scales of a token
    // side by side: then it is enough to look at one period, where the second starts at `shift` modulo the stride and so
    // has the first's teeth before it and, one stride on, after it.
    let ([outer, inner @ ..], [other_outer, other_inner @ ..]) = (axes, other_axes) else {
        return false;
    };
    if outer.stride != other_outer.stride {
        return false;
    }
    let phase = shift % outer.stride;
    apart(inner, cell_bytes, phase, other_inner, other_cell_bytes)
        && apart(other_inner, other_cell_bytes, outer.stride - phase, inner, cell_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::ops::Range;

    use proptest::prelude::*;

    use super::*;

    fn plane(
        offset: u64,
        cell_bytes: u64,
        (units, unit_stride): (u32, u64),
        (tokens, token_stride): (u32, u64),
    ) -> Plane {
        Plane { offset, cell_bytes, unit_stride, token_stride, units: 0..units, units_total: units, tokens }
    }

    /// Every byte of every cell, one by one; `None` if a byte is in two cells.
    fn bytes_of(plane: &Plane) -> Option<HashSet<u64>> {
        let mut bytes = HashSet::new();
        for unit in 0..u64::from(plane.units.end) {
            for token in 0..u64::from(plane.tokens) {
                let cell = plane.offset + unit * plane.unit_stride + token * plane.token_stride;
                for byte in cell..cell + plane.cell_bytes {
                    if !bytes.insert(byte) {
                        return None;
                    }
                }
            }
        }
        Some(bytes)
    }

    fn small_plane(stride: Range<u64>) -> impl Strategy<Value = Plane> {
        let axis = || (1..4u32, stride.clone());
        (0..24u64, 1..4u64, axis(), axis()).prop_map(|(offset, cell, units, tokens)| plane(offset, cell, units, tokens))
    }

    #[track_caller]
    fn check_apart(a: Plane, b: Plane, expected: bool) {
        let (a, b) = (Comb::of(&a).unwrap(), Comb::of(&b).unwrap());
        assert_eq!((a.is_apart_from(&b), b.is_apart_from(&a)), (expected, expected));
    }

    #[test]
    fn the_two_orders_nest() {
        assert!(Comb::of(&plane(0, 2, (4, 6), (3, 2))).is_some(), "HND");
        assert!(Comb::of(&plane(0, 2, (4, 2), (3, 8))).is_some(), "NHD");
        assert!(Comb::of(&plane(0, 2, (4, 5), (3, 2))).is_none(), "a line of three cells is 6 B");
        assert!(Comb::of(&plane(0, 2, (4, 1), (1, 0))).is_none(), "units are 1 B apart");
        assert!(Comb::of(&plane(0, 2, (1, 0), (1, 0))).is_some(), "strides of single cells mean nothing");
    }

    #[test]
    fn keys_beside_their_scales() {
        // 64 tokens, each a key of 128 B and a scale of 4 B right behind it.
        check_apart(plane(0, 128, (1, 0), (64, 132)), plane(128, 4, (1, 0), (64, 132)), true);
        check_apart(plane(0, 128, (1, 0), (64, 132)), plane(124, 4, (1, 0), (64, 132)), false);
        // All keys, then all scales.
        check_apart(plane(0, 128, (1, 0), (64, 128)), plane(8192, 4, (1, 0), (64, 4)), true);
        check_apart(plane(0, 128, (1, 0), (64, 128)), plane(8191, 4, (1, 0), (64, 4)), false);
        // Two heads a token, the key and the value of a head side by side.
        check_apart(plane(0, 8, (2, 12), (16, 24)), plane(8, 4, (2, 12), (16, 24)), true);
        check_apart(plane(0, 8, (2, 12), (16, 24)), plane(20, 4, (2, 12), (16, 24)), true);
        check_apart(plane(0, 8, (2, 12), (16, 24)), plane(18, 4, (2, 12), (16, 24)), false);
    }

    #[test]
    fn sizes_past_u64_end_nowhere() {
        assert_eq!(Comb::of(&plane(1, u64::MAX, (1, 0), (1, 0))).unwrap().end(), None);
        assert_eq!(Comb::of(&plane(0, 1, (3, u64::MAX), (1, 0))).unwrap().end(), None);
        assert_eq!(Comb::of(&plane(0, 1, (u32::MAX, u64::MAX), (u32::MAX, u64::MAX - 1))).unwrap().end(), None);
        assert!(Comb::of(&plane(0, 1, (u32::MAX, u64::MAX - 1), (u32::MAX, u64::MAX - 2))).is_none());
    }

    proptest! {
        #[test]
        fn cells_of_nested_strides_are_apart(plane in small_plane(0..20)) {
            if let Some(comb) = Comb::of(&plane) {
                let bytes = bytes_of(&plane);
                prop_assert!(bytes.is_some());
                prop_assert_eq!(comb.end(), bytes.unwrap().into_iter().max().map(|last| last + 1));
            }
        }

        #[test]
        fn planes_called_apart_share_no_byte(a in small_plane(1..20), b in small_plane(1..20), in_step in any::<bool>()) {
            // Strides drawn alone are seldom equal, and only planes in step can be apart while they interleave.
            let strides = if in_step { (a.unit_stride, a.token_stride) } else { (b.unit_stride, b.token_stride) };
            let b = Plane { unit_stride: strides.0, token_stride: strides.1, ..b };
            if let (Some(a_comb), Some(b_comb)) = (Comb::of(&a), Comb::of(&b)) {
                let apart = a_comb.is_apart_from(&b_comb);
                prop_assert_eq!(apart, b_comb.is_apart_from(&a_comb));
                prop_assert!(!apart || bytes_of(&a).unwrap().is_disjoint(&bytes_of(&b).unwrap()));
            }
        }
    }
}
