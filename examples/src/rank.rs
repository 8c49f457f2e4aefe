//! One rank's run, up to the point where the two sides differ: pools, bytes, the meeting, the engine.

use std::cell::OnceCell;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use kvferry::{Engine, EngineOptions, InstanceCard, InstanceCardError, Link, RequestKey, Transfer};
use kvferry_layout::{MemoryKind, PageTable, PoolId, Slot};
use kvferry_match::BlockMap;
use kvferry_wire::{CudaOpenError, CudaOptions, Region, RegionError, cuda_devices};

use crate::deadline::Deadline;
use crate::event::Phase;
use crate::failure::Failure;
use crate::fill::fill;
use crate::job::{Job, REQUEST, table_bytes};
use crate::meet::tcp::{self, Host};
use crate::meet::{Cards, MeetError, MeetingPoint, Member, Side, directory};
use crate::options::{JobOptions, Memory, MoveOptions, RankOptions};
use crate::voice::Voice;
use crate::{available, blame, failure, fit, watch};

/// The only try at the only request.
const KEY: RequestKey = RequestKey { request: REQUEST, attempt: 0 };

/// How often somebody who waits for a transfer looks how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A rank that is connected to its peers, with pools that are filled.
#[derive(Debug)]
pub struct Rank<'a> {
    /// What the run is about.
    pub job: Job,
    /// Which rank this is.
    pub member: Member,
    /// Its table, with the addresses of its pools.
    pub table: PageTable,
    /// The request's slots, by group.
    pub slots: Vec<Vec<Slot>>,
    /// The memory behind each pool.
    pub regions: Vec<Region>,
    engine: &'a Engine,
    /// `None` if the rank has no part in the request.
    link: Option<Link>,
}

/// A pool whose memory cannot be reached. A bug: tables and regions come from one place.
#[derive(Debug, thiserror::Error)]
#[error("cannot reach byte {offset} of pool {}", pool.0)]
pub struct PoolError {
    /// The pool.
    pub pool: PoolId,
    /// Offset in it.
    pub offset: u64,
    /// Why.
    pub source: RegionError,
}

/// The ranks of one side are no instance.
#[derive(Debug, thiserror::Error)]
#[error("cards of the {side} instance")]
pub struct CardsError {
    /// Which.
    pub side: Side,
    /// Why.
    pub source: InstanceCardError,
}

/// Runs one rank's program, whatever its side: `work` is given what says how it goes, and the place for its engine.
///
/// How it went is said before the engine goes, which takes as long as a peer that is gone lets it.
pub fn tell(
    member: Member,
    moving: &MoveOptions,
    work: impl FnOnce(&mut Voice, &OnceCell<Engine>) -> Result<(), Failure>,
) -> ExitCode {
    if std::env::var_os("RUST_LOG").is_some() {
        let logs = tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env());
        logs.with_writer(std::io::stderr).init();
    }
    let mut voice = Voice::new(member, moving.json);
    told_before_drop(
        |engine| {
            let outcome = work(&mut voice, engine);
            (outcome, voice)
        },
        |(outcome, voice)| {
            voice.end(&outcome);
            failure::exit(&member.side.to_string(), &outcome)
        },
    )
}

/// Does `work`, lets `tell` have what came of it, and only then drops what `work` has put aside.
fn told_before_drop<K, T, E>(work: impl FnOnce(&OnceCell<K>) -> T, tell: impl FnOnce(T) -> E) -> E {
    let kept = OnceCell::new();
    tell(work(&kept))
}

