//! This process's side.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;
use kvferry_wire::{
    Context, ContextOptions, CudaOptions, EndpointId, Event, Part, PutError, Region, RemoteRegion, Route, TransferId,
    TransferStats, Worker,
};

use crate::child::Target;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) struct End {
    pub(crate) context: Context,
    pub(crate) worker: Worker,
    pub(crate) events: Receiver<Event>,
    pub(crate) pool: Region,
}

impl End {
    /// A worker with a pool of `bytes` on device 0, filled with [`pattern`].
    pub(crate) fn start(route: Option<Route>, transports: Option<&str>, bytes: u64) -> Self {
        Self::start_with(route, transports, bytes, Context::allocate_device)
    }

    /// As [`start`](Self::start), with memory that `allocate` gets.
    pub(crate) fn start_with(
        route: Option<Route>,
        transports: Option<&str>,
        bytes: u64,
        allocate: impl FnOnce(&Context, u64) -> Result<Region, kvferry_wire::RegionError>,
    ) -> Self {
        Self::start_on(Some(0), route, transports, bytes, allocate)
    }

    /// As [`start_with`](Self::start_with), on a GPU or none.
    pub(crate) fn start_on(
        device: Option<u32>,
        route: Option<Route>,
        transports: Option<&str>,
        bytes: u64,
        allocate: impl FnOnce(&Context, u64) -> Result<Region, kvferry_wire::RegionError>,
    ) -> Self {
        let (transports, cuda) = (transports.map(str::to_owned), device.map(CudaOptions::new));
        let options = ContextOptions { transports, route, cuda, ..Default::default() };
        let context = Context::open(&options).unwrap();
        let (worker, events) = Worker::start(&context, epoch()).unwrap();
        let pool = allocate(&context, bytes).unwrap();
        pool.write(0, &pattern(bytes)).unwrap();
        Self { context, worker, events, pool }
    }

    pub(crate) fn connect(&self, target: &Target) -> (EndpointId, RemoteRegion) {
        let endpoint = self.worker.connect(&target.address, target.epoch).unwrap();
        (endpoint, self.worker.import(endpoint, &target.card).unwrap())
    }

    pub(crate) fn put(&self, endpoint: EndpointId, parts: Vec<Part>) -> Result<TransferStats, PutError> {
        self.worker.put(endpoint, TransferId(1), parts).unwrap();
        self.done()
    }

    /// The end of the only transfer, past everything else.
    pub(crate) fn done(&self) -> Result<TransferStats, PutError> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let event = self.events.recv_deadline(deadline).expect("the end of a transfer within the deadline");
            if let Event::TransferDone { result, .. } = event {
                return result;
            }
        }
    }
}

/// An epoch that no other worker of these tests has.
fn epoch() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn pattern(bytes: u64) -> Vec<u8> {
    let word = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index << 7).to_le_bytes();
    (0..bytes.div_ceil(8)).flat_map(word).take(bytes as usize).collect()
}
