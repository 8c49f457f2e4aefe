//! One UCX instance: its settings, and the registrations made through it.
//!
//! # Safety
//!
//! The raw context comes from `ucp_init` and is released once, when the last [`Region`] and the last worker that hold it
//! are gone. It is made with `mt_workers_shared`, so UCX locks around the calls that take it, from any thread.
#![allow(unsafe_code, reason = "calls UCX on the context it owns")]

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use ucx_sys::{Status, Ucx, Version};

use crate::cuda::driver::CudaError;
use crate::cuda::gpu::Gpu;
use crate::cuda::memory::DeviceMemory;
use crate::error::{OpenError, RegionError};
use crate::forked;
use crate::memory::HostMemory;
use crate::options::{ContextOptions, Pages};
use crate::region::{Region, RegionId, WeakRegion};

/// One UCX instance. Cheap to clone; lives until the last clone, region and worker are gone.
#[derive(Clone, Debug)]
pub struct Context {
    inner: Arc<Inner>,
}

/// The raw context, shared by what was made from it.
#[derive(Debug)]
struct Inner {
    ucx: &'static Ucx,
    raw: NonNull<ucx_sys::ucp_context>,
    options: ContextOptions,
    /// Workers started so far.
    workers: AtomicUsize,
    /// What peers may name as a target of bytes that this process scatters for them.
    regions: Mutex<BTreeMap<RegionId, WeakRegion>>,
    /// The GPU, if the options ask for one.
    gpu: Option<Arc<Gpu>>,
}

// SAFETY: the context is made with `mt_workers_shared`, so every call that takes it locks inside UCX.
unsafe impl Send for Inner {}
// SAFETY: as above; `Inner` itself has no interior state.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: `raw` came from `ucp_init` in `Context::open` and is released only here. Regions and workers hold an `Arc` of
        // `Inner`, so none is left.
        unsafe { self.ucx.ucp_cleanup(self.raw.as_ptr()) }
    }
}

