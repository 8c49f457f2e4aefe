//! All ranks of both instances on this machine: see `loopback --help`.

use std::process::ExitCode;

use kvferry_examples::{failure, loopback};

fn main() -> ExitCode {
    failure::exit("loopback", &loopback::main(std::env::args_os()))
}
