//! The ranks of both instances: engines of this process, each with threads that do what the dispatcher decides.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};
use kvferry::{
    ConnectError, Engine, EngineOptions, InstanceCard, InstanceCardError, Link, Outcome, PostError, PublishError,
    RequestKey, StartError, Transfer,
};
use kvferry_layout::PageTable;
use kvferry_match::BlockMap;
use kvferry_wire::{Region, TransferStats, Version};

use crate::failure;
use crate::meet::{Member, Side};
use crate::options::MoveOptions;
use crate::replay::content::{Content, ContentError};
use crate::replay::pool::Frame;
use crate::replay::setup::{Instance, Setup};
use crate::replay::trace::Block;

/// Past an engine's own patience, how long a transfer may take to say that it has ended.
const GRACE: Duration = Duration::from_secs(10);

/// Bytes that a pool is written in, so that its memory is there before anything is timed.
const TOUCH_BYTES: usize = 1 << 20;

/// Why the ranks did not come up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RanksError {
    /// See the source.
    #[error("{member}")]
    Start {
        /// The rank.
        member: Member,
        /// Why.
        source: Box<StartError>,
    },
    /// See the source.
    #[error("{member}")]
    Publish {
        /// The rank.
        member: Member,
        /// Why.
        source: Box<PublishError>,
    },
    /// See the source.
    #[error("{side} instance")]
    Cards {
        /// Which.
        side: Side,
        /// Why.
        source: Box<InstanceCardError>,
    },
    /// See the source.
    #[error("{member}")]
    Connect {
        /// The rank.
        member: Member,
        /// Why.
        source: Box<ConnectError>,
    },
}

/// One rank: its engine, and what it publishes.
#[derive(Debug)]
pub struct Rank {
    /// Which rank it is.
    pub member: Member,
    engine: Engine,
    link: Link,
    table: PageTable,
    regions: Vec<Region>,
    slots_per_frame: u32,
    seed: u64,
    deadline: Duration,
}

/// A block of a request in a frame of a rank.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// The block.
    pub block: Block,
    /// Where it is.
    pub frame: Frame,
    /// Tokens of it, as scaled.
    pub tokens: u64,
}

/// What a rank is to do.
#[derive(Clone, Debug)]
pub enum Task {
    /// Write blocks: what computing them would.
    Write(Vec<Placed>),
    /// Send or receive tokens, and compare blocks when they are there.
    Move {
        /// The tokens.
        tokens: Range<u64>,
        /// Where their blocks are, by group.
        maps: Vec<BlockMap>,
        /// What to compare.
        check: Vec<Placed>,
        /// A block to spoil before it is compared.
        flip: Option<Placed>,
    },
}

/// What a rank has done.
#[derive(Debug)]
pub enum Done {
    /// Its blocks are written, or why not.
    Written(Result<(), String>),
    /// The transfer has ended.
    Moved(Moved),
}

/// How a rank's part of a request went.
#[derive(Debug)]
pub struct Moved {
    /// When it was posted.
    pub posted: Instant,
    /// When it had ended.
    pub ended: Instant,
    /// What moved, by peer; or why it failed.
    pub outcome: Result<Vec<Part>, Failed>,
    /// Bytes compared and found right.
    pub checked_bytes: u64,
}

/// What moved between two ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes, by the count of whoever says so.
    pub bytes: u64,
    /// A prefill rank: from the first write to the last byte's being there. A decode rank: from asking to being told.
    pub elapsed: Duration,
    /// How they went.
    pub carried: Vec<TransferStats>,
}

/// Why a rank's part of a request failed.
#[derive(Debug)]
pub struct Failed {
    /// In one line.
    pub line: String,
    /// Whether somebody may still touch its frames.
    pub exposed: bool,
}

/// Says who has done what.
pub type Told = (Member, usize, Done);

/// Threads of all ranks, while they are asked.
#[derive(Debug)]
pub struct Crew {
    tasks: BTreeMap<Member, Sender<(usize, Task)>>,
    /// What they say.
    pub told: Receiver<Told>,
}