impl<'a> Rank<'a> {
    /// Checks the options, makes and fills the pools, meets all ranks, and connects to those that this one needs.
    ///
    /// A sender's pools hold the request; a receiver's nothing but canary.
    ///
    /// # Errors
    ///
    /// [`Failure`] with the line and exit code to end with.
    pub fn start(
        member: Member,
        options: &JobOptions,
        rank: &RankOptions,
        moving: &MoveOptions,
        voice: &mut Voice,
        engine: &'a OnceCell<Engine>,
    ) -> Result<Self, Failure> {
        if rank.stop_on_eof {
            watch::end_with_standard_input().map_err(Failure::failed)?;
        }
        let job = Job::new(options).map_err(Failure::usage)?;
        let mut table = job.table(member).map_err(Failure::usage)?;
        let tables = job.tables().map_err(Failure::usage)?;
        fit::check(&job, &tables, Some(member)).map_err(Failure::usage)?;
        let meeting = tables.meeting_deadline(moving.deadline());
        let device = device(member, moving).map_err(Failure::failed)?;
        match device {
            None => available::check(table_bytes(&table)).map_err(Failure::failed)?,
            Some(device) => table.pools.iter_mut().for_each(|pool| pool.memory = MemoryKind::Cuda { device }),
        }
        let host = host(member, rank).map_err(Failure::failed)?;

        let options = EngineOptions {
            rank: member.rank,
            transports: moving.transport.clone(),
            route: moving.route,
            patience: moving.deadline(),
            ..EngineOptions::default()
        };
        let started = match device {
            None => Engine::start(options),
            Some(device) => Engine::start_on_gpu(options, CudaOptions::new(device)),
        };
        let started = started.map_err(Failure::failed)?;
        let engine = engine.get_or_init(|| started);
        let regions = engine.allocate(&mut table).map_err(Failure::failed)?;
        let slots = job.slots(member, &table);
        let held = if member.side == Side::Sender { slots.as_slice() } else { &[] };
        let image = job.image(member, &table, held).map_err(Failure::failed)?;
        let pool_bytes = pool_bytes(&regions);
        let total = Some(pool_bytes.iter().sum());
        let write = |pool: PoolId, offset: u64, bytes: &[u8]| {
            regions[usize::from(pool.0)].write(offset, bytes).map_err(|source| PoolError { pool, offset, source })
        };
        fill(&image, &pool_bytes, write, |done| voice.progress(Phase::Fill, done, total)).map_err(Failure::failed)?;

        engine.publish(table.clone(), regions.clone()).map_err(Failure::failed)?;
        let card = engine.card().unwrap_or_default();
        let deadline = Deadline::after(meeting);
        let cards = meet(&job, member, rank, host, card, deadline);
        let cards = cards.map_err(|error| Failure::caused_by(blame::of_meeting(&error), error))?;
        let of_part = |side: Side, cards: Vec<Vec<u8>>| {
            let part = job.part(side);
            let of_part = (0..).zip(cards).filter(|(rank, _)| part.contains(rank)).map(|(_, card)| card);
            let card = InstanceCard::new(part.iter().copied(), of_part);
            card.map_err(|source| Failure::failed(CardsError { side, source }))
        };
        let link = if job.part(member.side).contains(&member.rank) {
            let senders = of_part(Side::Sender, cards.senders)?;
            let link = engine.connect(&senders, &of_part(Side::Receiver, cards.receivers)?);
            Some(link.map_err(|error| Failure::caused_by(blame::of_connect(&error), error))?)
        } else {
            None
        };
        Ok(Self { job, member, table, slots, regions, engine, link })
    }

    /// Bytes of each pool's memory.
    pub fn pool_bytes(&self) -> Vec<u64> {
        pool_bytes(&self.regions)
    }

    /// Posts the send of the whole request. `None` if this rank has no part in it.
    ///
    /// # Errors
    ///
    /// [`Failure`] with the line and exit code to end with.
    pub fn send(&self) -> Result<Option<kvferry::Send>, Failure> {
        let post = |link| self.engine.send(link, KEY, self.block_maps(), 0..self.job.tokens());
        self.link.map(post).transpose().map_err(Failure::failed)
    }

