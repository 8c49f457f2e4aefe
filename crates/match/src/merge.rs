//! Merging of pieces until no two make one.

use std::cmp::Ordering;
use std::collections::HashMap;

use crate::piece::{Dim, Piece};

/// A piece with the array (role, plane) that it came from. Merging across layers goes better when arrays are first taken
/// one at a time: keys and values of unequal spacing alternate, the keys alone are evenly spaced.
pub(crate) type Tagged = (usize, Piece);

/// What two pieces must share to be repetitions of one another.
type Shape = (u64, [Dim; 2]);

/// Merges pieces of one slot pair. They cover different bytes on both sides.
///
/// In the result no two pieces lie side by side, continue each other's dimensions, or are two repetitions for which a
/// dimension is left (that is: are of one shape, and in the same order on both sides). Ascending by destination.
pub(crate) fn merge(mut pieces: Vec<Tagged>) -> Vec<Piece> {
    loop {
        let before = pieces.len();
        join(&mut pieces);
        // Long progressions first: rows that alternate evenly are one, where each array alone would be several.
        repeat(&mut pieces, 3, |_, _| Ordering::Equal);
        repeat(&mut pieces, 2, |a, b| a.cmp(&b));
        repeat(&mut pieces, 2, |_, _| Ordering::Equal);
        if pieces.len() == before {
            break;
        }
    }
    let mut pieces: Vec<Piece> = pieces.into_iter().map(|(_, piece)| piece).collect();
    pieces.sort_unstable_by_key(|piece| piece.destination_offset);
    pieces
}

/// Joins pieces that lie side by side or continue each other. Sorts by destination.
fn join(pieces: &mut Vec<Tagged>) {
    pieces.sort_unstable_by_key(|(_, piece)| piece.destination_offset);
    // Destination bytes are written once, so an offset names one piece. A joined piece keeps the lower offset of the two.
    let offsets: Vec<u64> = pieces.iter().map(|(_, piece)| piece.destination_offset).collect();
    let mut gone = vec![false; pieces.len()];
    for start in 0..pieces.len() {
        let mut at = start;
        while !gone[at] {
            let piece = pieces[at].1;
            let found = |offset: Option<u64>| {
                let index = offsets.binary_search(&offset?).ok()?;
                (index != at && !gone[index]).then_some(index)
            };
            let above = after(&piece).find_map(|offset| {
                let index = found(offset)?;
                Some((at, index, piece.joined(&pieces[index].1)?))
            });
            let below = || {
                before(&piece).find_map(|offset| {
                    let index = found(offset)?;
                    Some((index, at, pieces[index].1.joined(&piece)?))
                })
            };
            let Some((kept, taken, joined)) = above.or_else(below) else {
                break;
            };
            pieces[kept].1 = joined;
            gone[taken] = true;
            at = kept;
        }
    }
    let mut gone = gone.into_iter();
    pieces.retain(|_| gone.next() == Some(false));
}

/// Where a piece would start that this one can be joined with, above it.
fn after(piece: &Piece) -> impl Iterator<Item = Option<u64>> + use<> {
    let start = piece.destination_offset;
    let past_dims = piece.used_dims().map(move |dim| start.checked_add(dim.destination_stride.checked_mul(dim.count)?));
    std::iter::once(start.checked_add(piece.run_bytes)).chain(past_dims)
}

/// Where a single repetition would start that one of the piece's dimensions continues. All else is found from below.
fn before(piece: &Piece) -> impl Iterator<Item = Option<u64>> + use<> {
    let start = piece.destination_offset;
    piece.used_dims().map(move |dim| start.checked_sub(dim.destination_stride))
}

/// Makes evenly spaced pieces of one shape repetitions of the first: `count_min` or more of them, among the pieces whose
/// tags `by_tag` calls equal.
fn repeat(pieces: &mut Vec<Tagged>, count_min: u64, by_tag: fn(usize, usize) -> Ordering) {
    let order = |a: &Tagged, b: &Tagged| shape(&a.1).cmp(&shape(&b.1)).then_with(|| by_tag(a.0, b.0));
    pieces.sort_unstable_by(|a, b| order(a, b).then(a.1.destination_offset.cmp(&b.1.destination_offset)));
    let alike = pieces.chunk_by(|a, b| order(a, b) == Ordering::Equal);
    *pieces = alike.flat_map(|alike| progressions(alike, count_min)).collect();
}

fn shape(piece: &Piece) -> Shape {
    (piece.run_bytes, piece.dims)
}

