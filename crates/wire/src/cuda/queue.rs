//! A stream of copies of one progress thread: kernels are launched on it, and looked after until they have ended. Nothing
//! here waits for the device.
//!
//! # Safety
//!
//! A kernel reads a template, a sheet and the memory of a transfer. Templates and sheets are given back in the order of the
//! stream or after the kernel has ended; the memory is held by whoever holds the [`Ticket`].
#![allow(unsafe_code, reason = "calls the driver")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3Builder;
use zerocopy::IntoBytes;

use crate::cuda::driver::{CudaCode, CudaError, DeviceAddress, RawEvent, RawStream, constant};
use crate::cuda::expand::{self, Expansion, Mode, Numbering, Pair, Placed};
use crate::cuda::gpu::Gpu;
use crate::cuda::kernel::{self, INLINE_BYTES, Job};
use crate::pieces::{Piece, SlotPair};

/// Templates that are kept. Beyond, all of them are given up, to be uploaded again when they are used.
const TEMPLATES_MAX: usize = 256;

/// Least bytes of a sheet, so that few sizes are ever made.
const SHEET_BYTES_MIN: usize = 64 << 10;

/// Bytes of [`Queue::progress`].
const PROGRESS_BYTES: usize = 8;

/// Copies of one direction.
pub(crate) struct Queue {
    templates: HashMap<Vec<u64>, Rc<Template>, Xxh3Builder>,
    sheets: Vec<Sheet>,
    events: Vec<RawEvent>,
    /// What the kernels of the stream count with: two numbers, zero between launches.
    progress: DeviceAddress,
    stream: Rc<Stream>, // last: everything above is freed on it
}

/// The stream, destroyed with what was made on it.
struct Stream {
    gpu: Arc<Gpu>,
    raw: RawStream,
}

/// The pieces of transfers between the same regions, on the device.
struct Template {
    expansion: Expansion,
    entries: DeviceAddress,
    starts: DeviceAddress,
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
    mode: Mode,
}

impl Prepared {
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

/// A kernel that has been launched.
#[derive(Debug)]
#[must_use = "the memory that the kernel copies is to be held until it has ended"]
pub(crate) struct Ticket(RawEvent);

impl Queue {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let entered = gpu.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both receive numbers; a context is current.
        unsafe { gpu.driver.context_stream_priorities(&raw mut least, &raw mut greatest) }?;
        let raw = gpu.stream(&entered, if gpu.options.urgent { greatest } else { least })?;
        drop(entered);
        let stream = Rc::new(Stream { gpu: gpu.clone(), raw });
        let (templates, sheets, events) = (HashMap::default(), Vec::new(), Vec::new());
        let mut queue = Self { templates, sheets, events, progress: 0, stream };
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
        mode: Mode,
        placed: &[Placed<'_>],
        pairs: &[&[SlotPair]],
    ) -> Result<Option<Prepared>, CudaError> {
        let Some(template) = self.template(mode, placed)? else { return Ok(None) };
        let counts: Vec<usize> = pairs.iter().map(|pairs| pairs.len()).collect();
        let Some(numbering) = template.expansion.number(&counts) else { return Ok(None) };
        let sets = numbering.sets.as_bytes();
        let pair = |pair: &SlotPair| Pair { from: pair.local, to: pair.remote };
        let pairs = pairs.iter().flat_map(|pairs| pairs.iter()).map(pair);
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
        Ok(Some(Prepared { template, numbering, slots, mode }))
    }

