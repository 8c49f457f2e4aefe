//! Copies between host memory that other processes may write.
//!
//! # Safety
//!
//! A [`Window`] is mapped while its lifetime lasts, and every copy is checked against both windows. Bytes that somebody else
//! changes meanwhile arrive old or new: the copies go through raw pointers and machine instructions, never through
//! references. Ranges that overlap arrive as some mixture.
#![allow(unsafe_code, reason = "copies through raw pointers, with instructions that bypass the cache")]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

/// Runs shorter than this go through the cache: then the lines are not full often enough to gain (measured: 1 KiB runs
/// lose, 4 KiB runs gain a quarter, 16 KiB runs half).
const STREAM_BYTES_MIN: usize = 2048;

/// Lines that are asked for ahead of a run; the rest the processor fetches by itself.
const PREFETCH_LINES: usize = 16;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// How the bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// Through the cache: whoever reads them next is near.
    Cached,
    /// Around the cache where it gains: the lines that are overwritten whole are not read first, which is a third of the
    /// memory traffic of a copy.
    Streaming,
}

/// A range of memory that is mapped for `'a`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window<'a> {
    base: NonNull<u8>,
    bytes: usize,
    owner: PhantomData<&'a ()>,
}

impl<'a> Window<'a> {
    /// Memory that nobody else can reach meanwhile.
    pub(crate) fn of(bytes: &'a mut [u8]) -> Self {
        let length = bytes.len();
        // SAFETY: the exclusive borrow lasts for `'a`.
        unsafe { Self::new(NonNull::from(bytes).cast(), length) }
    }

    /// # Safety
    ///
    /// `bytes` bytes from `base` on stay mapped, readable and writable, for `'a`.
    pub(crate) unsafe fn new(base: NonNull<u8>, bytes: usize) -> Self {
        Self { base, bytes, owner: PhantomData }
    }

    /// Byte `offset`, if `bytes` bytes from there are inside.
    fn at(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes as u64);
        inside.then(|| self.base.as_ptr().wrapping_add(usize::try_from(offset).expect("inside, so a usize")))
    }

    /// Copies into this window. `None`, and nothing is copied, if either range leaves its window. Streamed bytes are ordered
    /// before a later message by [`publish`] only.
    pub(crate) fn copy_from(&self, to: u64, source: Window<'_>, from: u64, bytes: u64, stores: Stores) -> Option<()> {
        let (to, from) = (self.at(to, bytes)?, source.at(from, bytes)?);
        let bytes = usize::try_from(bytes).ok()?;
        // SAFETY: both ranges are inside their windows, which are mapped.
        unsafe { copy(from, to, bytes, stores) };
        Some(())
    }

    /// Asks for the first lines of what is copied from here next: a scattered run is too short for the processor to guess.
    /// For a short one it is the translation of its address that counts, and more lines would only stand in the way of the
    /// copy at hand (measured: 1 KiB runs take 0.6 us with a line of each side, 1.0 with none or with all of the source).
    pub(crate) fn prefetch(&self, offset: u64, bytes: u64) {
        let lines = if bytes < STREAM_BYTES_MIN as u64 { 1 } else { PREFETCH_LINES };
        self.prefetch_lines(offset, lines);
    }

    /// The same for what is copied to here next.
    pub(crate) fn prefetch_target(&self, offset: u64) {
        self.prefetch_lines(offset, 1);
    }

    fn prefetch_lines(&self, offset: u64, lines: usize) {
        if let Some(start) = self.at(offset, 1) {
            #[cfg(target_arch = "x86_64")]
            (0..lines).for_each(|line| x86::prefetch(start.wrapping_add(line * LINE_BYTES)));
            #[cfg(not(target_arch = "x86_64"))]
            let _ = (start, lines);
        }
    }
}

/// Copies `bytes` from `from` to `to`. Streamed bytes are ordered before a later message by [`publish`] only.
///
/// # Safety
///
/// Both ranges are mapped for `bytes`.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, stores: Stores) {
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streaming
        && bytes >= STREAM_BYTES_MIN
        && let Some(stream) = x86::kernel()
    {
        // SAFETY: the caller's promise; the kernel was chosen for this processor.
        return unsafe { stream(from, to, bytes) };
    }
    let _ = stores;
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(from, to, bytes) }
}

