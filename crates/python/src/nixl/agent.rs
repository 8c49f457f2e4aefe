//! The agent.

use std::any::Any;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_agent::wire::{ContextOptions, CudaOptions, MemoryKind, RegionId, Route, Run};
use kvferry_agent::{Agent, AgentOptions, MemoryError, Operation};
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::failure::Failure;
use crate::nixl::transfer::{NixlList, NixlTransfer, indices};
use crate::own::{Own, release};

/// Address, length and device of one descriptor, 64 bits each.
const DESCRIPTOR_BYTES: usize = 24;

/// Longer than anything is waited for: 100 years.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// An agent with its threads.
#[pyclass(frozen)]
pub(crate) struct NixlAgent {
    agent: Own<Mutex<Option<Arc<Agent>>>>,
    /// The GPU of the agent.
    gpu: Option<u32>,
}

/// What was registered at once: a region for each descriptor.
#[pyclass(frozen)]
pub(crate) struct NixlRegistration {
    /// `None` for one of no bytes, of which there is nothing to register, and for one that was undone.
    regions: Mutex<Vec<Option<RegionId>>>,
}

impl NixlAgent {
    /// The agent, which is not released while the caller has it.
    fn get(&self) -> Result<Arc<Agent>, Failure> {
        self.agent.get()?.lock().clone().ok_or_else(Failure::closed)
    }

    /// Does something that may wait.
    fn with<T: Send, E: Into<Failure> + Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Agent) -> Result<T, E> + Send,
    ) -> Result<T, Failure> {
        let agent = self.get()?;
        // The last to have it releases it, which waits: hence in here.
        py.detach(move || call(&agent)).map_err(Into::into)
    }
}

#[pymethods]
impl NixlAgent {
    /// Opens UCX and starts the threads. `gpu`: the one device whose memory may be registered.
    #[new]
    #[pyo3(signature = (name, *, gpu, listen, patience, transfer_deadline, transports, route, linger, copy_threads))]
    #[allow(clippy::too_many_arguments, reason = "one an option")]
    fn new(
        py: Python<'_>,
        name: &str,
        gpu: Option<u32>,
        listen: Option<(String, u16)>,
        patience: Option<f64>,
        transfer_deadline: Option<f64>,
        transports: Option<String>,
        route: Option<&str>,
        linger: Option<f64>,
        copy_threads: Option<usize>,
    ) -> Result<Self, Failure> {
        let mut options = AgentOptions::default();
        let context = ContextOptions { transports, cuda: gpu.map(CudaOptions::new), ..ContextOptions::default() };
        options.context = ContextOptions { route: route.map(route_of).transpose()?, ..context };
        if let Some(patience) = patience {
            options.patience = seconds("patience", patience)?;
            options.context.stall_deadline = options.patience;
        }
        if let Some(linger) = linger {
            options.context.linger = seconds("linger", linger)?;
        }
        if let Some(threads) = copy_threads {
            options.context.copy_threads = threads;
        }
        options.transfer_deadline =
            transfer_deadline.map(|allowed| seconds("transfer_deadline", allowed)).transpose()?;
        options.listen = listen.map(|(host, port)| resolve(&host, port)).transpose()?;
        let agent = py.detach(|| Agent::new(name, options))?;
        Ok(Self { agent: Own::new(Mutex::new(Some(Arc::new(agent)))), gpu })
    }

    /// Stops the threads. Everything else says from then on that the agent has been closed.
    fn close(&self, py: Python<'_>) -> Result<(), Failure> {
        let agent = self.agent.get()?.lock().take();
        py.detach(|| {
            if let Some(agent) = agent {
                agent.stop(); // whoever is in a call returns
                release(agent);
            }
        });
        Ok(())
    }

    #[getter]
    fn gpu(&self) -> Option<u32> {
        self.gpu
    }

    #[getter]
    fn ucx_version(&self) -> Result<String, Failure> {
        Ok(self.get()?.ucx_version().to_string())
    }

    /// Host and port that it listens at, if it does.
    #[getter]
    fn listens_at(&self) -> Result<Option<(String, u16)>, Failure> {
        Ok(self.get()?.listens_at().map(|address| (address.ip().to_string(), address.port())))
    }

