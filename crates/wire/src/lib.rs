//! Moves strided pieces of registered memory over UCX.
//!
//! A [`Context`] is one UCX. It registers memory as [`Region`]s, whose [`RegionCard`]s a peer imports. A [`Worker`] is a
//! progress thread: it connects to the addresses of other workers, sends them frames, and carries out transfers of
//! [`Part`]s, each of which ends in one [`Event`]. This crate knows addresses, lengths and strides; what they mean is its
//! caller's business.
//!
//! - Completed means visible: see [`Event::TransferDone`].
//! - Every local and remote range is checked before anything is posted, on every transport: over tcp and cma a peer's key
//!   protects nothing (read and measured in UCX 1.22).
//! - GPU memory is moved by one kernel a transfer, whatever the number of its pieces: see [`CudaOptions`].
//! - Peer error handling is always on: a peer that dies is an [`Event::EndpointFailed`].
#![deny(unsafe_code)]

mod address;
mod connection;
mod context;
mod copy;
mod cuda;
mod cursor;
mod delivery;
mod direct;
mod endpoint;
mod endpoints;
mod error;
mod event;
mod forked;
mod frame;
mod frames;
#[cfg(fuzzing)]
pub mod fuzzing;
mod helm;
mod inbox;
mod inflight;
mod list;
mod listener;
mod memory;
mod options;
mod permits;
mod pieces;
mod process;
mod progress;
mod raw;
mod region;
mod report;
mod route;
mod runs;
mod service;
mod share;
mod side;
mod sleepers;
mod stage;
mod sync;
mod transfer;
mod units;
mod worker;

pub use address::{AddressError, keys_agree};
pub use context::Context;
pub use cuda::driver::{CudaCode, CudaError, CudaOpenError, cuda_devices};
pub use cuda::event::CudaEvent;
pub use cuda::options::CudaOptions;
pub use endpoint::{EndpointId, Lane, RemoteRegion};
pub use error::{CommandError, OpenError, PutError, RegionError, TransferError};
pub use event::{Event, TransferId, TransferStats};
pub use frame::{FRAME_PAYLOAD_BYTES_MAX, Frame, FrameError, PROTOCOL_VERSION};
pub use inbox::message::Refusal;
pub use list::{List, ListError, Run};
pub use options::{ContextOptions, Pages};
pub use permits::{Permit, Permitted};
pub use pieces::{Dim, Piece, SlotPair};
pub use region::{MemoryKind, Region, RegionCard, RegionId};
pub use report::{Finding, Report, RouteTrial, TrialError, UcxFound, chain, report};
pub use route::{Route, RouteReason};
pub use side::{Extent, Side};
pub use transfer::{Part, Prepared};
pub use ucx_sys::{Status, Version};
pub use worker::{Worker, drive};
