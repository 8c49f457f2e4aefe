//! Which request goes when: a state machine that is told what happened and the time, and says what to begin. It moves
//! nothing and reads no clock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use crate::pattern::Key;
use crate::replay::pool::{Frame, Lease, Pool};
use crate::replay::trace::{Request, Trace};

/// What decides when requests go.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Requests between their begin and their end at most.
    pub in_flight_max: usize,
    /// Frames of each instance.
    pub frame_count: u32,
    /// How the trace's time becomes that of the replay.
    pub speed: Speed,
    /// How long generating a token takes, in the trace's time. Until then the decode instance keeps the frames.
    pub token_time: Duration,
    /// Decides which frames are given out first.
    pub seed: u64,
}

/// How much faster than in the trace requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Speed {
    /// So many times.
    Times(f64),
    /// All at once, and nothing is generated.
    Max,
}

/// A request that is to begin now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// Its place in the trace.
    pub request: usize,
    /// Its blocks' frames at the prefill instance.
    pub source: Vec<Frame>,
    /// How many of the first ones the prefill instance has already.
    pub computed: usize,
    /// Its blocks' frames at the decode instance.
    pub destination: Vec<Frame>,
    /// How many of the first ones the decode instance has already.
    pub reused: usize,
}

/// How a request that was begun has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Its bytes are there.
    Arrived,
    /// It failed.
    Failed {
        /// Why, in one line.
        line: String,
        /// Its frames that somebody may still touch.
        exposed: Exposed,
    },
}

/// Instances at which somebody may still touch the frames of a request that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exposed {
    /// At the prefill instance, to read them.
    pub source: bool,
    /// At the decode instance, to write to them.
    pub destination: bool,
}

/// What became of a request, for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It arrived.
    Done,
    /// It has more blocks than an instance has frames.
    TooLong {
        /// Blocks, those for what is generated included.
        blocks: usize,
        /// Frames that there are.
        frames: usize,
    },
    /// It failed.
    Failed {
        /// Why, in one line.
        line: String,
    },
}

/// Requests by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Those that arrived.
    pub done: usize,
    /// Those that no pool has room for.
    pub rejected: usize,
    /// Those that failed.
    pub failed: usize,
}

/// The state machine.
#[derive(Debug)]
pub struct Dispatcher {
    rules: Rules,
    prefill: Pool,
    decode: Pool,
    /// Requests by their arrival in the replay's time.
    to_come: VecDeque<(Duration, usize)>,
    in_flight: BTreeMap<usize, InFlight>,
    /// Leases of the decode instance, by when what they are for has been generated. Numbered, since equal times are no
    /// reason to compare leases.
    generating: BinaryHeap<Reverse<(Duration, usize)>>,
    leases: BTreeMap<usize, Lease>,
    verdicts: Vec<Option<Verdict>>,
}

#[derive(Debug)]
struct InFlight {
    source: Lease,
    destination: Lease,
    generation: Duration,
}

impl Speed {
    /// How long something takes in the replay's time.
    pub fn scale(self, time: Duration) -> Duration {
        match self {
            // Both are bounded where they come from, so that the quotient is a duration.
            Self::Times(times) => Duration::try_from_secs_f64(time.as_secs_f64() / times).unwrap_or(Duration::MAX),
            Self::Max => Duration::ZERO,
        }
    }
}

impl Dispatcher {
    /// Nothing has begun.
    pub fn new(trace: &Trace, rules: Rules) -> Self {
        let first = trace.requests.first().map_or(Duration::ZERO, |request| request.arrival);
        let arrival = |request: &Request| rules.speed.scale(request.arrival - first);
        let to_come = trace.requests.iter().map(arrival).zip(0..).collect();
        let pool = |side| Pool::new(rules.frame_count, Key::new(rules.seed).part(4).part(side));
        Self {
            prefill: pool(0),
            decode: pool(1),
            to_come,
            in_flight: BTreeMap::new(),
            generating: BinaryHeap::new(),
            leases: BTreeMap::new(),
            verdicts: vec![None; trace.requests.len()],
            rules,
        }
    }

