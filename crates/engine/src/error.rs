//! What can go wrong, divided by what the caller does next.

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use kvferry_layout::{DecodeError, LayoutError};
use kvferry_match::{BindError, MatchError, Side, TemplateError};
use kvferry_wire::{CommandError, OpenError, PutError, RegionError, Status, Version};

use crate::message::{Refusal, RequestKey};

/// A rank of the other instance, as errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerName {
    /// Its instance.
    pub side: Side,
    /// Its rank there.
    pub rank: u32,
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rank {}", self.side, self.rank)
    }
}

/// The engine did not start. Fix the setup.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// UCX is missing or refuses its settings.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There is no memory for what peers write to when they connect.
    #[error("no memory to be tested with")]
    Probe(#[from] RegionError),
    /// The operating system gave no random epoch.
    #[error("no random epoch")]
    Epoch(#[from] getrandom::Error),
    /// The operating system refused a thread.
    #[error("cannot start the control thread")]
    Thread(#[from] std::io::Error),
    /// Choose between 1 and 64 workers.
    #[error("an engine cannot have {workers} workers")]
    Workers {
        /// As given.
        workers: usize,
    },
    /// Choose a patience between a millisecond and a year.
    #[error("a patience of {0:?} is out of range")]
    Patience(Duration),
    /// Choose a time between a millisecond and the patience.
    #[error("an answer cannot be waited for {resend:?} with a patience of {patience:?}")]
    Resend {
        /// As given.
        resend: Duration,
        /// As given.
        patience: Duration,
    },
}

/// Options could not be read. Mend the file or the variable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// The file is not there or cannot be read.
    #[error("cannot read {path:?}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Options are in files called `*.json` or `*.toml`.
    #[error("{path:?} is neither called .json nor .toml")]
    Format {
        /// Which.
        path: PathBuf,
    },
    /// The text is no JSON, or has an option that there is not.
    #[error("not the options of an engine")]
    Json(#[from] serde_json::Error),
    /// The text is no TOML, or has an option that there is not.
    #[error("not the options of an engine")]
    Toml(#[from] toml::de::Error),
    /// There is no such option, or it cannot have that value.
    #[error("{variable}={value:?}")]
    Variable {
        /// Name of the variable.
        variable: String,
        /// What it is set to.
        value: String,
        /// Why.
        source: serde_json::Error,
    },
}

/// A page table was not published. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The table is wrong, or a pool lies outside its region. Mend the table.
    #[error("the page table does not hold")]
    Table(#[from] LayoutError),
    /// Memory is registered with the engine that publishes it: see `Engine::context`.
    #[error("the region of pool {pool} was registered with another engine")]
    OtherContext {
        /// Index of the pool.
        pool: usize,
    },
    /// There must be one region a pool, in the order of the pools.
    #[error("{pools} pools need {pools} regions, not {regions}")]
    Regions {
        /// Pools of the table.
        pools: usize,
        /// Regions given.
        regions: usize,
    },
    /// Memory could not be allocated or registered.
    #[error("no memory for pool {pool}")]
    Memory {
        /// Index of the pool.
        pool: usize,
        /// Why.
        source: RegionError,
    },
    /// An engine publishes one table in its life: peers hold its card.
    #[error("a page table has been published already")]
    Twice,
}

/// The bytes are no card of a rank that this engine can work with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CardError {
    /// Something else was passed in place of a card.
    #[error("{bytes} B that are no card")]
    NotACard {
        /// Length of it.
        bytes: usize,
    },
    /// The peer runs another release. Run the same protocol version on both sides.
    #[error("it speaks protocol version {theirs}, this side {ours}")]
    Version {
        /// The peer's version.
        theirs: u16,
        /// This engine's version.
        ours: u16,
    },
    /// The bytes have changed on the way.
    #[error("its card was damaged on the way")]
    Damaged,
    /// The digest holds but the contents do not decode: a bug in what made the card.
    #[error("its card does not decode")]
    Undecodable,
    /// The card has no worker, or more than a rank can have: a bug in what made the card.
    #[error("its card has {workers} workers")]
    Workers {
        /// Workers of the card.
        workers: usize,
    },
    /// The page table in the card is not one.
    #[error("its page table does not decode")]
    Table(#[from] DecodeError),
    /// A pool of the table has no region, or lies outside of it.
    #[error("its page table does not hold")]
    Layout(#[from] LayoutError),
    /// The card has another number of regions than pools.
    #[error("its card has {pools} pools and {regions} regions")]
    Regions {
        /// Pools of the table.
        pools: usize,
        /// Regions of the card.
        regions: usize,
    },
}

/// The cards of some ranks are no instance. Collect those that are named again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstanceCardError {
    /// What was passed in place of an instance's card is none, or is not what was made.
    #[error("the card of an instance was refused")]
    Unreadable(#[from] CardError),
    /// One rank's card was refused: mend the rank, or collect its card again.
    #[error("card {place} was refused")]
    Card {
        /// Its place among those passed, from 0 on.
        place: usize,
        /// Why.
        source: CardError,
    },
    /// A rank of the instance has no card: wait for it.
    #[error("the card of rank {rank} is missing")]
    Missing {
        /// The first such rank.
        rank: u32,
    },
    /// Two cards of one rank: of two processes that were given the same number, or of two lives of one, of which the
    /// earlier is over.
    #[error("there are two cards of rank {rank}")]
    Twice {
        /// The rank.
        rank: u32,
    },
    /// A card of a rank that the instance, or the part of it that is meant, has not got.
    #[error("rank {rank} is none of the instance's")]
    Unexpected {
        /// The rank.
        rank: u32,
    },
    /// The cards are of two instances.
    #[error("rank {rank} is of instance {theirs:?}, others are of {others:?}")]
    OtherInstance {
        /// The first that differs from those before it.
        rank: u32,
        /// Its instance.
        theirs: String,
        /// Theirs.
        others: String,
    },
}

/// The instances were not connected. Nothing is left behind; what the caller does next depends on the variant.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// This engine's own card must be among those of exactly one side.
    #[error("this engine's card is not among those of exactly one side")]
    NotAmong,
    /// UCX before 1.19 and from 1.19 on cannot unpack each other's keys. Run one of them on both sides.
    #[error("{peer} runs UCX {theirs}, which cannot work with UCX {ours} here")]
    Ucx {
        /// Who.
        peer: PeerName,
        /// Its UCX.
        theirs: Version,
        /// This engine's.
        ours: Version,
    },
    /// Checksums are made and checked on both sides or on neither: set `verify` alike.
    #[error("{peer} has verify = {theirs}, this side {ours}")]
    Verify {
        /// Who.
        peer: PeerName,
        /// Its option.
        theirs: bool,
        /// This engine's.
        ours: bool,
    },
    /// The instances cannot serve each other: fix their layouts.
    #[error("the instances do not match")]
    Match(#[source] MatchError),
    /// The pieces between two ranks cannot be described.
    #[error("no template between this rank and {peer}")]
    Template {
        /// The other rank.
        peer: PeerName,
        /// Why.
        source: TemplateError,
    },
    /// UCX refused an address or key.
    #[error("no endpoint to {peer}")]
    Endpoint {
        /// Who.
        peer: PeerName,
        /// Why.
        source: CommandError,
    },
    /// Bytes do not get to the peer: by no route, or not by the one that the options force.
    #[error("a write to {peer} does not arrive")]
    SelfTest {
        /// Who.
        peer: PeerName,
        /// Why.
        source: PutError,
    },
    /// The peer's memory cannot be written to.
    #[error("a write to {peer} cannot be posted")]
    Unwritable {
        /// Who.
        peer: PeerName,
        /// Why.
        source: kvferry_wire::TransferError,
    },
    /// The peer did not say hello: it is not there, or it has not called `connect` with the same cards.
    #[error("{peer} did not answer within {waited:.1?}")]
    NoAnswer {
        /// Who.
        peer: PeerName,
        /// The deadline.
        waited: Duration,
    },
    /// The peer is gone. Collect its card again when it is back.
    #[error("{peer} was lost while connecting")]
    Lost {
        /// Who.
        peer: PeerName,
        /// UCX's reason.
        source: Status,
    },
    /// The peer matched the same two ranks differently: it was given other cards.
    #[error("{peer} has another plan for the same two ranks: it was given other cards")]
    PlansDiffer {
        /// Who.
        peer: PeerName,
    },
    /// The peer is connected already, by an earlier call.
    #[error("{peer} is connected already")]
    Already {
        /// Who.
        peer: PeerName,
    },
    /// Publish a page table first.
    #[error("no page table has been published")]
    Unpublished,
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// A request was not taken up. Nothing was sent and no slot is exposed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// Receive on the destination's side of a link, send on the source's.
    #[error("this engine is the other side of the link")]
    OtherSide,
    /// The request and attempt are under way. Wait for them, or count the attempt up.
    #[error("request {} attempt {} is under way", .0.request, .0.attempt)]
    UnderWay(RequestKey),
    /// A peer that the request needs is gone, or not back yet. Try again: the engine connects by itself to what comes back.
    #[error("{0} is lost")]
    Lost(PeerName),
    /// The request and attempt have ended here. An attempt ends once: count it up.
    #[error("request {} attempt {} is over", .0.request, .0.attempt)]
    Over(RequestKey),
    /// So many requests are under way, or wait for peers that may still write. See `Engine::quarantine`.
    #[error("{requests_max} requests are under way or not quiet yet")]
    TooMany {
        /// The limit, of the engine's options.
        requests_max: usize,
    },
    /// The block maps do not cover the tokens.
    #[error("the block maps cannot be bound to {peer}")]
    BlockMaps {
        /// The rank whose part it is.
        peer: PeerName,
        /// What is missing.
        source: BindError,
    },
    /// Split the request, or use larger blocks.
    #[error("a receive of {blocks} blocks is over the limit of {blocks_max}")]
    TooManyBlocks {
        /// Blocks of all groups.
        blocks: usize,
        /// The limit.
        blocks_max: usize,
    },
    /// The link is not one of this engine's, or has been disconnected.
    #[error("no such link")]
    NoLink,
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// A part was not taken up; the send goes on without it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// Parts follow each other. Push from the next token on.
    #[error("tokens {pushed:?} do not follow: {next} is next, and {end} the end")]
    Tokens {
        /// As given.
        pushed: Range<u64>,
        /// Where the part has to begin.
        next: u64,
        /// Where the request ends.
        end: u64,
    },
    /// Layer ranges of the same tokens follow each other, from the rank's first to its last.
    #[error("layers {pushed:?} do not follow: next is {next:?}, and this rank has layers in {own:?}")]
    Layers {
        /// As given.
        pushed: Option<Range<u32>>,
        /// Where the range has to begin, if others were pushed.
        next: Option<u32>,
        /// From the first layer of this rank to behind its last.
        own: Range<u32>,
    },
    /// A note goes with the last part, and is short.
    #[error("a note of {bytes} B, of at most {bytes_max}")]
    Note {
        /// Its length.
        bytes: usize,
        /// The limit for this part.
        bytes_max: usize,
    },
    /// The send has ended.
    #[error("the send has ended")]
    Ended,
}

/// A request failed. Treat every byte of its slots at the destination as unwritten, and use them for nothing else until the
/// handle gives them back as [`Quiet`](crate::Quiet).
#[derive(Debug)]
pub struct RequestError {
    /// The request.
    pub key: RequestKey,
    /// What was known to have gone wrong when the request ended, in the order of ranks. At least one.
    pub errors: Vec<PartError>,
}

/// What went wrong with one peer of a request, and how far it had come.
#[derive(Debug)]
pub struct PartError {
    /// The life of the peer; 0 if it is nothing that a peer did.
    pub epoch: u64,
    /// How far the request was there.
    pub phase: Phase,
    /// What happened.
    pub error: TransferError,
}

/// How far a request has come with one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// The two sides have not found each other.
    Waiting,
    /// The source knows where to write.
    Moving,
    /// All is written; the two sides compare.
    Settling,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Waiting => "waiting",
            Self::Moving => "moving",
            Self::Settling => "settling",
        })
    }
}

