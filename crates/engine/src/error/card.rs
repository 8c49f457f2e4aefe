//! Cards that cannot be used.

use kvferry_layout::{DecodeError, LayoutError};

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
