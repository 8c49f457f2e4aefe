//! One rank of the sending instance: see `sender --help`.

use std::process::ExitCode;

use kvferry_examples::{quiet, sender};

fn main() -> ExitCode {
    quiet::without_ucx_messages();
    sender::main(std::env::args_os())
}
