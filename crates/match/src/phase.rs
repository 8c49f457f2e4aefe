//! The token axis: how blocks of two sizes overlap.

use std::ops::Range;

/// One way in which a source block and a destination block overlap.
///
/// With blocks of S and D tokens the overlaps repeat every lcm(S, D) tokens. A phase is one overlap of such a period: in
/// period `q` it is that of source block `q * source_step + source_index` and destination block
/// `q * destination_step + destination_index`, over the tokens `q * period_tokens + tokens`.
///
/// Equal block sizes have one phase. State has one too, of steps 0: it has no token axis, and one slot a request.
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

    /// The periods in which the overlap shares a token with `tokens`. State has period 0, whatever `tokens` is.
    pub(crate) fn periods(&self, tokens: &Range<u64>) -> Range<u64> {
        if self.period_tokens == 0 {
            return 0..1;
        }
        if tokens.is_empty() {
            return 0..0;
        }
        // Period q overlaps iff q * period + end > tokens.start and q * period + start < tokens.end.
        let first = match tokens.start.checked_sub(self.tokens.end) {
            Some(past) => past / self.period_tokens + 1,
            None => 0,
        };
        let end = tokens.end.saturating_sub(self.tokens.start).div_ceil(self.period_tokens);
        first..end.max(first)
    }

    /// Ordinals of the source block and the destination block in a period of [`Self::periods`]. They fit: each block
    /// starts at or before a token below the end of the request's tokens, a `u64`, and holds at least one.
    pub(crate) fn ordinals(&self, period: u64) -> (u64, u64) {
        (period * self.source_step + self.source_index, period * self.destination_step + self.destination_index)
    }
}

/// Number of phases of two block sizes, neither 0.
pub(crate) fn phase_count(source_tokens: u32, destination_tokens: u32) -> u64 {
    let common = gcd(source_tokens, destination_tokens);
    u64::from(source_tokens / common) + u64::from(destination_tokens / common) - 1
}

/// The phases of two block sizes, neither 0, in order of tokens.
pub(crate) fn phases(source_tokens: u32, destination_tokens: u32) -> impl Iterator<Item = Phase> {
    let common = gcd(source_tokens, destination_tokens);
    let (source_step, destination_step) = (u64::from(destination_tokens / common), u64::from(source_tokens / common));
    let (source_tokens, destination_tokens) = (u64::from(source_tokens), u64::from(destination_tokens));
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

fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
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
        let check = |tokens: Range<u64>, expected: Range<u64>| {
            let found = third.periods(&tokens);
            assert!(found == expected || (found.is_empty() && expected.is_empty()), "{tokens:?}: {found:?}");
        };
        check(0..48, 0..0);
        check(0..49, 0..1);
        check(63..64, 0..1);
        check(64..144, 1..1);
        check(64..145, 1..2);
        check(0..1000, 0..10);
        check(50..50, 0..0);
        check(u64::MAX - 1..u64::MAX, 192_153_584_101_141_162..192_153_584_101_141_163);
        assert_eq!(Phase::STATE.periods(&(7..7)), 0..1);
    }

    #[test]
    fn largest_tokens_do_not_overflow() {
        for (source, destination) in [(1, 1), (1, 3), (u32::MAX, 1), (u32::MAX, u32::MAX - 1)] {
            for phase in phases(source, destination).take(1000) {
                let periods = phase.periods(&(u64::MAX - 200..u64::MAX));
                for period in [periods.start, periods.end.saturating_sub(1)].into_iter().filter(|p| periods.contains(p))
                {
                    phase.ordinals(period);
                }
            }
        }
    }
}
