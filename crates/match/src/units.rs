//! The unit axis: which source ranks hold which units of a plane.

use std::ops::Range;

/// Cuts `wanted` at every bound of a `held` range. Of each stretch between two cuts a holder has all or nothing: yields
/// the stretches, ascending, each with the indices of its holders.
pub(crate) fn stretches(wanted: &Range<u32>, held: &[Range<u32>]) -> Vec<(Range<u32>, Vec<usize>)> {
    let inside = |unit: &u32| wanted.contains(unit);
    let mut cuts: Vec<u32> = held.iter().flat_map(|range| [range.start, range.end]).filter(inside).collect();
    cuts.extend([wanted.start, wanted.end]);
    cuts.sort_unstable();
    cuts.dedup();
    let holders = |start: u32, end: u32| {
        let holds = move |(_, range): &(usize, &Range<u32>)| range.start <= start && end <= range.end;
        held.iter().enumerate().filter(holds).map(|(index, _)| index).collect()
    };
    cuts.iter().zip(cuts.iter().skip(1)).map(|(&start, &end)| (start..end, holders(start, end))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_at_every_bound() {
        let check = |wanted: Range<u32>, held: &[Range<u32>], expected: &[(Range<u32>, &[usize])]| {
            let found = stretches(&wanted, held);
            let found: Vec<_> = found.iter().map(|(units, holders)| (units.clone(), holders.as_slice())).collect();
            assert_eq!(found, expected);
        };
        // TP 2 to 3 over six heads.
        check(2..4, &[0..3, 3..6], &[(2..3, &[0]), (3..4, &[1])]);
        // Replicas, one of them of a part only.
        check(0..4, &[0..4, 0..4, 2..4], &[(0..2, &[0, 1]), (2..4, &[0, 1, 2])]);
        // Nobody holds the middle.
        check(0..3, &[0..1, 2..8], &[(0..1, &[0]), (1..2, &[]), (2..3, &[1])]);
        check(0..3, &[], &[(0..3, &[])]);
    }
}
