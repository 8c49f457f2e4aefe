//! A small trace of the same form as a real one, for whoever has none: conversations whose prompts grow, behind one system
//! prompt that all share.

use std::time::Duration;

use crate::pattern::Key;
use crate::replay::trace::{BLOCK_TOKENS, Request, Trace};

/// Blocks of the system prompt.
const SYSTEM_BLOCKS: u64 = 2;
/// New full blocks of one turn at most.
const TURN_BLOCKS_MAX: u64 = 12;
/// Tokens of an answer at most.
const ANSWER_TOKENS_MAX: u64 = 600;
/// Conversations at a time.
const CONVERSATIONS: u64 = 12;
/// Turns of a conversation, on the average.
const TURNS: u64 = 4;
/// Mean time between two requests.
const GAP: Duration = Duration::from_millis(20);

/// A trace of `count` requests, decided by `seed`.
pub fn trace(seed: u64, count: usize) -> Trace {
    let mut draws = Draws { key: Key::new(seed).part(3), count: 0 };
    let mut next_id = SYSTEM_BLOCKS;
    let mut fresh = || {
        next_id += 1;
        next_id - 1
    };
    let system: Vec<u64> = (0..SYSTEM_BLOCKS).collect();
    let mut conversations = vec![system.clone(); usize::try_from(CONVERSATIONS).unwrap_or(1)];
    let mut arrival = Duration::ZERO;
    let requests = (0..count).map(|_| {
        let place = draws.below(conversations.len() as u64);
        let blocks = &mut conversations[usize::try_from(place).unwrap_or(0)];
        if draws.below(TURNS) == 0 {
            blocks.clone_from(&system);
        }
        blocks.extend((0..=draws.below(TURN_BLOCKS_MAX)).map(|_| fresh()));
        let rest = draws.below(BLOCK_TOKENS);
        let mut ids = blocks.clone();
        // The block at a prompt's end that is not full is no other prompt's.
        ids.extend((rest > 0).then(&mut fresh));
        let arrived = arrival;
        arrival += draws.gap();
        let tokens = blocks.len() as u64 * BLOCK_TOKENS + rest;
        Request::new(arrived, tokens, 1 + draws.below(ANSWER_TOKENS_MAX), &ids)
    });
    Trace { requests: requests.collect() }
}

/// Numbers that look drawn.
struct Draws {
    key: Key,
    count: u64,
}

impl Draws {
    fn word(&mut self) -> u64 {
        self.count += 1;
        self.key.word(self.count)
    }

    /// Below `end`, which is small: the modulo favours nothing that could be seen.
    fn below(&mut self, end: u64) -> u64 {
        self.word() % end.max(1)
    }

    /// Time to the next of arrivals that do not know of each other, in whole milliseconds as traces have it.
    fn gap(&mut self) -> Duration {
        let share = (self.word() >> 11) as f64 / (1u64 << 53) as f64;
        let gap = GAP.mul_f64(-(1.0 - share).ln());
        Duration::from_millis(u64::try_from(gap.as_millis()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_a_trace_with_shared_prefixes() {
        let made = trace(1, 200);
        assert_eq!(made, trace(1, 200));
        assert_ne!(made, trace(2, 200));
        assert_eq!(made.requests.len(), 200);
        assert!(made.requests.is_sorted_by_key(|request| request.arrival));
        let (blocks, again) = made.blocks();
        assert!(again * 4 > blocks && again * 4 < blocks * 3, "{again} of {blocks}");
        for request in &made.requests {
            assert_eq!(request.blocks.len() as u64, request.input_tokens.div_ceil(BLOCK_TOKENS));
            assert_eq!(request.blocks.iter().map(|block| block.tokens).sum::<u64>(), request.input_tokens);
        }
        assert!((Duration::from_secs(2)..Duration::from_secs(8)).contains(&made.span()), "{:?}", made.span());
    }
}
