//! The ranks, and what they ask for.

mod happenings;
mod schedule;
mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kvferry_match::Side;

use super::super::{Action, Core, Handle, Introduction, Limits, LinkId, Peer};
use super::check::Books;
use super::fixture::{DESTINATIONS, SOURCES, peers};
use super::network::{Frame, News, Way, Write};
use super::random::Random;
use crate::message::{About, Message, RequestKey, Serial};
use users::Deed;

const PATIENCE: Duration = Duration::from_secs(10);

/// One rank, in its present life.
struct Rank {
    side: Side,
    rank: u32,
    epoch: u64,
    core: Core,
    alive: bool,
    frozen: bool,
    /// Its engine has been told to stop: it keeps no time, and hears for as long as it lives.
    stopped: bool,
    link: LinkId,
    /// `None` while it is being connected, or for good.
    connected: Option<bool>,
    next_link: u32,
}

pub(super) struct World {
    random: Random,
    talk: bool,
    now: Instant,
    start: Instant,
    ranks: Vec<Rank>,
    frames: Vec<Frame>,
    writes: Vec<Write>,
    /// By rank.
    news: Vec<(usize, News)>,
    deeds: Vec<(usize, Deed)>,
    /// Connections that have failed at the one that writes, and not been made again.
    failed: BTreeSet<(u64, u64)>,
    /// Wants that destinations let in through their inboxes: lives of source and destination.
    permits: BTreeSet<(u64, u64, Serial)>,
    /// Requests for which a network goes on writing although their connection has failed.
    late: BTreeSet<(u64, u64, RequestKey)>,
    books: Books,
    next_epoch: u64,
    next_request: u64,
    /// How often frames are lost or doubled: one in so many.
    bad: usize,
    /// Deaths are certain at once, or never.
    one_host: bool,
    /// What is sent is summed, and compared where it arrives.
    verify: bool,
    keys: Vec<RequestKey>,
    well: BTreeMap<RequestKey, usize>,
}

/// A life of a rank; later ones have larger epochs.
fn peer_of_life(peers: &[Peer], rank: u32, epoch: u64) -> Peer {
    Peer { born: epoch, ..peers[usize::try_from(rank).unwrap()].clone() }
}

impl World {
    pub(super) fn new(seed: u64, talk: bool) -> Self {
        let mut random = Random::new(seed);
        let (bad, one_host) = ([4, 10, 50, 1_000_000][random.below(4)], !random.one_in(4));
        let verify = random.one_in(4);
        let now = Instant::now();
        let mut world = Self {
            random,
            talk,
            now,
            start: now,
            ranks: Vec::new(),
            frames: Vec::new(),
            writes: Vec::new(),
            news: Vec::new(),
            deeds: Vec::new(),
            failed: BTreeSet::new(),
            permits: BTreeSet::new(),
            late: BTreeSet::new(),
            books: Books::default(),
            next_epoch: 1,
            next_request: 0,
            bad,
            one_host,
            verify,
            keys: Vec::new(),
            well: BTreeMap::new(),
        };
        let names = (0..SOURCES).map(|rank| (Side::Source, rank));
        for (side, rank) in names.chain((0..DESTINATIONS).map(|rank| (Side::Destination, rank))) {
            let epoch = world.born();
            let core = world.new_core(epoch);
            let (link, next_link) = (LinkId(0), 0);
            let connected = Some(false);
            let (alive, frozen, stopped) = (true, false, false);
            world.ranks.push(Rank { side, rank, epoch, core, alive, frozen, stopped, link, connected, next_link });
        }
        for index in 0..world.ranks.len() {
            world.connect(index);
        }
        world
    }

    fn new_core(&self, epoch: u64) -> Core {
        let resend = Duration::from_millis(200);
        let mut core = Core::new(Limits { patience: PATIENCE, resend, requests_max: 64, verify: self.verify });
        core.introduce(Introduction { instance: String::new(), born: epoch, card: vec![1], own_layers: 0..2 });
        core
    }

    fn born(&mut self) -> u64 {
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        self.books.born(epoch);
        epoch
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.talk {
            println!("{:>8.3} {}", (self.now - self.start).as_secs_f64(), what());
        }
    }

    fn at(&self, epoch: u64) -> Option<usize> {
        self.ranks.iter().position(|rank| rank.alive && rank.epoch == epoch)
    }

    /// Connects a rank with the present lives of the other side.
    fn connect(&mut self, index: usize) {
        let rank = &self.ranks[index];
        let others = self.ranks.iter().filter(|other| other.side != rank.side).map(|other| (other.epoch, other.rank));
        let peers = peers(rank.side, rank.rank);
        let members: BTreeMap<_, _> = others.map(|(epoch, rank)| (epoch, peer_of_life(&peers, rank, epoch))).collect();
        if members.keys().any(|epoch| rank.core.known(*epoch).is_some()) {
            return;
        }
        let own = rank.epoch;
        self.failed.retain(|(from, to)| *from != own || !members.contains_key(to));
        let gone: Vec<u64> = members.keys().copied().filter(|epoch| self.at(*epoch).is_none()).collect();
        let (now, rank) = (self.now, &mut self.ranks[index]);
        rank.link = LinkId(rank.next_link);
        rank.next_link += 1;
        rank.connected = None;
        let actions = rank.core.connect(now, rank.link, rank.side, rank.rank, members);
        self.news.extend(gone.into_iter().map(|epoch| (index, News::Lost(epoch))));
        self.act(index, actions);
    }

    /// Leaves the link, if no request is under way.
    fn disconnect(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        if rank.frozen || rank.connected != Some(true) || rank.core.under_way(rank.link).is_some() {
            return;
        }
        rank.connected = Some(false);
        let actions = rank.core.disconnect(self.now, rank.link).expect("it is connected");
        self.say(|| format!("{}: leaves", self.ranks[index].epoch));
        self.act(index, actions);
    }

