//! How the kernel expands a transfer, in Rust: makes the structures that it reads, and mirrors its arithmetic for tests. The
//! head of `kernels/move.cu` says what a unit is. Numbers and addresses only; nothing here touches memory.

use zerocopy::{Immutable, IntoBytes};

use crate::pieces::{Piece, Shape, SlotPair, Span};

/// Bytes of a piece, for one pair of slots, that one group of lanes copies at a time. The width of a slab's places.
pub(crate) const UNIT_BYTES: u64 = 512;

/// Numbers that a [`Divisor`] divides, units among them, are below.
pub(crate) const NUMBERS_MAX: u64 = 1 << 31;

/// Division by a constant through a multiplication.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoBytes, Immutable)]
struct Divisor {
    value: u32,
    /// 0 divides by 1.
    multiplier: u32,
    shift: u32,
    unused: u32,
}

impl Divisor {
    /// By `value`, which is from 1 to below 2^31.
    fn new(value: u32) -> Self {
        debug_assert!((1..NUMBERS_MAX).contains(&u64::from(value)), "{value}");
        if value == 1 {
            return Self { value, multiplier: 0, shift: 0, unused: 0 };
        }
        // Rounded up, the multiplier is off by less than 2^-31 of the quotient: too little to reach the next one for numbers
        // below 2^31.
        let bits = (value - 1).ilog2() + 1;
        let multiplier = (1u64 << (31 + bits)).div_ceil(u64::from(value));
        let multiplier = u32::try_from(multiplier).expect("the power of two is at most 2^31 times the value, doubled");
        Self { value, multiplier, shift: bits - 1, unused: 0 }
    }

    #[cfg(test)]
    fn divide(self, number: u32) -> u32 {
        match self.multiplier {
            0 => number,
            multiplier => u32::try_from((u64::from(number) * u64::from(multiplier)) >> 32).unwrap() >> self.shift,
        }
    }
}

/// `Entry` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoBytes, Immutable)]
pub(crate) struct Entry {
    from: u64,
    to: u64,
    from_slot: u64,
    to_slot: u64,
    from_outer: u64,
    to_outer: u64,
    from_inner: u64,
    to_inner: u64,
    run_words: Divisor,
    inner: Divisor,
    words: u32,
    width_log2: u32,
    unused: [u32; 2],
}

/// `Set` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoBytes, Immutable)]
pub(crate) struct Set {
    pair_units: Divisor,
    first_unit: u32,
    first_entry: u32,
    entries: u32,
    first_pair: u32,
}

/// `Pair` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoBytes, Immutable)]
pub(crate) struct Pair {
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// `mode` of the kernel's `Job`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// From slots to slots.
    Direct = 0,
    /// From slots into a slab.
    Gather = 1,
    /// From a slab into slots.
    Scatter = 2,
    /// From the remote slots into the local ones. To the kernel it is the same as `Direct`.
    Pull = 3,
}

impl Mode {
    /// As the kernel numbers it.
    pub(crate) fn number(self) -> u32 {
        if self == Self::Pull { Self::Direct as u32 } else { self as u32 }
    }

    /// What the kernel reads and writes of a pair of slots.
    pub(crate) fn pair(self, pair: &SlotPair) -> Pair {
        let SlotPair { local, remote } = *pair;
        if self == Self::Pull { Pair { from: remote, to: local } } else { Pair { from: local, to: remote } }
    }
}

/// One shape, with the addresses of its two regions. A side that the mode leaves out has any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Shapes of one set move the same pairs of slots.
    pub(crate) set: usize,
}

/// What is the same for all requests between the same regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Expansion {
    pub(crate) entries: Vec<Entry>,
    /// First unit of each entry, from the first of its set for one pair of slots.
    pub(crate) starts: Vec<u32>,
    sets: Vec<SetPieces>,
}

/// The entries of a set, and their units for one pair of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SetPieces {
    first_entry: u32,
    entries: u32,
    pair_units: u32,
}

/// The units of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Numbering {
    pub(crate) sets: Vec<Set>,
    /// All pairs, set by set.
    pub(crate) pairs: u64,
    pub(crate) units: u32,
}