    /// Registers all of the descriptors, or none. `owner` lives as long as the registrations.
    #[allow(unsafe_code, reason = "whether an address is one of `owner` cannot be checked")]
    fn register(
        &self,
        py: Python<'_>,
        on_gpu: bool,
        descriptors: &[u8],
        owner: Py<PyAny>,
    ) -> Result<NixlRegistration, Failure> {
        let runs = split(descriptors)?;
        for (address, bytes, device) in &runs {
            if *bytes > 0 && usize::try_from(*address).unwrap_or(0) == 0 {
                return Err(Failure::invalid(
                    "Address",
                    &format!("memory at address {address:#x} cannot be registered"),
                ));
            }
            if on_gpu && Some(*device) != self.gpu.map(u64::from) {
                let has = self.gpu.map_or("no GPU".to_owned(), |gpu| format!("GPU {gpu}"));
                let message = format!(
                    "memory of GPU {device} cannot be registered with an agent that has {has}: cuda_device of its \
                     nixl_agent_config says which"
                );
                return Err(Failure::unsupported(&message));
            }
        }
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(owner);
        self.with(py, |agent| {
            let mut registered: Vec<Option<RegionId>> = Vec::with_capacity(runs.len());
            for (address, bytes, _) in runs {
                if bytes == 0 {
                    registered.push(None);
                    continue;
                }
                let (base, owner) = (NonNull::new(address as *mut u8), owner.clone());
                let region = match base.filter(|_| !on_gpu) {
                    // SAFETY: `kvferry.nixl` takes address and length from a tensor, which is the owner, or from somebody who
                    // hands over an address and is told by the documentation to keep the memory until it is deregistered.
                    // There are no references to the memory: Python has none, and what it reads and writes is its user's to
                    // order after transfers.
                    Some(base) => unsafe { agent.context().register(base, bytes, owner) },
                    // SAFETY: as above.
                    None => unsafe { agent.context().register_device(address, bytes, owner) },
                };
                match region.map_err(MemoryError::from).and_then(|region| agent.register(region)) {
                    Ok(id) => registered.push(Some(id)),
                    Err(error) => {
                        for id in registered.into_iter().flatten() {
                            let _ = agent.deregister(id, Duration::ZERO); // nobody has used it yet
                        }
                        return Err(error);
                    }
                }
            }
            Ok(NixlRegistration { regions: Mutex::new(registered) })
        })
    }

    /// The latest registrations of these very descriptors, all of them or an error.
    fn registration(&self, on_gpu: bool, descriptors: &[u8]) -> Result<NixlRegistration, Failure> {
        let agent = self.get()?;
        let regions = latest(&agent, on_gpu, &runs(descriptors)?)?;
        Ok(NixlRegistration { regions: Mutex::new(regions) })
    }

    /// Undoes a registration of these descriptors. What cannot be undone does not keep the others from it: the first error is told,
    /// and another call undoes the rest.
    fn deregister(
        &self,
        py: Python<'_>,
        on_gpu: bool,
        descriptors: &[u8],
        registration: &NixlRegistration,
        timeout: f64,
    ) -> Result<(), Failure> {
        let (runs, timeout) = (runs(descriptors)?, seconds("timeout", timeout)?);
        self.with(py, |agent| {
            let deadline = Instant::now() + timeout;
            let undo = |id| agent.deregister(id, deadline.saturating_duration_since(Instant::now()));
            let mut regions = registration.regions.lock();
            if regions.len() != runs.len() {
                *regions = latest(agent, on_gpu, &runs)?; // the list has been changed since
            }
            let mut failed = None;
            for (own, run) in regions.iter_mut().zip(runs) {
                let Some(id) = *own else { continue };
                let undone = match undo(id) {
                    // Somebody has deregistered it by another list of the same memory, and left this one for the other.
                    Err(MemoryError::Unknown { .. }) => region_of(agent, on_gpu, run).and_then(|other| {
                        *own = Some(other);
                        Ok(undo(other)?)
                    }),
                    undone => undone.map_err(Failure::from),
                };
                match undone {
                    Ok(()) => *own = None,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            failed.map_or(Ok(()), Err)
        })
    }

    /// Whether each of the descriptors is in registered memory.
    fn is_registered(&self, py: Python<'_>, on_gpu: bool, descriptors: &[u8]) -> Result<Vec<bool>, Failure> {
        let runs = runs(descriptors)?;
        self.with(py, |agent| Ok::<_, Failure>(agent.is_registered(kind(on_gpu), &runs)))
    }

    fn metadata<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>, Failure> {
        Ok(PyBytes::new(py, &self.get()?.metadata()))
    }

    fn metadata_of<'py>(
        &self,
        py: Python<'py>,
        on_gpu: bool,
        descriptors: &[u8],
        address: bool,
    ) -> Result<Bound<'py, PyBytes>, Failure> {
        let ids = self.registered(on_gpu, descriptors)?;
        Ok(PyBytes::new(py, &self.get()?.metadata_of(&ids, address)?))
    }

