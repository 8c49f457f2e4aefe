//! A peer in a process of its own: killed, stopped, continued, restarted, closed and left alone, over every route and with
//! UCX's own choice of transports as well as tcp.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

mod child;
mod closed;
mod end;
mod frames;
mod idle;
mod killed;
mod memory;
mod stopped;
