//! A trace of requests between two instances: see `replay --help`.

use std::process::ExitCode;

use kvferry_examples::{failure, quiet, replay};

fn main() -> ExitCode {
    quiet::without_ucx_messages();
    failure::exit("replay", &replay::main(std::env::args_os()))
}
