//! A peer's end of a slab: gathers chunks of a transfer straight into the peer's GPU, which scatters them.
//!
//! # Safety
//!
//! A kernel reads this side's slots and writes the chunk of the peer's slab that was granted. Regions and mapping are held
//! until every kernel has ended.
#![allow(unsafe_code, reason = "launches the kernel on memory that it holds")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use crate::address::InboxCard;
use crate::cuda::copy::pair_sets;
use crate::cuda::expand::{Mode, Placed, UNIT_BYTES, count_units};
use crate::cuda::imported::Imported;
use crate::cuda::queue::{Prepared, Queue, Ticket};
use crate::error::PutError;
use crate::inbox::message::{Body, DESCRIBE_BYTES, DeviceDescription, Refusal, StreamId};
use crate::inbox::source::refusal;
use crate::route::Route;
use crate::transfer::Work;

/// Chunks that are being gathered at a time. One keeps the link busy while the next is launched.
const GATHERING_MAX: usize = 8;

/// A peer's slab, mapped here.
#[derive(Clone, Debug)]
pub(crate) struct PeerSlab {
    pub(crate) card: InboxCard,
    pub(crate) mapped: Arc<Imported>,
}

/// One transfer through a peer's slab.
pub(crate) struct DeviceFilling {
    work: Arc<Work>,
    slab: PeerSlab,
    queue: Rc<RefCell<Queue>>,
    stream: StreamId,
    prepared: Option<Prepared>,
    described: bool,
    chunk_units: u32,
    credits: VecDeque<u32>,
    next_index: u64,
    chunk_count: u64,
    gathering: VecDeque<Gathering>,
    moved_units: u64,
    end: Option<Result<(), PutError>>,
}

/// A chunk that a kernel is filling.
struct Gathering {
    ticket: Ticket,
    index: u64,
    chunk: u32,
    units: u32,
}

impl DeviceFilling {
    pub(crate) fn start(
        queue: &Rc<RefCell<Queue>>,
        work: Arc<Work>,
        slab: PeerSlab,
        stream: StreamId,
    ) -> Result<Self, PutError> {
        let mut owner = queue.borrow_mut();
        if let Some(ready) = &work.ready {
            // SAFETY: the event is live, as whoever posted it promised.
            unsafe { owner.wait_for(ready.raw()) }.map_err(|source| PutError::Cuda { source })?;
        }
        let (sets, of_shape) = pair_sets(&work.shapes);
        let placed: Vec<Placed<'_>> = (work.shapes.iter().zip(&work.locals).zip(&of_shape))
            .map(|((shape, local), set)| Placed { shape, from: local.base(), to: 0, set: *set })
            .collect();
        let prepared = owner.prepare(Mode::Gather, &placed, &sets).map_err(|source| PutError::Cuda { source })?;
        drop(owner);
        let prepared = prepared.ok_or(PutError::RouteUnavailable { route: Route::Landing })?;
        let chunk_units = u32::try_from(u64::from(slab.card.chunk_bytes) / UNIT_BYTES).unwrap_or(0);
        if chunk_units == 0 {
            return Err(PutError::RouteUnavailable { route: Route::Landing });
        }
        debug_assert_eq!(count_units(&work.shapes), Some(u64::from(prepared.units())));
        let chunk_count = u64::from(prepared.units().div_ceil(chunk_units));
        Ok(Self {
            work,
            slab,
            queue: queue.clone(),
            stream,
            prepared: Some(prepared),
            described: false,
            chunk_units,
            credits: VecDeque::new(),
            next_index: 0,
            chunk_count,
            gathering: VecDeque::new(),
            moved_units: 0,
            end: None,
        })
    }

    pub(crate) fn stream(&self) -> StreamId {
        self.stream
    }

    /// Bytes gathered, or nearly: a chunk counts by its share of the units.
    pub(crate) fn moved_bytes(&self) -> u64 {
        let units = self.prepared.as_ref().map_or(1, |prepared| u64::from(prepared.units().max(1)));
        let share = u128::from(self.work.size.bytes) * u128::from(self.moved_units) / u128::from(units);
        u64::try_from(share).unwrap_or(u64::MAX)
    }

    pub(crate) fn granted(&mut self, chunks: &[u32]) {
        self.credits.extend(chunks);
    }

