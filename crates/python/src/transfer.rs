//! Requests under way.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, SendError};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use kvferry::{NotQuiet, Outcome, PartSpec, Ready, Received, RequestError, RequestKey, Sent, Times};
use kvferry_wire::TransferStats;
use parking_lot::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::bell::Bell;
use crate::failure::Failure;
use crate::maps::{RawMap, block_maps};
use crate::own::Process;

/// How long a signal may wait for a thread that waits.
const SIGNALS_EVERY: Duration = Duration::from_millis(200);

/// A send or a receive.
#[pyclass(frozen)]
pub(crate) struct Transfer {
    process: Process,
    handle: Handle,
}

enum Handle {
    Receive(kvferry::Receive),
    Send(kvferry::Send),
}

/// Calls the same method of whichever it is.
macro_rules! either {
    ($self:ident, $handle:ident => $call:expr) => {{
        $self.process.check()?;
        match &$self.handle {
            Handle::Receive($handle) => $call,
            Handle::Send($handle) => $call,
        }
    }};
}

impl From<kvferry::Receive> for Transfer {
    fn from(handle: kvferry::Receive) -> Self {
        Self { process: Process::this(), handle: Handle::Receive(handle) }
    }
}

impl From<kvferry::Send> for Transfer {
    fn from(handle: kvferry::Send) -> Self {
        Self { process: Process::this(), handle: Handle::Send(handle) }
    }
}

#[pymethods]
impl Transfer {
    /// Request and attempt.
    fn key(&self) -> Result<(u64, u32), Failure> {
        let RequestKey { request, attempt } = either!(self, handle => handle.key());
        Ok((request, attempt))
    }

    fn moved_bytes(&self) -> Result<u64, Failure> {
        Ok(either!(self, handle => handle.moved_bytes()))
    }

    fn cancel(&self, py: Python<'_>) -> Result<(), Failure> {
        either!(self, handle => py.detach(|| handle.cancel()));
        Ok(())
    }

    /// What was moved, a tuple a peer, or `None` if the request has not ended within `seconds`.
    fn wait<'py>(&self, py: Python<'py>, seconds: f64) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        either!(self, handle => match within(py, limit(seconds)?, |slice| handle.wait(slice))? {
            Some(outcome) => Ok(Some(report(py, &outcome)?)),
            None => Ok(None),
        })
    }

    /// Whether the slots have become quiet within `seconds`. Says so once.
    fn quiet(&self, py: Python<'_>, seconds: f64) -> Result<bool, Failure> {
        let wait = |slice| match either!(self, handle => handle.wait_quiet(slice)) {
            Err(NotQuiet::Waiting) => Ok(None),
            Ok(_) => Ok(Some(())),
            Err(error) => Err(Failure::from(error)),
        };
        Ok(within(py, limit(seconds)?, |slice| wait(slice).transpose())?.transpose()?.is_some())
    }

    /// Has `bell` ring with `token` when the request has ended. True if it has, and nothing rings.
    fn ring_at_end(&self, bell: &Bell, token: u64) -> Result<bool, Failure> {
        let waker = bell.waker(token);
        let mut context = Context::from_waker(&waker);
        Ok(either!(self, handle => pin!(handle.until_ended()).poll(&mut context).is_ready()))
    }

    /// Has `bell` ring with `token` when the slots are quiet, or when something else happens. True if they are, which is said
    /// once, and nothing rings.
    fn ring_when_quiet(&self, bell: &Bell, token: u64) -> Result<bool, Failure> {
        let waker = bell.waker(token);
        let mut context = Context::from_waker(&waker);
        match either!(self, handle => pin!(handle.until_quiet()).poll(&mut context)) {
            Poll::Pending => Ok(false),
            Poll::Ready(quiet) => Ok(quiet.map(|_| true)?),
        }
    }

    /// Adds a part to a send that was posted in parts.
    #[pyo3(signature = (tokens, layers, maps, note, signal))]
    fn push(
        &self,
        py: Python<'_>,
        tokens: (u64, u64),
        layers: Option<(u32, u32)>,
        maps: Option<Vec<RawMap>>,
        note: Vec<u8>,
        signal: Option<&Signal>,
    ) -> Result<(), Failure> {
        self.process.check()?;
        let Handle::Send(send) = &self.handle else {
            return Err(PyRuntimeError::new_err("a receive has no parts to push").into());
        };
        let part = PartSpec {
            tokens: tokens.0..tokens.1,
            layers: layers.map(|(first, end)| first..end),
            block_maps: maps.map(block_maps).transpose()?,
            note,
        };
        let ready = match signal {
            Some(signal) => signal.ready()?,
            None => Ready::now(),
        };
        Ok(py.detach(|| send.push(part, ready))?)
    }
}

