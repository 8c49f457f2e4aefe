//! The engine.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use kvferry::{EngineOptions, Quarantine, RequestKey};
use kvferry_match::BlockMap;
use kvferry_wire::CudaOptions;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::card::InstanceCard;
use crate::failure::Failure;
use crate::maps::{RawMap, block_maps};
use crate::own::{Own, release};
use crate::region::Region;
use crate::table::Table;
use crate::transfer::{Transfer, interruptible};

/// One rank's engine.
#[pyclass(frozen)]
pub(crate) struct Engine {
    engine: Own<Mutex<Option<Arc<kvferry::Engine>>>>,
}

/// A pair of connected instances.
#[pyclass(frozen, eq, hash, from_py_object)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Link {
    link: kvferry::Link,
}

/// Request, attempt, side and rank of the peer, its epoch, slots, pools, bytes, seconds, reason, and all of it for people.
type Quarantined = (u64, u32, (String, u32), u64, usize, usize, u64, f64, String, String);

impl Engine {
    /// The engine, which is not released while the caller has it.
    fn get(&self) -> Result<Arc<kvferry::Engine>, Failure> {
        self.engine.get()?.lock().clone().ok_or_else(Failure::closed)
    }

    /// Does something that may wait.
    fn with<T: Send, E: Into<Failure> + Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&kvferry::Engine) -> Result<T, E> + Send,
    ) -> Result<T, Failure> {
        let engine = self.get()?;
        // The last to have it releases it, which waits: hence in here.
        py.detach(move || call(&engine)).map_err(Into::into)
    }
}

#[pymethods]
impl Engine {
    /// Starts an engine. Its options are those of a file, if there is one, changed by the environment, if that is asked for, and by
    /// what is given as JSON; those of its GPU, if it has one, are JSON too.
    #[new]
    fn new(
        py: Python<'_>,
        file: Option<&str>,
        environment: bool,
        given: &str,
        gpu: Option<&str>,
    ) -> Result<Self, Failure> {
        let mut options = file.map(EngineOptions::from_file).transpose()?.unwrap_or_default();
        if environment {
            // Others' variables need not be text.
            let texts =
                std::env::vars_os().filter_map(|(name, value)| name.into_string().ok().zip(value.into_string().ok()));
            options = options.with_environment(texts)?;
        }
        let options = changed(&options, given).map_err(json_error)?;
        let gpu = gpu.map(serde_json::from_str::<CudaOptions>).transpose().map_err(json_error)?;
        let engine = py.detach(|| match gpu {
            Some(gpu) => kvferry::Engine::start_on_gpu(options, gpu),
            None => kvferry::Engine::start(options),
        })?;
        Ok(Self { engine: Own::new(Mutex::new(Some(Arc::new(engine)))) })
    }

    /// The options, as JSON.
    fn options(&self) -> Result<String, Failure> {
        let engine = self.get()?;
        Ok(serde_json::to_string(engine.options()).map_err(json_error)?)
    }

    fn epoch(&self) -> Result<u64, Failure> {
        Ok(self.get()?.epoch())
    }

    fn ucx_version(&self) -> Result<String, Failure> {
        Ok(self.get()?.ucx_version().to_string())
    }

    fn resent_messages(&self) -> Result<u64, Failure> {
        Ok(self.get()?.resent_messages())
    }

    /// Allocates memory for a table: the table with its addresses, and a region a pool.
    fn allocate(&self, py: Python<'_>, table: &Table) -> Result<(Table, Vec<Region>), Failure> {
        let mut table = table.table.clone();
        let (table, regions) =
            self.with(py, move |engine| engine.allocate(&mut table).map(|regions| (table, regions)))?;
        Ok((Table { table }, regions.into_iter().map(Region::new).collect()))
    }

    /// Allocates memory of the host or of the engine's GPU.
    fn allocate_bytes(&self, py: Python<'_>, bytes: u64, on_gpu: bool) -> Result<Region, Failure> {
        let region = self.with(py, |engine| match on_gpu {
            false => engine.context().allocate(bytes),
            true => engine.context().allocate_device(bytes),
        })?;
        Ok(Region::new(region))
    }

    /// Registers memory that `owner` keeps alive: of the host or of the engine's GPU.
    #[allow(unsafe_code, reason = "whether an address is one of `owner` cannot be checked")]
    fn register(
        &self,
        py: Python<'_>,
        base: u64,
        bytes: u64,
        on_gpu: bool,
        owner: Py<PyAny>,
    ) -> Result<Region, Failure> {
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(owner);
        let address = usize::try_from(base).unwrap_or(0);
        if address == 0 {
            return Err(PyValueError::new_err(format!("memory at address {base} cannot be registered")).into());
        }
        let region = self.with(py, |engine| match on_gpu {
            // SAFETY: `kvferry._memory` takes address and length from what `owner` says of itself by one of the array
            // interfaces, which promise that they hold while it lives, or from somebody who hands over an address and is told
            // so by the documentation. `owner` lives as long as the registration. There are no references to the memory:
            // Python has none, and what it reads and writes is its user's to order after transfers.
            false => unsafe { engine.context().register(host(address), bytes, owner) },
            // SAFETY: as above.
            true => unsafe { engine.context().register_device(base, bytes, owner) },
        })?;
        Ok(Region::new(region))
    }

