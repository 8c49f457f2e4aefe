//! The load and the faults.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver};
use kvferry::RequestKey;

use crate::member::{Connection, Heard, Member};
use crate::pool::RANKS;
use crate::random::Random;
use crate::serve::{Ask, Report, Said, Setup};

/// How long; nightly runs have more.
const SECONDS: &str = "KVFERRY_FAULTS_SECONDS";

const PATIENCE: Duration = Duration::from_secs(2);

/// Time for anything to end, on a busy machine and with a peer frozen in between.
const LONG: Duration = Duration::from_secs(60);

const UNDER_WAY_MAX: usize = 6;

/// The last rank of each side is never killed: its memory is looked at.
const SURVIVORS: [usize; 2] = [RANKS as usize - 1, 2 * RANKS as usize - 1];

/// A request, which is tried until it has gone well everywhere or was cancelled.
struct Request {
    attempt: u32,
    blocks: usize,
    began: Instant,
    /// Ranks that have yet to say how this attempt ended; empty: it is to be tried again.
    waiting: BTreeSet<usize>,
    again: Instant,
    failed: bool,
    cancel: Option<Instant>,
    cancelled: bool,
}

#[derive(Debug, Default)]
struct Counts {
    well: u32,
    badly: u32,
    cancelled: u32,
    kills: u32,
    freezes: u32,
    connects_again: u32,
}

struct Load {
    random: Random,
    members: Vec<Member>,
    heard: Receiver<Heard>,
    requests: BTreeMap<u64, Request>,
    next: u64,
    reports: BTreeMap<usize, Report>,
    counts: Counts,
    why: BTreeMap<String, u32>,
}

impl Load {
    fn start(transports: Option<&str>) -> Self {
        let (say, heard) = channel::unbounded();
        let members = (0..2 * RANKS).map(|index| {
            let transports = transports.map(str::to_owned);
            let setup = Setup { source: index < RANKS, rank: index % RANKS, transports, patience: PATIENCE };
            Member::start(index as usize, setup, say.clone())
        });
        Self {
            random: Random::new(),
            members: members.collect(),
            heard,
            requests: BTreeMap::new(),
            next: 0,
            reports: BTreeMap::new(),
            counts: Counts::default(),
            why: BTreeMap::new(),
        }
    }

    fn hear_all(&mut self, wait: Duration) {
        let mut next = self.heard.recv_timeout(wait).ok();
        while let Some((index, life, said)) = next {
            if self.members[index].life == life {
                self.hear(index, said.unwrap_or_else(|| panic!("rank {index} died of itself in life {life}")));
            }
            next = self.heard.try_recv().ok();
        }
    }

    fn hear(&mut self, index: usize, said: Said) {
        match said {
            Said::Card { card, epoch, fragile } => {
                (self.members[index].card, self.members[index].fragile) = (Some((card, epoch)), fragile);
            }
            Said::Connected(Ok(())) => self.members[index].connection = Connection::Made,
            Said::Connected(Err(why)) => {
                println!("rank {index} connects again: {why}");
                self.members[index].connection = Connection::None;
                self.counts.connects_again += 1;
            }
            Said::Ended { key, how } => {
                let Some(request) = self.requests.get_mut(&key.request) else { panic!("{index}: {key:?} ended twice") };
                assert!(
                    request.attempt == key.attempt && request.waiting.remove(&index),
                    "{index}: {key:?} ended twice"
                );
                if let Err(why) = how {
                    let kind = why.split(": ").last().unwrap_or_default();
                    let kind: String =
                        kind.split(" (").next().unwrap().chars().filter(|c| !c.is_ascii_digit()).collect();
                    *self.why.entry(kind).or_default() += 1;
                    let first = !std::mem::replace(&mut request.failed, true);
                    // Some users give the rest up as soon as a part has failed, others see it end by itself.
                    if first && self.random.below(2) == 0 {
                        self.cancel_everywhere(key);
                    }
                }
                self.settle(key.request);
            }
            Said::Report(report) => drop(self.reports.insert(index, report)),
        }
    }

