//! One rank of the receiving instance: see `receiver --help`.

use std::process::ExitCode;

use kvferry_examples::{quiet, receiver};

fn main() -> ExitCode {
    quiet::without_ucx_messages();
    receiver::main(std::env::args_os())
}
