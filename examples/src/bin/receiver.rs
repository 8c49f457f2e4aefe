//! One rank of the receiving instance: see `receiver --help`.

use std::process::ExitCode;

use kvferry_examples::receiver;

fn main() -> ExitCode {
    receiver::main(std::env::args_os())
}
