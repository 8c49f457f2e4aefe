//! What can go wrong, divided by what the caller does next.

use std::time::Duration;

use thiserror::Error;
use ucx_sys::{LoadError, Status};

use crate::address::AddressError;
use crate::cuda::driver::{CudaError, CudaOpenError};
use crate::inbox::message::Refusal;
use crate::route::Route;

/// UCX could not be opened or set up. Nothing is left behind; fix the setup and open again.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No usable UCX was found. Install one, or point `KVFERRY_UCX_DIR` at its directory.
    #[error("no usable UCX")]
    Load(#[from] LoadError),
    /// A setting was refused: for the transport list, one that this UCX does not know.
    #[error("UCX refuses {key}={value:?}")]
    Setting {
        /// Name without the `UCX_` in front.
        key: &'static str,
        /// The value as given.
        value: String,
        /// UCX's reason.
        source: Status,
    },
    /// None of the transports asked for can be used on this machine. `tcp` can everywhere.
    #[error("UCX cannot use the transports {list:?} here")]
    Transports {
        /// As given, or as in `UCX_TLS`.
        list: String,
        /// UCX's reason.
        source: Status,
    },
    /// UCX refused to start.
    #[error("UCX does not start in {call}")]
    Start {
        /// The call that failed.
        call: &'static str,
        /// UCX's reason.
        source: Status,
    },
    /// The options ask for a GPU, and there is none that can be used. Mend the setup, or ask for none.
    #[error("no GPU")]
    Cuda(#[from] CudaOpenError),
    /// There is no memory for the inbox. Ask for a smaller one.
    #[error("cannot set up the inbox")]
    Inbox(#[from] RegionError),
    /// This process may not run on a processor that the options name.
    #[error("cannot run on processor {cpu}")]
    Processor {
        /// Its number.
        cpu: usize,
    },
    /// This process was forked off one that had opened UCX, which may be in the middle of something here for ever. Start processes by
    /// executing them (Python: by multiprocessing's "spawn"), or fork before there is a [`Context`](crate::Context).
    #[error("this process was forked off one that had opened UCX")]
    Forked,
    /// The operating system refused a thread or a file descriptor.
    #[error("cannot start the progress thread")]
    System(#[from] std::io::Error),
}

/// Memory could not be registered, or an access falls outside of it. Nothing was read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegionError {
    /// A region has at least one byte.
    #[error("a region of 0 B cannot be registered")]
    Empty,
    /// The machine has not got so much memory, or the address range wraps. Ask for less.
    #[error("cannot allocate {bytes} B")]
    Allocation {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The system has not so many huge pages. Set more aside (`vm.nr_hugepages`), or take normal ones.
    #[error("no {bytes} B of huge pages")]
    HugePages {
        /// Bytes asked for.
        bytes: u64,
    },
    /// UCX refused the memory: look at the memory lock limit and the transports.
    #[error("UCX does not register {bytes} B at {base:#x}")]
    Register {
        /// First address.
        base: u64,
        /// Length.
        bytes: u64,
        /// UCX's reason.
        source: Status,
    },
    /// The context was opened without a GPU: set [`ContextOptions::cuda`](crate::ContextOptions::cuda).
    #[error("the context has no GPU")]
    NoGpu,
    /// The range is not memory of the context's GPU.
    #[error("{bytes} B at {base:#x} are not memory of CUDA device {device}")]
    NotOfDevice {
        /// First address.
        base: u64,
        /// Length.
        bytes: u64,
        /// The context's GPU.
        device: u32,
    },
    /// The driver refused, for want of memory or because the GPU's context is lost.
    #[error("the GPU refuses")]
    Cuda(#[from] CudaError),
    /// The caller's range is wrong.
    #[error("{bytes} B at offset {offset} are outside a region of {region_bytes} B")]
    Outside {
        /// First byte, from the start of the region.
        offset: u64,
        /// Length.
        bytes: u64,
        /// Length of the region.
        region_bytes: u64,
    },
}

/// A command was not carried out.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The worker is shutting down. Start another.
    #[error("the worker has stopped")]
    Stopped,
    /// The progress thread did not answer: it is stuck inside UCX. Give the worker up.
    #[error("the progress thread did not answer within {0:.1?}")]
    Stuck(Duration),
    /// The endpoint was closed or has failed. Connect again.
    #[error("no such endpoint")]
    NoEndpoint,
    /// See the source.
    #[error("cannot connect to the address")]
    Address(#[from] AddressError),
    /// UCX could not make sense of the peer's address: another build of UCX, or no common transport.
    #[error("UCX cannot connect to the address")]
    Connect {
        /// UCX's reason.
        source: Status,
    },
    /// UCX could not make sense of the peer's memory key: another build of UCX, or no common transport.
    #[error("UCX cannot unpack the memory key")]
    Key {
        /// UCX's reason.
        source: Status,
    },
    /// The card is not of the process that the endpoint leads to: of an earlier life of it, or of another peer. Ask the
    /// peer for its cards.
    #[error("the region of {bytes} B at {base:#x} does not belong to the peer of the endpoint")]
    Foreign {
        /// First address, as claimed.
        base: u64,
        /// Length, as claimed.
        bytes: u64,
    },
    /// Send less in one frame.
    #[error("a payload of {bytes} B is over the limit")]
    PayloadTooLong {
        /// Bytes of the payload.
        bytes: usize,
    },
    /// The claimed address range of the peer's memory is empty or wraps.
    #[error("a region of {bytes} B at {base:#x} cannot be")]
    Range {
        /// First address.
        base: u64,
        /// Length.
        bytes: u64,
    },
}

/// A transfer was refused before anything of it was posted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// A piece has no bytes, an empty loop, or an extent past 64 bits. Mend the plan.
    #[error("part {part}, piece {piece}: not a piece")]
    BadPiece {
        /// Index of the part.
        part: usize,
        /// Index of the piece in the part.
        piece: usize,
    },
    /// Bytes or runs past 64 bits. Split the transfer.
    #[error("part {part}: more than 64 bits of bytes")]
    TooLarge {
        /// Index of the part.
        part: usize,
    },
    /// A local slot ends outside its region. Mend the plan or the table.
    #[error("part {part}, pair {pair}: local slot {slot} ends outside its region of {region_bytes} B")]
    OutsideLocal {
        /// Index of the part.
        part: usize,
        /// Index of the pair in the part.
        pair: usize,
        /// The slot.
        slot: u32,
        /// Length of the region.
        region_bytes: u64,
    },
    /// A remote slot ends outside its region. Mend the plan, or refuse the peer's table.
    #[error("part {part}, pair {pair}: remote slot {slot} ends outside its region of {region_bytes} B")]
    OutsideRemote {
        /// Index of the part.
        part: usize,
        /// Index of the pair in the part.
        pair: usize,
        /// The slot.
        slot: u32,
        /// Length of the region.
        region_bytes: u64,
    },
    /// Other than as many sets of pairs as the prepared parts take. Name one for each.
    #[error("{sets} sets of pairs, and parts that take {prepared}")]
    Sets {
        /// Sets that were given.
        sets: usize,
        /// Sets that the parts take.
        prepared: usize,
    },
    /// The remote region was imported on another endpoint. Import it on this one.
    #[error("part {part}: the remote region belongs to another endpoint")]
    OtherEndpoint {
        /// Index of the part.
        part: usize,
    },
    /// The local region was registered with another context. Register it with this worker's.
    #[error("part {part}: the local region belongs to another context")]
    OtherContext {
        /// Index of the part.
        part: usize,
    },
    /// See the source.
    #[error("the transfer was not queued")]
    Command(#[from] CommandError),
}

/// A posted transfer failed. Treat every byte of its destination as unwritten, and, if
/// [`may_still_arrive`](Self::may_still_arrive) says so, as still exposed to a late write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PutError {
    /// [`Worker::cancel`](crate::Worker::cancel): some of the bytes may have been written, none of the others is any more.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// The peer is gone or cannot answer any more, or this side closed the endpoint. Connect again.
    #[error("the endpoint failed")]
    Endpoint {
        /// UCX's reason.
        source: Status,
        /// Nothing more of the transfer is written: it had not begun, or this process had copied it itself, and copies no more.
        settled: bool,
    },
    /// A write failed: the peer's memory is not there, or the transport lost it.
    #[error("a put failed")]
    Put {
        /// UCX's reason for the first that failed.
        source: Status,
    },
    /// A read failed: the peer's memory is not there, or the transport lost it.
    #[error("a get failed")]
    Get {
        /// UCX's reason for the first that failed.
        source: Status,
    },
    /// The peer has undone the registration of this memory. Ask it for its cards.
    #[error("the target region of {bytes} B at {base:#x} is not registered any more")]
    Withdrawn {
        /// First address, in the peer.
        base: u64,
        /// Length.
        bytes: u64,
    },
    /// The peer did not take the transfer: nothing of it is written any more, and nothing was but what it had taken in before it
    /// [revoked](Refusal::Revoked) the transfer or its GPU failed.
    #[error("the peer refused the transfer")]
    Refused {
        /// The peer's reason.
        #[source]
        refusal: Refusal,
    },
    /// The options ask for a route that this transfer cannot take, or a pull has none: nothing was written.
    #[error("the route {route} cannot be taken to this target")]
    RouteUnavailable {
        /// The route.
        route: Route,
    },
    /// The GPU did not copy, or not all. If its context is lost, so is every transfer of this process.
    #[error("the GPU did not copy")]
    Cuda {
        /// The driver's reason.
        source: CudaError,
    },
    /// There is no memory to gather in. Nothing more is written.
    #[error("no memory to gather in")]
    NoMemory,
    /// The writes left, but nothing proves that they arrived.
    #[error("the flush behind the puts failed")]
    Flush {
        /// UCX's reason.
        source: Status,
    },
}

impl PutError {
    /// Whether bytes of the transfer may still be written after its end: see [`Worker`](crate::Worker) for until when.
    #[must_use]
    pub fn may_still_arrive(&self) -> bool {
        match self {
            Self::Endpoint { settled, .. } => !settled,
            Self::Put { .. } | Self::Cuda { .. } | Self::Flush { .. } => true,
            Self::Cancelled
            | Self::Get { .. }
            | Self::Withdrawn { .. }
            | Self::Refused { .. }
            | Self::RouteUnavailable { .. }
            | Self::NoMemory => false,
        }
    }
}