/// Orders everything copied before it ahead of every store after it: whoever sees the message that this thread sends
/// next, and orders its reads behind it, sees the bytes.
pub(crate) fn publish() {
    #[cfg(target_arch = "x86_64")]
    x86::drain();
    fence(Ordering::Release);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm_sfence};
    use std::sync::OnceLock;

    use super::LINE_BYTES;

    pub(super) type Kernel = unsafe fn(*const u8, *mut u8, usize);

    /// The widest streaming copy of this processor. Whole lines at once are what gains: with halves of lines most of it
    /// is lost when two threads copy.
    pub(super) fn kernel() -> Option<Kernel> {
        static KERNEL: OnceLock<Option<Kernel>> = OnceLock::new();
        *KERNEL.get_or_init(|| {
            if is_x86_feature_detected!("avx512f") {
                Some(stream_512)
            } else if is_x86_feature_detected!("avx2") {
                Some(stream_256)
            } else {
                None
            }
        })
    }

    pub(super) fn drain() {
        // SAFETY: an instruction of every x86-64 processor.
        unsafe { _mm_sfence() }
    }

    pub(super) fn prefetch(line: *const u8) {
        // SAFETY: a prefetch of any address has no effect but on the cache.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }

    /// Copies the bytes before the first whole line of `to` and those behind the last whole `step` bytes, and returns what
    /// lies between.
    ///
    /// # Safety
    ///
    /// As [`super::copy`].
    unsafe fn ends(from: *const u8, to: *mut u8, bytes: usize, step: usize) -> (*const u8, *mut u8, usize) {
        let head = to.align_offset(LINE_BYTES).min(bytes);
        let whole = (bytes - head) / step * step;
        let tail = head + whole;
        // SAFETY: the caller's ranges, in part.
        unsafe { std::ptr::copy(from, to, head) };
        let (from_tail, to_tail) = (from.wrapping_add(tail), to.wrapping_add(tail));
        // SAFETY: as above.
        unsafe { std::ptr::copy(from_tail, to_tail, bytes - tail) };
        (from.wrapping_add(head), to.wrapping_add(head), whole)
    }

    /// # Safety
    ///
    /// As [`super::copy`], on a processor with AVX-512F.
    unsafe fn stream_512(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        let (from, to, whole) = unsafe { ends(from, to, bytes, 256) };
        if whole == 0 {
            return;
        }
        // SAFETY: reads and writes `whole` bytes, a multiple of 256, of the caller's ranges; `to` is aligned to a line. The
        // registers are declared by their lowest parts, which stand for the whole; `vzeroupper` leaves the upper parts of
        // the others as the calling convention has them: unused across a call, which the clobber of all of them makes this.
        unsafe {
            asm!(
                "2:",
                "prefetcht0 [{from} + 1024]",
                "prefetcht0 [{from} + 1088]",
                "prefetcht0 [{from} + 1152]",
                "prefetcht0 [{from} + 1216]",
                "vmovdqu64 zmm0, [{from}]",
                "vmovdqu64 zmm1, [{from} + 64]",
                "vmovdqu64 zmm2, [{from} + 128]",
                "vmovdqu64 zmm3, [{from} + 192]",
                "vmovntdq [{to}], zmm0",
                "vmovntdq [{to} + 64], zmm1",
                "vmovntdq [{to} + 128], zmm2",
                "vmovntdq [{to} + 192], zmm3",
                "add {from}, 256",
                "add {to}, 256",
                "sub {whole}, 256",
                "jnz 2b",
                "vzeroupper",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                whole = inout(reg) whole => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nostack),
            );
        }
    }

    /// # Safety
    ///
    /// As [`super::copy`], on a processor with AVX.
    unsafe fn stream_256(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        let (from, to, whole) = unsafe { ends(from, to, bytes, 128) };
        if whole == 0 {
            return;
        }
        // SAFETY: as in `stream_512`, 128 bytes at a time.
        unsafe {
            asm!(
                "2:",
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovdqu ymm2, [{from} + 64]",
                "vmovdqu ymm3, [{from} + 96]",
                "vmovntdq [{to}], ymm0",
                "vmovntdq [{to} + 32], ymm1",
                "vmovntdq [{to} + 64], ymm2",
                "vmovntdq [{to} + 96], ymm3",
                "add {from}, 128",
                "add {to}, 128",
                "sub {whole}, 128",
                "jnz 2b",
                "vzeroupper",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                whole = inout(reg) whole => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nostack),
            );
        }
    }

    #[cfg(test)]
    pub(super) fn kernels() -> Vec<Kernel> {
        let mut kernels: Vec<Kernel> = Vec::new();
        if is_x86_feature_detected!("avx512f") {
            kernels.push(stream_512);
        }
        if is_x86_feature_detected!("avx2") {
            kernels.push(stream_256);
        }
        kernels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize);

    unsafe fn streaming(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { copy(from, to, bytes, Stores::Streaming) }
    }

    fn check(copy: Copy, offsets: (usize, usize), bytes: usize) {
        let from: Vec<u8> = (0..8192u32).map(|i| (i * 31 % 251) as u8).collect();
        let mut to = vec![0xee; 8192];
        let (source, target) = (from[offsets.0..].as_ptr(), to[offsets.1..].as_mut_ptr());
        // SAFETY: both ranges are inside their vectors.
        unsafe { copy(source, target, bytes) };
        publish();
        let mut expected = vec![0xee; 8192];
        expected[offsets.1..offsets.1 + bytes].copy_from_slice(&from[offsets.0..offsets.0 + bytes]);
        assert!(to == expected, "{offsets:?} {bytes}");
    }

    #[test]
    fn every_kernel_copies_what_it_is_told_and_nothing_else() {
        let mut kernels: Vec<Copy> = vec![streaming];
        #[cfg(target_arch = "x86_64")]
        kernels.extend(x86::kernels());
        for kernel in kernels {
            for from in [0, 1, 17, 63] {
                for to in [0, 1, 15, 32, 64, 100, 255] {
                    for bytes in [0, 1, 64, 127, 128, 255, 256, 257, 511, 512, 2047, 2048, 2049, 4096, 5001] {
                        check(kernel, (from, to), bytes);
                    }
                }
            }
        }
    }
}
