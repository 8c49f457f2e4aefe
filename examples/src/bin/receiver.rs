//! One rank of the receiving instance: see `receiver --help`.

use std::process::ExitCode;

use kvferry_examples::{failure, receiver};

fn main() -> ExitCode {
    failure::exit("receiver", receiver::main(std::env::args_os()))
}
