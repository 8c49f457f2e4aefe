#![doc = include_str!("../../../README.md")]
#![forbid(unsafe_code)]

mod card;
mod completion;
mod control;
mod core;
mod engine;
mod error;
mod instance;
mod message;
mod options;
mod peer;
mod quarantine;
mod quiet;
mod ready;
mod report;
mod shared;
mod sums;
mod survey;
pub mod telemetry;
mod transfer;
mod verify;
mod workers;

pub use core::PartSpec;
pub use engine::{Engine, Link};
pub use error::{
    CardError, ConnectError, InstanceCardError, OptionsError, PartError, PeerName, Phase, PostError, PublishError,
    PushError, RequestError, StartError, TransferError,
};
pub use instance::InstanceCard;
pub use message::{Refusal, RequestKey};
pub use options::EngineOptions;
pub use quarantine::{Quarantine, QuarantineReason};
pub use quiet::{NotQuiet, Quiet};
pub use ready::{Ready, Signal};
pub use report::{Received, Sent, Times};
pub use transfer::{Outcome, Receive, Send, Transfer};
