//! One rank of the sending instance: see `sender --help`.

use std::process::ExitCode;

use kvferry_examples::{failure, sender};

fn main() -> ExitCode {
    failure::exit("sender", sender::main(std::env::args_os()))
}
