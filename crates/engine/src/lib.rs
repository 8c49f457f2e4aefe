#![doc = include_str!("../../../README.md")]
#![forbid(unsafe_code)]

mod card;
mod core;
mod engine;
mod error;
mod message;
mod peer;
mod report;
mod survey;
pub mod telemetry;
mod transfer;

pub use engine::{Engine, EngineOptions, Link};
pub use error::{CardError, ConnectError, PeerName, PostError, PublishError, RequestError, StartError, TransferError};
pub use message::{Refusal, RequestKey};
pub use report::{Received, Sent};
pub use transfer::{Outcome, Receive, Send, Transfer};