    fn cancel_everywhere(&mut self, key: RequestKey) {
        for index in self.requests[&key.request].waiting.clone() {
            self.members[index].ask(&Ask::Cancel { key });
        }
    }

    fn settle(&mut self, number: u64) {
        let request = self.requests.get_mut(&number).unwrap();
        if !request.waiting.is_empty() {
            return;
        }
        match (request.failed, request.cancelled) {
            (false, _) => self.counts.well += 1,
            (true, true) => self.counts.cancelled += 1,
            (true, false) => {
                self.counts.badly += 1;
                request.attempt += 1;
                request.again = Instant::now() + self.random.millis(20, 200);
                return;
            }
        }
        self.requests.remove(&number);
    }

    /// Posts what is to be tried again.
    fn post(&mut self) {
        let now = Instant::now();
        for (number, request) in &mut self.requests {
            if !request.waiting.is_empty() || request.again > now {
                continue;
            }
            let key = RequestKey { request: *number, attempt: request.attempt };
            (request.failed, request.began) = (false, now);
            for (index, member) in self.members.iter_mut().enumerate() {
                if member.connection == Connection::Made {
                    member.ask(&Ask::Post { key, blocks: request.blocks });
                    request.waiting.insert(index);
                } else {
                    request.failed = true; // in vain for those that try
                }
            }
        }
    }

    fn begin(&mut self) {
        let now = Instant::now();
        let request = Request {
            attempt: 0,
            blocks: usize::try_from(1 + self.random.below(5)).unwrap(),
            began: now,
            waiting: BTreeSet::new(),
            again: now,
            failed: false,
            cancel: (self.random.below(8) == 0).then(|| now + self.random.millis(0, 20)),
            cancelled: false,
        };
        self.requests.insert(self.next, request);
        self.next += 1;
    }

    /// Cancels what is due, at one rank of those that have it.
    fn cancel(&mut self) {
        let now = Instant::now();
        let at = self.any_member();
        for (number, request) in &mut self.requests {
            if request.waiting.contains(&at) && request.cancel.take_if(|at| *at <= now).is_some() {
                request.cancelled = true;
                let key = RequestKey { request: *number, attempt: request.attempt };
                self.members[at].ask(&Ask::Cancel { key });
            }
        }
    }

    fn any_member(&mut self) -> usize {
        usize::try_from(self.random.below(2 * u64::from(RANKS))).unwrap()
    }

    fn fault(&mut self) {
        let index = self.any_member();
        if self.random.below(100) < 35 {
            let Member { connection, fragile, .. } = self.members[index];
            if SURVIVORS.contains(&index) || fragile && connection != Connection::Made {
                return;
            }
            self.counts.kills += 1;
            self.members[index].restart();
            let concerned = self.requests.iter_mut().filter_map(|(number, request)| {
                request.waiting.remove(&index).then(|| {
                    request.failed = true;
                    *number
                })
            });
            for number in concerned.collect::<Vec<_>>() {
                self.settle(number);
            }
        } else if self.members[index].connection == Connection::Made && self.members[index].frozen_until.is_none() {
            self.counts.freezes += 1;
            let longer_than_patience = self.random.below(4) == 0;
            let time = if longer_than_patience { 2 * PATIENCE } else { self.random.millis(1, 500) };
            self.members[index].freeze(time);
        }
    }

    /// Continues who has been frozen for long enough, and connects who is not, once all cards are those of the living.
    fn tend(&mut self, freezes: bool) {
        let now = Instant::now();
        for member in &mut self.members {
            if member.frozen_until.is_some_and(|until| until <= now || !freezes) {
                member.go_on();
            }
        }
        let cards = self.members.iter().map(|member| member.card.clone().map(|(card, _)| card));
        let Some(cards) = cards.collect::<Option<Vec<_>>>() else { return };
        let (sources, destinations) = cards.split_at(RANKS as usize);
        for member in self.members.iter_mut().filter(|member| member.connection == Connection::None) {
            member.ask(&Ask::Connect { sources: sources.to_vec(), destinations: destinations.to_vec() });
            member.connection = Connection::Asked;
        }
    }

