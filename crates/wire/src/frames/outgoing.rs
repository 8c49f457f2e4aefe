//! The sending end of a connection: frames in their order, by the ring or by UCX.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

use crate::copy;
use crate::frame::{self, Audience, Place, StreamNumber, Tag};
use crate::frames::ring::{Pushed, Writer};
use crate::inbox::message::{Body, ConnectionId, Message};
use crate::options::Pages;
use crate::raw::{RawEndpoint, Unsent};
use crate::share::ring::RingMemory;
use crate::share::{Mapped, Share};

/// Kind of the frames between workers. Their payload says the rest.
const KIND: u16 = 0;

/// Who speaks: what this worker writes in front of its messages.
pub(crate) struct Sender<'a> {
    pub(crate) epoch: u64,
    pub(crate) address: &'a [u8],
    /// Frames that UCX has accepted and not sent, or that wait for room in a ring.
    pub(crate) unsent: &'a Rc<Cell<u64>>,
}

/// The frames of one sending end of a connection.
#[derive(Debug)]
pub(crate) struct Outgoing {
    stream: StreamNumber,
    /// Number of the last frame since the ring was offered.
    number: u64,
    ring: Ring,
    /// What the ring has no room for, and all behind it. Not by UCX: shared memory of UCX's has one queue for all peers of a process, in
    /// which one that is stopped stops all.
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    frame: Vec<u8>,
    _counted: Unsent,
}

#[derive(Debug)]
enum Ring {
    /// None, or none any more.
    Absent,
    /// None yet, of how many bytes there is to be one.
    Wanted(u32),
    /// The file, which the peer has not opened yet.
    Offered(Writer<RingMemory<Share>>),
    Attached(Writer<RingMemory<Mapped>>),
    /// The peer reads no more.
    Broken,
}

impl Outgoing {
    /// To a peer on this host with a ring of `ring_bytes`, to others with 0.
    pub(crate) fn new(ring_bytes: u32) -> Self {
        let ring = if ring_bytes == 0 { Ring::Absent } else { Ring::Wanted(ring_bytes) };
        Self { stream: StreamNumber::next(), number: 0, ring, waiting: VecDeque::new() }
    }

    /// Whether the peer has let go of its end, which only one does that stops or finds damage.
    pub(crate) fn is_broken(&self) -> bool {
        matches!(self.ring, Ring::Broken)
    }

    /// Sends a caller's frame.
    pub(crate) fn send(
        &mut self,
        endpoint: &RawEndpoint,
        sender: &Sender<'_>,
        peer_epoch: u64,
        kind: u16,
        payload: &[u8],
    ) {
        self.deliver(endpoint, sender, Audience::Caller, peer_epoch, kind, payload);
    }

    /// Says something to the peer's worker.
    pub(crate) fn say(&mut self, endpoint: &RawEndpoint, sender: &Sender<'_>, peer_epoch: u64, message: &Message) {
        self.deliver(endpoint, sender, Audience::Worker, peer_epoch, KIND, &message.encode());
    }

    fn deliver(
        &mut self,
        endpoint: &RawEndpoint,
        sender: &Sender<'_>,
        audience: Audience,
        peer_epoch: u64,
        kind: u16,
        payload: &[u8],
    ) {
        if let Ring::Wanted(bytes) = self.ring {
            self.offer(bytes, endpoint, sender, peer_epoch);
        }
        let place = match self.ring {
            Ring::Absent | Ring::Wanted(_) => Place::NONE,
            _ => {
                self.number += 1;
                Place { stream: self.stream, number: self.number }
            }
        };
        let frame = frame::encode(audience, sender.epoch, peer_epoch, place, kind, payload);
        let left = match self.waiting.is_empty() {
            true => self.pass(endpoint, sender, peer_epoch, place.number, frame),
            false => Some(frame),
        };
        let number = place.number;
        self.waiting.extend(left.map(|frame| Waiting { number, frame, _counted: Unsent::new(sender.unsent) }));
    }