    /// Posts the receive of the whole request. `None` if this rank has no part in it.
    ///
    /// # Errors
    ///
    /// [`Failure`] with the line and exit code to end with.
    pub fn receive(&self) -> Result<Option<kvferry::Receive>, Failure> {
        let post = |link| self.engine.receive(link, KEY, &self.block_maps(), 0..self.job.tokens());
        self.link.map(post).transpose().map_err(Failure::failed)
    }

    fn block_maps(&self) -> Vec<BlockMap> {
        self.slots.iter().map(|slots| BlockMap::dense(0, slots.iter().copied())).collect()
    }
}

/// Waits until a transfer has ended; the engine's patience sees to it that it does. Returns what moved, by peer.
///
/// # Errors
///
/// [`Failure`] with the line and exit code to end with.
pub fn wait<R>(transfer: &Transfer<R>, total_bytes: Option<u64>, voice: &mut Voice) -> Result<Arc<[R]>, Failure> {
    let mut moved_bytes = 0;
    loop {
        if let Some(outcome) = transfer.wait(LOOK_INTERVAL) {
            return outcome.map_err(|error| Failure::caused_by(blame::of_transfer(&error), error));
        }
        let now = transfer.moved_bytes();
        if now > moved_bytes {
            moved_bytes = now;
            voice.progress(Phase::Move, moved_bytes, total_bytes);
        }
    }
}

fn pool_bytes(regions: &[Region]) -> Vec<u64> {
    regions.iter().map(Region::bytes).collect()
}

/// The GPU of a rank, if its pools are to be on one.
fn device(member: Member, moving: &MoveOptions) -> Result<Option<u32>, CudaOpenError> {
    if moving.memory == Memory::Host {
        return Ok(None);
    }
    let count = cuda_devices()?.max(1);
    let nth = member.rank % count;
    Ok(Some(if member.side == Side::Sender { nth } else { count - 1 - nth }))
}

/// Opens the meeting, if that is this rank's to do: early, so that an address that is taken is noticed at once.
fn host(member: Member, rank: &RankOptions) -> Result<Option<Host>, MeetError> {
    match &rank.meet {
        MeetingPoint::Address(address) if member == Member::HOST && !rank.join => Host::bind(address).map(Some),
        _ => Ok(None),
    }
}

/// Meets all ranks, and hosts the meeting if `host` is given.
fn meet(
    job: &Job,
    member: Member,
    rank: &RankOptions,
    host: Option<Host>,
    card: Vec<u8>,
    deadline: Deadline,
) -> Result<Cards, MeetError> {
    let (attendance, terms) = (job.attendance(), job.terms());
    match &rank.meet {
        MeetingPoint::Directory(path) => directory::meet(path, member, &terms, card, attendance, deadline),
        // The host is a guest of its own. Its thread ends when all have been answered, and knows best what went wrong.
        MeetingPoint::Address(address) => thread::scope(|scope| {
            let hosted = host.map(|host| {
                let terms = terms.clone();
                scope.spawn(move || host.serve(attendance, terms, deadline))
            });
            let cards = tcp::meet(address, member, &terms, card, attendance, deadline);
            match hosted.map(ScopedJoinHandle::join) {
                Some(Ok(Err(refusal))) => Err(refusal.into()),
                _ => cards,
            }
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// Says when it goes.
    struct Kept(Rc<RefCell<Vec<&'static str>>>);

    impl Drop for Kept {
        fn drop(&mut self) {
            self.0.borrow_mut().push("dropped");
        }
    }

    /// An engine whose peer is gone may take its time to go. What happened is known before.
    #[test]
    fn outcomes_are_told_before_anything_goes() {
        let log = Rc::new(RefCell::new(Vec::new()));
        let work = |kept: &OnceCell<Kept>| {
            kept.get_or_init(|| Kept(log.clone()));
            log.borrow_mut().push("failed");
        };
        told_before_drop(work, |()| log.borrow_mut().push("told"));
        assert_eq!(*log.borrow(), ["failed", "told", "dropped"]);
    }
}