/// Starts an engine for each rank and connects them all.
///
/// # Errors
///
/// [`RanksError`] names the rank.
pub fn start(setup: &Setup, moving: &MoveOptions, seed: u64) -> Result<Vec<Arc<Rank>>, RanksError> {
    let members = |side, instance: &Instance| {
        (0..).zip(instance.tables.clone()).map(move |(rank, table)| (side, rank, table)).collect()
    };
    let mut all: Vec<(Side, u32, PageTable)> = members(Side::Sender, &setup.prefill);
    let receivers: Vec<_> = members(Side::Receiver, &setup.decode);
    all.extend(receivers);
    let mut engines = Vec::with_capacity(all.len());
    for (side, rank, mut table) in all {
        let member = Member { side, rank };
        let options = EngineOptions {
            rank,
            transports: moving.transport.clone(),
            route: moving.route,
            patience: moving.deadline(),
            ..EngineOptions::default()
        };
        let engine = Engine::start(options).map_err(|source| RanksError::Start { member, source: Box::new(source) })?;
        let failed = |source| RanksError::Publish { member, source: Box::new(source) };
        let regions = engine.allocate(&mut table).map_err(failed)?;
        engine.publish(table.clone(), regions.clone()).map_err(failed)?;
        engines.push((member, engine, table, regions));
    }
    let card = |side| {
        let of_side = || engines.iter().filter(move |(member, ..)| member.side == side);
        let cards = of_side().filter_map(|(_, engine, ..)| engine.card());
        InstanceCard::new(of_side().map(|(member, ..)| member.rank), cards)
            .map_err(|source| RanksError::Cards { side, source: Box::new(source) })
    };
    let (sources, destinations) = (card(Side::Sender)?, card(Side::Receiver)?);
    let connect = |(member, engine, _, regions): &(Member, Engine, PageTable, Vec<Region>)| {
        regions.iter().for_each(touch);
        let link = engine.connect(&sources, &destinations);
        link.map_err(|source| RanksError::Connect { member: *member, source: Box::new(source) })
    };
    let connect = &connect;
    let links: Vec<Result<Link, RanksError>> = thread::scope(|scope| {
        let connecting: Vec<_> = engines.iter().map(|rank| scope.spawn(move || connect(rank))).collect();
        connecting.into_iter().map(|link| link.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let ranks = engines.into_iter().zip(links).map(|((member, engine, table, regions), link)| {
        let slots_per_frame = match member.side {
            Side::Sender => setup.prefill.slots_per_frame,
            Side::Receiver => setup.decode.slots_per_frame,
        };
        let deadline = moving.deadline();
        Ok(Arc::new(Rank { member, engine, link: link?, table, regions, slots_per_frame, seed, deadline }))
    });
    ranks.collect()
}

/// Writes all of a region once.
fn touch(region: &Region) {
    let zeros = vec![0; TOUCH_BYTES];
    for start in (0..region.bytes()).step_by(TOUCH_BYTES) {
        let bytes = usize::try_from(region.bytes() - start).unwrap_or(TOUCH_BYTES).min(TOUCH_BYTES);
        // Inside the region, which is all that writing asks for.
        let _ = region.write(start, &zeros[..bytes]);
    }
}

impl Rank {
    /// The UCX in use.
    pub fn ucx_version(&self) -> Version {
        self.engine.ucx_version()
    }

    fn content(&self) -> Content<'_> {
        Content::new(&self.table, &self.regions, self.slots_per_frame, self.seed)
    }

    /// Compares blocks with what they should hold; returns the bytes that were compared.
    ///
    /// # Errors
    ///
    /// [`ContentError`] names the first that differs.
    pub fn check(&self, blocks: &[Placed]) -> Result<u64, ContentError> {
        let content = self.content();
        blocks.iter().try_fold(0, |sum, placed| Ok(sum + content.check(placed.block, placed.tokens, placed.frame)?))
    }

    fn perform(&self, request: usize, task: Task) -> Done {
        match task {
            Task::Write(blocks) => {
                let content = self.content();
                let write = |placed: &Placed| content.write(placed.block, placed.frame);
                Done::Written(blocks.iter().try_for_each(write).map_err(|error| failure::line(&error)))
            }
            Task::Move { tokens, maps, check, flip } => Done::Moved(self.take_part(request, tokens, maps, || {
                if let Some(Placed { block, frame, .. }) = flip {
                    self.content().flip(block, frame)?;
                }
                self.check(&check)
            })),
        }
    }

    fn take_part(
        &self,
        request: usize,
        tokens: Range<u64>,
        maps: Vec<BlockMap>,
        check: impl FnOnce() -> Result<u64, ContentError>,
    ) -> Moved {
        let key = RequestKey { request: request as u64, attempt: 0 };
        let posted = Instant::now();
        let outcome = match self.member.side {
            Side::Sender => self.finish(self.engine.send(self.link, key, maps, tokens), |sent| Part {
                bytes: sent.bytes,
                elapsed: sent.elapsed,
                carried: sent.carried.clone(),
            }),
            Side::Receiver => self.finish(self.engine.receive(self.link, key, &maps, tokens), |received| Part {
                bytes: received.bytes,
                elapsed: received.elapsed,
                carried: received.carried.clone(),
            }),
        };
        let ended = Instant::now();
        let (outcome, checked_bytes) = match outcome {
            Err(failed) => (Err(failed), 0),
            Ok(parts) => match check() {
                Ok(bytes) => (Ok(parts), bytes),
                Err(error) => (Err(Failed { line: failure::line(&error), exposed: false }), 0),
            },
        };
        Moved { posted, ended, outcome, checked_bytes }
    }

    fn finish<R>(
        &self,
        posted: Result<Transfer<R>, PostError>,
        part: impl Fn(&R) -> Part,
    ) -> Result<Vec<Part>, Failed> {
        let transfer = posted.map_err(|error| Failed { line: failure::line(&error), exposed: false })?;
        let ended = match self.wait(&transfer) {
            Some(ended) => ended,
            None => {
                transfer.cancel();
                return Err(Failed { line: "the transfer has not ended, and nothing moves".to_owned(), exposed: true });
            }
        };
        // The frames are the pool's again when the engine says so, which after a good end it does at once.
        match (ended, transfer.wait_quiet(self.deadline)) {
            (Ok(parts), Ok(_)) => Ok(parts.iter().map(part).collect()),
            (Ok(_), Err(error)) => Err(Failed { line: failure::line(&error), exposed: true }),
            (Err(error), quiet) => Err(Failed { line: failure::line(&*error), exposed: quiet.is_err() }),
        }
    }

    /// Waits until a transfer has ended, or for longer than the engine should let it stand still.
    fn wait<R>(&self, transfer: &Transfer<R>) -> Option<Outcome<R>> {
        let mut moved_bytes = 0;
        loop {
            if let Some(outcome) = transfer.wait(self.deadline + GRACE) {
                return Some(outcome);
            }
            let now = transfer.moved_bytes();
            if now <= moved_bytes {
                return None;
            }
            moved_bytes = now;
        }
    }
}

impl Crew {
    /// Starts `threads` threads a rank. They end when the crew is dropped.
    pub fn start<'scope>(scope: &'scope Scope<'scope, '_>, ranks: &[Arc<Rank>], threads: usize) -> Self {
        let (tell, told) = unbounded();
        let mut tasks = BTreeMap::new();
        for rank in ranks {
            let (give, get) = unbounded::<(usize, Task)>();
            tasks.insert(rank.member, give);
            for _ in 0..threads {
                let (rank, get, tell) = (Arc::clone(rank), get.clone(), tell.clone());
                scope.spawn(move || {
                    for (request, task) in get {
                        let done = rank.perform(request, task);
                        if tell.send((rank.member, request, done)).is_err() {
                            break;
                        }
                    }
                });
            }
        }
        Self { tasks, told }
    }

    /// Gives a rank something to do for a request.
    pub fn give(&self, member: Member, request: usize, task: Task) {
        if let Some(tasks) = self.tasks.get(&member) {
            // Its threads end after this does.
            let _ = tasks.send((request, task));
        }
    }
}