    /// Whether frames wait for room in the ring.
    pub(crate) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Passes on what waits, as far as there is room. Returns whether anything went.
    pub(crate) fn pass_waiting(&mut self, endpoint: &RawEndpoint, sender: &Sender<'_>, peer_epoch: u64) -> bool {
        let before = self.waiting.len();
        while let Some(Waiting { number, frame, _counted }) = self.waiting.pop_front() {
            if let Some(frame) = self.pass(endpoint, sender, peer_epoch, number, frame) {
                self.waiting.push_front(Waiting { number, frame, _counted });
                break;
            }
        }
        self.waiting.len() < before
    }

    /// Passes a frame on by the way that it takes, behind all before it. Returns it if it has to wait.
    fn pass(
        &mut self,
        endpoint: &RawEndpoint,
        sender: &Sender<'_>,
        peer_epoch: u64,
        number: u64,
        frame: Vec<u8>,
    ) -> Option<Vec<u8>> {
        match self.push(number, &frame) {
            Pushed::Published { bell: false } => {}
            Pushed::Published { bell: true } => self.tell(Body::Bell, endpoint, sender, peer_epoch),
            // What cannot be read any more is lost, as it is on a broken endpoint.
            Pushed::Gone => self.ring = Ring::Broken,
            Pushed::NoRoom => return Some(frame),
            Pushed::TooLong | Pushed::Unattached => self.send_by_ucx(endpoint, sender, frame),
        }
        None
    }

    /// Makes the ring, and has the peer look for it.
    fn offer(&mut self, bytes: u32, endpoint: &RawEndpoint, sender: &Sender<'_>, peer_epoch: u64) {
        let length = usize::try_from(bytes).ok();
        let share = length.and_then(|length| Share::create(length, Pages::Normal));
        self.ring = Ring::Absent; // without memory frames take UCX
        let Some((share, card)) = share.and_then(|share| share.card().map(|card| (share, card))) else { return };
        if let Some(memory) = RingMemory::new(share) {
            self.ring = Ring::Offered(Writer::new(memory));
            self.tell(Body::Ring { stream: self.stream, share: card, bytes }, endpoint, sender, peer_epoch);
        }
    }

    /// Says something by UCX that has no place among the frames.
    fn tell(&self, body: Body, endpoint: &RawEndpoint, sender: &Sender<'_>, peer_epoch: u64) {
        let message = Message { connection: ConnectionId(0), body }.encode();
        let frame = frame::encode(Audience::Worker, sender.epoch, peer_epoch, Place::NONE, KIND, &message);
        self.send_by_ucx(endpoint, sender, frame);
    }

    fn send_by_ucx(&self, endpoint: &RawEndpoint, sender: &Sender<'_>, frame: Vec<u8>) {
        endpoint.send(Tag::new(sender.epoch, self.stream), frame, sender.unsent);
    }

    fn push(&mut self, number: u64, frame: &[u8]) -> Pushed {
        if let Ring::Offered(writer) = &self.ring
            && writer.is_attached()
            && let Ring::Offered(writer) = std::mem::replace(&mut self.ring, Ring::Absent)
        {
            // The peer has mapped the file: nobody else is to open it.
            self.ring = Ring::Attached(writer.map(RingMemory::close_file));
        }
        match &mut self.ring {
            Ring::Attached(writer) => {
                // What the frame speaks of may have been copied around the cache.
                copy::publish();
                writer.push(number, frame)
            }
            Ring::Broken => Pushed::Gone,
            Ring::Absent | Ring::Wanted(_) | Ring::Offered(_) => Pushed::Unattached,
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        match &self.ring {
            Ring::Offered(writer) => writer.memory().withdraw(),
            Ring::Attached(writer) => writer.memory().withdraw(),
            Ring::Absent | Ring::Wanted(_) | Ring::Broken => {}
        }
    }
}
