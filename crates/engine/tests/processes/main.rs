//! Engines in processes of their own: killed, stopped, continued and restarted in the middle of requests, over shared memory
//! and tcp, with slots that are used again the moment that they are quiet and watched for late writes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cancel;
mod child;
mod connecting;
mod killed;
mod points;
mod rank;
mod restarted;
mod stopped;
