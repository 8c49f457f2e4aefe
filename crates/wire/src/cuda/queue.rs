//! A stream of copies of one progress thread: kernels are launched on it, and looked after until they have ended. Nothing
//! here waits for the device.
//!
//! Kernels of a stream end in its order, and each writes its number to host memory when it does. That is where the end is
//! looked for: an event would be recorded, and asked for, by a call of the driver each, and comes microseconds later.
//!
//! # Safety
//!
//! A kernel reads a template, a sheet and the memory of a transfer. Templates and sheets are given back in the order of the
//! stream or after the kernel has ended; the memory is held by whoever holds the [`Ticket`]. The number that a kernel writes
//! last lies in memory that lives until the stream has been waited for.
#![allow(unsafe_code, reason = "calls the driver")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3Builder;
use zerocopy::IntoBytes;

use crate::cuda::done::Done;
use crate::cuda::driver::{CudaCode, CudaError, DeviceAddress, RawEvent, RawStream, constant};
use crate::cuda::expand::{self, Expansion, Mode, Numbering, Pair, Placed};
use crate::cuda::gpu::Gpu;
use crate::cuda::kernel::{self, INLINE_BYTES, Job};
use crate::cuda::slab::Slab;
use crate::inbox::message::Bytes;
use crate::pieces::{Piece, SlotPair};
use crate::region::RegionId;

/// Templates that are kept. Beyond, all of them are given up, to be uploaded again when they are used.
const TEMPLATES_MAX: usize = 256;

/// Least bytes of a sheet, so that few sizes are ever made.
const SHEET_BYTES_MIN: usize = 64 << 10;

/// Bytes of [`Queue::progress`], and where in it is the number of a job to stop.
const PROGRESS_BYTES: usize = 12;
const STOP_OFFSET: u64 = 8;

/// Looks at a number that has not come after which the driver is asked whether the GPU has failed.
const LOOKS_PER_QUERY: u32 = 1024;

/// Copies of one direction.
pub(crate) struct Queue {
    templates: HashMap<Vec<u64>, Rc<Template>, Xxh3Builder>,
    sheets: Vec<Sheet>,
    /// What the kernels of the stream count with, and what they are stopped by.
    progress: DeviceAddress,
    done: Done,
    /// Of the last kernel that was launched.
    number: u64,
    looks: u32,
    /// For what must not wait behind a kernel, once there is something.
    aside: Option<Stream>,
    stream: Rc<Stream>, // last: everything above is freed on it
}

/// The stream, destroyed with what was made on it.
struct Stream {
    gpu: Arc<Gpu>,
    raw: RawStream,
}

/// The pieces of transfers between the same regions, on the device.
pub(crate) struct Template {
    mode: Mode,
    expansion: Expansion,
    entries: DeviceAddress,
    starts: DeviceAddress,
    /// What a peer is told of the parts, with the regions there.
    pub(crate) described: RefCell<Option<(Vec<RegionId>, Rc<Bytes>)>>,
    /// What the key names by address, so that no other can get it.
    _pieces: Vec<Arc<[Piece]>>,
    stream: Rc<Stream>,
}

/// The slots of one transfer: written on the host, copied to the device.
struct Sheet {
    host: *mut c_void,
    device: DeviceAddress,
    bytes: usize,
    stream: Rc<Stream>,
}

/// A transfer that is ready to be launched, in whole or by units.
pub(crate) struct Prepared {
    template: Rc<Template>,
    numbering: Numbering,
    slots: Slots,
}

impl Prepared {
    pub(crate) fn template(&self) -> &Template {
        &self.template
    }

    pub(crate) fn units(&self) -> u32 {
        self.numbering.units
    }
}

/// Where the kernel finds the sets and pairs.
enum Slots {
    /// In its parameters: sets, then pairs.
    Inline(Box<[u8; INLINE_BYTES]>),
    Sheet(Sheet),
}

/// A kernel that has been launched, by its number.
#[derive(Debug)]
#[must_use = "the memory that the kernel copies is to be held until it has ended"]
pub(crate) struct Ticket(u64);

