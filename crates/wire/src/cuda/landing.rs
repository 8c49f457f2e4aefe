//! The end of a source that has a GPU, of a transfer through memory that the target sets aside: gathers chunks straight into the
//! slab of the target's GPU, or its inbox in host memory, or into host memory from where they are put into that inbox over a
//! network. The slots may be host memory, and the target scatters with a GPU if it has one.
//!
//! A launch fills several chunks: as many as keep the link busy while the target empties those before. Chunks that
//! were granted ahead are being filled while the target still reads what the transfer is.
//!
//! # Safety
//!
//! A kernel reads this side's slots and writes the chunk of the peer's slab or inbox that was granted, or a slot of this side's
//! outbox.
//! Regions and mapping are held until every kernel has ended.
#![allow(unsafe_code, reason = "launches the kernel on memory that it holds")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use crate::address::InboxCard;
use crate::cuda::description;
use crate::cuda::desk::Desk;
use crate::cuda::driver::CudaError;
use crate::cuda::expand::{Mode, UNIT_BYTES};
use crate::cuda::imported::Imported;
use crate::cuda::kernel::CHUNKS;
use crate::cuda::pinned::PinnedMapping;
use crate::cuda::queue::{Prepared, Queue, Ticket};
use crate::cuda::slab::Slab;
use crate::delivery::Delivery;
use crate::endpoint::KeyId;
use crate::error::PutError;
use crate::inbox::message::{Body, Bytes, DESCRIBE_BYTES, Refusal, StreamId};
use crate::inbox::source::{SPOKEN_BYTES_MAX, refusal};
use crate::raw::Put;
use crate::region::{Region, RegionId};
use crate::route::Route;
use crate::stage::stage;
use crate::transfer::{Direction, Work};

/// Launches at a time. One keeps the link busy while the next is launched.
const GATHERING_MAX: usize = 8;

/// Chunks that a launch fills even where little was granted at first.
const BATCH_MIN: usize = 4;

/// Chunks of one transfer that are on their way over a network at a time, gathered or put.
const STAGED_MAX: usize = 8;

/// Launches of one transfer, at least, if it has so many chunks: so that gathering and scattering overlap.
const LAUNCHES_MIN: u64 = 8;

/// A peer's slab, mapped here.
#[derive(Clone, Debug)]
pub(crate) struct PeerSlab {
    pub(crate) card: InboxCard,
    pub(crate) mapped: Arc<Imported>,
}

/// How chunks get to the target.
pub(crate) enum Way {
    /// Gathered straight into its slab.
    Slab(PeerSlab),
    /// Gathered straight into its inbox.
    Inbox { inbox: InboxCard, pinned: Arc<PinnedMapping> },
    /// Gathered into host memory and put into its inbox.
    Staged { inbox: InboxCard, key: KeyId },
    /// Gathered into host memory, and from there into a message.
    Spoken { inbox: InboxCard },
}

/// One transfer.
pub(crate) struct DeviceFilling {
    work: Arc<Work>,
    way: Way,
    queue: Rc<RefCell<Queue>>,
    stream: StreamId,
    /// Where each part's slots are, for the GPU of this side.
    prepared: Option<Prepared>,
    described: bool,
    /// The target has refused the transfer before it took any of it.
    turned_down: bool,
    chunk_units: u32,
    /// Chunks of a launch, at most.
    batch: usize,
    /// Chunks that were granted ahead, until the target is known to have taken the transfer.
    ahead: Vec<u32>,
    credits: VecDeque<u32>,
    /// Chunks that were ever granted, those ahead included.
    granted: u64,
    next_index: u64,
    /// Taken by lanes in turn: the next begins while the last multiprocessors are busy with the one before.
    launches: usize,
    chunk_count: u64,
    gathering: VecDeque<Gathering>,
    sending: Vec<Sending>,
    moved_units: u64,
    /// Why the transfer is given up, and whether the target has been told.
    stopping: Option<(PutError, bool)>,
    end: Option<Result<(), PutError>>,
}

