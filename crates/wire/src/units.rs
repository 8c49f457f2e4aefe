//! A transfer in the order of a GPU's kernel, for a side that has none: so that what one side gathers with the one, the other
//! scatters with the other.
//!
//! The kernel numbers *units* of 512 B: of a set of parts that move the same pairs of slots, for one pair after the other, the
//! pieces of all its parts; of each piece the runs as one stream, filled up to whole units. The host's own order
//! ([`Cursor`](crate::cursor::Cursor)) goes part by part, and fills nothing up.

use crate::cuda::expand::{NUMBERS_MAX, UNIT_BYTES};
use crate::cursor::{Cursor, Run};
use crate::pieces::Shape;

/// The order of one transfer.
#[derive(Clone, Debug)]
pub(crate) struct Units {
    /// Those that move something.
    sets: Vec<Set>,
    count: u64,
}

/// Parts that move the same pairs.
#[derive(Clone, Debug)]
struct Set {
    entries: Vec<Entry>,
    pairs: usize,
    /// Units of one pair.
    pair_units: u64,
    first_unit: u64,
}

/// A piece.
#[derive(Clone, Copy, Debug)]
struct Entry {
    part: usize,
    piece: usize,
    /// Of the units of a pair.
    first_unit: u64,
}

impl Units {
    /// Of shapes that have been checked, with their pairs. `set_of` has the number of the set of each. `None` past what a kernel
    /// can count.
    pub(crate) fn of(shapes: &[Shape], set_of: &[usize]) -> Option<Self> {
        let mut numbers: Vec<usize> = set_of.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        let mut units = Self { sets: Vec::new(), count: 0 };
        for number in numbers {
            let (mut entries, mut pair_units, mut pairs) = (Vec::new(), 0u64, 0);
            for (part, (shape, _)) in shapes.iter().zip(set_of).enumerate().filter(|(_, (_, of))| **of == number) {
                pairs = shape.pairs.len();
                for (piece, shape) in shape.pieces.iter().enumerate() {
                    entries.push(Entry { part, piece, first_unit: pair_units });
                    pair_units = pair_units.checked_add(shape.bytes().div_ceil(UNIT_BYTES))?;
                }
            }
            let of_set = pair_units.checked_mul(pairs as u64)?;
            if of_set > 0 {
                units.sets.push(Set { entries, pairs, pair_units, first_unit: units.count });
                units.count = units.count.checked_add(of_set).filter(|count| *count < NUMBERS_MAX)?;
            }
        }
        Some(units)
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The runs of `count` units from `first` on, of which there are some.
    pub(crate) fn walk<'a>(&'a self, shapes: &'a [Shape], first: u64, count: u64) -> Walk<'a> {
        let count = count.min(self.count.saturating_sub(first));
        let mut walk =
            Walk { units: self, shapes, set: 0, pair: 0, entry: 0, cursor: Cursor::default(), place: 0, end: 0 };
        if count > 0 {
            walk.set = self.sets.partition_point(|set| set.first_unit <= first) - 1;
            let set = &self.sets[walk.set];
            let in_set = first - set.first_unit;
            walk.pair = usize::try_from(in_set / set.pair_units).expect("less than the number of pairs, a usize");
            let in_pair = in_set % set.pair_units;
            walk.entry = set.entries.partition_point(|entry| entry.first_unit <= in_pair) - 1;
            walk.enter((in_pair - set.entries[walk.entry].first_unit) * UNIT_BYTES);
            walk.end = count * UNIT_BYTES;
        }
        walk
    }
}

/// Runs, each with where its bytes lie in the units, from the first on.
pub(crate) struct Walk<'a> {
    units: &'a Units,
    shapes: &'a [Shape],
    set: usize,
    pair: usize,
    entry: usize,
    cursor: Cursor,
    place: u64,
    end: u64,
}

impl Walk<'_> {
    /// Starts at a byte of the entry's stream.
    fn enter(&mut self, position: u64) {
        if let Some(set) = self.units.sets.get(self.set) {
            let Entry { part, piece, .. } = set.entries[self.entry];
            self.cursor = Cursor::in_piece(self.shapes, part, self.pair, piece, position);
        }
    }
}

impl Iterator for Walk<'_> {
    type Item = (Run, u64);

    fn next(&mut self) -> Option<Self::Item> {
        if self.place >= self.end {
            return None;
        }
        let (set, place) = (self.units.sets.get(self.set)?, self.place);
        let run = self.cursor.next(self.shapes, self.end - place)?;
        self.place += run.bytes;
        if self.cursor.has_left(set.entries[self.entry].piece) {
            self.place = self.place.next_multiple_of(UNIT_BYTES);
            self.entry += 1;
            if self.entry == set.entries.len() {
                (self.entry, self.pair) = (0, self.pair + 1);
            }
            if self.pair == set.pairs {
                (self.pair, self.set) = (0, self.set + 1);
            }
            self.enter(0);
        }
        Some((run, place))
    }
}
