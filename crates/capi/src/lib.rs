//! The C interface: the engine's level, and the agent's. `include/kvferry.h` is made of this crate, its comments included; a
//! test keeps the two alike.
//!
//! # The contract
//!
//! What C promises, on which every unsafe block here relies:
//!
//! - A handle is one that a function of this library has written, and has not been freed. `NULL` is refused, and freeing it
//!   does nothing. Handles may be used by any thread, by several at a time; but what is freed, nobody uses meanwhile.
//! - Text is UTF-8 that ends in a NUL. An array has the length that is given with it; one of length 0 may be `NULL`. Both have to
//!   last for the call only. What a function writes to is writable.
//! - Memory that is registered stays until the library says that it is released.
//!
//! References and boxes in the signatures are C's pointers, under this contract; `Option` makes `NULL` one of their values.
//!
//! What the library promises: handles know the process that made them (`own.rs`); no panic leaves it, it is [`Status::Panic`](status::Status); every call that waits ends at its time;
//! every error has a message, [`status::kvf_last_error`], of the thread that got it.
#![deny(unsafe_code)]

pub mod agent;
pub mod bytes;
pub mod card;
pub mod engine;
pub mod list;
mod own;
pub mod plan;
pub mod region;
pub mod status;
pub mod table;
pub mod telemetry;
pub mod transfer;

use std::ffi::c_char;

use crate::bytes::Bytes;
use crate::status::{Status, guard, out};

/// Grows by one whenever a program that was compiled with an older header would not work any more.
pub const KVF_ABI_VERSION: u32 = 1;

/// The `KVF_ABI_VERSION` of the library. A program compares it with its header's before anything else.
#[unsafe(no_mangle)]
#[allow(unsafe_code, reason = "the name is this library's: nothing else begins with kvf_")]
pub extern "C" fn kvf_abi_version() -> u32 {
    KVF_ABI_VERSION
}

/// Version of the library, as text. Lasts for ever.
#[unsafe(no_mangle)]
#[allow(unsafe_code, reason = "the name is this library's: nothing else begins with kvf_")]
pub extern "C" fn kvf_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Looks at this machine, for people: which UCX there is, which routes work, what could be better. Takes up to a few seconds.
#[unsafe(no_mangle)]
#[allow(unsafe_code, reason = "the name is this library's: nothing else begins with kvf_")]
pub extern "C" fn kvf_doctor(report: Option<&mut std::mem::MaybeUninit<Bytes>>) -> Status {
    guard(|| {
        out(report)?.write(Bytes::text(kvferry_wire::report().to_string()));
        Ok(())
    })
}