/// Chunks that a kernel is filling.
struct Gathering {
    ticket: Ticket,
    /// Of the first.
    index: u64,
    chunks: Vec<u32>,
    units: u32,
    /// Where it is gathered, if not in the slab.
    staged: Option<Slot>,
}

/// A slot of the outbox.
struct Slot {
    number: u32,
    region: Region,
    offset: u64,
}

/// A chunk on its way over the network.
struct Sending {
    slot: u32,
    index: u64,
    chunk: u32,
    delivery: Delivery,
}

fn failed(source: CudaError) -> PutError {
    PutError::Cuda { source }
}

impl Way {
    fn route(&self) -> Route {
        match self {
            Self::Slab(_) | Self::Inbox { .. } => Route::Landing,
            Self::Staged { .. } | Self::Spoken { .. } => Route::Staged,
        }
    }

    fn card(&self) -> &InboxCard {
        match self {
            Self::Slab(slab) => &slab.card,
            Self::Inbox { inbox, .. } | Self::Staged { inbox, .. } | Self::Spoken { inbox } => inbox,
        }
    }

    /// Units of a chunk, and whether a launch may fill several. `bytes_max` bounds what is gathered at a time on this side.
    fn chunk_units(&self, bytes_max: u32) -> (u32, bool) {
        let units = |bytes: u32| u32::try_from(u64::from(bytes) / UNIT_BYTES).unwrap_or(0);
        let (chunk_bytes, room) = (self.card().chunk_bytes, units(self.card().chunk_bytes));
        // As the kernel numbers them.
        let numbered = room.is_power_of_two() && u64::from(room) * UNIT_BYTES == u64::from(chunk_bytes);
        match self {
            Self::Slab(_) => (if numbered { room } else { 0 }, true),
            Self::Inbox { .. } => (room, numbered),
            Self::Staged { .. } => (room.min(units(bytes_max)), false),
            Self::Spoken { .. } => (room.min(units(bytes_max)).min(units(SPOKEN_BYTES_MAX)), false),
        }
    }
}

impl DeviceFilling {
    /// `chunk_bytes_max` bounds what is gathered at a time on this side.
    pub(crate) fn start(
        queue: &Rc<RefCell<Queue>>,
        work: Arc<Work>,
        way: Way,
        chunk_bytes_max: u32,
        stream: StreamId,
    ) -> Result<Self, PutError> {
        let unavailable = PutError::RouteUnavailable { route: way.route() };
        let (chunk_units, several) = way.chunk_units(chunk_bytes_max);
        if chunk_units == 0 {
            return Err(unavailable);
        }
        let mut owner = queue.borrow_mut();
        if let Some(ready) = &work.ready {
            // SAFETY: the event is live, as whoever posted it promised.
            unsafe { owner.wait_for(ready.raw()) }.map_err(failed)?;
        }
        let template = owner.template_of(Mode::Gather, work.parts(), None).map_err(failed)?.ok_or(unavailable)?;
        let prepared = owner.prepare(&template, &work.sets).map_err(failed)?.ok_or(unavailable)?;
        drop(owner);
        let chunk_count = u64::from(prepared.units().div_ceil(chunk_units));
        let batch = match several {
            true => usize::try_from(chunk_count / LAUNCHES_MIN).unwrap_or(CHUNKS).clamp(1, CHUNKS),
            false => 1,
        };
        Ok(Self {
            work,
            way,
            queue: queue.clone(),
            stream,
            prepared: Some(prepared),
            described: false,
            turned_down: false,
            chunk_units,
            batch,
            granted: 0,
            ahead: Vec::new(),
            credits: VecDeque::new(),
            next_index: 0,
            launches: 0,
            chunk_count,
            gathering: VecDeque::new(),
            sending: Vec::new(),
            moved_units: 0,
            stopping: None,
            end: None,
        })
    }

    pub(crate) fn stream(&self) -> StreamId {
        self.stream
    }

