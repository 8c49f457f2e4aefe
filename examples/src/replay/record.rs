//! What is known of each request that was moved, and the figures that follow.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::meet::{Member, Side};
use crate::replay::ranks::Part;

/// One request that was begun. Times are from the start of the replay.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its place in the trace.
    pub request: usize,
    /// When it arrived.
    pub arrived: Duration,
    /// When it was begun.
    pub begun: Duration,
    /// Blocks of its prompt.
    pub blocks: usize,
    /// How many of the first ones the decode instance had.
    pub reused: usize,
    /// Bytes of those, over all decode ranks.
    pub saved_bytes: u64,
    /// What each rank did.
    pub legs: Vec<Leg>,
}

/// One rank's part of a request.
#[derive(Clone, Debug)]
pub struct Leg {
    /// The rank.
    pub member: Member,
    /// When it posted its send or receive.
    pub posted: Duration,
    /// When that had ended.
    pub ended: Duration,
    /// What moved, by peer; `None` if it failed.
    pub parts: Option<Vec<Part>>,
    /// Bytes compared and found right.
    pub checked_bytes: u64,
}

/// The 50th, 95th and 99th percentile of durations, and the longest, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// How many there are.
    pub count: usize,
    /// Half take no longer.
    pub p50_ms: f64,
    /// 95 of 100 take no longer.
    pub p95_ms: f64,
    /// 99 of 100 take no longer.
    pub p99_ms: f64,
    /// None takes longer.
    pub max_ms: f64,
}

/// What a replay comes to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// From the first arrival to the last end, in seconds.
    pub elapsed_s: f64,
    /// Seconds of those in which some rank was receiving.
    pub moving_s: f64,
    /// Bytes that decode ranks have received, by their own count.
    pub moved_bytes: u64,
    /// Bytes that they had already.
    pub saved_bytes: u64,
    /// Blocks of the prompts of all requests that arrived.
    pub blocks: usize,
    /// Those of them that the decode instance had already.
    pub reused_blocks: usize,
    /// Requests that arrived of which nothing had to be moved.
    pub nothing_to_move: usize,
    /// From asking for a request's bytes to the last rank's being told that they are there; of those with bytes to move.
    pub transfer: Quantiles,
    /// From the first write of one rank to another until the last byte is there; of those with bytes.
    pub write: Quantiles,
    /// From a request's arrival until it is begun.
    pub wait: Quantiles,
    /// Bytes compared at decode ranks and found right.
    pub checked_bytes: u64,
    /// Bytes by the way that they took.
    pub routes: BTreeMap<String, u64>,
}

impl Record {
    /// Whether all ranks did their part.
    pub fn is_done(&self) -> bool {
        self.legs.iter().all(|leg| leg.parts.is_some())
    }

    /// Bytes that its decode ranks received.
    pub fn moved_bytes(&self) -> u64 {
        self.of_side(Side::Receiver).map(Leg::bytes).sum()
    }

    fn of_side(&self, side: Side) -> impl Iterator<Item = &Leg> {
        self.legs.iter().filter(move |leg| leg.member.side == side)
    }

    /// From asking to the last decode rank's end.
    fn transfer(&self) -> Option<Duration> {
        let (posted, ended) = (self.of_side(Side::Receiver).map(|leg| leg.posted), self.of_side(Side::Receiver));
        Some(ended.map(|leg| leg.ended).max()?.saturating_sub(posted.min()?))
    }
}

impl Leg {
    /// Bytes that it moved.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().flatten().map(|part| part.bytes).sum()
    }
}

impl Quantiles {
    /// Of some durations: each the least of them that so large a share does not exceed.
    pub fn of(mut durations: Vec<Duration>) -> Self {
        durations.sort_unstable();
        let count = durations.len();
        let of_share = |percent: usize| {
            let place = (count * percent).div_ceil(100).saturating_sub(1);
            durations.get(place).map_or(0.0, |duration| duration.as_secs_f64() * 1e3)
        };
        let [p50_ms, p95_ms, p99_ms, max_ms] = [50, 95, 99, 100].map(of_share);
        Self { count, p50_ms, p95_ms, p99_ms, max_ms }
    }
}

impl Figures {
    /// Of requests that ended by `elapsed`.
    pub fn of(records: &[Record], elapsed: Duration) -> Self {
        let done = || records.iter().filter(|record| record.is_done());
        let with_bytes = || done().filter(|record| record.moved_bytes() > 0);
        let receiving = records.iter().flat_map(|record| record.of_side(Side::Receiver)).filter(|leg| leg.bytes() > 0);
        let writes = done().flat_map(|record| record.of_side(Side::Sender)).flat_map(|leg| leg.parts.iter().flatten());
        let writes: Vec<&Part> = writes.filter(|part| part.bytes > 0).collect();
        let mut routes = BTreeMap::new();
        for of in writes.iter().flat_map(|part| &part.carried) {
            *routes.entry(of.route.to_string()).or_default() += of.bytes;
        }
        Self {
            elapsed_s: elapsed.as_secs_f64(),
            moving_s: union(receiving.map(|leg| (leg.posted, leg.ended)).collect()).as_secs_f64(),
            moved_bytes: done().map(Record::moved_bytes).sum(),
            saved_bytes: done().map(|record| record.saved_bytes).sum(),
            blocks: done().map(|record| record.blocks).sum(),
            reused_blocks: done().map(|record| record.reused).sum(),
            nothing_to_move: done().count() - with_bytes().count(),
            transfer: Quantiles::of(with_bytes().filter_map(Record::transfer).collect()),
            write: Quantiles::of(writes.iter().map(|part| part.elapsed).collect()),
            wait: Quantiles::of(done().map(|record| record.begun.saturating_sub(record.arrived)).collect()),
            checked_bytes: records.iter().flat_map(|record| &record.legs).map(|leg| leg.checked_bytes).sum(),
            routes,
        }
    }

