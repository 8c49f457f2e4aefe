//! What can go wrong, divided by what the caller does next.

use std::error::Error;
use std::fmt;
use std::ops::Range;
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
    /// The operating system gave no random epoch.
    #[error("no random epoch")]
    Epoch(#[from] getrandom::Error),
    /// The operating system refused a thread.
    #[error("cannot start the control thread")]
    Thread(#[from] std::io::Error),
    /// Choose a patience between a millisecond and a year.
    #[error("a patience of {0:?} is out of range")]
    Patience(Duration),
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

/// The instances were not connected. Nothing is left behind; what the caller does next depends on the variant.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A card was refused: fix the peer, or collect its card again.
    #[error("{peer}: card refused")]
    Card {
        /// Whose card.
        peer: PeerName,
        /// Why.
        source: CardError,
    },
    /// Cards must stand in the order of ranks, each once.
    #[error("{peer}, or a later one: the card in its place is of rank {found}")]
    Order {
        /// The first whose card may stand there.
        peer: PeerName,
        /// Whose card is there.
        found: u32,
    },
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
    /// A peer that the request needs is gone. Connect again.
    #[error("{0} is lost")]
    Lost(PeerName),
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

/// A request failed. Treat every byte of its slots at the destination as unwritten, and do not hand slots of a receive to
/// another request while a process that [`RequestError::may_still_write`] names lives.
#[derive(Debug)]
pub struct RequestError {
    /// What happened with each peer whose part failed, in the order of ranks. At least one.
    pub errors: Vec<TransferError>,
}

impl RequestError {
    /// Peers that may still write to the slots of a receive: those that were lost or stalled. With
    /// [`TransferError::Stopped`] among the errors it is every source of the request.
    pub fn may_still_write(&self) -> impl Iterator<Item = PeerName> + '_ {
        let exposes =
            |error: &&TransferError| matches!(error, TransferError::Lost { .. } | TransferError::Stalled { .. });
        self.errors.iter().filter(exposes).filter_map(TransferError::peer)
    }
}

impl From<TransferError> for RequestError {
    fn from(error: TransferError) -> Self {
        Self { errors: vec![error] }
    }
}

/// The only error as it is; several on one line, each with its causes.
impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
    /// The peer is gone. Connect again, to its next life.
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
            | Self::Put { peer, .. } => Some(*peer),
            Self::Stopped => None,
        }
    }
}
