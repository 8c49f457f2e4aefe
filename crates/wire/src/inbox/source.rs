//! A peer's end of an inbox: fills the chunks that it is granted.

use std::collections::VecDeque;
use std::sync::Arc;

use ucx_sys::Status;

use crate::address::InboxCard;
use crate::context::Context;
use crate::copy::{self, Stores, Window};
use crate::cuda::expand::UNIT_BYTES;
use crate::cursor::Cursor;
use crate::delivery::Delivery;
use crate::endpoint::{EndpointId, KeyId};
use crate::error::PutError;
use crate::frame::FRAME_PAYLOAD_BYTES_MAX;
use crate::inbox::message::{Body, Bytes, DESCRIBE_BYTES, Description, PartDescription, Refusal, StreamId};
use crate::inbox::outbox::Outbox;
use crate::inbox::units::UnitSource;
use crate::raw::{Operation, Put, RawEndpoint};
use crate::share::Mapped;
use crate::transfer::{Direction, Work};

/// Chunks of one transfer that are on their way over a network at a time.
const PUTS_MAX: usize = 4;

/// Bytes that travel as one message, where puts cannot be had: with the rest of the message they fit a frame.
pub(crate) const SPOKEN_BYTES_MAX: u32 = (1 << 20) - 1024;

const _: () = assert!(SPOKEN_BYTES_MAX as usize + 1024 <= FRAME_PAYLOAD_BYTES_MAX);

/// What a step may use and say.
pub(crate) struct Desk<'a> {
    pub(crate) context: &'a Context,
    pub(crate) id: EndpointId,
    pub(crate) endpoint: &'a RawEndpoint,
    pub(crate) inbox: &'a InboxCard,
    pub(crate) outbox: &'a mut Outbox,
    pub(crate) say: &'a mut dyn FnMut(Body),
}

/// One transfer through a peer's inbox.
pub(crate) struct Filling {
    stream: StreamId,
    way: Way,
    /// Set if the target's GPU scatters: then the stream is that of its units.
    units: Option<UnitSource>,
    described: bool,
    chunk_bytes: u64,
    chunk_count: u64,
    credits: VecDeque<u32>,
    /// Chunks that were ever granted.
    granted: u64,
    next_index: u64,
    moved_bytes: u64,
    stopping: Option<Stopping>,
    end: Option<Result<(), PutError>>,
}

/// How a transfer ends that its target has begun to take: it agrees with the target first, so that nothing lands behind the end.
struct Stopping {
    why: PutError,
    /// Behind the chunks that were on their way: none of them is written after it.
    settled: Option<Operation>,
    said: bool,
}

/// How bytes get into a chunk.
enum Way {
    /// The inbox is mapped here: gathered straight into it.
    Landing { inbox: Arc<Mapped> },
    /// Gathered into a message.
    Spoken,
    /// Gathered into the outbox and put.
    Staged { inbox: KeyId, sending: Vec<Sending> },
}

/// A chunk on its way over the network.
struct Sending {
    slot: u32,
    index: u64,
    chunk: u32,
    delivery: Delivery,
}

impl Filling {
    pub(crate) fn landing(stream: StreamId, inbox: Arc<Mapped>) -> Self {
        Self::new(stream, Way::Landing { inbox })
    }

    pub(crate) fn staged(stream: StreamId, inbox: KeyId) -> Self {
        Self::new(stream, Way::Staged { inbox, sending: Vec::new() })
    }

    /// As staged, without puts.
    pub(crate) fn spoken(stream: StreamId) -> Self {
        Self::new(stream, Way::Spoken)
    }

    fn new(stream: StreamId, way: Way) -> Self {
        Self {
            stream,
            way,
            units: None,
            described: false,
            chunk_bytes: 0,
            chunk_count: 0,
            credits: VecDeque::new(),
            granted: 0,
            next_index: 0,
            moved_bytes: 0,
            stopping: None,
            end: None,
        }
    }

    /// In the order of a GPU's, for the target's to scatter.
    pub(crate) fn in_units(self, units: UnitSource) -> Self {
        Self { units: Some(units), ..self }
    }

    pub(crate) fn stream(&self) -> StreamId {
        self.stream
    }

    /// Puts of chunks that have not completed.
    pub(crate) fn outstanding(&self) -> u64 {
        match &self.way {
            Way::Landing { .. } | Way::Spoken => 0,
            Way::Staged { sending, .. } => sending.iter().map(|sending| sending.delivery.outstanding()).sum(),
        }
    }

    /// Bytes gathered.
    pub(crate) fn moved_bytes(&self) -> u64 {
        self.moved_bytes
    }

