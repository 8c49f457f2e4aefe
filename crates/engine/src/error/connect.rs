//! Two instances that do not come together.

use std::time::Duration;

use kvferry_match::{MatchError, TemplateError};
use kvferry_wire::{CommandError, PutError, Status, Version};

use super::PeerName;

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
