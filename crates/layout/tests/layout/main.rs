//! Tests of `kvferry-layout` through its public API.
#![expect(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

mod build;
mod check;
mod codec;
mod config;
mod cut;
mod digest;
mod families;
mod golden;
mod interleaved;
mod models;
mod storage;
mod tables;
