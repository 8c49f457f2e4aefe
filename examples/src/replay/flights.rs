//! The replay itself: gives ranks what the dispatcher decides, and hears what came of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::RecvTimeoutError;
use indicatif::{ProgressBar, ProgressStyle};

use crate::meet::{Member, Side};
use crate::replay::dispatch::{Begin, Dispatcher, End, Exposed};
use crate::replay::options::ReplayOptions;
use crate::replay::pool::Frame;
use crate::replay::ranks::{Crew, Done, Failed, Moved, Placed, Rank, Task};
use crate::replay::record::{Leg, Record};
use crate::replay::setup::Setup;
use crate::replay::trace::{BLOCK_TOKENS, Block, Trace};

/// How often the progress bar is drawn while nothing happens.
const DRAW_INTERVAL: Duration = Duration::from_millis(100);

/// Past what a transfer may take to say that it has ended, how long ranks may say nothing.
const SILENCE_GRACE: Duration = Duration::from_secs(60);

/// The request that `--flip-byte` is about.
const FLIPPED: usize = 3;

/// Ranks that should have ended what they do have said nothing for too long. A bug, or a machine that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no rank said anything for {silence_s} s, with {in_flight} requests under way")]
pub struct Silence {
    /// How long.
    pub silence_s: u64,
    /// Requests under way.
    pub in_flight: usize,
}

/// How a replay ended.
#[derive(Debug)]
pub struct Replayed {
    /// With all verdicts.
    pub dispatcher: Dispatcher,
    /// Requests that were begun, in the order of their ends.
    pub records: Vec<Record>,
    /// How long it took.
    pub elapsed: Duration,
}

/// A request between its begin and its end.
struct Flight {
    begin: Begin,
    begun: Duration,
    /// Ranks that have not said that they are done with what they do now.
    waits_for: usize,
    legs: Vec<Leg>,
    /// The first reason, and what may still be touched.
    failed: Option<(String, Exposed)>,
}

/// What stays the same during a replay.
struct Replay<'a> {
    options: &'a ReplayOptions,
    setup: &'a Setup,
    trace: &'a Trace,
    crew: Crew,
    start: Instant,
}