/// Pieces of one shape, ascending by destination, as progressions. Each piece goes on with the progression that expects
/// it, else begins one with a single piece below it on both sides, else stays single: so of those that are left single no
/// two are in the same order on both sides.
fn progressions(alike: &[Tagged], count_min: u64) -> Vec<Tagged> {
    let Some((_, first)) = alike.first().filter(|(_, first)| first.has_room() && alike.len() > 1) else {
        return alike.to_vec();
    };
    let other_dim = first.dims[0];
    // The first piece of each progression and the spacing, and the progression of each piece.
    let mut found: Vec<(usize, Dim)> = Vec::new();
    let mut progression_of: Vec<usize> = Vec::with_capacity(alike.len());
    // Progressions of one piece; their sources descend, so the last one is the lowest.
    let mut single: Vec<usize> = Vec::new();
    let mut expecting: HashMap<(u64, u64), usize> = HashMap::new();
    for (index, (_, piece)) in alike.iter().enumerate() {
        let place = (piece.source_offset, piece.destination_offset);
        let below = single.last().copied().filter(|below| alike[found[*below].0].1.source_offset < place.0);
        let progression = if let Some(expected) = expecting.remove(&place) {
            found[expected].1.count += 1;
            expected
        } else if let Some(below) = below {
            single.pop();
            let first = &alike[found[below].0].1;
            found[below].1 = Dim {
                count: 2,
                source_stride: place.0 - first.source_offset,
                destination_stride: place.1 - first.destination_offset,
            };
            below
        } else {
            single.push(found.len());
            found.push((index, Dim::UNUSED));
            found.len() - 1
        };
        let along = found[progression].1;
        if along.count > 1
            && let Some(source) = place.0.checked_add(along.source_stride)
            && let Some(destination) = place.1.checked_add(along.destination_stride)
        {
            expecting.insert((source, destination), progression);
        }
        progression_of.push(progression);
    }
    let merged = alike.iter().enumerate().zip(progression_of).filter_map(|((index, (tag, piece)), progression)| {
        let (first, along) = found[progression];
        if along.count < count_min {
            return Some((*tag, *piece));
        }
        let Piece { source_offset, destination_offset, run_bytes, .. } = *piece;
        (first == index).then(|| (*tag, Piece::new(source_offset, destination_offset, run_bytes, [other_dim, along])))
    });
    merged.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every byte: from where, to where.
    fn bytes(pieces: &[Piece]) -> Vec<(u64, u64)> {
        let mut bytes = Vec::new();
        for piece in pieces {
            let [outer, inner] = piece.dims;
            for (i, j) in (0..outer.count).flat_map(|i| (0..inner.count).map(move |j| (i, j))) {
                let source = piece.source_offset + i * outer.source_stride + j * inner.source_stride;
                let destination =
                    piece.destination_offset + i * outer.destination_stride + j * inner.destination_stride;
                bytes.extend((0..piece.run_bytes).map(|byte| (source + byte, destination + byte)));
            }
        }
        bytes.sort_unstable();
        bytes
    }

    fn row(source: u64, destination: u64, run: u64) -> Piece {
        Piece::new(source, destination, run, [Dim::UNUSED; 2])
    }

    fn check(pieces: &[Piece], tags: usize, expected: &[Piece]) {
        let tagged = pieces.iter().enumerate().map(|(index, piece)| (index % tags, *piece)).collect();
        let merged = merge(tagged);
        assert_eq!(merged, expected);
        assert_eq!(bytes(&merged), bytes(pieces));
    }

    fn along(count: u64, source_stride: u64, destination_stride: u64) -> Dim {
        Dim { count, source_stride, destination_stride }
    }

    #[test]
    fn neighbours_are_one_run() {
        let rows: Vec<Piece> = (0..6).map(|i| row(100 + i * 8, i * 8, 8)).collect();
        check(&rows, 2, &[row(100, 0, 48)]);
        // Of unequal lengths, and not given in order.
        check(&[row(30, 10, 5), row(20, 0, 10), row(35, 15, 1)], 1, &[row(20, 0, 16)]);
    }

    #[test]
    fn even_spacing_is_a_dimension() {
        let rows: Vec<Piece> = (0..6).map(|i| row(i * 16, i * 8, 8)).collect();
        check(&rows, 2, &[Piece::new(0, 0, 8, [along(6, 16, 8), Dim::UNUSED])]);
    }

    #[test]
    fn alternating_arrays_are_two_dimensions() {
        // Keys at 0 and values at 10 of every 100 bytes, from 0 and 20 of every 50.
        let rows: Vec<Piece> =
            (0..5).flat_map(|i| [row(i * 50, i * 100, 4), row(i * 50 + 20, i * 100 + 10, 4)]).collect();
        check(&rows, 2, &[Piece::new(0, 0, 4, [along(5, 50, 100), along(2, 20, 10)])]);
    }

    #[test]
    fn alternating_arrays_with_one_dimension_left_are_two_pieces() {
        let cells = |source, destination| Piece::new(source, destination, 4, [along(3, 8, 6), Dim::UNUSED]);
        let rows: Vec<Piece> =
            (0..5).flat_map(|i| [cells(i * 100, i * 90), cells(i * 100 + 40, i * 90 + 20)]).collect();
        let of_layers = |source, destination| Piece::new(source, destination, 4, [along(5, 100, 90), along(3, 8, 6)]);
        check(&rows, 2, &[of_layers(0, 0), of_layers(40, 20)]);
    }

    #[test]
    fn opposite_orders_stay_apart() {
        let rows: Vec<Piece> = (0..4).map(|i| row(90 - i * 10, i * 10, 4)).collect();
        check(&rows, 1, &rows);
    }

    #[test]
    fn nested_orders_are_paired() {
        // Sources 3 2 1 | 6 5 4: the innermost two go together, then the next.
        let rows: Vec<Piece> = [3, 2, 1, 6, 5, 4].into_iter().zip(0..).map(|(s, d)| row(s * 10, d * 7, 4)).collect();
        let merged = merge(rows.iter().map(|piece| (0, *piece)).collect());
        assert_eq!(bytes(&merged), bytes(&rows));
        assert_eq!(merged.len(), 3);
    }

    #[test]
    fn a_piece_before_a_progression_joins_it() {
        // The second row comes between the first and the two that follow it, so that neither pass finds all three.
        let rows = [(0, row(10, 0, 1)), (0, row(5, 4, 1)), (1, row(20, 10, 1)), (1, row(30, 20, 1))];
        let expected = [Piece::new(10, 0, 1, [along(3, 10, 10), Dim::UNUSED]), row(5, 4, 1)];
        assert_eq!(merge(rows.to_vec()), expected);
    }

    #[test]
    fn a_spacing_that_does_not_fit_in_64_bits_ends() {
        let last = u64::MAX - 8;
        check(&[row(0, 0, 8), row(last, last, 8)], 1, &[Piece::new(0, 0, 8, [along(2, last, last), Dim::UNUSED])]);
    }

    /// Rows of a few arrays a layer, with gaps, on both sides in an order of their own.
    fn rows() -> impl Strategy<Value = Vec<Tagged>> {
        let array = (1..4_u64, 1..4_u64, 0..3_u64);
        let arrays = proptest::collection::vec(array, 1..4);
        let gaps = proptest::collection::vec(prop_oneof![4 => Just(0_u64), 1 => 1..5_u64], 1..8);
        let order = proptest::collection::vec(any::<u8>(), 0..8);
        (arrays, 1..8_usize, gaps.clone(), gaps, order).prop_map(|(arrays, layers, gaps, source_gaps, order)| {
            let rows: Vec<_> = (0..layers).flat_map(|_| arrays.iter().copied().enumerate()).collect();
            let mut by_source: Vec<usize> = (0..rows.len()).collect();
            by_source.sort_by_key(|index| order.get(*index).copied().unwrap_or(u8::MAX));
            let mut sources = vec![0; rows.len()];
            let mut cursor = 0;
            for (index, gap) in by_source.into_iter().zip(source_gaps.iter().cycle()) {
                let (_, (run, count, source_gap)) = rows[index];
                sources[index] = cursor + gap;
                cursor += gap + count * (run + source_gap);
            }
            let mut cursor = 0;
            let mut pieces = Vec::new();
            for (((tag, (run, count, gap)), source), row_gap) in rows.into_iter().zip(sources).zip(gaps.iter().cycle())
            {
                let dims = [along(count, run + gap, run + gap / 2), Dim::UNUSED];
                pieces.push((tag, Piece::new(source, cursor + row_gap, run, dims)));
                cursor += row_gap + count * (run + gap / 2);
            }
            pieces
        })
    }

    /// Whether two pieces, the first below the second in the destination, make one.
    fn make_one(a: &Piece, b: &Piece) -> bool {
        let repeat = shape(a) == shape(b) && a.has_room() && a.source_offset < b.source_offset;
        repeat || a.joined(b).is_some()
    }

    fn config() -> ProptestConfig {
        if cfg!(miri) {
            return ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() };
        }
        ProptestConfig::default()
    }

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn same_bytes_and_no_two_make_one(rows in rows()) {
            let before: Vec<Piece> = rows.iter().map(|(_, piece)| *piece).collect();
            let merged = merge(rows);
            prop_assert_eq!(bytes(&merged), bytes(&before));
            prop_assert!(merged.is_sorted_by_key(|piece| piece.destination_offset), "{merged:?}");
            for (index, a) in merged.iter().enumerate() {
                for b in &merged[index + 1..] {
                    prop_assert!(!make_one(a, b), "{a:?} and {b:?} of {merged:?}");
                }
            }
        }
    }
}
