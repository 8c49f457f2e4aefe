//! The engine: its workers, one control thread, one for checksums if they are asked for, and the state machine that all of them
//! drive.

mod connect;
mod publish;
mod requests;

use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Sender};
use kvferry_wire::{Context, ContextOptions, CudaOptions, Version};

use crate::control;
use crate::core::{Core, Limits, LinkId};
use crate::error::{PostError, StartError};
use crate::options::EngineOptions;
use crate::peer::PROBE_BYTES;
use crate::quarantine::Quarantine;
use crate::shared::{Chore, Shared};
use crate::sums;
use crate::transfer::{Receive, Send};
use crate::workers::Workers;

/// How long after the engine the wire gives a peer up, at least.
const STALL_MARGIN_MIN: Duration = Duration::from_secs(1);

/// How long an engine that is dropped waits for its writes to end: they were cancelled.
const WRITES_DEADLINE: Duration = Duration::from_secs(1);

/// One pair of connected instances, of which the engine that made it is a rank. Another engine knows no such link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    engine: u64,
    id: LinkId,
}

/// Moves one rank's page cache. See the crate's documentation for the order of calls.
///
/// Dropping it ends every request with [`TransferError::Stopped`](crate::TransferError::Stopped) and flushes what it has
/// said to its peers.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    control: Option<JoinHandle<()>>,
    /// It ends after the control thread.
    sums: Option<JoinHandle<()>>,
}

impl Engine {
    /// Opens UCX and starts the threads.
    ///
    /// # Errors
    ///
    /// [`StartError`]; nothing is left behind.
    pub fn start(options: EngineOptions) -> Result<Self, StartError> {
        Self::start_with(options, None)
    }

    /// As [`start`](Self::start), for pools in the memory of a GPU. The driver is opened at run time.
    ///
    /// # Errors
    ///
    /// [`StartError`]; nothing is left behind.
    pub fn start_on_gpu(options: EngineOptions, gpu: CudaOptions) -> Result<Self, StartError> {
        Self::start_with(options, Some(gpu))
    }

    fn start_with(options: EngineOptions, cuda: Option<CudaOptions>) -> Result<Self, StartError> {
        options.check()?;
        tracing::info!(?options, "an engine starts");
        let context = Context::open(&ContextOptions {
            transports: options.transports.clone(),
            route: options.route,
            inbox_bytes: options.inbox_bytes,
            chunk_bytes: options.chunk_bytes,
            ring_bytes: options.ring_bytes,
            copy_threads: options.copy_threads,
            cpus: options.cpus.clone(),
            // The engine gives a write up first: then the peer is asked to agree, and cut off only if it does not. Two threads keep
            // the two deadlines, and either may be late.
            stall_deadline: options.patience + (options.patience / 4).max(STALL_MARGIN_MIN),
            cuda,
            ..ContextOptions::default()
        })?;
        let limits = Limits {
            patience: options.patience,
            resend: options.resend,
            requests_max: options.requests_max,
            verify: options.verify,
        };
        let verify = options.verify;
        let (chores, chore_queue) = channel::unbounded();
        let probe = context.allocate(PROBE_BYTES)?;
        let shared = Shared::new(options, getrandom::u64()?, context, probe, Core::new(limits), chores.clone());
        // The progress threads hold the engine from their first event on, until they end.
        let place = Arc::new(OnceLock::<Arc<Shared>>::new());
        let handler = || {
            let (place, gone) = (place.clone(), Gone(chores.clone()));
            move |event| {
                let _ = &gone;
                if let Some(shared) = place.get() {
                    shared.hear(event);
                }
            }
        };
        shared.set_workers(Workers::start(&shared.context, &shared.options, shared.epoch, handler)?);
        let _ = place.set(shared.clone()); // once
        let (checks, check_queue) = channel::unbounded();
        let for_control = shared.clone();
        let keep_time = move || control::run(&for_control, &chore_queue, &checks);
        let spawn = |name: &str, body: Box<dyn FnOnce() + std::marker::Send>| {
            let spawned = thread::Builder::new().name(name.to_owned()).spawn(body);
            spawned.inspect_err(|_| shared.workers().stop())
        };
        let make_sums = || {
            let (shared, gone) = (shared.clone(), Gone(chores));
            let body = move || {
                let _gone = gone;
                sums::run(&shared, &check_queue);
            };
            spawn("kvferry-sums", Box::new(body))
        };
        let sums = verify.then(make_sums).transpose()?;
        let control = Some(spawn("kvferry-engine", Box::new(keep_time))?);
        Ok(Self { shared, control, sums })
    }

    /// The options that the engine was started with.
    #[must_use]
    pub fn options(&self) -> &EngineOptions {
        &self.shared.options
    }

    /// Version of the UCX in use.
    #[must_use]
    pub fn ucx_version(&self) -> Version {
        self.shared.context.ucx_version()
    }

    /// The UCX instance, to allocate or register memory with.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// This life of the engine, as errors of peers name it.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    /// Slots of receives that have ended and to which a peer may still write, one entry a request and peer. They come back
    /// through their handles, when the peer has said that it has stopped, or has died; never because time has passed.
    #[must_use]
    pub fn quarantine(&self) -> Vec<Quarantine> {
        let now = Instant::now();
        let state = self.shared.lock();
        let own = state.published.clone();
        let pools = own.map_or(0, |own| own.table.pools.len());
        let quarantined = state.core.quarantine().into_iter();
        quarantined.map(|quarantined| Quarantine::new(now, pools, quarantined)).collect()
    }

    /// Messages that were sent again because they had not been answered in time. On a healthy network with patient ranks few.
    #[must_use]
    pub fn resent_messages(&self) -> u64 {
        self.shared.lock().core.resent()
    }

    /// Ends every request, and every call that waits, as dropping the engine does: for somebody who shares it with threads that may
    /// be in one. What is called afterwards says that the engine has stopped. Does not wait.
    pub fn stop(&self) {
        let _ = self.shared.chores.send(Chore::Stop); // gone: ended already
    }

    fn id_of(&self, link: Link) -> Result<LinkId, PostError> {
        if link.engine == self.shared.epoch { Ok(link.id) } else { Err(PostError::NoLink) }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
        for thread in [self.control.take(), self.sums.take()].into_iter().flatten() {
            if thread.join().is_err() {
                tracing::error!("a thread of the engine panicked");
            }
        }
        // Writes that were cancelled end soon, and their destinations are told. What has not ended by then may go on.
        let deadline = Instant::now() + WRITES_DEADLINE;
        while self.shared.lock().core.is_writing() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        self.shared.workers().stop();
    }
}

/// Held by another thread of the engine: tells the control thread when that ends, however it does.
struct Gone(Sender<Chore>);

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = self.0.send(Chore::Gone); // nobody there: ended already
    }
}

const _: () = {
    const fn shared_by_threads<T: std::marker::Send + Sync>() {}
    shared_by_threads::<Engine>();
    shared_by_threads::<Receive>();
    shared_by_threads::<Send>();
};