    /// Chunks that the transfer has.
    pub(crate) fn chunk_count(&self) -> u64 {
        self.chunk_count
    }

    /// Begins with chunks that were granted ahead, no more than there are. Before the first step.
    pub(crate) fn begin(&mut self, ahead: Vec<u32>) {
        debug_assert!(!self.described && ahead.len() as u64 <= self.chunk_count);
        self.granted = ahead.len() as u64;
        self.credits.extend(&ahead);
        self.ahead = ahead;
    }

    /// Bytes gathered, or nearly: a chunk counts by its share of the units.
    pub(crate) fn moved_bytes(&self) -> u64 {
        let units = self.prepared.as_ref().map_or(1, |prepared| u64::from(prepared.units().max(1)));
        let share = u128::from(self.work.size.bytes) * u128::from(self.moved_units) / u128::from(units);
        u64::try_from(share).unwrap_or(u64::MAX)
    }

    /// The next chunks that may be filled. Any others are not taken: a chunk that is filled twice holds two parts of the stream.
    pub(crate) fn granted(&mut self, before: u64, chunks: &[u32]) {
        if before == self.granted {
            stage!("granted");
            if self.batch > 1 && self.granted == self.ahead.len() as u64 {
                // What is granted at first is most of what there will be at a time: half of it is filled while the other half
                // is emptied.
                self.batch = self.batch.min(chunks.len().div_ceil(2).max(BATCH_MIN));
            }
            self.granted += chunks.len() as u64;
            self.credits.extend(chunks);
        }
    }

    /// Chunks that were granted ahead and are this side's again: the target has not taken the transfer. Call it at the end.
    pub(crate) fn take_ahead(&mut self) -> Vec<u32> {
        let taken = self.described && !self.turned_down;
        if taken { Vec::new() } else { std::mem::take(&mut self.ahead) }
    }

    /// Fills no more. The end is `why`, unless the target says first that all has landed, or refuses.
    pub(crate) fn stop(&mut self, why: PutError) {
        self.stopping.get_or_insert((why, false));
    }

    /// The target scatters nothing of this any more. It is asked that before it says so.
    pub(crate) fn dropped(&mut self) {
        if let Some((why, true)) = self.stopping {
            self.end.get_or_insert(Err(why));
        }
    }

    pub(crate) fn landed(&mut self) {
        // Said too early it is a peer's mistake, which would be a success that never was.
        let complete = self.described
            && self.next_index == self.chunk_count
            && self.gathering.is_empty()
            && self.sending.is_empty();
        self.end = Some(if complete { Ok(()) } else { Err(PutError::Refused { refusal: Refusal::Unreadable }) });
    }

    pub(crate) fn refused(&mut self, why: Refusal) {
        self.turned_down = why != Refusal::Gpu;
        self.end = Some(Err(refusal(why, &self.work)));
    }

    /// Kernels and puts that have not ended.
    pub(crate) fn outstanding(&mut self) -> u64 {
        let mut queue = self.queue.borrow_mut();
        let kernels = self.gathering.iter().filter(|gathering| queue.poll(&gathering.ticket).is_none()).count() as u64;
        kernels + self.sending.iter().map(|sending| sending.delivery.outstanding()).sum::<u64>()
    }

    /// Gives back what the transfer holds of the outbox. Call it when the transfer is over and nothing is outstanding.
    pub(crate) fn slots(&mut self) -> Vec<u32> {
        let gathered = self.gathering.iter_mut().filter_map(|gathering| gathering.staged.take());
        let gathered: Vec<u32> = gathered.map(|slot| slot.number).collect();
        gathered.into_iter().chain(self.sending.drain(..).map(|sending| sending.slot)).collect()
    }

