//! Prints what this machine offers kvferry: the UCX that is found, each route tried from this process to itself, limits, and
//! what to do about what is missing. Exits with 1 if something is broken.

use std::process::ExitCode;

fn main() -> ExitCode {
    let report = kvferry_wire::report();
    print!("{report}");
    let broken = report.ucx.is_err() || report.routes.iter().any(|(_, tried)| tried.is_err());
    if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
