//! How a context is set up.

use std::time::Duration;

use crate::cuda::options::CudaOptions;
use crate::frames::incoming::RING_BYTES_MAX;
use crate::route::Route;

/// Transports of UCX that move data through memory which both processes map.
const SHARED_MEMORY: [&str; 5] = ["sm", "shm", "mm", "posix", "sysv"];

/// Fewer bytes make no ring of frames.
const RING_BYTES_MIN: u32 = 4 << 10;

/// Pages of memory that a context allocates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pages {
    /// Of the usual size.
    #[default]
    Normal,
    /// Huge ones of the default size, which have to be set aside (`vm.nr_hugepages`). A region starts at one and takes whole
    /// ones, and one more.
    Huge,
}

/// How UCX and the routes are set up. Start from the default and change what you need.
#[derive(Clone, Debug)]
pub struct ContextOptions {
    /// Transports that UCX may use, as in `UCX_TLS`; `None` leaves the choice to UCX and its environment. With peer error
    /// handling, which is always on, the list needs `tcp` or a network transport for UCX 1.13. A list without shared memory
    /// also rules out the routes through memory that both processes map.
    pub transports: Option<String>,
    /// The only route that transfers take. One that cannot take it fails; `None` leaves the choice to the figures.
    pub route: Option<Route>,
    /// Memory that a worker sets aside for peers to write what it then scatters, in bytes. Taken when first used.
    pub inbox_bytes: u64,
    /// Bytes that travel to a peer's inbox at a time. Each takes room there in whole 512 B.
    pub chunk_bytes: u32,
    /// Memory through which frames go to a peer on this host, in bytes: for each connection and direction, taken when first used.
    /// With less than 4 KiB, or where the transports rule out memory that both processes map, they go by UCX, as those do that
    /// are too long or find no room. At most 1 MiB.
    pub ring_bytes: u32,
    /// Threads that copy into mapped memory. One is the progress thread alone; more take cores from whatever else runs.
    pub copy_threads: usize,
    /// Processors to pin progress threads to, one for each worker of the context in turn. Empty leaves them to the system,
    /// which is right unless the processors are kept free for them: callers make no progress in their place then.
    pub cpus: Vec<usize>,
    /// Whether memory of a peer on this host is mapped page by page ahead of the first transfer, by a thread of its own that
    /// starts with the import. That takes the pages that the peer has not touched yet; without it, each first copy to a page
    /// stops to map it.
    pub populate: bool,
    /// A transfer of which nothing moves for so long has failed, and its endpoint with it.
    pub stall_deadline: Duration,
    /// How long the progress thread looks on for more before it sleeps. An answer on one host comes sooner than a sleeper wakes,
    /// which takes up to 100 us; a process with a core to spare does well to look on for milliseconds.
    pub linger: Duration,
    /// The GPU whose memory may be allocated and registered; `None` leaves CUDA alone. The driver is opened at run time.
    pub cuda: Option<CudaOptions>,
}

impl Default for ContextOptions {
    fn default() -> Self {
        Self {
            transports: None,
            route: None,
            inbox_bytes: 64 << 20,
            chunk_bytes: 256 << 10,
            ring_bytes: 64 << 10,
            copy_threads: 1,
            cpus: Vec::new(),
            populate: true,
            stall_deadline: Duration::from_secs(30),
            linger: Duration::from_micros(50),
            cuda: None,
        }
    }
}

impl ContextOptions {
    /// Whether the caller's own list names shared memory.
    pub(crate) fn names_shared_memory(&self) -> bool {
        self.transports.as_deref().is_some_and(names_shared_memory)
    }

    /// Whether UCX may have the kernel copy between processes.
    pub(crate) fn allows_cma(&self) -> bool {
        let names_cma = |list: &str| list.split(',').any(|name| ["cma", "sm", "shm", "all"].contains(&name));
        match (&self.transports, std::env::var("UCX_TLS")) {
            (Some(list), _) => names_cma(list),
            (None, Ok(list)) => list.starts_with('^') || names_cma(&list),
            (None, Err(_)) => true,
        }
    }

    /// Bytes of the ring of frames to a peer, which is on this host if `near`; 0 for none.
    pub(crate) fn ring_bytes_for(&self, near: bool) -> u32 {
        if near && self.allows_rings() { self.ring_bytes.min(RING_BYTES_MAX) } else { 0 }
    }

    /// Whether frames may go through memory that both processes map.
    pub(crate) fn allows_rings(&self) -> bool {
        self.ring_bytes >= RING_BYTES_MIN && self.allows_shared_memory()
    }

    /// Whether memory of another process may be mapped: unless the transports in force leave shared memory out.
    pub(crate) fn allows_shared_memory(&self) -> bool {
        match &self.transports {
            Some(list) => allows_shared_memory(list),
            None => std::env::var("UCX_TLS").map_or(true, |list| allows_shared_memory(&list)),
        }
    }
}

fn names_shared_memory(list: &str) -> bool {
    list.split(',').any(|name| SHARED_MEMORY.contains(&name))
}

/// A list may be negated with `^`: then it names what is not to be used.
fn allows_shared_memory(list: &str) -> bool {
    match list.strip_prefix('^') {
        Some(forbidden) => !names_shared_memory(forbidden),
        None => names_shared_memory(list) || list.split(',').any(|name| name == "all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_allowed_unless_the_list_leaves_it_out() {
        for (list, allowed) in [
            ("all", true),
            ("tcp,sysv", true),
            ("posix,tcp,cma", true),
            ("tcp", false),
            ("tcp,cma", false),
            ("^ib", true),
            ("^sm,ib", false),
        ] {
            assert_eq!(allows_shared_memory(list), allowed, "{list}");
        }
    }
}
