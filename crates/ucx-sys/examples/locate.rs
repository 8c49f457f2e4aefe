//! Prints which UCX `ucx_sys::load` finds: version, file, how it was found. Without one, says what was tried and exits
//! with 1.

use std::process::ExitCode;

fn main() -> ExitCode {
    match ucx_sys::load() {
        Ok(ucx) => {
            println!("UCX {} {} ({})", ucx.version(), ucx.path().display(), ucx.origin());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
