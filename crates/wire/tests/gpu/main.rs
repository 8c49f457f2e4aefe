//! GPU memory of one process copied into that of another: every byte checked against an oracle of plain loops, on one GPU and
//! on two, with a target that dies. All of it needs a GPU: `ci/gpu-test`. What does not need much of one is run without, too:
//! see [`fake`].
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

mod child;
mod end;
mod fabric;
mod fake;
mod framework;
mod killed;
mod lists;
mod one_sided;
mod plan;
mod right;
