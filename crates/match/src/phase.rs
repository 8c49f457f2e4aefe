//! The token axis: how blocks of two sizes overlap.

use std::ops::Range;

use kvferry_layout::Ordinals;

use crate::chunk::Chunk;

/// One way in which a source block and a destination block overlap.
///
/// With blocks of S and D tokens the overlaps repeat every lcm(S, D) tokens. A phase is one overlap of such a period: in
/// period `q` it is that of source block `q * source_step + source_index` and destination block
/// `q * destination_step + destination_index`, over the tokens `q * period_tokens + tokens`.
///
/// Equal block sizes have one phase. State has one too, of steps 0: it has no token axis, and one slot a request.
///
/// Where blocks are dealt out to context-parallel ranks, an overlap is one of two given ranks only every so many periods.
/// Then these are the period.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Phase {
    /// Tokens after which the overlaps repeat; 0 for state.
    pub period_tokens: u64,
    /// Tokens of the overlap, from the start of the period.
    pub tokens: Range<u64>,
    /// Source blocks of a period.
    pub source_step: u64,
    /// Which of them it is.
    pub source_index: u64,
    /// Destination blocks of a period.
    pub destination_step: u64,
    /// Which of them it is.
    pub destination_index: u64,
}

impl Phase {
    /// The one phase of state: block 0 on both sides.
    pub(crate) const STATE: Self = Self {
        period_tokens: 0,
        tokens: 0..1,
        source_step: 0,
        source_index: 0,
        destination_step: 0,
        destination_index: 0,
    };

    /// The periods in which the overlap moves with `chunk`: those where its last token is one of the chunk's. Of a group
    /// with a window, it must be inside the window as well. State has period 0, in the last chunk.
    pub(crate) fn periods(&self, chunk: &Chunk, window_tokens: Option<u32>) -> Range<u64> {
        if self.period_tokens == 0 {
            return 0..u64::from(chunk.is_last());
        }
        let tokens = chunk.within(window_tokens);
        if tokens.is_empty() {
            return 0..0;
        }
        // In period q the last token is q * period + end - 1, or the request's last one if that is earlier. It is at or
        // past the first of `tokens` iff q * period + end > tokens.start.
        let first = match tokens.start.checked_sub(self.tokens.end) {
            Some(past) => past / self.period_tokens + 1,
            None => 0,
        };
        // It is before their end iff q * period + end <= tokens.end; in the last chunk iff the overlap has any token.
        let end = if chunk.is_last() {
            tokens.end.saturating_sub(self.tokens.start).div_ceil(self.period_tokens)
        } else {
            tokens.end.checked_sub(self.tokens.end).map_or(0, |past| past / self.period_tokens + 1)
        };
        first..end.max(first)
    }

    /// The phase of those periods in which both blocks are among the ordinals that their ranks hold. `None` if they never
    /// are, before tokens no longer fit in 64 bits.
    pub(crate) fn dealt(self, source: Ordinals, destination: Ordinals) -> Option<Self> {
        if (source, destination) == (Ordinals::ALL, Ordinals::ALL) {
            return Some(self);
        }
        let ours = Every::solving(self.source_step, self.source_index, source)?;
        let theirs = Every::solving(self.destination_step, self.destination_index, destination)?;
        let Every { first, step } = ours.and(theirs)?;
        let start = first.checked_mul(self.period_tokens)?;
        let index = |step: u64, index: u64| first.checked_mul(step)?.checked_add(index);
        Some(Self {
            // A step past 64 bits is taken by no request: there is the first period only, and any such step will do.
            period_tokens: step.saturating_mul(self.period_tokens),
            tokens: start.checked_add(self.tokens.start)?..start.checked_add(self.tokens.end)?,
            source_step: step.saturating_mul(self.source_step),
            source_index: index(self.source_step, self.source_index)?,
            destination_step: step.saturating_mul(self.destination_step),
            destination_index: index(self.destination_step, self.destination_index)?,
        })
    }

    /// Ordinals of the source block and the destination block in a period of [`Self::periods`]. They fit: each block
    /// starts at or before a token below the end of the request's tokens, a `u64`, and holds at least one.
    pub(crate) fn ordinals(&self, period: u64) -> (u64, u64) {
        (period * self.source_step + self.source_index, period * self.destination_step + self.destination_index)
    }
}

/// The numbers `first`, `first + step`, ...
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Every {
    /// Below `step`.
    first: u64,
    step: u64,
}

impl Every {
    /// The `q` for which `q * step + index` is among the ordinals.
    fn solving(step: u64, index: u64, ordinals: Ordinals) -> Option<Self> {
        let (modulus, wanted) = (u64::from(ordinals.step), u64::from(ordinals.first));
        // All below 2^32 from here on, so that nothing overflows.
        let (step, index) = (step % modulus, index % modulus);
        let distance = (wanted + modulus - index) % modulus;
        let common = gcd(step, modulus);
        if !distance.is_multiple_of(common) {
            return None;
        }
        let (step, distance, modulus) = (step / common, distance / common, modulus / common);
        Some(Self { first: distance * inverse(step, modulus) % modulus, step: modulus })
    }