    fn publish(&self, py: Python<'_>, table: &Table, regions: Vec<PyRef<'_, Region>>) -> Result<(), Failure> {
        let table = table.table.clone();
        let regions = regions.iter().map(|region| region.get().cloned()).collect::<Result<Vec<_>, _>>()?;
        self.with(py, move |engine| engine.publish(table, regions))
    }

    fn card<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyBytes>>, Failure> {
        Ok(self.get()?.card().map(|card| PyBytes::new(py, &card)))
    }

    /// Done by a thread of its own, so that an interrupt ends the wait: what comes of it then is undone.
    fn connect(&self, py: Python<'_>, sources: &InstanceCard, destinations: &InstanceCard) -> Result<Link, Failure> {
        let (sources, destinations) = (sources.card.clone(), destinations.card.clone());
        let (engine, undo) = (self.get()?, self.get()?);
        let connect = move || engine.connect(&sources, &destinations);
        let disconnect = move |connected: Result<kvferry::Link, _>| {
            // Nobody knows the link, so nothing of it is under way.
            let _ = connected.map(|link| undo.disconnect(link));
        };
        Ok(Link { link: interruptible(py, connect, disconnect)?? })
    }

    fn disconnect(&self, py: Python<'_>, link: Link) -> Result<(), Failure> {
        self.with(py, move |engine| engine.disconnect(link.link))
    }

    fn receive(
        &self,
        py: Python<'_>,
        links: Vec<Link>,
        key: (u64, u32),
        maps: Vec<RawMap>,
        tokens: (u64, u64),
    ) -> Result<Transfer, Failure> {
        let (key, maps, tokens) = posted(key, maps, tokens)?;
        let links: Vec<_> = links.into_iter().map(|link| link.link).collect();
        let receive = self.with(py, move |engine| engine.receive_from_any(&links, key, &maps, tokens))?;
        Ok(receive.into())
    }

    fn send(
        &self,
        py: Python<'_>,
        link: Link,
        key: (u64, u32),
        maps: Vec<RawMap>,
        tokens: (u64, u64),
        in_parts: bool,
    ) -> Result<Transfer, Failure> {
        let (key, maps, tokens) = posted(key, maps, tokens)?;
        let send = self.with(py, move |engine| match in_parts {
            false => engine.send(link.link, key, maps, tokens),
            true => engine.send_in_parts(link.link, key, maps, tokens),
        })?;
        Ok(send.into())
    }

    fn quarantine(&self) -> Result<Vec<Quarantined>, Failure> {
        Ok(self.get()?.quarantine().into_iter().map(quarantined).collect())
    }

    /// Ends what is under way and says goodbye to the peers.
    fn close(&self, py: Python<'_>) -> Result<(), Failure> {
        let engine = self.engine.get()?.lock().take();
        py.detach(|| {
            if let Some(engine) = engine {
                engine.stop(); // whoever is in a call returns
                release(engine);
            }
        });
        Ok(())
    }
}

/// The memory at an address that is not 0.
fn host(address: usize) -> NonNull<u8> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(address)).expect("checked by the caller")
}

/// Options with the keys of `given` in place of their own.
fn changed(options: &EngineOptions, given: &str) -> serde_json::Result<EngineOptions> {
    let mut values = serde_json::to_value(options)?;
    for (name, value) in serde_json::from_str::<serde_json::Map<_, _>>(given)? {
        values[name] = value;
    }
    serde_json::from_value(values)
}

fn json_error(error: serde_json::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

type Posted = (RequestKey, Vec<BlockMap>, std::ops::Range<u64>);

fn posted((request, attempt): (u64, u32), maps: Vec<RawMap>, (start, end): (u64, u64)) -> PyResult<Posted> {
    Ok((RequestKey { request, attempt }, block_maps(maps)?, start..end))
}

fn quarantined(held: Quarantine) -> Quarantined {
    let text = held.to_string();
    let Quarantine { key, peer, epoch, slots, pools, bytes, elapsed, why } = held;
    let peer = (peer.side.to_string(), peer.rank);
    let why = format!("{why:?}");
    (key.request, key.attempt, peer, epoch, slots, pools, bytes, elapsed.as_secs_f64(), why, text)
}
