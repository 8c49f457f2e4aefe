//! What this machine offers, found out by trying.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};
use thiserror::Error;
use ucx_sys::{LoadError, Origin, Version};

use crate::context::Context;
use crate::endpoint::Lane;
use crate::error::{CommandError, OpenError, PutError, RegionError, TransferError};
use crate::event::{Event, TransferId};
use crate::options::ContextOptions;
use crate::pieces::{Dim, Piece, SlotPair};
use crate::route::Route;
use crate::transfer::Part;
use crate::worker::Worker;

/// How long one route is tried.
const TRIAL_DEADLINE: Duration = Duration::from_secs(5);

/// Bytes that a trial moves, in pieces of 4 KiB.
const TRIAL_BYTES: u64 = 1 << 20;
const TRIAL_PIECE: u64 = 4096;

/// Below this `/dev/shm` is too small for UCX's own shared memory between more than a few processes.
const SHARED_MEMORY_BYTES_MIN: u64 = 256 << 20;

/// What there is on this machine. [`fmt::Display`] is for people.
#[derive(Debug)]
#[non_exhaustive]
pub struct Report {
    /// The UCX in use.
    pub ucx: Result<UcxFound, LoadError>,
    /// Each route from this process to itself.
    pub routes: Vec<(Route, Result<RouteTrial, TrialError>)>,
    /// Bytes that may be locked, which registration with a network card does; `None` is no limit.
    pub memory_lock_bytes: Option<u64>,
    /// Size of `/dev/shm`, which UCX's own shared memory uses; `None` if there is none.
    pub shared_memory_bytes: Option<u64>,
    /// What could be better, and how.
    pub findings: Vec<Finding>,
}

/// The UCX in use.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UcxFound {
    /// Its version.
    pub version: Version,
    /// Its file.
    pub path: PathBuf,
    /// Why it was taken.
    pub origin: Origin,
    /// The directory that `KVFERRY_UCX_DIR` names, if it is another one: this process had a libucp open before.
    pub overridden: Option<PathBuf>,
    /// The transports of an endpoint from this process to itself; `None` before UCX 1.14, which does not say.
    pub lanes: Option<Vec<Lane>>,
}

/// A route that worked.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RouteTrial {
    /// Time that 1 MiB in pieces of 4 KiB took, the second time.
    pub elapsed: Duration,
}

