//! How GPU memory is moved.

use serde::{Deserialize, Serialize};

/// Settings of a context that has a GPU. Start from [`CudaOptions::new`] and change what you need. In a file, what is not given but
/// for the device is as there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaOptions {
    /// The GPU, as this process counts them (`CUDA_VISIBLE_DEVICES`). Its primary context is used: that of the framework in
    /// the same process.
    pub device: u32,
    /// Blocks of 512 threads, hence multiprocessors, that one copy takes at most: the rest is left to the model's kernels.
    /// `None` takes the fewest that were measured to reach nine tenths of the peak.
    #[serde(default)]
    pub sm_blocks: Option<u32>,
    /// Whether copies go before other work of the same GPU that waits for a multiprocessor.
    #[serde(default = "urgent")]
    pub urgent: bool,
    /// GPU memory that a worker sets aside for peers to write what it then scatters, in bytes. 0 for none: then peers of the
    /// same host can write only straight into pools.
    #[serde(default = "slab_bytes")]
    pub slab_bytes: u64,
    /// Bytes of it that are granted at a time, rounded down to a power of two. A large transfer fills several at once; a
    /// quarter of the slab is granted ahead to peers that have been here before, a chunk or more each, so that their next
    /// transfer need not ask first.
    #[serde(default = "slab_chunk_bytes")]
    pub slab_chunk_bytes: u32,
}

impl CudaOptions {
    /// The defaults, for a GPU.
    #[must_use]
    pub fn new(device: u32) -> Self {
        Self { device, sm_blocks: None, urgent: true, slab_bytes: 128 << 20, slab_chunk_bytes: 4 << 20 }
    }
}

fn urgent() -> bool {
    CudaOptions::new(0).urgent
}

fn slab_bytes() -> u64 {
    CudaOptions::new(0).slab_bytes
}

fn slab_chunk_bytes() -> u32 {
    CudaOptions::new(0).slab_chunk_bytes
}