    /// What begins at `now`: requests that have arrived, in order, as far as there is room. `trace` is the one that the
    /// dispatcher was made for.
    pub fn step(&mut self, now: Duration, trace: &Trace) -> Vec<Begin> {
        while self.generating.peek().is_some_and(|Reverse((until, _))| *until <= now) {
            let lease = self.generating.pop().and_then(|Reverse((_, request))| self.leases.remove(&request));
            if let Some(lease) = lease {
                self.decode.give_back(lease);
            }
        }
        let mut begins = Vec::new();
        while let Some(&(arrival, request)) = self.to_come.front() {
            if arrival > now || self.in_flight.len() >= self.rules.in_flight_max {
                break;
            }
            let of = &trace.requests[request];
            let more = usize::try_from(of.output_blocks()).unwrap_or(usize::MAX);
            let (blocks, frames) = (of.blocks.len().saturating_add(more), self.capacity());
            if blocks > frames {
                self.to_come.pop_front();
                self.verdicts[request] = Some(Verdict::TooLong { blocks, frames });
                continue;
            }
            // Both or none: to take frames and give them back would have forgotten other blocks for nothing.
            if !self.prefill.has_room(&of.blocks, 0) || !self.decode.has_room(&of.blocks, more) {
                break;
            }
            let (Some(source), Some(destination)) =
                (self.prefill.take(&of.blocks, 0), self.decode.take(&of.blocks, more))
            else {
                unreachable!("both have room");
            };
            self.to_come.pop_front();
            begins.push(Begin {
                request,
                source: source.frames().to_vec(),
                computed: source.reused(),
                destination: destination.frames().to_vec(),
                reused: destination.reused(),
            });
            let tokens = u32::try_from(of.output_tokens).unwrap_or(u32::MAX);
            let generation = self.rules.speed.scale(self.rules.token_time.saturating_mul(tokens));
            self.in_flight.insert(request, InFlight { source, destination, generation });
        }
        begins
    }

    /// A request that was begun has ended.
    pub fn ended(&mut self, now: Duration, request: usize, end: End) {
        let Some(InFlight { mut source, mut destination, generation }) = self.in_flight.remove(&request) else {
            return;
        };
        let verdict = match end {
            End::Arrived => {
                self.prefill.publish(&mut source);
                self.prefill.give_back(source);
                self.decode.publish(&mut destination);
                self.generating.push(Reverse((now.saturating_add(generation), request)));
                self.leases.insert(request, destination);
                Verdict::Done
            }
            End::Failed { line, exposed } => {
                let leave = |pool: &mut Pool, lease: Lease, exposed: bool| {
                    if exposed { pool.quarantine(lease) } else { pool.give_back(lease) }
                };
                leave(&mut self.prefill, source, exposed.source);
                leave(&mut self.decode, destination, exposed.destination);
                Verdict::Failed { line }
            }
        };
        self.verdicts[request] = Some(verdict);
    }

    /// After a [`Self::step`] at `now`: when the next has something to do for the time alone. `None` if only an end can
    /// bring something.
    pub fn next_step(&self, now: Duration) -> Option<Duration> {
        let room = self.in_flight.len() < self.rules.in_flight_max;
        // One that has arrived and did not begin waits for frames.
        let arrival = self.to_come.front().filter(|_| room).map(|(arrival, _)| *arrival).filter(|at| *at > now);
        let generated = self.generating.peek().filter(|_| !self.to_come.is_empty()).map(|Reverse((until, _))| *until);
        arrival.into_iter().chain(generated).min()
    }

    /// Requests that have arrived and not begun.
    pub fn waiting(&self, now: Duration) -> usize {
        self.to_come.partition_point(|(arrival, _)| *arrival <= now)
    }

    /// Requests between their begin and their end.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether every request has a verdict.
    pub fn is_over(&self) -> bool {
        self.to_come.is_empty() && self.in_flight.is_empty()
    }

    /// What became of each request, in the trace's order; `None` if that is not known yet.
    pub fn verdicts(&self) -> &[Option<Verdict>] {
        &self.verdicts
    }

    /// Frames, of both instances, that are not used again because somebody may still touch them.
    pub fn quarantined(&self) -> usize {
        self.prefill.quarantined() + self.decode.quarantined()
    }

    /// The decode instance's pool.
    pub fn decode(&self) -> &Pool {
        &self.decode
    }

    /// Counts the verdicts.
    pub fn account(&self) -> Account {
        let mut account = Account::default();
        for verdict in self.verdicts.iter().flatten() {
            match verdict {
                Verdict::Done => account.done += 1,
                Verdict::TooLong { .. } => account.rejected += 1,
                Verdict::Failed { .. } => account.failed += 1,
            }
        }
        account
    }

    fn capacity(&self) -> usize {
        self.prefill.capacity().min(self.decode.capacity())
    }
}

impl Account {
    /// Requests that something is known of.
    pub fn total(&self) -> usize {
        self.done + self.rejected + self.failed
    }
}

#[cfg(test)]
mod tests;