/// Replays a trace until every request has a verdict.
///
/// # Errors
///
/// [`Silence`].
pub fn replay(options: &ReplayOptions, setup: &Setup, trace: &Trace, ranks: &[Arc<Rank>]) -> Result<Replayed, Silence> {
    let rules = options.rules();
    let threads = rules.in_flight_max.min(trace.requests.len());
    let mut dispatcher = Dispatcher::new(trace, rules);
    let silence_max = options.moving.deadline() * 2 + SILENCE_GRACE;
    let bar = bar(trace.requests.len() as u64);
    thread::scope(|scope| {
        let crew = Crew::start(scope, ranks, threads);
        let replay = Replay { options, setup, trace, crew, start: Instant::now() };
        let mut flights = BTreeMap::new();
        let (mut records, mut moved_bytes) = (Vec::new(), 0);
        let mut last_heard = Instant::now();
        loop {
            let now = replay.start.elapsed();
            for begin in dispatcher.step(now, trace) {
                flights.insert(begin.request, replay.begin(begin, now));
            }
            bar.set_position(dispatcher.account().total() as u64);
            bar.set_message(format!(
                "{} moving, {} waiting, {:.2} GB",
                dispatcher.in_flight(),
                dispatcher.waiting(now),
                moved_bytes as f64 / 1e9
            ));
            if dispatcher.is_over() {
                break;
            }
            let step = dispatcher.next_step(now).map_or(DRAW_INTERVAL, |at| at.saturating_sub(now));
            match replay.crew.told.recv_timeout(step.min(DRAW_INTERVAL)) {
                Ok((member, request, done)) => {
                    last_heard = Instant::now();
                    if let Some((record, end)) = replay.heard(&mut flights, member, request, done) {
                        moved_bytes += record.moved_bytes();
                        records.push(record);
                        dispatcher.ended(replay.start.elapsed(), request, end);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let silence = last_heard.elapsed();
                    if !flights.is_empty() && silence > silence_max {
                        return Err(Silence { silence_s: silence.as_secs(), in_flight: flights.len() });
                    }
                    if flights.is_empty() {
                        last_heard = Instant::now();
                    }
                }
            }
        }
        let elapsed = replay.start.elapsed();
        bar.finish_and_clear();
        Ok(Replayed { dispatcher, records, elapsed })
    })
}

impl Replay<'_> {
    fn begin(&self, begin: Begin, now: Duration) -> Flight {
        let mut flight = Flight { begin, begun: now, waits_for: 0, legs: Vec::new(), failed: None };
        let computed = flight.begin.computed;
        if self.options.verify && computed < flight.begin.source.len() {
            let blocks = self.placed(flight.begin.request, &flight.begin.source, computed);
            for member in self.members(Side::Sender) {
                self.crew.give(member, flight.begin.request, Task::Write(blocks.clone()));
                flight.waits_for += 1;
            }
        } else {
            self.move_now(&mut flight);
        }
        flight
    }

    /// Asks all ranks for their parts of a transfer: those that receive first, as it is they who say where to.
    fn move_now(&self, flight: &mut Flight) {
        let Begin { request, source, destination, reused, .. } = &flight.begin;
        let (request, reused) = (*request, *reused);
        let tokens = self.setup.tokens(self.trace.requests[request].input_tokens);
        let frame_tokens = self.setup.tokens(BLOCK_TOKENS);
        let first = (reused as u64 * frame_tokens).min(tokens);
        let sides = [(Side::Receiver, &self.setup.decode, destination), (Side::Sender, &self.setup.prefill, source)];
        for (side, instance, frames) in sides {
            let check = self.options.verify && side == Side::Receiver;
            let check = if check { self.placed(request, frames, 0) } else { Vec::new() };
            for (member, table) in self.members(side).zip(&instance.tables) {
                let maps = instance.block_maps(table, reused, &frames[reused..], tokens);
                let spoiled =
                    self.options.flip_byte && request == FLIPPED && (side, member.rank) == (Side::Receiver, 0);
                let flip = check.last().filter(|_| spoiled).copied();
                self.crew.give(member, request, Task::Move { tokens: first..tokens, maps, check: check.clone(), flip });
                flight.waits_for += 1;
            }
        }
    }

    /// Takes note of what a rank has done; returns the record of a request that has ended.
    fn heard(
        &self,
        flights: &mut BTreeMap<usize, Flight>,
        member: Member,
        request: usize,
        done: Done,
    ) -> Option<(Record, End)> {
        let flight = flights.get_mut(&request)?;
        flight.waits_for -= 1;
        let wrote = matches!(done, Done::Written(_));
        match done {
            Done::Written(Ok(())) => {}
            Done::Written(Err(line)) => flight.fail(member.side, Failed { line, exposed: false }),
            Done::Moved(Moved { posted, ended, outcome, checked_bytes }) => {
                let since = |at: Instant| at.saturating_duration_since(self.start);
                let (posted, ended) = (since(posted), since(ended));
                let parts = outcome.map_err(|failed| flight.fail(member.side, failed)).ok();
                flight.legs.push(Leg { member, posted, ended, parts, checked_bytes });
            }
        }
        if flight.waits_for > 0 {
            return None;
        }
        if wrote && flight.failed.is_none() {
            self.move_now(flight);
            return None;
        }
        let flight = flights.remove(&request)?;
        let end = match &flight.failed {
            None => End::Arrived,
            Some((line, exposed)) => End::Failed { line: line.clone(), exposed: *exposed },
        };
        Some((self.record(flight), end))
    }

    fn record(&self, flight: Flight) -> Record {
        let Flight { begin, begun, legs, .. } = flight;
        let (of, first) = (&self.trace.requests[begin.request], &self.trace.requests[0]);
        let held_tokens: u64 = of.blocks[..begin.reused].iter().map(|block| self.setup.tokens(block.tokens)).sum();
        Record {
            request: begin.request,
            arrived: self.options.speed.scale(of.arrival - first.arrival),
            begun,
            blocks: of.blocks.len(),
            reused: begin.reused,
            saved_bytes: held_tokens * self.setup.decode.token_bytes(),
            legs,
        }
    }

    /// A request's blocks from the ordinal `first` on.
    fn placed(&self, request: usize, frames: &[Frame], first: usize) -> Vec<Placed> {
        let blocks = self.trace.requests[request].blocks.iter().zip(frames).skip(first);
        blocks.map(|(block, frame)| placed(self.setup, *block, *frame)).collect()
    }

    fn members(&self, side: Side) -> impl Iterator<Item = Member> + use<> {
        let instance = match side {
            Side::Sender => &self.setup.prefill,
            Side::Receiver => &self.setup.decode,
        };
        (0..instance.cut.rank_count()).map(move |rank| Member { side, rank })
    }
}

impl Flight {
    /// The first failure is the one that is told; any may leave frames exposed.
    fn fail(&mut self, side: Side, failed: Failed) {
        let (_, exposed) = self.failed.get_or_insert_with(|| (failed.line, Exposed::default()));
        match side {
            Side::Sender => exposed.source |= failed.exposed,
            Side::Receiver => exposed.destination |= failed.exposed,
        }
    }
}

/// A block in its frame.
pub fn placed(setup: &Setup, block: Block, frame: Frame) -> Placed {
    Placed { block, frame, tokens: setup.tokens(block.tokens) }
}

fn bar(requests: u64) -> ProgressBar {
    let template = "replay [{bar:40}] {pos}/{len} requests, {msg}";
    let style = ProgressStyle::with_template(template).expect("a template that a test has tried");
    ProgressBar::new(requests).with_style(style.progress_chars("=> "))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_bar_can_be_drawn() {
        super::bar(3).set_position(1);
    }
}
