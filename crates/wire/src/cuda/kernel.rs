//! The kernel: committed PTX, which the driver compiles for its GPU, and how it is launched.
//!
//! # Safety
//!
//! The parameters are those of `kernels/move.cu`, in its layout.
#![allow(unsafe_code, reason = "launches the kernel")]

use std::ffi::{c_uint, c_void};
use std::ptr;

use crate::cuda::driver::{CudaError, DeviceAddress, Driver, RawFunction, RawModule, RawStream};
use crate::cuda::gpu::{Entered, Gpu};

/// `kernels/move.cu`, compiled by `ci/kernels`.
const PTX: &[u8] = concat!(include_str!("../../kernels/move.ptx"), "\0").as_bytes();

/// Threads of a block: with the registers that the kernel takes, one block fills a multiprocessor.
const BLOCK_THREADS: c_uint = 512;

/// Lanes that copy a unit together, and groups of them in a warp.
const LANES: u32 = 8;
const WARP_GROUPS: u32 = 32 / LANES;

/// Tiles that a warp takes of a long transfer, at least, and units that each of its groups copies of one, at most.
const TILES_PER_WARP: u32 = 16;
const TILE_ROUNDS_MAX: u32 = 8;

/// `Job` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) entries: DeviceAddress,
    pub(crate) starts: DeviceAddress,
    /// 0: sets and pairs are in `inline`.
    pub(crate) sets: DeviceAddress,
    /// Address, or offset in `inline`.
    pub(crate) pairs: u64,
    pub(crate) slab: DeviceAddress,
    pub(crate) set_count: u32,
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) mode: u32,
    /// Three numbers of the stream's: two that are zero between launches, and that of a job to stop.
    pub(crate) progress: DeviceAddress,
    /// Where `number` is written when all is copied.
    pub(crate) done: DeviceAddress,
    pub(crate) number: u64,
    /// Set by [`launch`].
    pub(crate) tile: u32,
    pub(crate) entry_count: u32,
    /// Units of a chunk, as a power of two.
    pub(crate) chunk_shift: u32,
    pub(crate) chunks: [u32; CHUNKS],
    pub(crate) unused: u32,
    pub(crate) inline: [u8; INLINE_BYTES],
}

/// Sets and pairs that fit travel with the launch, without a copy of their own.
pub(crate) const INLINE_BYTES: usize = 768;

/// Chunks of a slab that one launch fills or empties, at most.
pub(crate) const CHUNKS: usize = 8;

const _: () = assert!(size_of::<Job>() == 128 + INLINE_BYTES);

pub(crate) fn load(driver: &Driver, _current: &Entered<'_>) -> Result<(RawModule, RawFunction), CudaError> {
    let (mut module, mut function) = (RawModule::NONE, RawFunction::NONE);
    // SAFETY: a context is current, and the image is PTX that ends with a zero.
    unsafe { driver.module_load(&raw mut module, PTX.as_ptr().cast()) }?;
    // SAFETY: the module was loaded above.
    unsafe { driver.module_function(&raw mut function, module, c"kvferry_move".as_ptr()) }?;
    Ok((module, function))
}

/// Launches the kernel for `job`, which has at least one unit, on at most `blocks_max` blocks.
///
/// # Safety
///
/// The addresses of `job` hold what the kernel reads, and every address that it makes of them is memory that the device can
/// reach, until the kernel has ended.
pub(crate) unsafe fn launch(
    gpu: &Gpu,
    _current: &Entered<'_>,
    stream: RawStream,
    mut job: Job,
    blocks_max: u32,
) -> Result<(), CudaError> {
    let blocks = job.count.div_ceil(BLOCK_THREADS / LANES).min(blocks_max).max(1);
    let groups = blocks * (BLOCK_THREADS / LANES);
    // A few tiles a warp, so that all end at about the same time, but not so many that they wait for their numbers.
    let rounds = (job.count.div_ceil(groups) / TILES_PER_WARP).clamp(1, TILE_ROUNDS_MAX);
    job.tile = rounds * WARP_GROUPS;
    let mut parameters = [ptr::from_mut(&mut job).cast::<c_void>()];
    let none = ptr::null_mut();
    // SAFETY: the function takes one `Job`, which the driver copies; the rest is the caller's promise.
    unsafe {
        gpu.driver.launch(gpu.kernel, blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, stream, parameters.as_mut_ptr(), none)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    #[test]
    fn the_ptx_is_that_of_the_source() {
        let digest = include_str!("../../kernels/move.digest");
        let lines: BTreeMap<&str, &str> = digest.lines().filter_map(|line| line.split_once(' ')).collect();
        // FNV-1a, as in ci/kernels.
        let fnv = |text: &str| {
            let mix = |state: u64, byte: u8| (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, mix))
        };
        let advice = "run ci/kernels";
        assert_eq!(lines["source"], fnv(include_str!("../../kernels/move.cu")), "move.cu has changed: {advice}");
        assert_eq!(lines["ptx"], fnv(include_str!("../../kernels/move.ptx")), "move.ptx has changed: {advice}");
        let script = include_str!("../../../../ci/kernels");
        let nvrtc = format!("VERSION = {:?}", lines["nvrtc"]);
        let options = lines["options"].split(' ').map(|option| format!("{option:?}")).collect::<Vec<_>>().join(", ");
        assert!(script.contains(&nvrtc) && script.contains(&options), "the compiler has changed: {advice}");
    }
}