    /// The next chunks that may be filled. Any others are not taken: a chunk that is filled twice holds two parts of the stream.
    pub(crate) fn granted(&mut self, before: u64, chunks: &[u32]) {
        if before == self.granted {
            self.granted += chunks.len() as u64;
            self.credits.extend(chunks);
        }
    }

    pub(crate) fn landed(&mut self) {
        // Said too early it is a peer's mistake, which would be a success that never was.
        let complete = self.described && self.next_index == self.chunk_count;
        self.end = Some(if complete { Ok(()) } else { Err(PutError::Refused { refusal: Refusal::Unreadable }) });
    }

    /// Fills no more. The end is `why`, unless the target says first that all has landed, or refuses.
    pub(crate) fn stop(&mut self, why: PutError) {
        self.stopping.get_or_insert(Stopping { why, settled: None, said: false });
    }

    /// The target scatters nothing of this any more. It is asked that before it says so.
    pub(crate) fn dropped(&mut self) {
        if let Some(Stopping { why, said: true, .. }) = self.stopping {
            self.end.get_or_insert(Err(why));
        }
    }

    pub(crate) fn refused(&mut self, why: Refusal, work: &Work) {
        self.end = Some(Err(refusal(why, work)));
    }

    /// Gives back what the transfer holds of the outbox. Call it when the transfer is over and no put is outstanding.
    pub(crate) fn release(&mut self, outbox: &mut Outbox) {
        if let Way::Staged { sending, .. } = &mut self.way {
            for sending in sending.drain(..) {
                outbox.put_back(sending.slot);
            }
        }
    }

    /// Fills one chunk, if there is one to fill. `Some` at the end, when no put is outstanding.
    pub(crate) fn step(&mut self, work: &Work, desk: &mut Desk<'_>) -> Option<Result<(), PutError>> {
        if let Some(end) = self.end {
            return (self.outstanding() == 0).then_some(end);
        }
        if self.stopping.is_some() {
            return self.take_back(desk);
        }
        if !self.described {
            self.describe(work, desk);
        }
        let filled = match self.finish_sending(desk) {
            Ok(()) if self.next_index < self.chunk_count => self.fill(work, desk),
            finished => finished,
        };
        if let Err(error) = filled {
            self.stop(error);
        }
        None
    }

    /// Waits for the chunks that are on their way, then has the target drop the stream. `Some` if that cannot be had.
    fn take_back(&mut self, desk: &mut Desk<'_>) -> Option<Result<(), PutError>> {
        let outstanding = self.outstanding();
        let stopping = self.stopping.as_mut()?;
        if !self.described {
            return Some(Err(stopping.why));
        }
        if stopping.said || outstanding > 0 {
            return None;
        }
        if let Way::Staged { sending, .. } = &self.way
            && !sending.is_empty()
        {
            let settled = stopping.settled.get_or_insert_with(|| desk.endpoint.flush()).result()?;
            if settled != Status::OK {
                let unsettled = PutError::Flush { source: settled };
                return Some(Err(if stopping.why == PutError::Cancelled { unsettled } else { stopping.why }));
            }
        }
        stopping.said = true;
        (desk.say)(Body::Drop { stream: self.stream });
        None
    }

    fn describe(&mut self, work: &Work, desk: &mut Desk<'_>) {
        let mut chunk_bytes = desk.inbox.chunk_bytes.min(desk.context.options().chunk_bytes);
        if let Way::Spoken = self.way {
            chunk_bytes = chunk_bytes.min(SPOKEN_BYTES_MAX);
        }
        let description = match &self.units {
            Some(units) => {
                let chunk_units = chunk_bytes / u32::try_from(UNIT_BYTES).expect("512");
                // Of no unit it is refused.
                chunk_bytes = chunk_units.max(1) * u32::try_from(UNIT_BYTES).expect("512");
                units.describe(work, chunk_units)
            }
            None => {
                let parts = work.shapes.iter().zip(&work.remotes);
                let parts = parts.map(|(shape, remote)| PartDescription::new(remote.id, shape)).collect();
                Description { chunk_bytes, parts }.encode()
            }
        };
        let total_bytes = u32::try_from(description.len()).unwrap_or(u32::MAX); // refused by the target if it is so long
        for bytes in description.chunks(DESCRIBE_BYTES) {
            let (stream, permit, bytes) = (self.stream, work.permit(), bytes.to_vec());
            (desk.say)(match &self.units {
                Some(_) => Body::DescribeDevice { stream, permit, slab: false, total_bytes, bytes: Bytes(bytes) },
                None => Body::Describe { stream, permit, total_bytes, bytes },
            });
        }
        self.described = true;
        self.chunk_bytes = u64::from(chunk_bytes);
        self.chunk_count = self.stream_bytes(work).div_ceil(self.chunk_bytes);
    }

