//! Copies of one progress thread in one direction: laid out, launched, and looked after until they have ended. Nothing here
//! waits for the device.
//!
//! # Safety
//!
//! A kernel reads a template, a sheet and the memory of a transfer. Template and sheet are held by the transfer until every kernel
//! of it has ended; the memory is held by whoever holds the [`Ticket`].
#![allow(unsafe_code, reason = "calls the driver")]

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use xxhash_rust::xxh3::Xxh3Builder;
use zerocopy::IntoBytes;

use crate::cuda::driver::{CudaError, DeviceAddress, RawEvent, constant};
use crate::cuda::expand::{self, Mode, Numbering, Pair, Placed};
use crate::cuda::gpu::Gpu;
use crate::cuda::kernel::{INLINE_BYTES, Job};
use crate::cuda::lane::Lane;
use crate::cuda::pairs::Pairs;
use crate::cuda::sheet::{Sheet, write_slots};
use crate::cuda::slab::Slab;
use crate::cuda::stream::Stream;
use crate::cuda::template::{Template, key};
use crate::transfer::Parts;

/// Templates that are kept. Beyond, all of them are given up, to be uploaded again when they are used.
const TEMPLATES_MAX: usize = 256;

/// Units of a copy that is over in microseconds: 8 MiB.
const SHORT_UNITS: u32 = 16 << 10;

/// Copies of one direction.
pub(crate) struct Queue {
    templates: HashMap<Vec<u64>, Rc<Template>, Xxh3Builder>,
    of_parts: HashMap<(usize, Mode), OfParts, Xxh3Builder>,
    sheets: Vec<Sheet>,
    /// For what must not wait behind a kernel, once there is something.
    aside: Option<Stream>,
    /// What is uploaded goes before the kernels of the first lane. Those of others wait for this, if there is anything new.
    uploaded: RawEvent,
    behind: bool,
    lanes: Vec<Lane>,
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

/// The template of parts that a caller keeps, by their address, which no others get while a count of them is held.
struct OfParts {
    parts: Weak<Parts>,
    template: Rc<Template>,
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
pub(crate) struct Ticket {
    lane: usize,
    number: u64,
}

impl Queue {
    /// With so many lanes, whose kernels run beside each other.
    pub(crate) fn new(gpu: &Arc<Gpu>, lanes: usize) -> Result<Self, CudaError> {
        let lanes = (0..lanes.max(1)).map(|_| Lane::new(gpu)).collect::<Result<Vec<Lane>, _>>()?;
        let mut uploaded = RawEvent::NONE;
        let entered = gpu.enter()?;
        // SAFETY: `uploaded` receives the event, which is destroyed with the queue.
        unsafe { gpu.driver.event_create(&raw mut uploaded, constant::EVENT_NO_TIMING) }?;
        drop(entered);
        // The first takes the driver long; not in the way of the first transfer.
        let sheets = vec![Sheet::new(&lanes[0].stream, 1)?];
        let (templates, of_parts) = (HashMap::default(), HashMap::default());
        Ok(Self { templates, of_parts, sheets, aside: None, uploaded, behind: false, lanes })
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.stream().gpu
    }

    /// What everything is uploaded on.
    fn stream(&self) -> &Rc<Stream> {
        &self.lanes[0].stream
    }

    /// Lays a transfer out. `pairs` are those of each set. `None` if the kernel cannot count it.
    pub(crate) fn prepare(
        &mut self,
        template: &Rc<Template>,
        pairs: &[impl Pairs],
    ) -> Result<Option<Prepared>, CudaError> {
        let counts: Vec<usize> = pairs.iter().map(Pairs::count).collect();
        let Some(numbering) = template.expansion.number(&counts) else { return Ok(None) };
        let sets = numbering.sets.as_bytes();
        let bytes = sets.len() + usize::try_from(numbering.pairs).unwrap_or(usize::MAX) * size_of::<Pair>();
        let slots = if bytes <= INLINE_BYTES {
            let mut inline = Box::new([0; INLINE_BYTES]);
            write_slots(&mut inline[..bytes], sets, pairs, template.mode);
            Slots::Inline(inline)
        } else {
            let mut sheet = self.sheet(bytes)?;
            sheet.fill(bytes, sets, pairs, template.mode)?;
            self.behind = true;
            Slots::Sheet(sheet)
        };
        Ok(Some(Prepared { template: template.clone(), numbering, slots }))
    }