    fn act(&mut self, index: usize, actions: Vec<Action>) {
        let epoch = self.ranks[index].epoch;
        for action in actions {
            match action {
                Action::Say { epoch: to, message } => {
                    if let Message::Want(want) = &message {
                        self.books.asks(epoch, want.about.key, to);
                    }
                    self.frames.push(Frame { from: epoch, to, message });
                }
                Action::Put { epoch: to, put, plan, then, serial, inbox_only, .. } => {
                    let mut slots = BTreeSet::new();
                    for (_, pairs) in plan.sections() {
                        slots.extend(pairs.iter().map(|pair| pair.destination.0));
                    }
                    let key = self.ranks[index].core.puts[&put].0.key;
                    let (waiting, flying) = (slots.into_iter().collect(), Vec::new());
                    let any = [Way::Direct, Way::Inbox, Way::Runs][self.random.below(3)];
                    let way = if inbox_only { Way::Inbox } else { any };
                    let (told, let_in, cancelled, over, bytes) = (false, None, false, false, plan.bytes());
                    self.writes.push(Write {
                        from: epoch,
                        to,
                        put,
                        key,
                        bytes,
                        waiting,
                        flying,
                        serial,
                        way,
                        told,
                        let_in,
                        cancelled,
                        over,
                        then,
                    });
                }
                Action::Sum { put, plan } => self.news.push((index, News::Sum(put, plan))),
                Action::Verify { epoch: from, key, check } => {
                    self.news.push((index, News::Verify(from, About { key, serial: check.serial })));
                }
                Action::CancelPut { put } => {
                    let of_put = |write: &&mut Write| write.from == epoch && write.put == put;
                    self.writes.iter_mut().filter(of_put).for_each(|write| write.cancelled = true);
                }
                Action::Permit { epoch: from, serial } => drop(self.permits.insert((from, epoch, serial))),
                Action::Expire { epoch: from, serial } => drop(self.permits.remove(&(from, epoch, serial))),
                Action::Revoke { epoch: from, serial } => {
                    self.permits.remove(&(from, epoch, serial));
                    self.news.push((index, News::Revoke(from, serial)));
                }
                Action::Dial { epoch } => self.news.push((index, News::Dial(epoch))),
                Action::Introduce { link, old, epoch, hello } => {
                    self.news.push((index, News::Introduce { link, old, epoch, hello }));
                }
                Action::Forget { epoch: peer } => {
                    self.failed.insert((epoch, peer));
                }
                Action::Connected { .. } => self.ranks[index].connected = Some(true),
                Action::NotConnected { error, .. } => {
                    self.say(|| format!("{epoch}: not connected: {error}"));
                    self.ranks[index].connected = Some(false);
                }
                Action::Progress { .. } => {}
                Action::Sent { ticket, outcome } => {
                    self.say(|| format!("{epoch}: sent {:?}: {:?}", ticket.key, outcome.as_ref().map(|_| ())));
                    self.books.ended(epoch, Handle::Send(ticket), outcome.is_ok());
                }
                Action::Received { key, outcome } => {
                    self.say(|| format!("{epoch}: received {key:?}: {:?}", outcome.as_ref().map(|_| ())));
                    if outcome.is_ok() {
                        *self.well.entry(key).or_default() += 1;
                    }
                    self.books.ended(epoch, Handle::Receive(key), outcome.is_ok());
                }
                Action::Quiet { handle } => {
                    self.say(|| format!("{epoch}: quiet {handle:?}"));
                    self.books.quiet(epoch, handle);
                }
            }
        }
    }

    fn runs(&self, index: usize) -> bool {
        self.ranks[index].alive && !self.ranks[index].frozen
    }

    fn deliver(&mut self, frame: Frame) {
        let Some(index) = self.at(frame.to) else { return };
        if !self.runs(index) {
            self.frames.push(frame);
            return;
        }
        self.say(|| format!("{} -> {}: {:?}", frame.from, frame.to, frame.message));
        let actions = self.ranks[index].core.heard(self.now, frame.from, frame.message);
        self.act(index, actions);
    }

    /// Goes in good order.
    fn stop(&mut self, index: usize) {
        self.say(|| format!("{}: stops", self.ranks[index].epoch));
        let actions = self.ranks[index].core.stop(self.now);
        self.act(index, actions);
        (self.ranks[index].stopped, self.ranks[index].connected) = (true, None);
    }

    fn kill(&mut self, index: usize) {
        let epoch = self.ranks[index].epoch;
        self.say(|| format!("{epoch}: killed"));
        (self.ranks[index].alive, self.ranks[index].frozen) = (false, false);
        self.books.died(epoch);
        self.news.retain(|(whose, _)| *whose != index);
        self.deeds.retain(|(whose, _)| *whose != index);
        for other in 0..self.ranks.len() {
            if self.ranks[other].alive && self.ranks[other].side != self.ranks[index].side {
                self.news.push((other, News::Lost(epoch)));
                if self.one_host {
                    self.news.push((other, News::Died(epoch)));
                }
            }
        }
    }

    fn restart(&mut self, index: usize) {
        let epoch = self.born();
        let core = self.new_core(epoch);
        let rank = &mut self.ranks[index];
        (rank.core, rank.epoch, rank.alive, rank.connected) = (core, epoch, true, Some(false));
        rank.stopped = false;
        self.say(|| format!("{epoch}: rank {index} is back"));
        self.connect(index);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for index in 0..self.ranks.len() {
            if self.runs(index) && !self.ranks[index].stopped {
                let actions = self.ranks[index].core.tick(self.now);
                self.act(index, actions);
            }
        }
    }
}