impl Queue {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let entered = gpu.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both receive numbers; a context is current.
        unsafe { gpu.driver.context_stream_priorities(&raw mut least, &raw mut greatest) }?;
        let raw = gpu.stream(&entered, if gpu.options.urgent { greatest } else { least })?;
        drop(entered);
        let stream = Rc::new(Stream { gpu: gpu.clone(), raw });
        let (templates, sheets, done) = (HashMap::default(), Vec::new(), Done::new(gpu)?);
        let mut queue = Self { templates, sheets, progress: 0, done, number: 0, looks: 0, aside: None, stream };
        let entered = gpu.enter()?;
        // SAFETY: `progress` receives memory that the queue frees, on the same stream.
        unsafe { gpu.driver.alloc_async(&raw mut queue.progress, PROGRESS_BYTES, raw) }?;
        // SAFETY: allocated above, in the order of the stream.
        unsafe { gpu.driver.fill(queue.progress, 0, PROGRESS_BYTES, raw) }?;
        drop(entered);
        // The first of each takes the driver long; not in the way of the first transfer.
        let sheet = queue.sheet(1)?;
        queue.sheets.push(sheet);
        Ok(queue)
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.stream.gpu
    }

    /// Lays a transfer out. `pairs` are those of each set. `None` if the kernel cannot count it.
    pub(crate) fn prepare(
        &mut self,
        template: &Rc<Template>,
        pairs: &[&[SlotPair]],
    ) -> Result<Option<Prepared>, CudaError> {
        let mode = template.mode;
        let counts: Vec<usize> = pairs.iter().map(|pairs| pairs.len()).collect();
        let Some(numbering) = template.expansion.number(&counts) else { return Ok(None) };
        let sets = numbering.sets.as_bytes();
        let pairs = pairs.iter().flat_map(|pairs| pairs.iter()).map(|pair| mode.pair(pair));
        let bytes = sets.len() + usize::try_from(numbering.pairs).unwrap_or(usize::MAX) * size_of::<Pair>();
        let slots = if bytes <= INLINE_BYTES {
            let mut inline = Box::new([0; INLINE_BYTES]);
            inline[..sets.len()].copy_from_slice(sets);
            for (place, pair) in inline[sets.len()..].chunks_exact_mut(size_of::<Pair>()).zip(pairs) {
                place.copy_from_slice(pair.as_bytes());
            }
            Slots::Inline(inline)
        } else {
            let sheet = self.sheet(bytes)?;
            sheet.write(sets, pairs);
            let entered = self.stream.gpu.enter()?;
            let stream = self.stream.raw;
            // SAFETY: both are `sheet.bytes` long, at least `bytes`; the sheet is not written again before the kernels behind the
            // copy have ended.
            unsafe { self.stream.gpu.driver.copy_to_device(sheet.device, sheet.host, bytes, stream) }?;
            drop(entered);
            Slots::Sheet(sheet)
        };
        Ok(Some(Prepared { template: template.clone(), numbering, slots }))
    }

    /// Launches the units `first .. first + count` of a transfer, at least one.
    ///
    /// # Safety
    ///
    /// All memory that the units name, and the slab for [`expand::UNIT_BYTES`] a unit, can be reached by the device and stays
    /// so until the ticket says that the kernel has ended. As many chunks are named as the units fill.
    pub(crate) unsafe fn launch(
        &mut self,
        prepared: &Prepared,
        first: u32,
        count: u32,
        slab: Slab,
    ) -> Result<Ticket, CudaError> {
        let number = self.number + 1;
        let sets = u32::try_from(prepared.numbering.sets.len()).expect("as many as there are in a template");
        let pairs_offset = size_of::<expand::Set>() as u64 * u64::from(sets);
        let mut job = Job {
            entries: prepared.template.entries,
            starts: prepared.template.starts,
            sets: 0,
            pairs: pairs_offset,
            slab: slab.base,
            set_count: sets,
            first,
            count,
            mode: prepared.template.mode.number(),
            progress: self.progress,
            done: self.done.device,
            number,
            tile: 0,
            entry_count: u32::try_from(prepared.template.expansion.entries.len()).unwrap_or(u32::MAX),
            chunk_shift: slab.chunk_shift,
            chunks: slab.chunks,
            unused: 0,
            inline: [0; INLINE_BYTES],
        };
        match &prepared.slots {
            Slots::Inline(inline) => job.inline = **inline,
            Slots::Sheet(sheet) => (job.sets, job.pairs) = (sheet.device, sheet.device + pairs_offset),
        }
        let Stream { gpu, raw } = &*self.stream;
        let entered = gpu.enter()?;
        // SAFETY: the template is freed and the sheet used again behind this on the stream, or after it has ended; `done` lives
        // until the stream has been waited for; the rest is the caller's promise.
        unsafe { kernel::launch(gpu, &entered, *raw, job, blocks_max(gpu, prepared.template.mode)) }?;
        self.number = number;
        Ok(Ticket(number))
    }

    /// Has a kernel end soon, without the rest of its copies. One of few units runs to its end.
    pub(crate) fn stop(&mut self, ticket: &Ticket) -> Result<(), CudaError> {
        let gpu = self.gpu().clone();
        let entered = gpu.enter()?;
        if self.aside.is_none() {
            self.aside = Some(Stream { gpu: gpu.clone(), raw: gpu.stream(&entered, 0)? });
        }
        let Some(Stream { raw, .. }) = &self.aside else { return Ok(()) };
        #[allow(clippy::cast_possible_truncation, reason = "as the kernel compares")]
        let number = ticket.0 as u32;
        // SAFETY: the third number of `progress`, which kernels only read. One that ended before is not looked for any more.
        unsafe { gpu.driver.fill_words(self.progress + STOP_OFFSET, number, 1, *raw) }
    }

    /// Waits for all that is on the stream.
    pub(crate) fn drain(&mut self) -> Result<(), CudaError> {
        let gpu = &self.stream.gpu;
        let _entered = gpu.enter()?;
        // SAFETY: the stream is live.
        unsafe { gpu.driver.stream_synchronize(self.stream.raw) }
    }

    /// Whether the kernel has ended, and how.
    pub(crate) fn poll(&mut self, ticket: &Ticket) -> Option<Result<(), CudaError>> {
        if self.done.number() >= ticket.0 {
            return Some(Ok(()));
        }
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOKS_PER_QUERY) {
            return None;
        }
        // A kernel that has failed says nothing.
        let Stream { gpu, raw } = &*self.stream;
        let _entered = match gpu.enter() {
            Ok(entered) => entered,
            Err(error) => return Some(Err(error)),
        };
        // SAFETY: the stream is live.
        match unsafe { gpu.driver.stream_query(*raw) } {
            Err(CudaError { code: CudaCode::NOT_READY, .. }) => None,
            Ok(()) if self.done.number() >= ticket.0 => Some(Ok(())),
            Ok(()) => Some(Err(CudaError { call: "kvferry_move", code: CudaCode::UNKNOWN })),
            failed => Some(failed),
        }
    }

    /// Gives back what a transfer took, of which every kernel has ended.
    pub(crate) fn release(&mut self, prepared: Prepared) {
        if let Slots::Sheet(sheet) = prepared.slots {
            self.sheets.push(sheet);
        }
    }

    /// What follows on the stream waits for `event`, an event of the caller's that has been recorded.
    ///
    /// # Safety
    ///
    /// `event` is a live event of any context of this process.
    pub(crate) unsafe fn wait_for(&mut self, event: RawEvent) -> Result<(), CudaError> {
        let gpu = &self.stream.gpu;
        let _entered = gpu.enter()?;
        // SAFETY: the caller's promise.
        unsafe { gpu.driver.stream_wait(self.stream.raw, event, 0) }
    }

    /// A sheet of at least `bytes`.
    fn sheet(&mut self, bytes: usize) -> Result<Sheet, CudaError> {
        if let Some(index) = self.sheets.iter().position(|sheet| sheet.bytes >= bytes) {
            return Ok(self.sheets.swap_remove(index));
        }
        let bytes = bytes.max(SHEET_BYTES_MIN).next_power_of_two();
        let gpu = &self.stream.gpu;
        let _entered = gpu.enter()?;
        let mut sheet = Sheet { host: ptr::null_mut(), device: 0, bytes, stream: self.stream.clone() };
        // SAFETY: `sheet.host` receives memory that the sheet frees.
        unsafe { gpu.driver.host_alloc(&raw mut sheet.host, bytes, constant::HOST_PORTABLE_MAPPED) }?;
        // SAFETY: `sheet.device` receives memory that the sheet frees, on the same stream.
        unsafe { gpu.driver.alloc_async(&raw mut sheet.device, bytes, self.stream.raw) }?;
        Ok(sheet)
    }

    /// The template of a transfer without its slots. `None` if the kernel cannot count it.
    pub(crate) fn template(&mut self, mode: Mode, placed: &[Placed<'_>]) -> Result<Option<Rc<Template>>, CudaError> {
        let key = key(mode, placed);
        if let Some(template) = self.templates.get(&key) {
            return Ok(Some(template.clone()));
        }
        let Some(expansion) = expand::expand(mode, placed) else { return Ok(None) };
        let pieces = placed.iter().map(|placed| placed.shape.pieces.clone()).collect();
        let (entries, starts) = (expansion.entries.as_bytes(), expansion.starts.as_bytes());
        let bytes = entries.len() + starts.len();
        let image = [entries, starts].concat();
        let starts_offset = entries.len() as u64;
        let (described, stream) = (RefCell::default(), self.stream.clone());
        let mut template = Template { mode, expansion, entries: 0, starts: 0, described, _pieces: pieces, stream };
        if bytes > 0 {
            let Stream { gpu, raw } = &*self.stream;
            let _entered = gpu.enter()?;
            // SAFETY: `entries` receives memory that the template frees, on the same stream.
            unsafe { gpu.driver.alloc_async(&raw mut template.entries, bytes, *raw) }?;
            // SAFETY: both are `bytes` long. The image is pageable, so the driver has read it when the call returns.
            unsafe { gpu.driver.copy_to_device(template.entries, image.as_ptr().cast(), bytes, *raw) }?;
            template.starts = template.entries + starts_offset;
        }
        if self.templates.len() >= TEMPLATES_MAX {
            self.templates.clear();
        }
        let template = Rc::new(template);
        self.templates.insert(key, template.clone());
        Ok(Some(template))
    }
}