    /// What goes through chunks.
    fn stream_bytes(&self, work: &Work) -> u64 {
        self.units.as_ref().map_or(work.size.bytes, UnitSource::bytes)
    }

    /// Tells the target of chunks that have arrived.
    fn finish_sending(&mut self, desk: &mut Desk<'_>) -> Result<(), PutError> {
        let Way::Staged { sending, .. } = &mut self.way else { return Ok(()) };
        let mut position = 0;
        while let Some(next) = sending.get_mut(position) {
            match next.delivery.poll(desk.endpoint) {
                None => position += 1,
                Some(Err(error)) => return Err(error),
                Some(Ok(())) => {
                    let Sending { slot, index, chunk, .. } = sending.remove(position);
                    desk.outbox.put_back(slot);
                    (desk.say)(Body::Chunk { stream: self.stream, index, chunk });
                }
            }
        }
        Ok(())
    }

    /// Fills the next chunk, if one has been granted.
    fn fill(&mut self, work: &Work, desk: &mut Desk<'_>) -> Result<(), PutError> {
        let Some(&chunk) = self.credits.front() else { return Ok(()) };
        let (index, start) = (self.next_index, self.next_index * self.chunk_bytes);
        let bytes = self.chunk_bytes.min(self.stream_bytes(work) - start);
        let offset = desk.inbox.offset_of(chunk);
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= desk.inbox.region.bytes);
        if !inside {
            return Err(PutError::Refused { refusal: Refusal::Unreadable }); // a chunk that the inbox has not got
        }
        let gather = |to: Window<'_>, offset| match &self.units {
            Some(units) => units.gather(work, start, bytes, to, offset),
            None => gather(work, start, bytes, to, offset),
        };
        let moved = match &mut self.way {
            Way::Landing { inbox } => {
                let moved = gather(inbox.window(), offset);
                // The message is sent behind this, and the target reads the chunk behind the message.
                copy::publish();
                (desk.say)(Body::Chunk { stream: self.stream, index, chunk });
                moved
            }
            Way::Spoken => {
                let mut spoken = vec![0; usize::try_from(bytes).expect("at most SPOKEN_BYTES_MAX")];
                let moved = gather(Window::of(&mut spoken), 0);
                copy::publish();
                (desk.say)(Body::Filled { stream: self.stream, index, chunk, bytes: spoken });
                moved
            }
            Way::Staged { inbox, sending } => {
                if sending.len() >= PUTS_MAX {
                    return Ok(());
                }
                let taken = desk.outbox.take(desk.context, desk.id).map_err(|_| PutError::NoMemory)?;
                let Some((slot, region, slot_offset)) = taken else { return Ok(()) };
                let moved = gather(region.window(), slot_offset);
                let mut delivery = Delivery::new(desk.context, Direction::Put, vec![region]);
                let to = desk.inbox.region.base + offset;
                delivery.put(desk.endpoint, &Put { held: 0, offset: slot_offset, key: *inbox, to, bytes });
                sending.push(Sending { slot, index, chunk, delivery });
                moved
            }
        };
        self.credits.pop_front();
        self.next_index += 1;
        self.moved_bytes += moved;
        Ok(())
    }
}

/// What a target's refusal means for the transfer.
pub(crate) fn refusal(refusal: Refusal, work: &Work) -> PutError {
    match refusal {
        Refusal::Unregistered { part } => match work.remotes.get(part) {
            Some(remote) => PutError::Withdrawn { base: remote.base(), bytes: remote.bytes() },
            None => PutError::Refused { refusal },
        },
        _ => PutError::Refused { refusal },
    }
}

/// Copies `bytes` bytes of the stream from `start` on to `to`, `offset` bytes from its start. Returns how many.
fn gather(work: &Work, start: u64, bytes: u64, to: Window<'_>, offset: u64) -> u64 {
    let mut cursor = Cursor::at(&work.shapes, start);
    let mut done = 0;
    let mut next = cursor.next(&work.shapes, bytes);
    while let Some(run) = next {
        let ahead = done + run.bytes;
        let after = if ahead < bytes { cursor.next(&work.shapes, bytes - ahead) } else { None };
        if let Some(after) = after {
            work.locals[after.part].window().prefetch(after.local_offset, after.bytes);
        }
        let from = work.locals[run.part].window();
        let copied = to.copy_from(offset + done, from, run.local_offset, run.bytes, Stores::Cached);
        debug_assert!(copied.is_some(), "the shapes and the chunk were checked");
        done = ahead;
        next = after;
    }
    done
}
