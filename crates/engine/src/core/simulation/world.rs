//! The ranks, their users, and the scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kvferry_layout::Slot;
use kvferry_match::{BlockMap, Side};
use kvferry_wire::Status;

use super::super::{Action, Core, Handle, Introduction, Limits, LinkId, PartSpec, Peer, Ticket};
use super::check::Books;
use super::fixture::{BLOCK_TOKENS, DESTINATIONS, SLOTS, SOURCES, peers};
use super::network::{Frame, News, Way, Write};
use super::random::Random;
use crate::message::{Message, RequestKey, Serial};

const PATIENCE: Duration = Duration::from_secs(10);

/// Steps of trouble.
const STEPS: usize = 1200;

/// Steps between which time passes, once everything is well again, and how many there may be.
const HEALING_STEP: Duration = Duration::from_millis(100);
const HEALING_STEPS: usize = 2000;

/// One rank, in its present life.
struct Rank {
    side: Side,
    rank: u32,
    epoch: u64,
    core: Core,
    alive: bool,
    frozen: bool,
    link: LinkId,
    /// `None` while it is being connected.
    connected: Option<bool>,
    next_link: u32,
}

/// What a user will do at some time.
#[derive(Clone, Debug)]
enum Deed {
    Receive { key: RequestKey, blocks: usize },
    Send { key: RequestKey, blocks: usize, held: usize },
    Push { key: RequestKey, part: PartSpec, ready: bool },
    Ready { key: RequestKey, index: usize },
    Cancel { key: RequestKey },
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
            keys: Vec::new(),
            well: BTreeMap::new(),
        };
        let names = (0..SOURCES).map(|rank| (Side::Source, rank));
        for (side, rank) in names.chain((0..DESTINATIONS).map(|rank| (Side::Destination, rank))) {
            let epoch = world.born();
            let core = world.new_core(epoch);
            let (link, next_link) = (LinkId(0), 0);
            let connected = Some(false);
            world.ranks.push(Rank { side, rank, epoch, core, alive: true, frozen: false, link, connected, next_link });
        }
        for index in 0..world.ranks.len() {
            world.connect(index);
        }
        world
    }

    fn new_core(&self, epoch: u64) -> Core {
        let resend = Duration::from_millis(200);
        let mut core = Core::new(Limits { patience: PATIENCE, resend, requests_max: 64, verify: false });
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
                Action::Sum { .. } | Action::Verify { .. } => unreachable!("sums are not asked for"),
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

    /// Moves one write along: a slot leaves its source, or lands.
    fn step_write(&mut self, place: usize) {
        let (now, write) = (self.now, &mut self.writes[place]);
        let (from, to, key, way) = (write.from, write.to, write.key, write.way);
        // What is on its way lands by the destination's own hand.
        let lands = self.ranks.iter().any(|rank| rank.alive && rank.epoch == to && !rank.frozen);
        if lands && !write.flying.is_empty() && !self.random.one_in(2) {
            let slot = write.flying.swap_remove(self.random.below(write.flying.len()));
            self.books.write(from, to, key, slot);
        }
        let source = self.at(from);
        let gone = source.is_none();
        if let Some(index) = source.filter(|index| self.runs(*index)) {
            let failed = self.failed.contains(&(from, to));
            let write = &mut self.writes[place];
            if way == Way::Inbox && !write.told {
                write.told = true;
                let put = write.put;
                let actions = self.ranks[index].core.put_takes_inbox(put);
                self.act(index, actions);
            } else if way == Way::Inbox && write.let_in.is_none() && lands && !failed && !write.over {
                write.let_in = Some(self.permits.contains(&(from, to, write.serial)));
            }
            let write = &mut self.writes[place];
            if !write.over
                && !write.cancelled
                && !failed
                && (way != Way::Inbox || write.let_in == Some(true))
                && let Some(slot) = write.waiting.pop()
            {
                let link = self.ranks[index].link;
                self.books.read(from, Handle::Send(Ticket { link, key }));
                if way == Way::Direct {
                    self.books.write(from, to, key, slot);
                } else {
                    write.flying.push(slot);
                }
            }
            if let Some(result) = write.end(failed) {
                write.over = true;
                if failed && way == Way::Runs {
                    self.late.insert((from, to, key));
                }
                let (put, then) = (write.put, write.then.take().filter(|_| result.is_ok()));
                self.frames.extend(then.map(|message| Frame { from, to, message }));
                let actions = self.ranks[index].core.put_done(now, put, result);
                self.act(index, actions);
            }
        }
        let nowhere = self.at(to).is_none();
        let write = &mut self.writes[place];
        if nowhere {
            write.flying.clear();
        }
        if (write.over || gone) && write.flying.is_empty() {
            self.writes.swap_remove(place);
        }
    }

    fn hear_news(&mut self, index: usize, news: News) {
        if !self.runs(index) {
            if self.ranks[index].alive {
                self.news.push((index, news));
            }
            return;
        }
        let (now, own) = (self.now, self.ranks[index].epoch);
        self.say(|| format!("{own}: {news:?}"));
        let actions = match news {
            News::Lost(epoch) => {
                self.failed.insert((own, epoch));
                self.ranks[index].core.lost(now, epoch, Status::ERR_CONNECTION_RESET)
            }
            News::Died(epoch) => {
                // The wire takes in what the dead had sent before it says so.
                while let Some(place) = self
                    .writes
                    .iter()
                    .position(|write| write.from == epoch && write.to == own && !write.flying.is_empty())
                {
                    let write = &mut self.writes[place];
                    let (key, slot) = (write.key, write.flying.pop().unwrap());
                    if self.random.one_in(2) {
                        self.books.write(epoch, own, key, slot);
                    }
                }
                self.failed.insert((own, epoch));
                self.ranks[index].core.died(now, epoch)
            }
            News::Revoke(epoch, serial) => {
                for write in self.writes.iter_mut().filter(|w| (w.from, w.to, w.serial) == (epoch, own, serial)) {
                    if write.way == Way::Inbox {
                        write.let_in = Some(false);
                        write.flying.clear();
                    }
                }
                self.ranks[index].core.revoked(epoch, serial)
            }
            News::Dial(epoch) if self.at(epoch).is_some() => {
                self.failed.remove(&(own, epoch));
                self.ranks[index].core.dialed(now, epoch)
            }
            News::Dial(epoch) => self.ranks[index].core.lost(now, epoch, Status::ERR_UNREACHABLE),
            News::Introduce { link, old, epoch, hello } => {
                let peers = peers(self.ranks[index].side, self.ranks[index].rank);
                let peer = peer_of_life(&peers, hello.rank, epoch);
                self.failed.remove(&(own, epoch));
                if self.at(epoch).is_none() {
                    self.news.push((index, News::Lost(epoch)));
                }
                self.ranks[index].core.replace(now, link, old, epoch, peer, *hello)
            }
        };
        self.act(index, actions);
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
        self.say(|| format!("{epoch}: rank {index} is back"));
        self.connect(index);
    }

    /// Has users post a request everywhere.
    fn post(&mut self) -> RequestKey {
        let key = RequestKey { request: self.next_request, attempt: 0 };
        self.next_request += 1;
        self.keys.push(key);
        let blocks = 1 + self.random.below(3);
        // Some blocks may be there already.
        let held = if self.random.one_in(4) { self.random.below(blocks) } else { 0 };
        for index in 0..self.ranks.len() {
            let deed = match self.ranks[index].side {
                Side::Source => Deed::Send { key, blocks, held },
                Side::Destination => Deed::Receive { key, blocks },
            };
            self.deeds.push((index, deed));
        }
        key
    }

    fn do_deed(&mut self, index: usize, deed: Deed) {
        if !self.runs(index) {
            if self.ranks[index].alive {
                self.deeds.push((index, deed));
            }
            return;
        }
        let (now, epoch, link, side) =
            (self.now, self.ranks[index].epoch, self.ranks[index].link, self.ranks[index].side);
        self.say(|| format!("{epoch}: {deed:?}"));
        match deed {
            Deed::Receive { key, blocks } => {
                let free = self.books.free(epoch);
                if free.len() < blocks {
                    return;
                }
                let slots: Vec<u32> = free[..blocks].to_vec();
                let map = BlockMap::new(0, slots.iter().map(|slot| Some(Slot(*slot))).collect());
                let handle = Handle::Receive(key);
                self.books.posted(epoch, handle, slots);
                let tokens = 0..blocks as u64 * BLOCK_TOKENS;
                match self.ranks[index].core.receive(now, key, &[link], &[map], &tokens) {
                    Ok(actions) => self.act(index, actions),
                    Err(_) => self.books.not_posted(epoch, handle),
                }
            }
            Deed::Send { key, blocks, held } => {
                let slots = (0..blocks).map(|block| Some(Slot(u32::try_from(block).unwrap() % SLOTS))).collect();
                let (ticket, end) = (Ticket { link, key }, blocks as u64 * BLOCK_TOKENS);
                let handle = Handle::Send(ticket);
                self.books.posted(epoch, handle, Vec::new());
                match self.ranks[index].core.send(now, ticket, vec![BlockMap::new(0, slots)], 0..end) {
                    Ok(actions) => self.act(index, actions),
                    Err(_) => return self.books.not_posted(epoch, handle),
                }
                let middle = held as u64 * BLOCK_TOKENS + 5;
                let whole = held == 0 || middle >= end;
                let bounds = if whole { vec![0, end] } else { vec![0, middle, end] };
                for (number, bounds) in bounds.windows(2).enumerate() {
                    let part = PartSpec { tokens: bounds[0]..bounds[1], ..PartSpec::default() };
                    let deed = Deed::Push { key, part, ready: !self.random.one_in(3) };
                    // Parts follow each other.
                    if number == 0 { self.do_deed(index, deed) } else { self.deeds.push((index, deed)) }
                }
            }
            Deed::Push { key, part, ready } => {
                if let Ok((number, actions)) = self.ranks[index].core.push(now, Ticket { link, key }, part, ready) {
                    self.act(index, actions);
                    if !ready {
                        self.deeds.push((index, Deed::Ready { key, index: number }));
                    }
                }
            }
            Deed::Ready { key, index: number } => {
                let actions = self.ranks[index].core.part_ready(now, Ticket { link, key }, number);
                self.act(index, actions);
            }
            Deed::Cancel { key } => {
                let core = &mut self.ranks[index].core;
                let actions = match side {
                    Side::Source => core.cancel_send(now, Ticket { link, key }),
                    Side::Destination => core.cancel_receive(now, key),
                };
                self.act(index, actions);
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for index in 0..self.ranks.len() {
            if self.runs(index) {
                let actions = self.ranks[index].core.tick(self.now);
                self.act(index, actions);
            }
        }
    }

    /// Everything that can go wrong.
    pub(super) fn trouble(&mut self) {
        for _ in 0..STEPS {
            let index = self.random.below(self.ranks.len());
            match self.random.below(100) {
                0..40 => {
                    let Some(frame) = self.random.take(&mut self.frames) else { continue };
                    if self.random.one_in(self.bad) {
                        if self.random.one_in(2) {
                            continue; // lost
                        }
                        self.frames.push(frame.clone());
                    }
                    self.deliver(frame);
                }
                40..62 if !self.writes.is_empty() => {
                    let place = self.random.below(self.writes.len());
                    self.step_write(place);
                }
                62..78 => {
                    if let Some((index, deed)) = self.random.take(&mut self.deeds) {
                        self.do_deed(index, deed);
                    }
                }
                78..84 if self.keys.len() < 24 => {
                    self.post();
                }
                84..88 => {
                    let time = Duration::from_millis([1, 50, 300, 3000][self.random.below(4)]);
                    self.pass(time);
                }
                88..93 => {
                    if let Some((index, news)) = self.random.take(&mut self.news) {
                        self.hear_news(index, news);
                    }
                }
                93 if !self.keys.is_empty() => {
                    let key = self.keys[self.random.below(self.keys.len())];
                    self.deeds.push((index, Deed::Cancel { key }));
                }
                94 if self.ranks[index].alive => {
                    let epoch = self.ranks[index].epoch;
                    self.say(|| format!("{epoch}: frozen or continued"));
                    self.ranks[index].frozen ^= true;
                }
                95 if self.ranks[index].alive => match self.random.below(4) {
                    0 if self.runs(index) => {
                        // In good order.
                        let actions = self.ranks[index].core.stop();
                        self.act(index, actions);
                        self.kill(index);
                    }
                    1 | 2 => self.kill(index),
                    _ => self.disconnect(index),
                },
                96 | 97 if !self.ranks[index].alive => self.restart(index),
                98 if self.random.one_in(2) => {
                    // A connection fails, on one side.
                    let others = self.ranks.iter().filter(|other| other.side != self.ranks[index].side);
                    let others: Vec<u64> = others.map(|other| other.epoch).collect();
                    let epoch = others[self.random.below(others.len())];
                    self.news.push((index, News::Lost(epoch)));
                }
                99 if self.ranks[index].connected == Some(false) && self.runs(index) => self.connect(index),
                _ => {}
            }
        }
    }

    /// Lets everything that is on its way happen.
    fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 10_000, "the ranks never stop talking");
            for (index, news) in std::mem::take(&mut self.news) {
                self.hear_news(index, news);
            }
            for (index, deed) in std::mem::take(&mut self.deeds) {
                self.do_deed(index, deed);
            }
            for place in (0..self.writes.len()).rev() {
                self.step_write(place);
            }
            let frames = std::mem::take(&mut self.frames);
            if frames.is_empty() && self.writes.is_empty() && self.news.is_empty() && self.deeds.is_empty() {
                return;
            }
            for frame in frames {
                self.deliver(frame);
            }
        }
    }

    /// Nothing goes wrong any more: everything that was begun ends, what cannot be given back is accounted for, and a new
    /// request succeeds.
    pub(super) fn heal(&mut self) {
        self.say(|| "all is well again".to_owned());
        for index in 0..self.ranks.len() {
            self.ranks[index].frozen = false;
            if !self.ranks[index].alive {
                self.restart(index);
            }
        }
        let mut proof = None;
        for step in 0.. {
            self.settle();
            self.pass(HEALING_STEP);
            self.settle();
            for index in 0..self.ranks.len() {
                if self.ranks[index].connected == Some(false) {
                    self.connect(index);
                }
            }
            // Slots that nothing gives back are lost until the rank restarts.
            for index in 0..self.ranks.len() {
                let epoch = self.ranks[index].epoch;
                if step > 20 && self.books.open(epoch).0.is_empty() && self.books.free(epoch).len() < 3 {
                    self.kill(index);
                    self.restart(index);
                }
            }
            // Users try, until a request succeeds everywhere.
            let posted = proof.filter(|key| self.is_open(*key));
            let over = proof.is_some_and(|key| self.well.get(&key) == Some(&usize::try_from(DESTINATIONS).unwrap()));
            if over && self.ranks.iter().all(|rank| self.books.open(rank.epoch).0.is_empty()) {
                break;
            }
            if posted.is_none() && !over {
                proof = Some(self.post());
            }
            assert!(step < HEALING_STEPS, "no request succeeds, or some never end");
        }
        // Whoever was asked to stop has been asked again by then.
        for _ in 0..200 {
            self.pass(HEALING_STEP);
            self.settle();
        }
        for rank in &self.ranks {
            let (_, exposed) = self.books.open(rank.epoch);
            let mut listed: Vec<Handle> =
                rank.core.quarantine().iter().map(|quarantined| Handle::Receive(quarantined.key)).collect();
            listed.dedup();
            assert_eq!(exposed, listed, "slots of {} are neither given back nor accounted for", rank.epoch);
            // Those who are there have answered. Only what is gone, or what a network may still deliver, holds slots, and not
            // where they are written by this side.
            for quarantined in rank.core.quarantine() {
                let (epoch, key) = (quarantined.epoch, quarantined.key);
                let late = quarantined.unsettled && self.late.contains(&(epoch, rank.epoch, key));
                let gone = self.at(epoch).is_none() && !self.one_host;
                let inbox_only = rank.core.receives[&key].parts[&epoch].inbox_only;
                assert!((late || gone) && !inbox_only, "{quarantined:?} could be given back");
            }
        }
    }

    fn is_open(&self, key: RequestKey) -> bool {
        let deeds = self
            .deeds
            .iter()
            .any(|(_, deed)| matches!(deed, Deed::Receive { key: of, .. } | Deed::Send { key: of, .. } if *of == key));
        deeds || self.ranks.iter().any(|rank| self.books.open(rank.epoch).0.iter().any(|handle| handle.key() == key))
    }
}
