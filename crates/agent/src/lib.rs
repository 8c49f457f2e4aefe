//! Named agents that move lists of addresses and notify each other, over `kvferry-wire`: the level below the engine, for
//! connectors that know addresses rather than page tables.
//!
//! An [`Agent`] has a name, registered memory and [metadata](Agent::metadata) that its peers load. A transfer pairs entries
//! of a prepared [`List`] of this side with entries of one of a remote agent, writes or reads, and may notify the remote agent
//! once the data is there. One that is told of by a [`Notification`] is there: nobody has to poll for it to be.
//!
//! - Nothing is moved unless every entry is inside of registered memory on both sides; the first that is not is named.
//! - A read is a pull where this side reaches the remote memory by itself, and else the remote agent is asked to push: its
//!   progress thread answers, whatever its owner does.
//! - A transfer that is [released](Transfer::release) while it is active is cancelled, and its memory is quiet when the call
//!   returns. Dropping one does the same without waiting.
//! - A remote agent that comes back under its name is another life, told by its epoch: what was prepared for the last is refused.
#![forbid(unsafe_code)]

mod agent;
mod control;
mod eager;
mod error;
mod exchange;
mod indices;
mod list;
mod memory;
mod message;
mod metadata;
mod notification;
mod options;
mod peer;
mod read;
#[cfg(test)]
mod reading;
mod remote;
mod serve;
mod shared;
mod telemetry;
mod transfer;

pub use agent::Agent;
pub use error::{ExchangeError, Failure, MakeError, MemoryError, PostError, ReleaseError, RemoteError, StartError};
pub use exchange::DEFAULT_PORT;
pub use indices::Indices;
pub use list::List;
pub use metadata::MetadataError;
pub use notification::Notification;
pub use options::AgentOptions;
pub use telemetry::Telemetry;
pub use transfer::{Operation, State, Transfer};

/// What of `kvferry-wire` is in this crate's signatures.
pub use kvferry_wire as wire;