    fn add_remote(&self, py: Python<'_>, metadata: &[u8]) -> Result<String, Failure> {
        self.with(py, |agent| agent.add_remote(metadata))
    }

    fn remove_remote(&self, py: Python<'_>, name: &str) -> Result<(), Failure> {
        self.with(py, |agent| agent.remove_remote(name))
    }

    fn knows(&self, name: &str, on_gpu: bool, descriptors: &[u8]) -> Result<bool, Failure> {
        Ok(self.get()?.knows(name, kind(on_gpu), &runs(descriptors)?))
    }

    fn connect(&self, py: Python<'_>, name: &str, timeout: f64) -> Result<(), Failure> {
        let timeout = seconds("timeout", timeout)?;
        self.with(py, |agent| agent.connect(name, timeout))
    }

    /// A list of this agent's memory, or, with the name of one, of a remote agent's.
    fn prepare(
        &self,
        py: Python<'_>,
        name: Option<&str>,
        on_gpu: bool,
        descriptors: &Bound<'_, PyBytes>,
    ) -> Result<NixlList, Failure> {
        let descriptors = descriptors.as_bytes();
        let list = self.with(py, |agent| {
            let runs = runs(descriptors)?;
            Ok::<_, Failure>(match name {
                None => agent.prepare_local(kind(on_gpu), &runs)?,
                Some(name) => agent.prepare_remote(name, kind(on_gpu), &runs)?,
            })
        })?;
        Ok(NixlList::new(list))
    }

    /// A transfer of the entries of these indices, `width` bytes each, or of all of them.
    #[allow(clippy::too_many_arguments, reason = "those of Python")]
    fn make(
        &self,
        py: Python<'_>,
        write: bool,
        local: &NixlList,
        from: Option<(&[u8], usize)>,
        remote: &NixlList,
        to: Option<(&[u8], usize)>,
        notification: &[u8],
    ) -> Result<NixlTransfer, Failure> {
        let (local, remote) = (local.get()?, remote.get()?);
        let operation = if write { Operation::Write } else { Operation::Read };
        let notification = Some(notification).filter(|message| !message.is_empty());
        let transfer = self.with(py, |agent| {
            let (from, to) = (indices(from), indices(to));
            agent.make(operation, local, from.as_indices(), remote, to.as_indices(), notification)
        })?;
        Ok(NixlTransfer::new(transfer))
    }

    /// What peers have said, by their names, added to `into`.
    fn notifications<'py>(&self, py: Python<'py>, into: Bound<'py, PyDict>) -> Result<Bound<'py, PyDict>, Failure> {
        let agent = self.get()?;
        for heard in py.detach(|| agent.notifications()) {
            let message = PyBytes::new(py, &heard.message);
            match into.get_item(&heard.from)? {
                Some(list) => list.call_method1("append", (message,)).map(drop)?,
                None => into.set_item(&heard.from, PyList::new(py, [message])?)?,
            }
        }
        Ok(into)
    }

    fn send_notification(&self, py: Python<'_>, name: &str, message: &[u8]) -> Result<(), Failure> {
        self.with(py, |agent| agent.send_notification(name, message))
    }

    fn send_metadata(
        &self,
        py: Python<'_>,
        host: &str,
        port: u16,
        metadata: Option<Vec<u8>>,
        timeout: f64,
    ) -> Result<(), Failure> {
        let timeout = seconds("timeout", timeout)?;
        self.with(py, |agent| Ok::<_, Failure>(agent.send_metadata(resolve(host, port)?, metadata, timeout)?))
    }

