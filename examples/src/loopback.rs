//! All ranks of both instances on this machine, as child processes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::children::{ChildError, Children};
use crate::deadline::Deadline;
use crate::event::{Event, Phase};
use crate::failure::{Failure, SystemError};
use crate::job::Job;
use crate::meet::tcp::Host;
use crate::meet::{Member, Side};
use crate::options::{LoopbackOptions, Memory, parse};
use crate::progress::Bars;
use crate::show::Summary;
use crate::voice::print;
use crate::{available, fit, quiet};

/// Silence of all ranks past their own deadline, before they count as stuck.
const SILENCE_GRACE: Duration = Duration::from_secs(15);

/// Runs the program.
///
/// # Errors
///
/// [`Failure`] with the line and exit code to end with.
pub fn main(args: impl IntoIterator<Item = OsString>) -> Result<(), Failure> {
    let Some(options) = parse::<LoopbackOptions>(args)? else {
        return Ok(());
    };
    let outcome = run(&options);
    if let (true, Err(failure)) = (options.moving.json, &outcome) {
        print(&json!({ "outcome": "failed", "error": failure.line() }).to_string());
    }
    outcome
}

fn run(options: &LoopbackOptions) -> Result<(), Failure> {
    let job = Job::new(&options.job).map_err(Failure::usage)?;
    // Cuts that do not fit the model or each other are noticed before anything starts.
    let tables = job.tables().map_err(Failure::usage)?;
    fit::check(&job, &tables, None).map_err(Failure::usage)?;
    if [Side::Sender, Side::Receiver].into_iter().all(|side| options.memory(side) == Memory::Host) {
        available::check(tables.pool_bytes()).map_err(Failure::failed)?;
    }

    let host = Host::bind("127.0.0.1:0").map_err(Failure::failed)?;
    let address = host.address().to_string();
    let programs = std::env::current_exe().map_err(SystemError::OwnPath).map_err(Failure::failed)?.with_file_name("");
    let commands = job.attendance().members().map(|member| (member, command(&programs, member, options, &address)));
    let commands = commands.collect();

    let (attendance, terms) = (job.attendance(), job.terms());
    let deadline = tables.meeting_deadline(options.moving.deadline());
    let serve = {
        let terms = terms.clone();
        move || host.serve(attendance, terms, Deadline::after(deadline))
    };
    // Its ranks are told what it finds, and tell it here, so that nobody needs to wait for the thread.
    thread::Builder::new().name("host".into()).spawn(serve).map_err(SystemError::Thread).map_err(Failure::failed)?;

    let mut bars = Bars::new();
    let mut summary = Summary::default();
    Children::run(commands, deadline + SILENCE_GRACE, |member, event| match (event, member.side) {
        // Both sides report a transfer. Receivers know how much it will be, senders how it went.
        (Event::Progress { phase: Phase::Move, .. }, Side::Sender) | (Event::Pair(_), Side::Receiver) => {}
        (Event::Progress { phase, done_bytes, total_bytes }, _) => bars.update(member, phase, done_bytes, total_bytes),
        (event, _) => summary.add(member, event),
    })
    .map_err(failure)?;
    bars.clear();
    summary.sort();

    let receivers = (0..attendance.receivers).map(|rank| Member { side: Side::Receiver, rank });
    if let Some(member) = receivers.into_iter().find(|member| !summary.has_verified(*member)) {
        return Err(Failure::Failed(format!("{member} ended without a verdict")));
    }
    if options.moving.json {
        print(&summary.json(&terms, "verified").to_string());
    } else {
        print(&summary.text());
        print("verified");
    }
    Ok(())
}

/// The command line of one rank.
fn command(programs: &Path, member: Member, options: &LoopbackOptions, address: &str) -> Command {
    let program: PathBuf = programs.join(member.side.to_string());
    let mut command = Command::new(program);
    command.args(options.job.to_args());
    command.arg(format!("--rank={}", member.rank)).arg(format!("--meet={address}"));
    command.arg(format!("--deadline-s={}", options.moving.deadline_s));
    command.args(["--join", "--stop-on-eof", "--json"]);
    // A rank that dies would leave UCX's warnings as its last words.
    quiet::silence(&mut command);
    if let Some(transport) = &options.moving.transport {
        command.arg(format!("--transport={transport}"));
    }
    if let Some(route) = options.moving.route {
        command.arg(format!("--route={route}"));
    }
    if options.memory(member.side) == Memory::Cuda {
        command.arg("--memory=cuda");
    }
    if options.flip_byte && member == Member::HOST {
        command.arg("--flip-byte");
    }
    command
}

/// A rank's own failure keeps its exit code.
fn failure(error: ChildError) -> Failure {
    match error {
        ChildError::Failed { exit_code: 2, .. } => Failure::usage(error),
        error => Failure::failed(error),
    }
}