    /// Launches the units `first .. first + count` of a transfer, at least one. `slab` takes the place of the side that the
    /// mode leaves out.
    ///
    /// # Safety
    ///
    /// All memory that the units name, and the slab for [`expand::UNIT_BYTES`] a unit, can be reached by the device and stays
    /// so until the ticket says that the kernel has ended.
    pub(crate) unsafe fn launch(
        &mut self,
        prepared: &Prepared,
        first: u32,
        count: u32,
        slab: DeviceAddress,
    ) -> Result<Ticket, CudaError> {
        let sets = u32::try_from(prepared.numbering.sets.len()).expect("as many as there are in a template");
        let pairs_offset = size_of::<expand::Set>() as u64 * u64::from(sets);
        let mut job = Job {
            entries: prepared.template.entries,
            starts: prepared.template.starts,
            sets: 0,
            pairs: pairs_offset,
            slab,
            set_count: sets,
            first,
            count,
            mode: prepared.mode as u32,
            progress: self.progress,
            tile: 0,
            entry_count: u32::try_from(prepared.template.expansion.entries.len()).unwrap_or(u32::MAX),
            inline: [0; INLINE_BYTES],
        };
        match &prepared.slots {
            Slots::Inline(inline) => job.inline = **inline,
            Slots::Sheet(sheet) => (job.sets, job.pairs) = (sheet.device, sheet.device + pairs_offset),
        }
        let event = self.event()?;
        let Stream { gpu, raw } = &*self.stream;
        let entered = gpu.enter()?;
        // SAFETY: the template is freed and the sheet used again behind this on the stream, or after it has ended; the rest is
        // the caller's promise.
        let launched = unsafe { kernel::launch(gpu, &entered, *raw, job, blocks_max(gpu, prepared.mode)) };
        // SAFETY: event and stream are of the current context.
        let recorded = launched.and_then(|()| unsafe { gpu.driver.event_record(event, *raw) });
        if recorded.is_err() {
            self.events.push(event);
        }
        recorded.map(|()| Ticket(event))
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
        let gpu = &self.stream.gpu;
        let entered = match gpu.enter() {
            Ok(entered) => entered,
            Err(error) => return Some(Err(error)),
        };
        // SAFETY: the event is live while its ticket is.
        let result = unsafe { gpu.driver.event_query(ticket.0) };
        drop(entered);
        match result {
            Err(CudaError { code: CudaCode::NOT_READY, .. }) => None,
            ended => Some(ended),
        }
    }

    /// Gives back what a kernel that has ended took.
    pub(crate) fn retire(&mut self, ticket: Ticket) {
        self.events.push(ticket.0);
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

    fn event(&mut self) -> Result<RawEvent, CudaError> {
        if let Some(event) = self.events.pop() {
            return Ok(event);
        }
        let gpu = &self.stream.gpu;
        let _entered = gpu.enter()?;
        let mut event = RawEvent::NONE;
        // SAFETY: `event` receives the event, which is destroyed with the queue.
        unsafe { gpu.driver.event_create(&raw mut event, constant::EVENT_NO_TIMING) }?;
        Ok(event)
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

    fn template(&mut self, mode: Mode, placed: &[Placed<'_>]) -> Result<Option<Rc<Template>>, CudaError> {
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
        let mut template = Template { expansion, entries: 0, starts: 0, _pieces: pieces, stream: self.stream.clone() };
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
        Mode::Direct => 16,
        Mode::Gather => 32,
        Mode::Scatter => 64,
    };
    gpu.options.sm_blocks.unwrap_or(default).clamp(1, gpu.processors.max(1))
}

/// All that a template depends on. The pieces go by address: a template holds them, so that no others can be there.
fn key(mode: Mode, placed: &[Placed<'_>]) -> Vec<u64> {
    let mut key = Vec::with_capacity(1 + placed.len() * 9);
    key.push(mode as u64);
    for Placed { shape, from, to, set } in placed {
        let (local, remote) = (&shape.local, &shape.remote);
        let pieces = (Arc::as_ptr(&shape.pieces).addr() as u64, shape.pieces.len() as u64);
        key.extend([from + local.base, local.slot_stride, to.wrapping_add(remote.base), remote.slot_stride]);
        key.extend([pieces.0, pieces.1, *set as u64]);
        if mode == Mode::Scatter {
            // These come with each description anew.
            key.truncate(key.len() - 3);
            key.push(*set as u64);
            key.extend(shape.pieces.iter().flat_map(numbers));
        }
    }
    key
}

/// What a piece is, on the side that is written.
fn numbers(piece: &Piece) -> [u64; 6] {
    let [outer, inner] = piece.dims;
    [piece.remote_offset, piece.run_bytes, outer.count, outer.remote_stride, inner.count, inner.remote_stride]
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
        // SAFETY: the stream is live. Nothing is left on it unless something has gone wrong.
        let _ = unsafe { gpu.driver.stream_synchronize(*raw) };
        // SAFETY: allocated on this stream in `new`.
        let _ = unsafe { gpu.driver.free_async(self.progress, *raw) };
        for event in self.events.drain(..) {
            // SAFETY: created in `event`, destroyed only here.
            let _ = unsafe { gpu.driver.event_destroy(event) };
        }
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
