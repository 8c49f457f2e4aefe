//! What goes wrong, and when.

use ucx_sys::Status;

/// What a worker asks of UCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// A message.
    Send,
    /// A remote write.
    Put,
    /// A remote read.
    Get,
    /// A flush of an endpoint.
    Flush,
}

/// What becomes of an operation. Those that make no sense for it change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A message is taken and never arrives.
    Lose,
    /// A message arrives twice.
    Double,
    /// A message arrives behind the next one.
    Overtaken,
    /// A message and all behind it, a put or a get waits for so many turns of its worker.
    Delay(u64),
    /// A message arrives in part, and the rest never does.
    Tear,
    /// A bit of byte `.0` of a message is another, counted round its length.
    Damage(usize),
    /// The operation fails, and nothing else does.
    Fail(Status),
    /// The endpoint fails, with everything on it.
    Break(Status),
    /// The peer dies: it does nothing any more, and every endpoint to it fails.
    KillPeer,
}

/// A fault of one operation.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The worker, in the order in which they were created since the script began.
    pub worker: usize,
    /// The kind of operation.
    pub act: Act,
    /// Which of its kind, from 0.
    pub nth: u64,
    /// What happens to it.
    pub fault: Fault,
}

/// Faults all over, by chance that is the same in every run.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    /// Where the chance starts.
    pub seed: u64,
    /// One operation in so many.
    pub one_in: u64,
    /// What happens to it, one of these.
    pub faults: &'static [Fault],
}

/// The faults of one session.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// For single operations.
    pub rules: Vec<Rule>,
    /// For the others.
    pub noise: Option<Noise>,
}

impl Script {
    pub(crate) fn fault(&self, worker: usize, act: Act, nth: u64) -> Option<Fault> {
        let named = |rule: &&Rule| (rule.worker, rule.act, rule.nth) == (worker, act, nth);
        if let Some(rule) = self.rules.iter().find(named) {
            return Some(rule.fault);
        }
        let noise = self.noise?;
        let place = noise.seed ^ (worker as u64) << 56 ^ (act as u64) << 48 ^ nth;
        let drawn = scramble(place);
        if !drawn.is_multiple_of(noise.one_in) {
            return None;
        }
        let which = usize::try_from((drawn >> 32) % noise.faults.len().max(1) as u64).ok()?;
        noise.faults.get(which).copied()
    }
}

/// The finalizer of SplitMix64.
pub(crate) fn scramble(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