    /// Launches the units `first .. first + count` of a transfer, at least one, on one of the lanes: those of one lane follow each
    /// other.
    ///
    /// # Safety
    ///
    /// All memory that the units name, and the slab for [`expand::UNIT_BYTES`] a unit, can be reached by the device and stays
    /// so until the ticket says that the kernel has ended. As many chunks are named as the units fill.
    pub(crate) unsafe fn launch(
        &mut self,
        prepared: &Prepared,
        (first, count): (u32, u32),
        slab: Slab,
        lane: usize,
    ) -> Result<Ticket, CudaError> {
        let sets = u32::try_from(prepared.numbering.sets.len()).expect("as many as there are in a template");
        let pairs_offset = size_of::<expand::Set>() as u64 * u64::from(sets);
        let template = &prepared.template;
        let mut job = Job {
            entries: template.entries,
            starts: template.starts,
            sets: 0,
            pairs: pairs_offset,
            slab: slab.base,
            set_count: sets,
            first,
            count,
            mode: template.mode.number(),
            progress: 0,
            done: 0,
            number: 0,
            tile: 0,
            entry_count: u32::try_from(template.expansion.entries.len()).unwrap_or(u32::MAX),
            chunk_shift: slab.chunk_shift,
            chunks: slab.chunks,
            unused: 0,
            inline: [0; INLINE_BYTES],
        };
        match &prepared.slots {
            Slots::Inline(inline) => job.inline = **inline,
            Slots::Sheet(sheet) => (job.sets, job.pairs) = (sheet.device, sheet.device + pairs_offset),
        }
        let lane = lane % self.lanes.len();
        if lane > 0 && std::mem::replace(&mut self.behind, false) {
            self.let_lanes_wait()?;
        }
        let blocks = blocks_max(self.gpu(), template.mode, count);
        // SAFETY: template and sheet are held by the transfer until the kernel has ended, and were uploaded before it; the rest is
        // the caller's promise.
        let number = unsafe { self.lanes[lane].launch(job, blocks) }?;
        Ok(Ticket { lane, number })
    }

    /// Has all lanes wait for what has been uploaded.
    fn let_lanes_wait(&mut self) -> Result<(), CudaError> {
        let uploaded = self.uploaded;
        let Stream { gpu, raw } = &**self.stream();
        let entered = gpu.enter()?;
        // SAFETY: event and stream are of the current context.
        unsafe { gpu.driver.event_record(uploaded, *raw) }?;
        drop(entered);
        for lane in &mut self.lanes[1..] {
            // SAFETY: the event lives as long as the queue, and was recorded above.
            unsafe { lane.wait_for(uploaded) }?;
        }
        Ok(())
    }

    /// Has a kernel end soon, without the rest of its copies. One of few units runs to its end.
    pub(crate) fn stop(&mut self, ticket: &Ticket) -> Result<(), CudaError> {
        if self.aside.is_none() {
            self.aside = Some(Stream::new(self.gpu(), true)?);
        }
        let Some(aside) = &self.aside else { return Ok(()) };
        self.lanes[ticket.lane].stop(ticket.number, aside)
    }

    /// Waits for all that is under way.
    pub(crate) fn drain(&mut self) -> Result<(), CudaError> {
        self.lanes.iter().try_for_each(|lane| lane.stream.drain())
    }

    /// Whether the kernel has ended, and how.
    pub(crate) fn poll(&mut self, ticket: &Ticket) -> Option<Result<(), CudaError>> {
        self.lanes[ticket.lane].poll(ticket.number)
    }

    /// Gives back what a transfer took, of which every kernel has ended.
    pub(crate) fn release(&mut self, prepared: Prepared) {
        if let Slots::Sheet(sheet) = prepared.slots {
            self.sheets.push(sheet);
        }
    }