impl Context {
    /// Opens UCX and starts it.
    ///
    /// Sets `RNDV_THRESH=inf` unless the environment says otherwise: with peer error handling UCX would else leave the
    /// zero-copy lanes of cma and tcp unused and emulate puts in fragments of 8 KiB (read in UCX 1.22, measured at 1.0
    /// against 5 GB/s). If `transports` names shared memory, its peer error handling is switched on, which UCX wants before
    /// it uses it here. That is not done unasked: the queue in shared memory through which a process of one host receives
    /// from all others stops for all of them when one is stopped or killed in the middle of an insertion, while the sockets
    /// that UCX takes otherwise are apart, and the kernel says at once that a peer died. What is gained by shared memory
    /// comes from the routes of this crate instead, and from its rings for frames, of which each sender has its own
    /// ([`ContextOptions::ring_bytes`]).
    ///
    /// # Errors
    ///
    /// [`OpenError`]; nothing is left behind.
    pub fn open(options: &ContextOptions) -> Result<Self, OpenError> {
        let ucx = ucx_sys::load()?;
        forked::claim()?;
        let gpu = options.cuda.as_ref().map(Gpu::open).transpose()?;
        let transports = options.transports.as_deref();
        let _as_wanted = environment(options);
        let config = Config::read(ucx)?;
        if std::env::var_os("UCX_RNDV_THRESH").is_none() {
            config.set("RNDV_THRESH", "inf")?;
        }
        if let Some(transports) = transports {
            config.set("TLS", transports)?;
        }
        let params = ucx_sys::ucp_params_t {
            field_mask: ucx_sys::UCP_PARAM_FIELD_FEATURES | ucx_sys::UCP_PARAM_FIELD_MT_WORKERS_SHARED,
            features: ucx_sys::UCP_FEATURE_RMA | ucx_sys::UCP_FEATURE_TAG | ucx_sys::UCP_FEATURE_WAKEUP,
            mt_workers_shared: 1,
            ..Default::default()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: `params` and `config` live across the call, `raw` receives the context.
        let status = unsafe { ucx.ucp_init(&raw const params, config.raw.as_ptr(), &raw mut raw) };
        match NonNull::new(raw) {
            Some(raw) if status == Status::OK => {
                let (options, regions) = (options.clone(), Mutex::default());
                Ok(Self { inner: Arc::new(Inner { ucx, raw, options, workers: AtomicUsize::new(0), regions, gpu }) })
            }
            _ if status == Status::ERR_NO_DEVICE => {
                let given = || std::env::var("UCX_TLS").unwrap_or_else(|_| "all".to_owned());
                Err(OpenError::Transports { list: options.transports.clone().unwrap_or_else(given), source: status })
            }
            _ => Err(OpenError::Start { call: "ucp_init", source: status }),
        }
    }

    /// Version of the UCX in use.
    #[must_use]
    pub fn ucx_version(&self) -> Version {
        self.inner.ucx.version()
    }

    /// File of the UCX in use.
    #[must_use]
    pub fn ucx_path(&self) -> &Path {
        self.inner.ucx.path()
    }

    /// Allocates and registers `bytes` of host memory, zeroed, from a page boundary on. Peers on this host can map it, which
    /// makes it the fastest target there is.
    ///
    /// # Errors
    ///
    /// [`RegionError`]: 0 bytes, no memory, or UCX refuses to register.
    pub fn allocate(&self, bytes: u64) -> Result<Region, RegionError> {
        self.allocate_in(bytes, Pages::Normal)
    }

    /// As [`allocate`](Self::allocate), in pages of the caller's choice.
    ///
    /// # Errors
    ///
    /// [`RegionError`]: as there, and [`RegionError::HugePages`] if there are not enough of them. Normal ones are not taken
    /// in their place.
    pub fn allocate_in(&self, bytes: u64, pages: Pages) -> Result<Region, RegionError> {
        let memory = HostMemory::allocate(bytes, pages)?;
        Region::register(self, memory)
    }

    /// Registers `bytes` of host memory at `base` that the caller allocated. `owner` is held until the registration is
    /// undone, which waits for the transfers that use it.
    ///
    /// # Errors
    ///
    /// [`RegionError`]: 0 bytes, a range that wraps, or UCX refuses to register.
    ///
    /// # Safety
    ///
    /// The range must be readable and writable and stay mapped while `owner` lives. No reference into it may be live while
    /// a transfer, a peer or [`Region::read`] and [`Region::write`] access it.
    pub unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Region, RegionError> {
        // SAFETY: the caller's promise, passed on.
        let memory = unsafe { HostMemory::borrow(base, bytes, owner) }?;
        Region::register(self, memory)
    }

    /// Allocates and registers `bytes` of memory of the context's GPU, zeroed. Peers on this host can map it, and what they
    /// have mapped stays valid for them when this process dies.
    ///
    /// # Errors
    ///
    /// [`RegionError`]: 0 bytes, no memory, or a context without a GPU.
    pub fn allocate_device(&self, bytes: u64) -> Result<Region, RegionError> {
        let gpu = self.gpu().ok_or(RegionError::NoGpu)?;
        let memory = DeviceMemory::allocate(gpu, bytes)?;
        Ok(Region::of_device(self, memory))
    }

    /// Registers `bytes` of memory of the context's GPU, from the device address `base` on, that the caller allocated,
    /// however it did. `owner` is held until the registration is undone, which waits for the transfers that use it. Peers
    /// write the memory through this process's slab. They can map it if it is made of at most 253 allocations of virtual memory
    /// management that were created to be exported as descriptors, as PyTorch's expandable segments are: then what they have
    /// mapped stays valid for them, whatever becomes of it here.
    ///
    /// # Errors
    ///
    /// [`RegionError`]: 0 bytes, a range that wraps or is not of this GPU, or a context without a GPU.
    ///
    /// # Safety
    ///
    /// The whole range must be memory of the GPU and stay allocated while `owner` lives.
    pub unsafe fn register_device(
        &self,
        base: u64,
        bytes: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Region, RegionError> {
        let gpu = self.gpu().ok_or(RegionError::NoGpu)?;
        // SAFETY: the caller's promise, passed on.
        let memory = unsafe { DeviceMemory::borrow(gpu, base, bytes, owner) }?;
        Ok(Region::of_device(self, memory))
    }

    /// What the context's GPU calls itself, and its free and total bytes; `None` without one.
    ///
    /// # Errors
    ///
    /// [`CudaError`]: the GPU's context is lost.
    pub fn gpu_memory(&self) -> Result<Option<(String, u64, u64)>, CudaError> {
        let memory = |gpu: &Arc<Gpu>| gpu.memory().map(|(free, total)| (gpu.name.clone(), free, total));
        self.gpu().map(memory).transpose()
    }

    /// Whether `region` was registered with this context. Another's is of no use here.
    #[must_use]
    pub fn owns(&self, region: &Region) -> bool {
        Arc::ptr_eq(&self.inner, &region.context().inner)
    }

    pub(crate) fn options(&self) -> &ContextOptions {
        &self.inner.options
    }

    /// The processor for the thread of the next worker, if the options name any.
    pub(crate) fn next_cpu(&self) -> Option<usize> {
        let worker = self.inner.workers.fetch_add(1, Ordering::Relaxed); // any order of them will do
        let cpus = &self.inner.options.cpus;
        cpus.get(worker.checked_rem(cpus.len())?).copied()
    }

    pub(crate) fn add_region(&self, id: RegionId, region: WeakRegion) {
        self.inner.regions.lock().insert(id, region);
    }

    pub(crate) fn remove_region(&self, id: RegionId) {
        self.inner.regions.lock().remove(&id);
    }

    /// The region that a peer names, if it is registered.
    pub(crate) fn region(&self, id: RegionId) -> Option<Region> {
        self.inner.regions.lock().get(&id).and_then(WeakRegion::upgrade)
    }

    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.inner.gpu.as_ref()
    }

    pub(crate) fn ucx(&self) -> &'static Ucx {
        self.inner.ucx
    }

