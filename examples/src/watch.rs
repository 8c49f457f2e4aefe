//! Ends this process when whoever started it is gone.

use std::io::{self, Read};
use std::thread;

use rustix::process::{Signal, getpid, kill_process};

use crate::failure::SystemError;

/// Ends this process at once when its standard input ends.
///
/// A parent that holds the other end of a pipe needs to do nothing for it, not even live.
///
/// # Errors
///
/// [`SystemError::Thread`].
pub fn end_with_standard_input() -> Result<(), SystemError> {
    let wait = || {
        let mut input = io::stdin().lock();
        while let Ok(1..) = input.read(&mut [0; 64]) {}
        // Not by a return from main or an exit, which would wait for, or trip over, threads that are in a transfer.
        if kill_process(getpid(), Signal::KILL).is_err() {
            std::process::abort();
        }
    };
    thread::Builder::new().name("watch".into()).spawn(wait).map(|_| ()).map_err(SystemError::Thread)
}