/// Lays out the pieces of `placed`, whose sets are numbered from 0 on. `None` for what the kernel's numbers cannot hold.
pub(crate) fn expand(mode: Mode, placed: &[Placed<'_>]) -> Option<Expansion> {
    let mut expansion = Expansion { entries: Vec::new(), starts: Vec::new(), sets: Vec::new() };
    let sets = placed.iter().map(|placed| placed.set + 1).max().unwrap_or(0);
    for set in 0..sets {
        let first_entry = u32::try_from(expansion.entries.len()).ok()?;
        let mut pair_units = 0u64;
        for placed in placed.iter().filter(|placed| placed.set == set) {
            for piece in placed.shape.pieces.iter() {
                expansion.starts.push(u32::try_from(pair_units).ok()?);
                expansion.entries.push(entry(mode, placed, piece)?);
                pair_units += piece.bytes().div_ceil(UNIT_BYTES);
            }
        }
        let entries = u32::try_from(expansion.entries.len()).ok()? - first_entry;
        let pair_units = u32::try_from(pair_units).ok().filter(|units| u64::from(*units) < NUMBERS_MAX)?;
        expansion.sets.push(SetPieces { first_entry, entries, pair_units });
    }
    Some(expansion)
}

impl Expansion {
    /// Numbers the units of a request with `pairs` pairs in each set. `None` past what the kernel can count.
    pub(crate) fn number(&self, pairs: &[usize]) -> Option<Numbering> {
        let mut numbering = Numbering { sets: Vec::with_capacity(pairs.len()), pairs: 0, units: 0 };
        let mut units = 0u64;
        for (pieces, &pairs) in self.sets.iter().zip(pairs) {
            if pieces.pair_units > 0 && pairs > 0 {
                numbering.sets.push(Set {
                    pair_units: Divisor::new(pieces.pair_units),
                    first_unit: u32::try_from(units).ok()?,
                    first_entry: pieces.first_entry,
                    entries: pieces.entries,
                    first_pair: u32::try_from(numbering.pairs).ok()?,
                });
                units = u64::from(pieces.pair_units).checked_mul(pairs as u64)?.checked_add(units)?;
            }
            numbering.pairs += pairs as u64;
        }
        numbering.units = u32::try_from(units).ok().filter(|units| u64::from(*units) < NUMBERS_MAX)?;
        Some(numbering)
    }
}

fn entry(mode: Mode, placed: &Placed<'_>, piece: &Piece) -> Option<Entry> {
    let Shape { local, remote, .. } = placed.shape;
    let first = |base: u64, span: &Span, offset: u64| base.wrapping_add(span.base).wrapping_add(offset);
    let from = first(placed.from, local, piece.local_offset);
    let to = first(placed.to, remote, piece.remote_offset);
    let [outer, inner] = piece.dims;
    let mut bits = piece.run_bytes;
    if mode != Mode::Scatter {
        bits |= from | local.slot_stride | outer.local_stride | inner.local_stride;
    }
    if mode != Mode::Gather {
        bits |= to | remote.slot_stride | outer.remote_stride | inner.remote_stride;
    }
    let width_log2 = match bits.trailing_zeros() {
        0 | 1 => 0,
        zeros => zeros.min(4),
    };
    let number = |number: u64| u32::try_from(number).ok().filter(|number| u64::from(*number) < NUMBERS_MAX);
    let entry = Entry {
        from,
        to,
        from_slot: local.slot_stride,
        to_slot: remote.slot_stride,
        from_outer: outer.local_stride,
        to_outer: outer.remote_stride,
        from_inner: inner.local_stride,
        to_inner: inner.remote_stride,
        run_words: Divisor::new(number(piece.run_bytes >> width_log2)?),
        inner: Divisor::new(number(inner.count)?),
        words: number(piece.bytes() >> width_log2)?,
        width_log2,
        unused: [0; 2],
    };
    Some(if mode == Mode::Pull { entry.turned() } else { entry })
}

impl Entry {
    /// The other way round.
    fn turned(self) -> Self {
        Self {
            from: self.to,
            to: self.from,
            from_slot: self.to_slot,
            to_slot: self.from_slot,
            from_outer: self.to_outer,
            to_outer: self.from_outer,
            from_inner: self.to_inner,
            to_inner: self.from_inner,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::cursor::Cursor;
    use crate::pieces::Dim;
    use crate::units::Units;

    const FROM: u64 = 1 << 40;
    const TO: u64 = 1 << 50;

    /// What the kernel copies in unit `unit`: (from, to, place in the unit's slab, bytes), word by word.
    fn unit(expansion: &Expansion, numbering: &Numbering, pairs: &[Pair], unit: u32) -> Vec<(u64, u64, u64, u64)> {
        let set = numbering.sets.iter().rev().find(|set| set.first_unit <= unit).unwrap();
        let in_set = unit - set.first_unit;
        let pair_index = set.pair_units.divide(in_set);
        let in_pair = in_set - pair_index * set.pair_units.value;
        let entries = set.first_entry as usize..(set.first_entry + set.entries) as usize;
        let index = entries.start + expansion.starts[entries].partition_point(|start| *start <= in_pair) - 1;
        let entry = &expansion.entries[index];
        let in_entry = in_pair - expansion.starts[index];
        let pair = pairs[(set.first_pair + pair_index) as usize];
        let from = entry.from + u64::from(pair.from) * entry.from_slot;
        let to = entry.to + u64::from(pair.to) * entry.to_slot;
        let unit_words = u32::try_from(UNIT_BYTES).unwrap() >> entry.width_log2;
        let first = in_entry * unit_words;
        let count = unit_words.min(entry.words - first);
        let word_bytes = 1u64 << entry.width_log2;
        let word = |word: u32| {
            let run = entry.run_words.divide(first + word);
            let within = u64::from(first + word - run * entry.run_words.value) * word_bytes;
            let outer = entry.inner.divide(run);
            let inner = u64::from(run - outer * entry.inner.value);
            let outer = u64::from(outer);
            let source = from + outer * entry.from_outer + inner * entry.from_inner + within;
            let target = to + outer * entry.to_outer + inner * entry.to_inner + within;
            (source, target, u64::from(word) * word_bytes, word_bytes)
        };
        (0..count).map(word).collect()
    }

    fn shape(align: u64) -> impl Strategy<Value = (Shape, usize)> {
        let dim = move || {
            (1..5u64, 0..60u64, 0..60u64).prop_map(move |(count, local, remote)| Dim {
                count,
                local_stride: local * align,
                remote_stride: remote * align,
            })
        };
        let piece = (0..20u64, 0..20u64, 1..80u64, (dim(), dim())).prop_map(move |(local, remote, run, dims)| Piece {
            local_offset: local * align,
            remote_offset: remote * align,
            run_bytes: run * align,
            dims: [dims.0, dims.1],
        });
        let span = move || {
            (0..9u64, 0..900u64).prop_map(move |(base, stride)| Span {
                base: base * align,
                slot_stride: stride * align,
                region_bytes: 1 << 30,
            })
        };
        (span(), span(), prop::collection::vec(piece, 0..4), 0..3usize).prop_map(|(local, remote, pieces, set)| {
            (Shape { local, remote, pieces: Arc::from(pieces), pairs: Arc::new([]) }, set)
        })
    }

    fn transfer() -> impl Strategy<Value = Vec<(Shape, usize)>> {
        let pair = (0..9u32, 0..9u32).prop_map(|(local, remote)| SlotPair { local, remote });
        let sets = prop::collection::vec(prop::collection::vec(pair, 0..5), 3);
        let shapes = prop::sample::select(vec![1u64, 2, 4, 8, 16, 48])
            .prop_flat_map(|align| prop::collection::vec(shape(align), 0..5));
        (shapes, sets).prop_map(|(mut shapes, sets)| {
            for (shape, set) in &mut shapes {
                shape.pairs = Arc::from(&sets[*set][..]);
            }
            shapes
        })
    }

    /// How often each byte is copied from where to where.
    type Copies = BTreeMap<(u64, u64), u64>;

    /// By the cursor, which the host routes copy with.
    fn expected(shapes: &[Shape]) -> Copies {
        let (mut copies, mut cursor) = (Copies::new(), Cursor::default());
        while let Some(run) = cursor.next(shapes, u64::MAX) {
            for byte in 0..run.bytes {
                *copies.entry((FROM + run.local_offset + byte, TO + run.remote_offset + byte)).or_default() += 1;
            }
        }
        copies
    }

    fn setup(mode: Mode, transfer: &[(Shape, usize)]) -> (Expansion, Numbering, Vec<Pair>) {
        let placed: Vec<_> =
            transfer.iter().map(|(shape, set)| Placed { shape, from: FROM, to: TO, set: *set }).collect();
        let expansion = expand(mode, &placed).unwrap();
        let of_set = |set: usize| transfer.iter().find(|(_, of)| *of == set).map_or(&[][..], |(shape, _)| &shape.pairs);
        let sets: Vec<_> = (0..expansion.sets.len()).map(of_set).collect();
        let numbering = expansion.number(&sets.iter().map(|pairs| pairs.len()).collect::<Vec<_>>()).unwrap();
        (expansion, numbering, sets.into_iter().flatten().map(|pair| mode.pair(pair)).collect())
    }

    proptest! {
        #[test]
        fn the_units_are_the_runs_of_the_cursor(transfer in transfer()) {
            let (expansion, numbering, pairs) = setup(Mode::Direct, &transfer);
            let shapes: Vec<Shape> = transfer.iter().map(|(shape, _)| shape.clone()).collect();
            let mut copies = Copies::new();
            for index in 0..numbering.units {
                for (from, to, _, bytes) in unit(&expansion, &numbering, &pairs, index) {
                    prop_assert_eq!((from % bytes, to % bytes), (0, 0), "words are aligned");
                    for byte in 0..bytes {
                        *copies.entry((from + byte, to + byte)).or_default() += 1;
                    }
                }
            }
            prop_assert_eq!(&copies, &expected(&shapes));
            let (expansion, numbering, pairs) = setup(Mode::Pull, &transfer);
            for (from, to, _, bytes) in (0..numbering.units).flat_map(|index| unit(&expansion, &numbering, &pairs, index)) {
                for byte in 0..bytes {
                    let copied = copies.get_mut(&(to + byte, from + byte)).filter(|times| **times > 0);
                    *copied.expect("the way back of a copy") -= 1;
                }
            }
            prop_assert!(copies.values().all(|times| *times == 0));
        }

        #[test]
        fn what_one_side_gathers_the_other_scatters(transfer in transfer()) {
            let (gather, numbering, pairs) = setup(Mode::Gather, &transfer);
            let (scatter, theirs, _) = setup(Mode::Scatter, &transfer);
            prop_assert_eq!(&numbering, &theirs);
            let shapes: Vec<Shape> = transfer.iter().map(|(shape, _)| shape.clone()).collect();
            let mut copies = Copies::new();
            for index in 0..numbering.units {
                let mut slab = BTreeMap::new();
                for (from, _, place, bytes) in unit(&gather, &numbering, &pairs, index) {
                    prop_assert!(from % bytes == 0 && place % bytes == 0 && place + bytes <= UNIT_BYTES);
                    slab.extend((0..bytes).map(|byte| (place + byte, from + byte)));
                }
                for (_, to, place, bytes) in unit(&scatter, &theirs, &pairs, index) {
                    prop_assert!(to % bytes == 0 && place % bytes == 0);
                    for byte in 0..bytes {
                        let from = slab.remove(&(place + byte));
                        *copies.entry((from.unwrap(), to + byte)).or_default() += 1;
                    }
                }
                prop_assert!(slab.is_empty());
            }
            prop_assert_eq!(copies, expected(&shapes));
        }

        /// What a side without a GPU gathers or scatters is what the kernel does, from wherever it begins.
        #[test]
        fn the_host_walks_the_units_as_the_kernel_does(
            transfer in transfer(),
            first: prop::sample::Index,
            count: prop::sample::Index,
        ) {
            let (gather, numbering, pairs) = setup(Mode::Gather, &transfer);
            let (scatter, _, _) = setup(Mode::Scatter, &transfer);
            let (shapes, set_of): (Vec<Shape>, Vec<usize>) = transfer.iter().cloned().unzip();
            let units = Units::of(&shapes, &set_of).unwrap();
            prop_assert_eq!(units.count(), u64::from(numbering.units));
            let first = first.index(numbering.units as usize + 1);
            let count = count.index(numbering.units as usize - first + 1) as u64;
            let first = first as u64;
            let mut walked = BTreeMap::new();
            for (run, place) in units.walk(&shapes, first, count) {
                for byte in 0..run.bytes {
                    let places = (FROM + run.local_offset + byte, TO + run.remote_offset + byte);
                    prop_assert_eq!(walked.insert(place + byte, places), None);
                }
            }
            for index in 0..count {
                let unit = |expansion| unit(expansion, &numbering, &pairs, u32::try_from(first + index).unwrap());
                let (mut from, mut to) = (BTreeMap::new(), BTreeMap::new());
                for (source, _, place, bytes) in unit(&gather) {
                    from.extend((0..bytes).map(|byte| (index * UNIT_BYTES + place + byte, source + byte)));
                }
                for (_, target, place, bytes) in unit(&scatter) {
                    to.extend((0..bytes).map(|byte| (index * UNIT_BYTES + place + byte, target + byte)));
                }
                for (place, from) in from {
                    prop_assert_eq!(walked.remove(&place), to.remove(&place).map(|to| (from, to)));
                }
                prop_assert!(to.is_empty());
            }
            prop_assert!(walked.is_empty());
        }

        #[test]
        fn the_division_is_one(value in 1..1u32 << 31, number in 0..1u32 << 31, small in 1..5000u32) {
            for value in [value, small] {
                let divisor = Divisor::new(value);
                for number in [number, number / value * value, (number / value * value).saturating_sub(1), (1 << 31) - 1] {
                    prop_assert_eq!(divisor.divide(number), number / value, "{} / {}", number, value);
                }
            }
        }
    }

    fn one_piece(run_bytes: u64, align: u64) -> Option<u32> {
        let piece = Piece { local_offset: align, remote_offset: 0, run_bytes, dims: [Dim::ONE; 2] };
        let span = Span { base: 0, slot_stride: 1 << 40, region_bytes: u64::MAX };
        let shape = Shape { local: span, remote: span, pieces: Arc::new([piece]), pairs: Arc::new([]) };
        let expansion = expand(Mode::Direct, &[Placed { shape: &shape, from: FROM, to: TO, set: 0 }])?;
        Some(expansion.entries[0].width_log2)
    }

    #[test]
    fn words_are_as_wide_as_both_sides_allow() {
        for (run_bytes, align, width) in [(64, 16, 4), (64, 8, 3), (24, 16, 3), (64, 4, 2), (64, 2, 0), (63, 16, 0)] {
            assert_eq!(one_piece(run_bytes, align), Some(width), "{run_bytes} {align}");
        }
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        assert_eq!(one_piece(1 << 34, 16), Some(4));
        assert_eq!(one_piece(1 << 36, 16), None);
        assert_eq!(one_piece((1 << 32) + 1, 1), None);
        let piece = Piece { local_offset: 0, remote_offset: 0, run_bytes: 1 << 20, dims: [Dim::ONE; 2] };
        let span = Span { base: 0, slot_stride: 0, region_bytes: u64::MAX };
        let pairs: Arc<[SlotPair]> = vec![SlotPair { local: 0, remote: 0 }; 1 << 20].into();
        let shape = Shape { local: span, remote: span, pieces: Arc::new([piece]), pairs };
        let expansion = expand(Mode::Direct, &[Placed { shape: &shape, from: 0, to: 0, set: 0 }]).unwrap();
        assert!(expansion.number(&[1 << 19]).is_some());
        assert!(expansion.number(&[1 << 20]).is_none());
        assert!(Units::of(&[shape], &[0]).is_none());
    }
}
