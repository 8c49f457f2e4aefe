//! What can go wrong, divided by what the caller does next.

use std::io;
use std::time::Duration;

use kvferry_wire::{
    CommandError, ListError, MemoryKind, OpenError, PutError, RegionError, RegionId, Run, TransferError,
};
use thiserror::Error;

use crate::message::Refused;
use crate::metadata::MetadataError;

/// The agent did not start. Nothing is left behind; fix the setup and start again.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// Give it a name of 1 to 4096 bytes.
    #[error("a name of {bytes} B")]
    Name {
        /// Length of the name.
        bytes: usize,
    },
    /// See the source.
    #[error("cannot start the worker")]
    Open(#[from] OpenError),
    /// The operating system refused randomness, or a thread.
    #[error("the system refuses")]
    System(#[source] io::Error),
    /// The address to listen at is taken or not of this machine.
    #[error("cannot listen for peers")]
    Listen(#[source] io::Error),
}

/// Memory was not registered, or not given back.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// See the source.
    #[error("cannot register")]
    Region(#[from] RegionError),
    /// The region was registered with another agent's context. Register it with this one's.
    #[error("the region of {bytes} B at {base:#x} belongs to another context")]
    OtherContext {
        /// First address.
        base: u64,
        /// Length.
        bytes: u64,
    },
    /// No such region is registered with the agent, or no more.
    #[error("{region:?} is not registered")]
    Unknown {
        /// Its name.
        region: RegionId,
    },
    /// Transfers that use the memory did not end in time. It takes part in nothing new, and is given back when they have ended:
    /// deregister it again to wait for that.
    #[error("{bytes} B at {base:#x} are still in use after {waited:.1?}")]
    Busy {
        /// First address.
        base: u64,
        /// Length.
        bytes: u64,
        /// How long they were waited for.
        waited: Duration,
    },
}

/// A remote agent was not added, or cannot be reached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// Ask the peer for its metadata again.
    #[error("cannot add a remote agent")]
    Metadata(#[from] MetadataError),
    /// Add its metadata first.
    #[error("no remote agent {name:?}")]
    Unknown {
        /// Its name.
        name: String,
    },
    /// The metadata that was added does not say where the agent is. Add some that does.
    #[error("the metadata of {name:?} has no address")]
    NoAddress {
        /// Its name.
        name: String,
    },
    /// The connection was lost. Ask the peer for its metadata, which may be another life of it, and add it.
    #[error("the connection to {name:?} has failed")]
    Disconnected {
        /// Its name.
        name: String,
    },
    /// The peer does not answer: it does not run, or cannot reach this side.
    #[error("{name:?} did not answer within {waited:.1?}")]
    Silent {
        /// Its name.
        name: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// See the source.
    #[error("cannot reach {name:?}")]
    Command {
        /// Its name.
        name: String,
        /// The wire's reason.
        source: CommandError,
    },
    /// Send less.
    #[error("a notification of {bytes} B is over the limit of {max} B")]
    NotificationTooLong {
        /// Length of the message.
        bytes: usize,
        /// The limit.
        max: usize,
    },
}

/// A list was not prepared, or a transfer not made. Nothing was sent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MakeError {
    /// An entry of a local list is in no registered memory of the kind. Register it.
    #[error("entry {index}: {} B at {:#x} are in no registered {kind:?} memory", run.bytes, run.address)]
    Local {
        /// The first such entry.
        index: usize,
        /// The entry.
        run: Run,
        /// Where it is said to be.
        kind: MemoryKind,
    },
    /// An entry of a remote list is in no memory of the kind that the agent's metadata tells of. Ask it for newer metadata.
    #[error("entry {index}: {} B at {:#x} are in no {kind:?} memory that {name:?} has told of", run.bytes, run.address)]
    Remote {
        /// The first such entry.
        index: usize,
        /// The entry.
        run: Run,
        /// Where it is said to be.
        kind: MemoryKind,
        /// The remote agent.
        name: String,
    },
    /// See the source.
    #[error("cannot prepare for the remote agent")]
    Peer(#[from] RemoteError),
    /// The entries cannot be paired: other counts or lengths, or an index past the end.
    #[error("cannot pair the entries")]
    Pair(#[from] ListError),
    /// The first list has to be local, the second remote.
    #[error("the {} list is on the wrong side", if *local { "local" } else { "remote" })]
    Side {
        /// Which of the two.
        local: bool,
    },
    /// Memory of the list was deregistered since. Prepare it again.
    #[error("memory of the list is not registered any more")]
    Deregistered,
    /// The list was prepared for an earlier life of the agent, or for a connection that was lost. Prepare it again.
    #[error("the list was prepared for an earlier connection to {name:?}")]
    Stale {
        /// The remote agent.
        name: String,
    },
    /// The list belongs to another agent of this process.
    #[error("the list belongs to another agent")]
    OtherAgent,
}

/// A transfer was not posted. Nothing was sent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PostError {
    /// Wait for it to end, or make another.
    #[error("the transfer is active")]
    Active,
    /// Memory of the transfer was deregistered since. Make it anew.
    #[error("memory of the transfer is not registered any more")]
    Deregistered,
    /// It was made for an earlier life of the agent, or for a connection that was lost. Prepare and make it anew.
    #[error("the transfer was made for an earlier connection to {name:?}")]
    Stale {
        /// The remote agent.
        name: String,
    },
    /// Send less.
    #[error("a notification of {bytes} B is over the limit of {max} B")]
    NotificationTooLong {
        /// Length of the message.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// See the source.
    #[error("cannot post")]
    Transfer(#[from] TransferError),
}

/// How a posted transfer failed. Treat every byte of its destination as unwritten.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Failure {
    /// This side gave it up.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// It took longer than its deadline.
    #[error("the transfer took longer than {allowed:.1?}")]
    Deadline {
        /// The deadline.
        allowed: Duration,
    },
    /// The connection was lost. Ask the peer for its metadata, which may be another life of it.
    #[error("the connection to {name:?} has failed")]
    Disconnected {
        /// The remote agent.
        name: String,
    },
    /// The peer was asked to push and has shown no sign of life since.
    #[error("{name:?} was silent for {waited:.1?}")]
    Silent {
        /// The remote agent.
        name: String,
        /// For how long.
        waited: Duration,
    },
    /// As much as the peer takes is asked of it already. Post it again when other reads have ended.
    #[error("too much is asked of {name:?} at a time")]
    Busy {
        /// The remote agent.
        name: String,
    },
    /// The peer would not push: its memory is not registered any more.
    #[error("{name:?} refuses: {why}")]
    Refused {
        /// The remote agent.
        name: String,
        /// Its reason.
        why: &'static str,
    },
    /// See the source.
    #[error("the wire failed")]
    Wire(#[from] PutError),
}

impl Failure {
    pub(crate) fn refused(name: &str, why: Refused) -> Self {
        let why = match why {
            Refused::Cancelled => return Self::Cancelled,
            Refused::NoRegion => "its memory is not registered any more",
            Refused::Bad => "the read is not in its memory",
            Refused::Busy => return Self::Busy { name: name.to_owned() },
            Refused::Failed => "its write failed",
        };
        Self::Refused { name: name.to_owned(), why }
    }
}

/// A transfer that was released is not quiet yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// Bytes of it may still be moved. Leave its memory alone and release it again, or let it be dropped: then the agent keeps
    /// the memory registered until it is quiet.
    #[error("the transfer is not quiet after {waited:.1?}")]
    NotQuiet {
        /// How long it was waited for.
        waited: Duration,
    },
}

/// Metadata was not exchanged with a peer over TCP. Try again.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// The peer cannot be reached, or the connection broke.
    #[error("cannot talk to the peer")]
    Network(#[from] io::Error),
    /// What is there does not speak this protocol.
    #[error("the peer does not listen for metadata of agents")]
    Protocol,
    /// The peer is another agent than was asked for.
    #[error("{found:?} listens there, not {wanted:?}")]
    Other {
        /// The agent asked for.
        wanted: String,
        /// The agent there.
        found: String,
    },
    /// The peer, or this side, did not take the metadata.
    #[error("the metadata was not taken")]
    Remote(#[from] RemoteError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_has_too_much_to_do_can_be_asked_again() {
        assert_eq!(Failure::refused("b", Refused::Busy), Failure::Busy { name: "b".to_owned() });
    }
}