    /// Gigabytes (10^9) a second over the whole replay.
    pub fn gb_per_s(&self) -> f64 {
        gb_per_s(self.moved_bytes, self.elapsed_s)
    }

    /// Gigabytes a second while something was received.
    pub fn moving_gb_per_s(&self) -> f64 {
        gb_per_s(self.moved_bytes, self.moving_s)
    }
}

fn gb_per_s(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / 1e9 / seconds } else { 0.0 }
}

/// Time that at least one of some intervals covers.
fn union(mut intervals: Vec<(Duration, Duration)>) -> Duration {
    intervals.sort_unstable();
    let (mut covered, mut until) = (Duration::ZERO, Duration::ZERO);
    for (start, end) in intervals {
        covered += end.saturating_sub(start.max(until));
        until = until.max(end);
    }
    covered
}

#[cfg(test)]
mod tests {
    use kvferry_wire::{Route, RouteReason, TransferStats};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn quantiles_are_durations_that_there_were() {
        let quantiles = Quantiles::of((1..=200).rev().map(|ms| ms * MS).collect());
        assert_eq!(quantiles, Quantiles { count: 200, p50_ms: 100.0, p95_ms: 190.0, p99_ms: 198.0, max_ms: 200.0 });
        let one = Quantiles { count: 1, p50_ms: 3.0, p95_ms: 3.0, p99_ms: 3.0, max_ms: 3.0 };
        assert_eq!(Quantiles::of(vec![3 * MS]), one);
        assert_eq!(Quantiles::of(Vec::new()), Quantiles::default());
    }

    #[test]
    fn overlaps_count_once() {
        assert_eq!(union(vec![(5 * MS, 9 * MS), (Duration::ZERO, 2 * MS), (MS, 3 * MS), (6 * MS, 7 * MS)]), 7 * MS);
        assert_eq!(union(Vec::new()), Duration::ZERO);
    }

    fn leg(side: Side, posted: u32, ended: u32, parts: Option<&[u64]>) -> Leg {
        let carried = |bytes: u64| {
            let (route, reason) = (Route::Direct, RouteReason::TargetMapped);
            vec![TransferStats { bytes, runs: 1, elapsed: MS, route, reason }]
        };
        let part = |bytes: &u64| Part { bytes: *bytes, elapsed: MS, carried: carried(*bytes) };
        Leg {
            member: Member { side, rank: 0 },
            posted: posted * MS,
            ended: ended * MS,
            parts: parts.map(|parts| parts.iter().map(part).collect()),
            checked_bytes: 1,
        }
    }

    #[test]
    fn figures_leave_out_what_failed_or_moved_nothing() {
        let record = |begun: u32, reused: usize, legs: Vec<Leg>| Record {
            request: 0,
            arrived: MS,
            begun: begun * MS,
            blocks: 4,
            reused,
            saved_bytes: reused as u64 * 10,
            legs,
        };
        let (sender, receiver) = (Side::Sender, Side::Receiver);
        let records = [
            record(
                2,
                1,
                vec![
                    leg(sender, 2, 9, Some(&[30])),
                    leg(receiver, 2, 7, Some(&[20, 10])),
                    leg(receiver, 3, 8, Some(&[])),
                ],
            ),
            record(3, 4, vec![leg(sender, 3, 4, Some(&[0])), leg(receiver, 3, 4, Some(&[0]))]),
            record(4, 2, vec![leg(sender, 4, 5, None), leg(receiver, 4, 5, Some(&[20]))]),
        ];
        let figures = Figures::of(&records, 100 * MS);
        assert_eq!((figures.moved_bytes, figures.saved_bytes), (30, 50));
        assert_eq!((figures.blocks, figures.reused_blocks, figures.nothing_to_move), (8, 5, 1));
        assert_eq!((figures.transfer.count, figures.transfer.max_ms), (1, 6.0));
        assert_eq!((figures.write.count, figures.wait.count, figures.wait.max_ms), (1, 2, 2.0));
        assert_eq!((figures.moving_s, figures.checked_bytes), (0.005, 7));
        assert_eq!(figures.routes, [("direct".to_owned(), 30)].into());
        assert_eq!(figures.gb_per_s(), 30.0 / 1e9 / 0.1);
    }
}
