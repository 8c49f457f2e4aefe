//! Keeps UCX's own messages away, so that what goes wrong is one line.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// UCX's variable for what it logs.
const VARIABLE: &str = "UCX_LOG_LEVEL";

/// Starts this program again, as the same process, with UCX's messages off; returns if that is done, or if whoever
/// started it has said what UCX is to log.
///
/// UCX reads its variable from this process's environment, which safe code cannot change, but which it can start with.
pub fn without_ucx_messages() {
    if env::var_os(VARIABLE).is_some() {
        return;
    }
    let Ok(program) = env::current_exe() else { return };
    let mut command = Command::new(program);
    let mut args = env::args_os();
    if let Some(name) = args.next() {
        command.arg0(name);
    }
    silence(&mut command);
    // Comes back only if it failed. UCX's messages are then beside this program's, which is no reason to do nothing.
    let _ = command.args(args).exec();
}

/// Starts `command` with UCX's messages off, unless whoever started this program has said what UCX is to log.
pub fn silence(command: &mut Command) {
    if env::var_os(VARIABLE).is_none() {
        command.env(VARIABLE, "fatal");
    }
}
