//! One rank of the sending instance: see `sender --help`.

use std::process::ExitCode;

use kvferry_examples::sender;

fn main() -> ExitCode {
    sender::main(std::env::args_os())
}
