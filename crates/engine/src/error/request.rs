//! Requests that are not taken up, or do not end well.

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use kvferry_match::{BindError, TemplateError};
use kvferry_wire::{PutError, Status};

use super::PeerName;
use crate::message::{Refusal, RequestKey};

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
    /// The range of tokens ends before it begins.
    #[error("tokens {tokens:?} end before they begin")]
    Tokens {
        /// As given.
        tokens: Range<u64>,
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
    /// Post the send anew, in larger parts: its last ones cannot follow.
    #[error("a send has at most {parts_max} parts")]
    TooManyParts {
        /// The limit.
        parts_max: usize,
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