    fn is_connected(&self) -> bool {
        self.members.iter().all(|member| member.connection == Connection::Made)
    }

    fn assert_none_is_stuck(&self) {
        for (number, request) in &self.requests {
            let Request { attempt, began, waiting, .. } = request;
            assert!(began.elapsed() < LONG, "request {number} attempt {attempt} does not end at {waiting:?}");
        }
    }

    fn report(&mut self, of: impl Iterator<Item = usize>) -> BTreeMap<usize, Report> {
        let of: Vec<usize> = of.collect();
        self.reports.clear();
        for index in &of {
            self.members[*index].ask(&Ask::Report);
        }
        let until = Instant::now() + LONG;
        while self.reports.len() < of.len() {
            assert!(Instant::now() < until, "of {of:?} these answer: {:?}", self.reports.keys());
            self.hear_all(Duration::from_millis(5));
            self.tend(false);
        }
        std::mem::take(&mut self.reports)
    }

    fn run(&mut self, time: Duration, faults: bool) {
        let end = Instant::now() + time;
        let mut fault = Instant::now();
        while Instant::now() < end || !self.requests.is_empty() || !self.is_connected() {
            let going = Instant::now() < end;
            self.hear_all(Duration::from_millis(2));
            self.tend(going);
            self.cancel();
            self.post();
            if going && self.requests.len() < UNDER_WAY_MAX {
                self.begin();
            }
            if going && faults && Instant::now() >= fault {
                fault = Instant::now() + self.random.millis(200, 1500);
                self.fault();
            }
            self.assert_none_is_stuck();
            assert!(Instant::now() < end + LONG, "these are lost: {:?}", self.requests.keys());
        }
    }
}

fn survive(transports: Option<&str>) {
    let seconds = std::env::var(SECONDS).map_or(60, |seconds| seconds.parse().expect("a number of seconds"));
    let mut load = Load::start(transports);
    let phase = |load: &mut Load, seconds, faults| {
        load.run(Duration::from_secs(seconds), faults);
        load.report(SURVIVORS.into_iter())
    };
    // Whatever is set up once is there before memory is looked at for the first time.
    let before = phase(&mut load, seconds / 5, true);
    let after = phase(&mut load, seconds - seconds / 5, true);
    println!("{transports:?}, {seconds} s: {:?}", load.counts);
    println!("{:?}", load.why);
    let epochs: Vec<u64> = load.members.iter().map(|member| member.card.as_ref().unwrap().1).collect();
    let until = Instant::now() + LONG;
    loop {
        let reports = load.report(0..load.members.len());
        if reports.values().all(|report| report.open.is_empty() && report.slots == 0) {
            break;
        }
        if Instant::now() < until {
            std::thread::sleep(Duration::from_millis(200));
            continue;
        }
        // Only what a living peer has left unsettled may be missing, and is named.
        for (index, report) in reports {
            println!("rank {index}: {report:?}");
            for key in report.open {
                let named = |(of, epoch, _): &(RequestKey, u64, String)| *of == key && epochs.contains(epoch);
                assert!(report.quarantine.iter().any(named), "rank {index}: {key:?} is not quiet, for no reason");
            }
        }
        break;
    }
    for index in SURVIVORS {
        let (Report { descriptors, resident, .. }, now) = (&before[&index], &after[&index]);
        println!(
            "rank {index}: descriptors {descriptors} -> {}, resident {resident} -> {}",
            now.descriptors, now.resident
        );
        assert!(now.descriptors <= descriptors + 8, "{descriptors} descriptors grew to {}", now.descriptors);
        assert!(now.resident <= resident + (16 << 20), "{resident} B grew to {} B", now.resident);
    }
    assert!(load.counts.well > 20, "{:?}", load.counts);
}

#[test]
fn two_instances_survive_over_shared_memory() {
    survive(None);
}

#[test]
fn two_instances_survive_over_tcp() {
    survive(Some("tcp"));
}