/// The most blocks that a kernel takes. By default the fewest that do the most, measured on two H200s joined by NVLink, end to
/// end: of those that write the peer's slots, 12 make 310 GB/s, 14 make 360, and all 132 no more. A slab's chunks are kernels of
/// their own, whose starts and ends need more blocks; those that scatter must be the faster ones.
fn blocks_max(gpu: &Gpu, mode: Mode) -> u32 {
    let default = match mode {
        Mode::Direct | Mode::Pull => 16,
        Mode::Gather => 32,
        Mode::Scatter => 64,
    };
    gpu.options.sm_blocks.unwrap_or(default).clamp(1, gpu.processors.max(1))
}

/// All that a template depends on. Many pieces go by address: a template holds them, so that no others can be there. One goes
/// by what it is, as those of a list do, which are made anew each time, and those that a peer has described.
fn key(mode: Mode, placed: &[Placed<'_>]) -> Vec<u64> {
    let mut key = Vec::with_capacity(1 + placed.len() * 15);
    key.push(mode as u64);
    for Placed { shape, from, to, set } in placed {
        let (local, remote) = (&shape.local, &shape.remote);
        key.extend([
            from.wrapping_add(local.base),
            local.slot_stride,
            to.wrapping_add(remote.base),
            remote.slot_stride,
        ]);
        key.extend([*set as u64, shape.pieces.len() as u64]);
        if mode == Mode::Scatter || shape.pieces.len() == 1 {
            key.extend(shape.pieces.iter().flat_map(numbers));
        } else {
            key.push(Arc::as_ptr(&shape.pieces).addr() as u64);
        }
    }
    key
}

fn numbers(piece: &Piece) -> [u64; 9] {
    let [outer, inner] = piece.dims.map(|dim| [dim.count, dim.local_stride, dim.remote_stride]);
    let [a, b, c] = [piece.local_offset, piece.remote_offset, piece.run_bytes];
    [a, b, c, outer[0], outer[1], outer[2], inner[0], inner[1], inner[2]]
}

impl Sheet {
    /// Writes the sets and, behind them, the pairs.
    fn write(&self, sets: &[u8], pairs: impl Iterator<Item = Pair>) {
        debug_assert!(sets.len() <= self.bytes);
        let host = self.host.cast::<u8>();
        // SAFETY: `host` is `self.bytes` of memory that nothing on the device reads now.
        unsafe { ptr::copy_nonoverlapping(sets.as_ptr(), host, sets.len()) };
        let mut place = sets.len();
        for pair in pairs {
            debug_assert!(place + size_of::<Pair>() <= self.bytes);
            // SAFETY: as above; the sheet was taken for so many pairs.
            unsafe { host.wrapping_add(place).cast::<Pair>().write_unaligned(pair) };
            place += size_of::<Pair>();
        }
    }
}

impl Drop for Sheet {
    fn drop(&mut self) {
        let Stream { gpu, raw } = &*self.stream;
        let Ok(_entered) = gpu.enter() else { return };
        if self.device != 0 {
            // SAFETY: allocated on this stream, and used on it only.
            let _ = unsafe { gpu.driver.free_async(self.device, *raw) };
        }
        if !self.host.is_null() {
            // SAFETY: allocated in `sheet`; what read it has ended, or the stream was waited for.
            let _ = unsafe { gpu.driver.host_free(self.host) };
        }
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        let Stream { gpu, raw } = &*self.stream;
        if self.entries != 0
            && let Ok(_entered) = gpu.enter()
        {
            // SAFETY: allocated on this stream; kernels that read it were launched on it before.
            let _ = unsafe { gpu.driver.free_async(self.entries, *raw) };
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let Stream { gpu, raw } = &*self.stream;
        let Ok(_entered) = gpu.enter() else { return };
        for raw in self.aside.iter().map(|aside| aside.raw).chain([*raw]) {
            // SAFETY: the stream is live. Nothing is left on it unless something has gone wrong.
            let _ = unsafe { gpu.driver.stream_synchronize(raw) };
        }
        // SAFETY: allocated on this stream in `new`.
        let _ = unsafe { gpu.driver.free_async(self.progress, *raw) };
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: created in `Queue::new`, destroyed only here.
            let _ = unsafe { self.gpu.driver.stream_destroy(self.raw) };
        }
    }
}
