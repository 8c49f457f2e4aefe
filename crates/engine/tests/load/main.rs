//! Two instances of four ranks each, every rank a process: prefill cut pp2tp2, decode tp4, so that each request involves all
//! eight and each rank has two peers. Ranks are killed, started anew, frozen and continued under the load, and requests are
//! cancelled. Nothing is lost, nothing is stuck, memory stays flat.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod load;
mod member;
mod pool;
mod random;
mod serve;