    /// The numbers in both; steps are below 2^32. `None` if there is none.
    fn and(self, other: Self) -> Option<Self> {
        let common = gcd(self.step, other.step);
        let step = other.step / common;
        let distance = (other.first + other.step - self.first % other.step) % other.step;
        if !distance.is_multiple_of(common) {
            return None;
        }
        let times = distance / common * inverse(self.step / common % step, step) % step;
        Some(Self { first: self.first + times * self.step, step: self.step * step })
    }
}

/// The number below `modulus` that times `number` leaves 1; `number` has no factor in common with `modulus`, below 2^32.
fn inverse(number: u64, modulus: u64) -> u64 {
    // Extended Euclid, with factors kept below the modulus: (remainder, factor) such that factor * number = remainder.
    let (mut last, mut next) = ((modulus, 0), (number % modulus, 1 % modulus));
    while next.0 > 1 {
        let times = last.0 / next.0;
        let factor = (last.1 + modulus - times % modulus * next.1 % modulus) % modulus;
        (last, next) = (next, (last.0 % next.0, factor));
    }
    next.1
}

/// Whether a source block and a destination block, both dealt out, can overlap at all.
pub(crate) fn overlap(source: (u32, Ordinals), destination: (u32, Ordinals)) -> bool {
    let cycle = |(tokens, ordinals): (u32, Ordinals)| u64::from(tokens) * u64::from(ordinals.step);
    let first = |(tokens, ordinals): (u32, Ordinals)| i128::from(tokens) * i128::from(ordinals.first);
    // The blocks are source.first + i * source cycle and destination.first + j * destination cycle on. What they are apart
    // differs by any multiple of the common divisor of the cycles.
    let common = i128::from(gcd(cycle(source), cycle(destination)));
    let apart = first(source) - first(destination);
    let most = apart + i128::from(source.0) - 1;
    let least = apart - i128::from(destination.0) + 1;
    most.div_euclid(common) * common >= least
}

/// Number of phases of two block sizes, neither 0.
pub(crate) fn phase_count(source_tokens: u32, destination_tokens: u32) -> u64 {
    let (source_tokens, destination_tokens) = (u64::from(source_tokens), u64::from(destination_tokens));
    let common = gcd(source_tokens, destination_tokens);
    source_tokens / common + destination_tokens / common - 1
}

