//! Who would send what to whom: see `plan --help`.

use std::process::ExitCode;

use kvferry_examples::{failure, plan};

fn main() -> ExitCode {
    failure::exit("plan", &plan::main(std::env::args_os()))
}