    /// What is launched from now on waits for `event`, an event of the caller's that has been recorded.
    ///
    /// # Safety
    ///
    /// `event` is a live event of any context of this process.
    pub(crate) unsafe fn wait_for(&mut self, event: RawEvent) -> Result<(), CudaError> {
        for lane in &mut self.lanes {
            // SAFETY: the caller's promise.
            unsafe { lane.wait_for(event) }?;
        }
        Ok(())
    }

    /// A sheet of at least `bytes`.
    fn sheet(&mut self, bytes: usize) -> Result<Sheet, CudaError> {
        match self.sheets.iter().position(|sheet| sheet.bytes >= bytes) {
            Some(index) => Ok(self.sheets.swap_remove(index)),
            None => Sheet::new(self.stream(), bytes),
        }
    }

    /// The template of parts whose remote places are `targets`, or are left out.
    pub(crate) fn template_of(
        &mut self,
        mode: Mode,
        parts: &Arc<Parts>,
        targets: Option<&[DeviceAddress]>,
    ) -> Result<Option<Rc<Template>>, CudaError> {
        let key = (Arc::as_ptr(parts).addr(), mode);
        if let Some(known) = self.of_parts.get(&key).filter(|known| known.parts.strong_count() > 0) {
            return Ok(Some(known.template.clone()));
        }
        let gpu = self.gpu().clone();
        let placed = (parts.bare.iter().zip(&parts.locals).zip(&parts.set_of)).enumerate().map(
            |(part, ((shape, local), set))| {
                let to = targets.map_or(0, |targets| targets[part]);
                Ok(Placed { shape, from: local.device_address(&gpu)?, to, set: *set })
            },
        );
        let placed: Vec<Placed<'_>> = placed.collect::<Result<_, _>>()?;
        let template = self.template(mode, &placed)?;
        // Only those that come again: others hold a count of them too.
        if let Some(template) = template.as_ref().filter(|_| Arc::strong_count(parts) > 1) {
            if self.of_parts.len() >= TEMPLATES_MAX {
                self.of_parts.retain(|_, known| known.parts.strong_count() > 0);
            }
            if self.of_parts.len() < TEMPLATES_MAX {
                let known = OfParts { parts: Arc::downgrade(parts), template: template.clone() };
                self.of_parts.insert(key, known);
            }
        }
        Ok(template)
    }

    /// The template of a transfer without its slots. `None` if the kernel cannot count it.
    pub(crate) fn template(&mut self, mode: Mode, placed: &[Placed<'_>]) -> Result<Option<Rc<Template>>, CudaError> {
        let key = key(mode, placed);
        if let Some(template) = self.templates.get(&key) {
            return Ok(Some(template.clone()));
        }
        let Some(expansion) = expand::expand(mode, placed) else { return Ok(None) };
        let template = Rc::new(Template::new(self.stream(), mode, expansion, placed)?);
        self.behind = true;
        if self.templates.len() >= TEMPLATES_MAX {
            self.templates.clear();
        }
        self.templates.insert(key, template.clone());
        Ok(Some(template))
    }
}

/// The most blocks that a kernel takes. By default the fewest that do the most, measured on two H200s joined by NVLink, end to
/// end: of those that write the peer's slots, 12 make 310 GB/s, 14 make 360, and all 132 no more. A slab's chunks are kernels of
/// their own, whose starts and ends need more blocks; those that scatter must be the faster ones.
///
/// A copy that is over in microseconds takes more for as long: what it waits for are its first reads.
fn blocks_max(gpu: &Gpu, mode: Mode, units: u32) -> u32 {
    let default = match mode {
        _ if units <= SHORT_UNITS => 64,
        Mode::Direct | Mode::Pull => 16,
        Mode::Gather => 32,
        Mode::Scatter => 64,
    };
    gpu.options.sm_blocks.unwrap_or(default).clamp(1, gpu.processors.max(1))
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _ = self.drain();
        let gpu = self.gpu().clone();
        if let Ok(_entered) = gpu.enter() {
            // SAFETY: created in `new`, destroyed only here.
            let _ = unsafe { gpu.driver.event_destroy(self.uploaded) };
        }
    }
}
