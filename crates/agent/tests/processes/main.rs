//! An agent and others in processes of their own: the caller's own memory, kills, freezes, cancels, and what is left behind.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod child;
mod end;
mod faults;
mod quiet;
mod usage;
