//! Replays a trace of requests between two instances.
//!
//! - What is replayed: [`options`], [`trace`], [`made`], [`setup`].
//! - What is decided: [`pool`], [`dispatch`], which move nothing and read no clock.
//! - What is done: [`content`], [`ranks`], [`flights`].
//! - What people and programs get to see: [`record`], [`report`], [`timeline`], [`exporter`].

pub mod content;
pub mod dispatch;
pub mod exporter;
pub mod flights;
pub mod made;
pub mod options;
pub mod pool;
pub mod ranks;
pub mod record;
pub mod report;
pub mod setup;
pub mod timeline;
pub mod trace;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use serde_json::json;

use crate::available;
use crate::failure::{Failure, one_line};
use crate::meet::{Member, Side};
use crate::options::parse;
use crate::replay::content::ContentError;
use crate::replay::dispatch::{Dispatcher, Verdict};
use crate::replay::flights::{Replayed, placed, replay};
use crate::replay::options::ReplayOptions;
use crate::replay::ranks::Rank;
use crate::replay::record::Figures;
use crate::replay::report::{Preface, Report};
use crate::replay::setup::Setup;
use crate::replay::trace::{Trace, TraceError};
use crate::voice::print;

/// Requests of a made trace, if nothing else is said.
const MADE_REQUESTS: u32 = 200;

/// Why a replay does not begin or end well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The file is no trace.
    #[error("--trace")]
    Trace(#[from] TraceError),
    /// A block that the decode instance held at the end is not what it was.
    #[error("at the end, {member}")]
    Audit {
        /// The rank.
        member: Member,
        /// What is wrong.
        source: ContentError,
    },
    /// The picture cannot be written.
    #[error("--svg {}", path.display())]
    Svg {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Runs the program.
///
/// # Errors
///
/// [`Failure`] with the line and exit code to end with.
pub fn main(args: impl IntoIterator<Item = OsString>) -> Result<(), Failure> {
    let Some(options) = parse::<ReplayOptions>(args)? else {
        return Ok(());
    };
    if std::env::var_os("RUST_LOG").is_some() {
        let logs = tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env());
        let spans = tracing_subscriber::fmt::format::FmtSpan::CLOSE;
        logs.with_span_events(spans).with_writer(io::stderr).init();
    }
    let outcome = run(&options);
    if let (true, Err((failure, false))) = (options.moving.json, &outcome) {
        print(&json!({ "outcome": "failed", "error": failure.line() }).to_string());
    }
    outcome.map_err(|(failure, _)| failure)
}

/// Replays. A failure says whether the report is printed already.
fn run(options: &ReplayOptions) -> Result<(), (Failure, bool)> {
    let unreported = |failure: Failure| (failure, false);
    let (setup, trace) = prepare(options).map_err(unreported)?;
    let preface = Preface::new(options, &setup, &trace);
    if !options.moving.json {
        print(&preface.text());
    }
    let (report, failed) = carry_out(options, &setup, &trace, &preface).map_err(unreported)?;
    let outcome = if failed.is_some() || !report.is_complete() { "failed" } else { "done" };
    if options.moving.json {
        print(&report.json(&preface, outcome).to_string());
    } else {
        print(&report.text());
    }
    match failed {
        Some((request, line)) => {
            let line =
                format!("{} of {} requests failed, first {request}: {line}", report.account.failed, report.requests);
            Err((Failure::Failed(one_line(&line)), true))
        }
        None if report.is_complete() => Ok(()),
        None => Err((Failure::Failed("not every request is accounted for".to_owned()), true)),
    }
}

/// Everything that follows from the options, and the trace.
fn prepare(options: &ReplayOptions) -> Result<(Setup, Trace), Failure> {
    let setup = Setup::new(options).map_err(Failure::usage)?;
    let requests_max = options.requests.map(|requests| usize::try_from(requests).unwrap_or(usize::MAX));
    let trace = match &options.trace {
        Some(path) => Trace::read(path, requests_max.unwrap_or(usize::MAX)),
        None => Ok(made::trace(
            options.seed,
            usize::try_from(options.requests.unwrap_or(MADE_REQUESTS)).unwrap_or(usize::MAX),
        )),
    };
    Ok((setup, trace.map_err(ReplayError::Trace).map_err(Failure::usage)?))
}

/// Replays, draws and compares. Returns the report, and the first request that failed with the reason.
fn carry_out(
    options: &ReplayOptions,
    setup: &Setup,
    trace: &Trace,
    preface: &Preface,
) -> Result<(Report, Option<(usize, String)>), Failure> {
    available::check(setup.pool_bytes()).map_err(Failure::failed)?;
    // Before the engines, which ask for their counters when they start.
    if let Some(address) = options.metrics {
        let address = exporter::serve(address).map_err(Failure::failed)?;
        eprintln!("metrics at http://{address}/metrics");
    }
    let ranks = ranks::start(setup, &options.moving, options.seed).map_err(Failure::failed)?;
    let Replayed { dispatcher, records, elapsed } = replay(options, setup, trace, &ranks).map_err(Failure::failed)?;
    if let Some(path) = &options.svg {
        let (from, to) = (&setup.prefill.cut, &setup.decode.cut);
        let title = format!("{} requests, {} from {from} to {to}", trace.requests.len(), options.model);
        let picture = timeline::draw(&records, elapsed, &title, &preface.trace);
        fs::write(path, picture)
            .map_err(|source| ReplayError::Svg { path: path.clone(), source })
            .map_err(Failure::failed)?;
    }
    let audited_blocks =
        options.verify.then(|| audit(setup, &dispatcher, &ranks)).transpose().map_err(Failure::failed)?;
    let failed = dispatcher.verdicts().iter().enumerate().find_map(|(request, verdict)| match verdict {
        Some(Verdict::Failed { line }) => Some((request, line.clone())),
        _ => None,
    });
    let report = Report {
        account: dispatcher.account(),
        requests: trace.requests.len(),
        ucx: ranks[0].ucx_version(),
        figures: Figures::of(&records, elapsed),
        quarantined: dispatcher.quarantined(),
        audited_blocks,
    };
    Ok((report, failed))
}

/// Compares every block that the decode instance holds, at each of its ranks, with what it should be: nobody has written
/// over it since it was compared as it arrived. Returns how many there are.
fn audit(setup: &Setup, dispatcher: &Dispatcher, ranks: &[Arc<Rank>]) -> Result<usize, ReplayError> {
    let held: Vec<_> = dispatcher.decode().held().map(|(block, frame)| placed(setup, block, frame)).collect();
    thread::scope(|scope| {
        let receivers = ranks.iter().filter(|rank| rank.member.side == Side::Receiver);
        let checks: Vec<_> = receivers.map(|rank| (rank.member, scope.spawn(|| rank.check(&held)))).collect();
        for (member, check) in checks {
            let checked = check.join().expect("checking does not panic");
            checked.map_err(|source| ReplayError::Audit { member, source })?;
        }
        Ok(held.len())
    })
}