    pub(crate) fn raw(&self) -> ucx_sys::ucp_context_h {
        self.inner.raw.as_ptr()
    }
}

/// Held for writing while this crate changes the environment, and for reading while it has UCX read it.
static ENVIRONMENT: RwLock<()> = RwLock::new(());

/// UCX leaves shared memory unused under peer error handling unless these are set. They are read from the environment only:
/// `ucp_config_modify` of 1.13 accepts them without effect.
const SHARED_MEMORY: [&str; 2] = ["UCX_POSIX_ERROR_HANDLING", "UCX_SYSV_ERROR_HANDLING"];

/// The environment as UCX is to find it, while this lives.
#[allow(dead_code, reason = "the locks are held")]
pub(crate) enum Environment {
    Unchanged(RwLockReadGuard<'static, ()>),
    Changed(RwLockWriteGuard<'static, ()>, Vec<&'static str>),
}

/// To be held while UCX opens a context or creates a worker, which is when it reads the environment. What is set for a context
/// that names shared memory is taken back: another context of this process, or of a child, does not expect it, and UCX 1.13
/// aborts when of two peers one has it and the other has not.
pub(crate) fn environment(options: &ContextOptions) -> Environment {
    if !options.names_shared_memory() {
        return Environment::Unchanged(ENVIRONMENT.read());
    }
    let alone = ENVIRONMENT.write();
    let unset: Vec<&str> = SHARED_MEMORY.into_iter().filter(|name| std::env::var_os(name).is_none()).collect();
    for name in &unset {
        // SAFETY: `set_var` races with threads that read the environment without Rust's lock. This crate's own calls of UCX that
        // do wait for `ENVIRONMENT`. A program that reads it from C on another thread must open its contexts and start its
        // workers before it starts that thread: `ucx_sys::load` asks the same of it.
        unsafe { std::env::set_var(name, "y") }
    }
    Environment::Changed(alone, unset)
}

impl Drop for Environment {
    fn drop(&mut self) {
        if let Self::Changed(_, set) = self {
            for name in set {
                // SAFETY: as in `environment`, whose lock is still held.
                unsafe { std::env::remove_var(name) }
            }
        }
    }
}

/// UCX's settings, released when done with.
struct Config {
    ucx: &'static Ucx,
    raw: NonNull<ucx_sys::ucp_config_t>,
}

impl Config {
    fn read(ucx: &'static Ucx) -> Result<Self, OpenError> {
        let mut raw = ptr::null_mut();
        // SAFETY: null prefix and file mean UCX's own; `raw` receives the settings.
        let status = unsafe { ucx.ucp_config_read(ptr::null(), ptr::null(), &raw mut raw) };
        match NonNull::new(raw) {
            Some(raw) if status == Status::OK => Ok(Self { ucx, raw }),
            _ => Err(OpenError::Start { call: "ucp_config_read", source: status }),
        }
    }

    fn set(&self, key: &'static str, value: &str) -> Result<(), OpenError> {
        let refused = |source| OpenError::Setting { key, value: value.to_owned(), source };
        let (Ok(name), Ok(text)) = (CString::new(key), CString::new(value)) else {
            return Err(refused(Status::ERR_INVALID_PARAM));
        };
        // SAFETY: `raw` is live until `self` drops; UCX copies both strings.
        match unsafe { self.ucx.ucp_config_modify(self.raw.as_ptr(), name.as_ptr(), text.as_ptr()) } {
            Status::OK => Ok(()),
            source => Err(refused(source)),
        }
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: `raw` came from `ucp_config_read` and is released only here.
        unsafe { self.ucx.ucp_config_release(self.raw.as_ptr()) }
    }
}
