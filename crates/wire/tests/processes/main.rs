//! A peer in a process of its own: killed, stopped, continued, restarted, closed and left alone, over every route and with
//! UCX's own choice of transports as well as tcp.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

#[allow(dead_code, reason = "what `tests/flat` needs of it")]
mod child;
mod closed;
#[allow(dead_code, reason = "as above")]
mod end;
mod frames;
mod idle;
mod killed;
mod stopped;
