//! The programs as people run them: real processes, over whatever UCX this machine has.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test they help")]

mod death;
mod meeting;
mod namespaces;
mod replay;
mod run;
mod transfer;
mod usage;