    pub(crate) fn landed(&mut self) {
        // Said too early it is a peer's mistake, which would be a success that never was.
        let complete = self.described && self.next_index == self.chunk_count && self.gathering.is_empty();
        self.end = Some(if complete { Ok(()) } else { Err(PutError::Refused { refusal: Refusal::Unreadable }) });
    }

    pub(crate) fn refused(&mut self, why: Refusal) {
        self.end = Some(Err(refusal(why, &self.work)));
    }

    /// Kernels that have not ended.
    pub(crate) fn outstanding(&mut self) -> u64 {
        let mut queue = self.queue.borrow_mut();
        self.gathering.iter().filter(|gathering| queue.poll(&gathering.ticket).is_none()).count() as u64
    }

    /// Describes the transfer, fills what has been granted, and tells of what is filled. `Some` at the end, when no kernel is
    /// left.
    pub(crate) fn step(&mut self, say: &mut dyn FnMut(Body)) -> Option<Result<(), PutError>> {
        if !self.described {
            self.describe(say);
        }
        if let Some(end) = self.end {
            return (self.outstanding() == 0).then_some(end);
        }
        let stepped = self.tell_filled(say).and_then(|()| self.fill());
        if let Err(error) = stepped {
            self.end = Some(Err(error));
        }
        None
    }

    fn describe(&mut self, say: &mut dyn FnMut(Body)) {
        let (sets, of_shape) = pair_sets(&self.work.shapes);
        let regions = self.work.remotes.iter().map(|remote| remote.id);
        let description = DeviceDescription::new(self.chunk_units, &self.work.shapes, regions, &sets, &of_shape);
        let description = description.encode();
        let total_bytes = u32::try_from(description.len()).unwrap_or(u32::MAX); // refused by the target if it is so long
        for bytes in description.chunks(DESCRIBE_BYTES) {
            say(Body::DescribeDevice { stream: self.stream, total_bytes, bytes: bytes.to_vec() });
        }
        self.described = true;
    }

    /// A kernel's writes are visible to every device before its end is.
    fn tell_filled(&mut self, say: &mut dyn FnMut(Body)) -> Result<(), PutError> {
        let mut queue = self.queue.borrow_mut();
        while let Some(front) = self.gathering.front()
            && let Some(result) = queue.poll(&front.ticket)
        {
            let Some(Gathering { ticket, index, chunk, units }) = self.gathering.pop_front() else { break };
            queue.retire(ticket);
            result.map_err(|source| PutError::Cuda { source })?;
            self.moved_units += u64::from(units);
            say(Body::Chunk { stream: self.stream, index, chunk });
        }
        Ok(())
    }

    fn fill(&mut self) -> Result<(), PutError> {
        let Some(prepared) = &self.prepared else { return Ok(()) };
        while self.next_index < self.chunk_count && self.gathering.len() < GATHERING_MAX {
            let Some(chunk) = self.credits.pop_front() else { return Ok(()) };
            let first = u32::try_from(self.next_index * u64::from(self.chunk_units)).expect("a unit of a transfer");
            let units = self.chunk_units.min(prepared.units() - first);
            let offset = u64::from(chunk) * u64::from(self.slab.card.chunk_bytes);
            let inside =
                offset.checked_add(u64::from(units) * UNIT_BYTES).is_some_and(|end| end <= self.slab.card.region.bytes);
            if !inside {
                return Err(PutError::Refused { refusal: Refusal::Unreadable }); // a chunk that the slab has not got
            }
            let place = self.slab.mapped.base() + offset;
            // SAFETY: the slots were checked against their regions, the chunk against the mapping; `self` holds both until the
            // kernel has ended.
            let ticket = unsafe { self.queue.borrow_mut().launch(prepared, first, units, place) };
            let ticket = ticket.map_err(|source| PutError::Cuda { source })?;
            self.gathering.push_back(Gathering { ticket, index: self.next_index, chunk, units });
            self.next_index += 1;
        }
        Ok(())
    }
}

impl Drop for DeviceFilling {
    fn drop(&mut self) {
        let left = self.outstanding() > 0;
        let mut queue = self.queue.borrow_mut();
        if left {
            // Only a worker that is torn down in the middle comes here; it must not let go of the memory.
            let _ = queue.drain();
        }
        self.gathering.drain(..).for_each(|ended| queue.retire(ended.ticket));
        self.prepared.take().into_iter().for_each(|prepared| queue.release(prepared));
    }
}