/// Why a route did not work from this process to itself.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrialError {
    /// See the source.
    #[error("UCX does not start")]
    Open(#[from] OpenError),
    /// See the source.
    #[error("no memory")]
    Region(#[from] RegionError),
    /// See the source.
    #[error("no connection")]
    Command(#[from] CommandError),
    /// See the source.
    #[error("not posted")]
    Transfer(#[from] TransferError),
    /// See the source.
    #[error("not moved")]
    Put(#[from] PutError),
    /// The bytes that arrived are not those that left.
    #[error("the bytes arrived wrong")]
    Wrong,
    /// Nothing came of it in time.
    #[error("nothing arrived within {0:?}")]
    Late(Duration),
}

/// Something that could be better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// There is no UCX.
    NoUcx,
    /// The UCX in use is not the one that `KVFERRY_UCX_DIR` names.
    UcxOverridden,
    /// The UCX has no kernel copies with peer error handling: caller-owned memory of a peer on this host is reached through
    /// sockets only, or through an inbox.
    OldUcx,
    /// A route does not work.
    RouteBroken(Route),
    /// Little memory may be locked.
    MemoryLock,
    /// `/dev/shm` is small or missing.
    SharedMemory,
}

impl Finding {
    /// What to do about it.
    #[must_use]
    pub fn fix(&self) -> &'static str {
        match self {
            Self::NoUcx => "install libucx0 (1.13 or newer) or the Python wheel libucx-cu13, or set KVFERRY_UCX_DIR",
            Self::UcxOverridden => {
                "load kvferry before whatever else opens UCX in this process, or have both use the same directory"
            }
            Self::OldUcx => "use UCX 1.16 or newer, or allocate pools through this library: then nothing depends on it",
            Self::RouteBroken(Route::Direct | Route::Landing) => {
                "let the process read /proc/<pid>/fd of its peers (same user, same PID namespace) and create memory files, and \
                 leave shared memory in UCX_TLS"
            }
            Self::RouteBroken(_) => "look at the reason; UCX_LOG_LEVEL=info says more",
            Self::MemoryLock => {
                "raise it (ulimit -l unlimited, or LimitMEMLOCK=infinity): network cards lock what they register"
            }
            Self::SharedMemory => {
                "give the container more (docker run --shm-size=1g): UCX's own shared memory lives there"
            }
        }
    }
}

/// Looks at this machine: loads UCX, tries each route from this process to itself, reads the limits. Takes well under a
/// second when all is well.
#[must_use]
pub fn report() -> Report {
    let mut findings = Vec::new();
    let mut routes = Vec::new();
    let ucx = ucx_sys::load().map(|ucx| {
        let mut lanes = None;
        for route in [Route::Direct, Route::Landing, Route::Staged, Route::Runs] {
            let tried = try_route(route);
            if tried.is_err() {
                findings.push(Finding::RouteBroken(route));
            }
            routes.push((
                route,
                tried.map(|(trial, found)| {
                    lanes = lanes.take().or(found);
                    trial
                }),
            ));
        }
        if ucx.version() < crate::route::CMA_WITH_ERROR_HANDLING {
            findings.push(Finding::OldUcx);
        }
        let overridden = ucx.overridden_directory().map(Path::to_owned);
        if overridden.is_some() {
            findings.push(Finding::UcxOverridden);
        }
        UcxFound { version: ucx.version(), path: ucx.path().to_owned(), origin: ucx.origin(), overridden, lanes }
    });
    if ucx.is_err() {
        findings.push(Finding::NoUcx);
    }
    let memory_lock_bytes = getrlimit(Resource::Memlock).current;
    if memory_lock_bytes.is_some_and(|bytes| bytes < 1 << 30) {
        findings.push(Finding::MemoryLock);
    }
    let shared_memory_bytes =
        rustix::fs::statvfs("/dev/shm").ok().map(|system| system.f_blocks.saturating_mul(system.f_frsize));
    if shared_memory_bytes.is_none_or(|bytes| bytes < SHARED_MEMORY_BYTES_MIN) {
        findings.push(Finding::SharedMemory);
    }
    Report { ucx, routes, memory_lock_bytes, shared_memory_bytes, findings }
}

/// Moves a little from one worker of this process to another, twice.
fn try_route(route: Route) -> Result<(RouteTrial, Option<Vec<Lane>>), TrialError> {
    let options = ContextOptions { route: Some(route), ..ContextOptions::default() };
    let context = Context::open(&options)?;
    let (source, events) = Worker::start(&context, 1)?;
    let (target, _target_events) = Worker::start(&context, 2)?;
    let endpoint = source.connect(target.address(), target.epoch())?;
    let (from, to) = (context.allocate(TRIAL_BYTES)?, context.allocate(TRIAL_BYTES)?);
    let sent: Vec<u8> = (0..=250).cycle().take(usize::try_from(TRIAL_BYTES).unwrap_or(0)).collect();
    from.write(0, &sent)?;
    let remote = source.import(endpoint, &to.card())?;
    let slots = u32::try_from(TRIAL_BYTES / TRIAL_PIECE).unwrap_or(0);
    let mut elapsed = Duration::ZERO;
    for transfer in 0..2 {
        let part = Part {
            local: from.clone(),
            local_base: 0,
            local_slot_stride: TRIAL_PIECE,
            remote,
            remote_base: 0,
            remote_slot_stride: TRIAL_PIECE,
            pieces: [Piece { local_offset: 0, remote_offset: 0, run_bytes: TRIAL_PIECE, dims: [Dim::ONE; 2] }].into(),
            pairs: (0..slots).map(|slot| SlotPair { local: slot, remote: slot }).collect(),
        };
        let start = Instant::now();
        source.put(endpoint, TransferId(transfer), vec![part])?;
        loop {
            match events.recv_timeout(TRIAL_DEADLINE) {
                Ok(Event::TransferDone { result, .. }) => {
                    result?;
                    break;
                }
                Ok(_) => {}
                Err(_) => return Err(TrialError::Late(TRIAL_DEADLINE)),
            }
        }
        elapsed = start.elapsed();
    }
    let mut arrived = vec![0; sent.len()];
    to.read(0, &mut arrived)?;
    if arrived != sent {
        return Err(TrialError::Wrong);
    }
    Ok((RouteTrial { elapsed }, source.lanes(endpoint)?))
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoUcx => f.write_str("there is no UCX"),
            Self::UcxOverridden => f.write_str("another UCX was open already than KVFERRY_UCX_DIR names"),
            Self::OldUcx => {
                f.write_str("this UCX cannot have the kernel copy between processes with error handling on")
            }
            Self::RouteBroken(route) => write!(f, "the route {route} does not work"),
            Self::MemoryLock => f.write_str("little memory may be locked"),
            Self::SharedMemory => f.write_str("/dev/shm is small or missing"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.ucx {
            Ok(ucx) => {
                writeln!(f, "UCX {} {} ({})", ucx.version, ucx.path.display(), ucx.origin)?;
                if let Some(directory) = &ucx.overridden {
                    writeln!(f, "not the one in {}, which KVFERRY_UCX_DIR names", directory.display())?;
                }
                match &ucx.lanes {
                    Some(lanes) => {
                        let lanes = lanes.iter().map(|lane| format!("{}/{}", lane.transport, lane.device));
                        writeln!(f, "lanes to itself: {}", lanes.collect::<Vec<_>>().join(", "))?;
                    }
                    None => writeln!(f, "lanes to itself: not known before UCX 1.14")?,
                }
            }
            Err(error) => writeln!(f, "UCX: {error}")?,
        }
        for (route, tried) in &self.routes {
            match tried {
                Ok(trial) => writeln!(f, "route {route}: works, 1 MiB in pieces of 4 KiB in {:?}", trial.elapsed)?,
                Err(error) => writeln!(f, "route {route}: {}", chain(error))?,
            }
        }
        let bytes =
            |bytes: Option<u64>, none: &str| bytes.map_or(none.to_owned(), |bytes| format!("{} KiB", bytes >> 10));
        writeln!(f, "memory that may be locked: {}", bytes(self.memory_lock_bytes, "no limit"))?;
        writeln!(f, "/dev/shm: {}", bytes(self.shared_memory_bytes, "none"))?;
        for finding in &self.findings {
            writeln!(f, "note: {finding}: {}", finding.fix())?;
        }
        Ok(())
    }
}

/// An error with its sources, for people: messages do not repeat them.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(error.source(), |error| error.source());
    sources.fold(error.to_string(), |text, source| format!("{text}: {source}"))
}
