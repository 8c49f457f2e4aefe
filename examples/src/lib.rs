//! Shared parts of the example binaries: two instances move a request's cache and prove every byte.
//!
//! - What is moved: [`options`], [`models`], [`job`], and whether it can be: [`fit`].
//! - What the bytes are: [`pattern`], [`slots`], [`image`], [`fill`], [`check`].
//! - How ranks find each other: [`meet`], [`deadline`].
//! - What people and programs get to see: [`event`], [`voice`], [`progress`], [`show`], [`failure`],
//!   [`blame`].
//! - What runs: [`sender`] and [`receiver`], which share [`rank`] and [`watch`]; [`loopback`], with [`children`]; and for all
//!   of them [`available`], [`files`] and [`quiet`]. [`plan`] moves nothing: it says who would send what. [`replay`] moves many requests, with an
//!   allocator, and brings its own parts.
#![forbid(unsafe_code)]

pub mod available;
pub mod blame;
pub mod check;
pub mod children;
pub mod deadline;
pub mod event;
pub mod failure;
pub mod files;
pub mod fill;
pub mod fit;
pub mod image;
pub mod job;
pub mod loopback;
pub mod meet;
pub mod models;
pub mod options;
pub mod pattern;
pub mod plan;
pub mod progress;
pub mod quiet;
pub mod rank;
pub mod receiver;
pub mod replay;
pub mod sender;
pub mod show;
pub mod slots;
pub mod voice;
pub mod watch;