/// Says when a part that was pushed may be read.
#[pyclass(frozen)]
pub(crate) struct Signal {
    process: Process,
    signal: Mutex<Option<kvferry::Signal>>,
    ready: Mutex<Option<Ready>>,
}

#[pymethods]
impl Signal {
    #[new]
    fn new() -> Self {
        let (signal, ready) = Ready::later();
        Self { process: Process::this(), signal: Mutex::new(Some(signal)), ready: Mutex::new(Some(ready)) }
    }

    /// The bytes are there. Of no effect the second time.
    fn set(&self, py: Python<'_>) -> Result<(), Failure> {
        self.process.check()?;
        let signal = self.signal.lock().take();
        py.detach(|| {
            if let Some(signal) = signal {
                signal.set();
            }
        });
        Ok(())
    }
}

impl Signal {
    fn ready(&self) -> Result<Ready, Failure> {
        self.process.check()?;
        let ready = self.ready.lock().take();
        ready.ok_or_else(|| PyValueError::new_err("a signal is for one part: this one has been pushed before").into())
    }
}

/// What is said of one peer of a request that has ended well.
trait Report {
    fn tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
}

impl Report for Sent {
    fn tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Self { rank, rows, pieces, runs, bytes, carried, elapsed, times } = self;
        let (carried, times) = (ways(carried), seconds(times));
        (*rank, *rows, *pieces, *runs, *bytes, carried, elapsed.as_secs_f64(), times).into_bound_py_any(py)
    }
}

impl Report for Received {
    fn tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Self { rank, rows, bytes, carried, elapsed, times, note } = self;
        let (carried, times) = (ways(carried), seconds(times));
        let note = PyBytes::new(py, note);
        (*rank, *rows, *bytes, carried, elapsed.as_secs_f64(), times, note).into_bound_py_any(py)
    }
}

/// Route, reason, bytes, runs and seconds.
type Way = (String, String, u64, u64, f64);

fn ways(carried: &[TransferStats]) -> Vec<Way> {
    let way = |way: &TransferStats| {
        let TransferStats { route, reason, bytes, runs, elapsed, .. } = *way;
        (route.to_string(), format!("{reason:?}"), bytes, runs, elapsed.as_secs_f64())
    };
    carried.iter().map(way).collect()
}

fn seconds(times: &Times) -> [f64; 4] {
    let Times { posting, queued, settling, total } = *times;
    [posting, queued, settling, total].map(|time| time.as_secs_f64())
}

fn report<'py, R: Report>(py: Python<'py>, outcome: &Outcome<R>) -> Result<Bound<'py, PyAny>, Failure> {
    let peers = outcome.as_ref().map_err(|error: &Arc<RequestError>| Failure::from(error.clone()))?;
    let peers = peers.iter().map(|peer| peer.tuple(py)).collect::<PyResult<Vec<_>>>()?;
    Ok(peers.into_bound_py_any(py)?)
}

/// Waits for `limit` with the interpreter released, but for a look at its signals now and then: so Control-C ends a wait.
pub(crate) fn within<T: Send>(
    py: Python<'_>,
    limit: Duration,
    wait: impl Fn(Duration) -> Option<T> + Send + Sync,
) -> Result<Option<T>, Failure> {
    let began = Instant::now();
    loop {
        let left = limit.saturating_sub(began.elapsed());
        let waited = py.detach(|| wait(left.min(SIGNALS_EVERY)));
        if waited.is_some() || left <= SIGNALS_EVERY {
            return Ok(waited);
        }
        py.check_signals()?;
    }
}

fn limit(seconds: f64) -> Result<Duration, Failure> {
    let limit = Duration::try_from_secs_f64(seconds);
    limit.map_err(|_| PyValueError::new_err(format!("{seconds} s is no time to wait")).into())
}

/// Does something that waits, on a thread of its own, and looks at the interpreter's signals meanwhile. `undo` is for what has come
/// of it after an interrupt.
pub(crate) fn interruptible<T: std::marker::Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> T + std::marker::Send + 'static,
    undo: impl FnOnce(T) + std::marker::Send + 'static,
) -> Result<T, Failure> {
    let (answer, answered) = mpsc::sync_channel(0); // handed over, or not: never left behind
    let run = move || {
        if let Err(SendError(outcome)) = answer.send(call()) {
            undo(outcome);
        }
    };
    thread::Builder::new().name("kvferry-call".to_owned()).spawn(run).map_err(PyErr::from)?;
    let answered = Mutex::new(answered);
    let answer = within(py, Duration::MAX, |slice| match answered.lock().recv_timeout(slice) {
        Ok(outcome) => Some(Ok(outcome)),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(Err(())),
    })?;
    answer.and_then(Result::ok).ok_or_else(|| PyRuntimeError::new_err("the call has panicked").into())
}
