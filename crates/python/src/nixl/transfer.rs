//! Lists and transfers.

use std::time::UNIX_EPOCH;

use kvferry_agent::{Indices, List, ReleaseError, State, Transfer};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::failure::Failure;
use crate::nixl::agent::seconds;
use crate::own::Own;
use crate::transfer::within;

/// A prepared list.
#[pyclass(frozen)]
pub(crate) struct NixlList {
    list: Own<List>,
}

/// A transfer. Destroying it while it is active cancels it and waits for nothing: the agent keeps its memory registered until
/// it is quiet.
#[pyclass(frozen)]
pub(crate) struct NixlTransfer {
    transfer: Own<Transfer>,
}

impl NixlList {
    pub(crate) fn new(list: List) -> Self {
        Self { list: Own::light(list) }
    }

    pub(crate) fn get(&self) -> Result<&List, Failure> {
        self.list.get()
    }
}

impl NixlTransfer {
    pub(crate) fn new(transfer: Transfer) -> Self {
        Self { transfer: Own::light(transfer) }
    }

    /// The state as connectors know it: `None` before the first post.
    fn said<'py>(py: Python<'py>, transfer: &Transfer, state: State) -> Result<Option<Bound<'py, PyString>>, Failure> {
        match state {
            State::Made => Ok(None),
            State::Active => Ok(Some(intern!(py, "PROC").clone())),
            State::Done => Ok(Some(intern!(py, "DONE").clone())),
            State::Failed => match transfer.failure() {
                Some(failure) => Err(failure.into()),
                None => Ok(Some(intern!(py, "ERR").clone())),
            },
        }
    }
}

#[pymethods]
impl NixlList {
    fn __len__(&self) -> Result<usize, Failure> {
        Ok(self.get()?.len())
    }
}

#[pymethods]
impl NixlTransfer {
    fn post<'py>(&self, py: Python<'py>, notification: &[u8]) -> Result<Option<Bound<'py, PyString>>, Failure> {
        let transfer = self.transfer.get()?;
        let notification = Some(notification).filter(|message| !message.is_empty());
        let state = py.detach(|| transfer.post(notification))?;
        Self::said(py, transfer, state)
    }

    fn state<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyString>>, Failure> {
        let transfer = self.transfer.get()?;
        // An active transfer is moved along by whoever looks, without the interpreter.
        let state = if transfer.is_active() { py.detach(|| transfer.state()) } else { transfer.state() };
        Self::said(py, transfer, state)
    }

    /// Waits until it is not active.
    fn wait<'py>(&self, py: Python<'py>, timeout: f64) -> Result<Option<Bound<'py, PyString>>, Failure> {
        let (transfer, timeout) = (self.transfer.get()?, seconds("timeout", timeout)?);
        let ended = |state: State| (state != State::Active).then_some(state);
        let state = within(py, timeout, |slice| ended(transfer.wait(slice)))?;
        Self::said(py, transfer, state.unwrap_or(State::Active))
    }

    /// Gives it up, and waits until nothing of it moves any more.
    fn quiet(&self, py: Python<'_>, timeout: f64) -> Result<(), Failure> {
        let (transfer, timeout) = (self.transfer.get()?, seconds("timeout", timeout)?);
        if within(py, timeout, |slice| transfer.quiet(slice).ok())?.is_none() {
            return Err(ReleaseError::NotQuiet { waited: timeout }.into());
        }
        Ok(())
    }

    /// Start in microseconds of Unix time, post and whole in microseconds, bytes, entries, and the route if it is known;
    /// `None` before its end.
    #[allow(clippy::type_complexity, reason = "fields of a class of Python's")]
    fn telemetry(&self) -> Result<Option<(u64, f64, f64, u64, u64, Option<(String, String)>)>, Failure> {
        let told = self.transfer.get()?.telemetry();
        Ok(told.map(|told| {
            let start = told.started.duration_since(UNIX_EPOCH).unwrap_or_default();
            let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
            let start = u64::try_from(start.as_micros()).unwrap_or(u64::MAX);
            let route = told.route.map(|(route, reason)| (route.to_string(), reason.to_string()));
            (start, micros(told.posting), micros(told.total), told.bytes, told.entries, route)
        }))
    }

    /// Whether it has ever been posted.
    #[getter]
    fn posted(&self) -> Result<bool, Failure> {
        let transfer = self.transfer.get()?;
        Ok(transfer.is_active() || transfer.state() != State::Made)
    }

    #[getter]
    fn nbytes(&self) -> Result<u64, Failure> {
        Ok(self.transfer.get()?.bytes())
    }
}

/// Indices as they came, in integers of 4 or 8 bytes.
pub(crate) enum Chosen {
    All,
    I32(Vec<i32>),
    I64(Vec<i64>),
}

/// Reads the bytes of an array of signed integers, `width` bytes each.
pub(crate) fn indices(bytes: Option<(&[u8], usize)>) -> Chosen {
    match bytes {
        None => Chosen::All,
        Some((bytes, 4)) => {
            Chosen::I32(bytes.as_chunks::<4>().0.iter().map(|word| i32::from_ne_bytes(*word)).collect())
        }
        Some((bytes, _)) => {
            Chosen::I64(bytes.as_chunks::<8>().0.iter().map(|word| i64::from_ne_bytes(*word)).collect())
        }
    }
}

impl Chosen {
    pub(crate) fn as_indices(&self) -> Indices<'_> {
        match self {
            Self::All => Indices::All,
            Self::I32(all) => Indices::I32(all),
            Self::I64(all) => Indices::I64(all),
        }
    }
}