/// The phases of two block sizes, neither 0, in order of tokens.
pub(crate) fn phases(source_tokens: u32, destination_tokens: u32) -> impl Iterator<Item = Phase> {
    let (source_tokens, destination_tokens) = (u64::from(source_tokens), u64::from(destination_tokens));
    let common = gcd(source_tokens, destination_tokens);
    let (source_step, destination_step) = (destination_tokens / common, source_tokens / common);
    // Both factors were u32.
    let period_tokens = source_tokens * source_step;
    let mut start = 0;
    std::iter::from_fn(move || {
        if start >= period_tokens {
            return None;
        }
        let (source_index, destination_index) = (start / source_tokens, start / destination_tokens);
        let end = ((source_index + 1) * source_tokens).min((destination_index + 1) * destination_tokens);
        let tokens = start..end;
        start = end;
        Some(Phase { period_tokens, tokens, source_step, source_index, destination_step, destination_index })
    })
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn overlaps_of_a_period() {
        let check = |source: u32, destination: u32, expected: &[(u64, u64, Range<u64>)]| {
            let found: Vec<_> =
                phases(source, destination).map(|p| (p.source_index, p.destination_index, p.tokens)).collect();
            assert_eq!(found, expected);
            assert_eq!(phase_count(source, destination), expected.len() as u64);
        };
        check(64, 64, &[(0, 0, 0..64)]);
        check(16, 32, &[(0, 0, 0..16), (1, 0, 16..32)]);
        check(48, 32, &[(0, 0, 0..32), (0, 1, 32..48), (1, 1, 48..64), (1, 2, 64..96)]);
        assert_eq!(phase_count(u32::MAX, u32::MAX - 1), 2 * u64::from(u32::MAX) - 2);
    }

    #[test]
    fn periods_touch_the_tokens() {
        // Of 48 to 32 the third phase: tokens 48..64 of every 96.
        let third = phases(48, 32).nth(2).expect("four phases");
        let check = |chunk: Chunk, expected: Range<u64>| {
            let found = third.periods(&chunk, None);
            assert!(found == expected || (found.is_empty() && expected.is_empty()), "{chunk:?}: {found:?}");
        };
        let whole = |tokens: Range<u64>| Chunk::from(tokens);
        check(whole(0..48), 0..0);
        check(whole(0..49), 0..1);
        check(whole(63..64), 0..1);
        check(whole(64..144), 1..1);
        check(whole(64..145), 1..2);
        check(whole(0..1000), 0..10);
        check(whole(50..50), 0..0);
        check(whole(u64::MAX - 1..u64::MAX), 192_153_584_101_141_162..192_153_584_101_141_163);
        // More of the request comes later.
        check(Chunk::new(0..63, 1000), 0..0);
        check(Chunk::new(0..64, 1000), 0..1);
        check(Chunk::new(63..160, 1000), 0..2);
        check(Chunk::new(64..161, 1000), 1..2);
        assert_eq!(Phase::STATE.periods(&whole(7..7), None), 0..1);
        assert_eq!(Phase::STATE.periods(&Chunk::new(0..7, 8), None), 0..0);
    }

    #[test]
    fn windows_count_from_the_end_of_the_request() {
        let phase = phases(16, 16).next().expect("one phase");
        let check = |chunk: Chunk, window_tokens: u32, expected: Range<u64>| {
            let found = phase.periods(&chunk, Some(window_tokens));
            assert!(found == expected || (found.is_empty() && expected.is_empty()), "{chunk:?}: {found:?}");
        };
        // The last 32 of 100 tokens are 68..100, in blocks 4 to 6.
        check(Chunk::from(0..100), 32, 4..7);
        check(Chunk::from(96..100), 32, 6..7);
        check(Chunk::from(0..20), 32, 0..2);
        check(Chunk::new(0..64, 100), 32, 0..0);
        check(Chunk::new(64..96, 100), 32, 4..6);
        check(Chunk::new(96..100, 100), 32, 6..7);
    }

    #[test]
    fn largest_tokens_do_not_overflow() {
        let sizes = [(1, 1), (1, 3), (u32::MAX, 1), (u32::MAX, u32::MAX - 1)];
        let every = |step: u32, first: u32| Ordinals { step, first };
        let deals = [
            (Ordinals::ALL, Ordinals::ALL),
            (every(2, 1), Ordinals::ALL),
            (every(u32::MAX, 0), every(u32::MAX - 1, 0)),
            (every(u32::MAX, u32::MAX - 1), every(u32::MAX - 1, 17)),
        ];
        for ((source, destination), (ours, theirs)) in sizes.into_iter().flat_map(|size| deals.map(|deal| (size, deal)))
        {
            for phase in phases(source, destination).take(1000).filter_map(|phase| phase.dealt(ours, theirs)) {
                for chunk in [Chunk::from(u64::MAX - 200..u64::MAX), Chunk::new(0..u64::MAX - 1, u64::MAX)] {
                    let periods = phase.periods(&chunk, None);
                    let ends = [periods.start, periods.end.saturating_sub(1)];
                    for period in ends.into_iter().filter(|period| periods.contains(period)) {
                        let (source, destination) = phase.ordinals(period);
                        assert!(ours.holds(source) && theirs.holds(destination));
                    }
                }
            }
        }
    }

    /// The overlaps that move, by scanning tokens: a pair of blocks moves with its last token.
    fn pairs_by_scan(
        (source, ours): (u32, Ordinals),
        (destination, theirs): (u32, Ordinals),
        chunk: &Chunk,
        window_tokens: Option<u32>,
    ) -> Vec<(u64, u64)> {
        let pair = |token: u64| (token / u64::from(source), token / u64::from(destination));
        let is_last = |token: &u64| token + 1 == chunk.request_tokens || pair(token + 1) != pair(*token);
        let window = window_tokens.map_or(0, |tokens| chunk.request_tokens.saturating_sub(tokens.into()));
        (0..chunk.request_tokens)
            .filter(|token| chunk.tokens.contains(token) && *token >= window)
            .filter(is_last)
            .map(pair)
            .filter(|(source, destination)| ours.holds(*source) && theirs.holds(*destination))
            .collect()
    }

    fn dealt_blocks() -> impl Strategy<Value = (u32, Ordinals)> {
        let ordinals = prop_oneof![1 => Just(1..=1), 3 => Just(1..=6_u32)].prop_flat_map(|steps| {
            steps.prop_flat_map(|step| (0..step).prop_map(move |first| Ordinals { step, first }))
        });
        (prop_oneof![1..=16_u32, prop::sample::select(vec![4_u32, 8, 16])], ordinals)
    }

    proptest! {
        #[test]
        fn chunks_move_what_a_scan_finds(
            source in dealt_blocks(),
            destination in dealt_blocks(),
            bounds in [0..200_u64, 0..200, 0..200],
            window_tokens in proptest::option::of(1..100_u32),
        ) {
            let mut bounds = bounds;
            bounds.sort_unstable();
            let chunk = Chunk::new(bounds[0]..bounds[1], bounds[2]);
            let phases = phases(source.0, destination.0);
            let mut found: Vec<(u64, u64)> = phases
                .filter_map(|phase| phase.dealt(source.1, destination.1))
                .flat_map(|phase| {
                    let periods = phase.periods(&chunk, window_tokens);
                    periods.map(move |period| phase.ordinals(period)).collect::<Vec<_>>()
                })
                .collect();
            found.sort_unstable();
            prop_assert_eq!(found, pairs_by_scan(source, destination, &chunk, window_tokens));
        }

        #[test]
        fn blocks_overlap_where_some_phase_says_so(source in dealt_blocks(), destination in dealt_blocks()) {
            let found = phases(source.0, destination.0).any(|phase| phase.dealt(source.1, destination.1).is_some());
            prop_assert_eq!(overlap(source, destination), found);
        }
    }
}