impl PartError {
    /// Of something that this side did.
    pub(crate) fn own(phase: Phase, error: TransferError) -> Self {
        Self { epoch: 0, phase, error }
    }
}

impl fmt::Display for PartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error)?;
        match self.epoch {
            0 => Ok(()),
            epoch => write!(f, " (epoch {epoch:016x}, {})", self.phase),
        }
    }
}

impl Error for PartError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

/// The only error with its causes left to whoever prints the chain; several on one line, each with its causes.
impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {} attempt {}: ", self.key.request, self.key.attempt)?;
        if let [error] = &self.errors[..] {
            return error.fmt(f);
        }
        for (index, error) in self.errors.iter().enumerate() {
            write!(f, "{}{error}", if index == 0 { "" } else { "; " })?;
            let mut source = error.source();
            while let Some(error) = source {
                write!(f, ": {error}")?;
                source = error.source();
            }
        }
        Ok(())
    }
}

impl Error for RequestError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.errors[..] {
            [error] => error.source(),
            _ => None,
        }
    }
}

/// What happened with one peer of a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The peer is gone. Try again when it is back.
    #[error("{peer} was lost after {moved} of {expected} B")]
    Lost {
        /// Who.
        peer: PeerName,
        /// Bytes known to have moved.
        moved: u64,
        /// Bytes of its part.
        expected: u64,
        /// UCX's reason.
        source: Status,
    },
    /// The peer is there, or seems to be, and nothing moves.
    #[error("{peer} made no progress for {waited:.1?}, at {moved} of {expected} B")]
    Stalled {
        /// Who.
        peer: PeerName,
        /// Time without news.
        waited: Duration,
        /// Bytes known to have moved.
        moved: u64,
        /// Bytes of its part; 0 if the peer never named its slots.
        expected: u64,
    },
    /// The peer ended the request; its own error says more.
    #[error("{peer} ended the request")]
    Refused {
        /// Who.
        peer: PeerName,
        /// Its reason.
        source: Refusal,
    },
    /// The source reports other bytes, or another plan, than the destination expects.
    #[error("{peer} reports {reported} B moved, {expected} B were expected, or another plan")]
    PlansDiffer {
        /// Who.
        peer: PeerName,
        /// Bytes by the peer's count.
        reported: u64,
        /// Bytes by this side's count.
        expected: u64,
    },
    /// The two sides were given different token ranges for the same request.
    #[error("{peer} names tokens {theirs:?} of the request, this side {ours:?}")]
    TokensDiffer {
        /// Who.
        peer: PeerName,
        /// Its tokens.
        theirs: Range<u64>,
        /// This side's.
        ours: Range<u64>,
    },
    /// The two block maps do not fit: a hole that the other side needs, a slot outside its pool or named twice.
    #[error("the block maps of this side and of {peer} cannot be bound")]
    BlockMaps {
        /// Who.
        peer: PeerName,
        /// What is missing.
        source: BindError,
    },
    /// The plan leaves a region: the peer's table and its memory do not agree.
    #[error("the plan to {peer} was refused")]
    Outside {
        /// Who.
        peer: PeerName,
        /// Where.
        source: kvferry_wire::TransferError,
    },
    /// A write failed.
    #[error("the write to {peer} failed after {moved} of {expected} B")]
    Put {
        /// Who.
        peer: PeerName,
        /// Bytes posted.
        moved: u64,
        /// Bytes of its part.
        expected: u64,
        /// Why.
        source: PutError,
    },
    /// There is no template of the layers of a part.
    #[error("no template of these layers to {peer}")]
    Layers {
        /// Who.
        peer: PeerName,
        /// Why.
        source: TemplateError,
    },
    /// What has arrived is not what was sent. Ask for it again.
    #[error("what {peer} has sent arrived with other checksums")]
    Corrupted {
        /// Who.
        peer: PeerName,
    },
    /// No source of any of the links has announced that it sends the request.
    #[error("nobody announced to send the request for {waited:.1?}")]
    NobodySends {
        /// Time without news.
        waited: Duration,
    },
    /// This side has cancelled the request.
    #[error("cancelled")]
    Cancelled,
    /// The engine was dropped.
    #[error("the engine has stopped")]
    Stopped,
}

impl TransferError {
    /// Whose part failed. `None` if it was this side's engine.
    #[must_use]
    pub fn peer(&self) -> Option<PeerName> {
        match self {
            Self::Lost { peer, .. }
            | Self::Stalled { peer, .. }
            | Self::Refused { peer, .. }
            | Self::PlansDiffer { peer, .. }
            | Self::TokensDiffer { peer, .. }
            | Self::BlockMaps { peer, .. }
            | Self::Outside { peer, .. }
            | Self::Put { peer, .. }
            | Self::Layers { peer, .. }
            | Self::Corrupted { peer } => Some(*peer),
            Self::NobodySends { .. } | Self::Cancelled | Self::Stopped => None,
        }
    }
}
