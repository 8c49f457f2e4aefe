//! What can go wrong, divided by what the caller does next.

mod card;
mod connect;
mod request;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use kvferry_layout::LayoutError;
use kvferry_match::Side;
use kvferry_wire::{OpenError, RegionError};

pub use card::{CardError, InstanceCardError};
pub use connect::ConnectError;
pub use request::{PartError, Phase, PostError, PushError, RequestError, TransferError};

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
    /// Choose a time between a millisecond and the patience, or 200 ms if that is longer.
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