    /// Describes the transfer, fills what has been granted, and tells of what is filled. `Some` at the end, when nothing is
    /// left outstanding.
    pub(crate) fn step(&mut self, desk: &mut Desk<'_>) -> Option<Result<(), PutError>> {
        if let Some(end) = self.end {
            return (self.outstanding() == 0).then_some(end);
        }
        if let Some((why, said)) = self.stopping {
            if !self.described {
                return (self.outstanding() == 0).then_some(Err(why));
            }
            // What is on its way arrives first, then the target is told that nothing more comes.
            let arrived = self.take_gathered(desk).and_then(|()| self.tell_delivered(desk));
            let settled = self.gathering.is_empty() && self.sending.is_empty();
            if arrived.is_err() && !settled {
                return (self.outstanding() == 0).then_some(Err(why));
            }
            if settled && !said {
                self.stopping = Some((why, true));
                (desk.say)(Body::Drop { stream: self.stream });
            }
            return None;
        }
        if !self.described {
            // What was granted ahead is on its way while the target hears of the rest.
            if let Err(error) = self.fill(desk) {
                self.stop(error);
                return None;
            }
            stage!("begun");
            self.describe(desk);
            stage!("described");
        }
        let stepped = self.take_gathered(desk).and_then(|()| self.tell_delivered(desk)).and_then(|()| self.fill(desk));
        if let Err(error) = stepped {
            self.stop(error);
        }
        None
    }

    fn describe(&mut self, desk: &mut Desk<'_>) {
        let Some(prepared) = &self.prepared else { return };
        let mut described = prepared.template().described.borrow_mut();
        let regions = self.work.remotes.iter().map(|remote| remote.id);
        let parts = match &*described {
            Some((known, parts)) if known.iter().copied().eq(regions.clone()) => parts.clone(),
            _ => {
                let regions: Vec<RegionId> = regions.collect();
                let parts = Rc::new(description::parts(&self.work.bare, &regions, &self.work.set_of));
                *described = Some((regions, parts.clone()));
                parts
            }
        };
        let description = description::encode(self.chunk_units, &self.ahead, &parts, &self.work.sets);
        let total_bytes = u32::try_from(description.len()).unwrap_or(u32::MAX); // refused by the target if it is so long
        let slab = matches!(self.way, Way::Slab(_));
        for bytes in description.chunks(DESCRIBE_BYTES) {
            let bytes = Bytes(bytes.to_vec());
            let permit = self.work.permit();
            (desk.say)(Body::DescribeDevice { stream: self.stream, permit, slab, total_bytes, bytes });
        }
        self.described = true;
    }

    /// A kernel's writes are visible to every device, and to the host, before its number is.
    fn take_gathered(&mut self, desk: &mut Desk<'_>) -> Result<(), PutError> {
        let mut queue = self.queue.borrow_mut();
        while let Some(front) = self.gathering.front()
            && let Some(result) = queue.poll(&front.ticket)
        {
            let Some(Gathering { index, chunks, units, staged, .. }) = self.gathering.pop_front() else { break };
            if let Err(error) = result {
                staged.into_iter().for_each(|slot| desk.outbox.put_back(slot.number));
                return Err(failed(error));
            }
            stage!("gathered");
            self.moved_units += u64::from(units);
            match (&self.way, staged) {
                (Way::Staged { inbox, key }, Some(slot)) => {
                    let chunk = chunks[0];
                    let to = inbox.region.base + inbox.offset_of(chunk);
                    let bytes = u64::from(units) * UNIT_BYTES;
                    let mut delivery = Delivery::new(desk.context, Direction::Put, vec![slot.region]);
                    delivery.put(desk.endpoint, &Put { held: 0, offset: slot.offset, key: *key, to, bytes });
                    self.sending.push(Sending { slot: slot.number, index, chunk, delivery });
                }
                (Way::Spoken { .. }, Some(slot)) => {
                    let bytes = usize::try_from(u64::from(units) * UNIT_BYTES).expect("at most SPOKEN_BYTES_MAX");
                    let mut spoken = vec![0; bytes];
                    slot.region
                        .read(slot.offset, &mut spoken)
                        .expect("a slot is inside of the outbox, which is the host's");
                    desk.outbox.put_back(slot.number);
                    (desk.say)(Body::Filled { stream: self.stream, index, chunk: chunks[0], bytes: spoken });
                }
                _ => (desk.say)(Body::Chunks { stream: self.stream, index, chunks }),
            }
        }
        Ok(())
    }