    fn fetch_metadata(
        &self,
        py: Python<'_>,
        host: &str,
        port: u16,
        name: Option<&str>,
        timeout: f64,
    ) -> Result<String, Failure> {
        let timeout = seconds("timeout", timeout)?;
        self.with(py, |agent| Ok::<_, Failure>(agent.fetch_metadata(resolve(host, port)?, name, timeout)?))
    }

    fn withdraw_metadata(&self, py: Python<'_>, host: &str, port: u16, timeout: f64) -> Result<(), Failure> {
        let timeout = seconds("timeout", timeout)?;
        self.with(py, |agent| Ok::<_, Failure>(agent.withdraw_metadata(resolve(host, port)?, timeout)?))
    }
}

impl NixlAgent {
    /// The regions that were registered by these very descriptors.
    fn registered(&self, on_gpu: bool, descriptors: &[u8]) -> Result<Vec<RegionId>, Failure> {
        let agent = self.get()?;
        let runs = runs(descriptors)?.into_iter().filter(|run| run.bytes > 0);
        runs.map(|run| region_of(&agent, on_gpu, run)).collect()
    }
}

/// The latest registration of each of these, but for those of no bytes.
fn latest(agent: &Agent, on_gpu: bool, runs: &[Run]) -> Result<Vec<Option<RegionId>>, Failure> {
    let region = |run: &Run| (run.bytes > 0).then(|| region_of(agent, on_gpu, *run)).transpose();
    runs.iter().map(region).collect()
}

/// The latest registration of this very memory.
fn region_of(agent: &Agent, on_gpu: bool, run: Run) -> Result<RegionId, Failure> {
    let Run { address, bytes } = run;
    let missing = || Failure::not_found(&format!("{bytes} B at {address:#x} were not registered, or are not any more"));
    agent.region(address, bytes, kind(on_gpu)).ok_or_else(missing)
}

/// Where the descriptors are. Their devices are those that their memory was registered with.
fn runs(descriptors: &[u8]) -> Result<Vec<Run>, Failure> {
    Ok(split(descriptors)?.into_iter().map(|(address, bytes, _)| Run { address, bytes }).collect())
}

/// Address, length and device of each descriptor.
fn split(bytes: &[u8]) -> Result<Vec<(u64, u64, u64)>, Failure> {
    let (rows, rest) = bytes.as_chunks::<DESCRIPTOR_BYTES>();
    if !rest.is_empty() {
        return Err(PyValueError::new_err(format!("{} B are no descriptors of 24 B", bytes.len())).into());
    }
    let word = |row: &[u8; DESCRIPTOR_BYTES], at: usize| {
        let (words, _) = row.as_chunks::<8>();
        u64::from_ne_bytes(words[at])
    };
    Ok(rows.iter().map(|row| (word(row, 0), word(row, 1), word(row, 2))).collect())
}

fn kind(on_gpu: bool) -> MemoryKind {
    if on_gpu { MemoryKind::Cuda } else { MemoryKind::Host }
}

pub(crate) fn seconds(what: &str, seconds: f64) -> Result<Duration, Failure> {
    let error = |_| PyValueError::new_err(format!("{what}: {seconds} s")).into();
    // What is longer is for ever, and no time of day once it is added to one.
    Duration::try_from_secs_f64(seconds).map(|time| time.min(FOR_EVER)).map_err(error)
}

fn route_of(name: &str) -> Result<Route, Failure> {
    let all = [Route::Direct, Route::Landing, Route::Staged, Route::Runs];
    let found = all.into_iter().find(|route| route.to_string() == name);
    found.ok_or_else(|| PyValueError::new_err(format!("no route {name:?}")).into())
}

/// The first address of a host.
fn resolve(host: &str, port: u16) -> Result<SocketAddr, Failure> {
    let none = || PyOSError::new_err(format!("{host} has no address"));
    let mut all = (host, port).to_socket_addrs().map_err(|error| PyOSError::new_err(format!("{host}: {error}")))?;
    Ok(all.next().ok_or_else(none)?)
}