    /// Tells the target of chunks that have arrived over the network.
    fn tell_delivered(&mut self, desk: &mut Desk<'_>) -> Result<(), PutError> {
        let mut position = 0;
        while let Some(next) = self.sending.get_mut(position) {
            match next.delivery.poll(desk.endpoint) {
                None => position += 1,
                Some(Err(error)) => return Err(error),
                Some(Ok(())) => {
                    let Sending { slot, index, chunk, .. } = self.sending.remove(position);
                    desk.outbox.put_back(slot);
                    (desk.say)(Body::Chunks { stream: self.stream, index, chunks: vec![chunk] });
                }
            }
        }
        Ok(())
    }

    fn fill(&mut self, desk: &mut Desk<'_>) -> Result<(), PutError> {
        while self.next_index < self.chunk_count && self.gathering.len() < GATHERING_MAX && !self.credits.is_empty() {
            let Some(prepared) = &self.prepared else { return Ok(()) };
            let left = usize::try_from(self.chunk_count - self.next_index).unwrap_or(usize::MAX);
            let count = self.batch.min(self.credits.len()).min(left);
            let chunks: Vec<u32> = self.credits.iter().copied().take(count).collect();
            let first = u32::try_from(self.next_index * u64::from(self.chunk_units)).expect("a unit of a transfer");
            let units = prepared.units() - first;
            let units =
                u32::try_from(count).ok().and_then(|n| n.checked_mul(self.chunk_units)).map_or(units, |n| n.min(units));
            let card = self.way.card();
            let chunk_bytes = u64::from(self.chunk_units) * UNIT_BYTES;
            let outside =
                |chunk: &u32| card.offset_of(*chunk).checked_add(chunk_bytes).is_none_or(|end| end > card.region.bytes);
            if chunks.iter().any(outside) {
                return Err(PutError::Refused { refusal: Refusal::Unreadable }); // a chunk that the peer has not got
            }
            let mut queue = self.queue.borrow_mut();
            let (place, staged): (Slab, _) = match &self.way {
                Way::Slab(slab) => (Slab::of(slab.mapped.base(), self.chunk_units, &chunks), None),
                Way::Inbox { pinned, .. } => match &chunks[..] {
                    [chunk] => (Slab::at(pinned.address() + card.offset_of(*chunk)), None),
                    _ => (Slab::of(pinned.address(), self.chunk_units, &chunks), None),
                },
                Way::Staged { .. } | Way::Spoken { .. } => {
                    if self.gathering.len() + self.sending.len() >= STAGED_MAX {
                        return Ok(());
                    }
                    let taken = desk.outbox.take(desk.context, desk.id).map_err(|_| PutError::NoMemory)?;
                    let Some((number, region, offset)) = taken else { return Ok(()) };
                    let base = region.device_address(queue.gpu());
                    let base = base.inspect_err(|_| desk.outbox.put_back(number)).map_err(failed)?;
                    (Slab::at(base + offset), Some(Slot { number, region, offset }))
                }
            };
            // SAFETY: the slots were checked against their regions, the chunks against the mapping, which has a card's bytes and
            // whose chunks are of so many units, or taken from the outbox; `self` holds both until the kernel has ended.
            let launched = unsafe { queue.launch(prepared, (first, units), place, self.launches) };
            let ticket = match launched {
                Ok(ticket) => ticket,
                Err(error) => {
                    staged.into_iter().for_each(|slot| desk.outbox.put_back(slot.number));
                    return Err(failed(error));
                }
            };
            self.launches += 1;
            self.gathering.push_back(Gathering { ticket, index: self.next_index, chunks, units, staged });
            self.credits.drain(..count);
            self.next_index += count as u64;
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
        self.prepared.take().into_iter().for_each(|prepared| queue.release(prepared));
    }
}
