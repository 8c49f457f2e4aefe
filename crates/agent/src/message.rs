//! What agents say to each other. Every field of a received message is a claim; the wire checks what is moved.

use kvferry_wire::{Dim, FRAME_PAYLOAD_BYTES_MAX, Part, Piece, RegionCard, RegionId, SlotPair};
use serde::{Deserialize, Serialize};

/// Frame whose payload is a notification as it is, rather than a [`Message`].
pub(crate) const NOTIFY: u16 = 1;

/// Frame whose payload is a [`Message`].
pub(crate) const MESSAGE: u16 = 2;

/// Frame whose payload is a small write: see [`eager`](crate::eager).
pub(crate) const WRITE: u16 = 3;

/// Pairs of slots in one message: at 10 B each they leave room for everything else.
const PAIRS_MAX: usize = 64 << 10;

/// Pieces in one message, at 90 B each.
const PIECES_MAX: usize = 1 << 10;

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// First on every connection: who speaks, where it is to be answered, and how many connections it has made.
    Hello { name: String, address: Vec<u8>, answer: bool, connection: u64 },
    /// To a hello that asks for it.
    Welcome,
    /// The sender goes, or does not want to hear any more: last on that connection. It may arrive behind the hello of the next one.
    Bye { connection: u64 },
    /// Memory of the sender that its reads are to be pushed to.
    Region(RegionCard),
    /// Push these parts to me. In several messages if they are many: `last` ends them.
    Read { serial: u64, last: bool, parts: Vec<Wanted> },
    /// Do not, or no more.
    CancelRead { serial: u64 },
    /// So much of a read is on its way.
    ReadMoves { serial: u64, bytes: u64 },
    /// The read, or the small write, is there.
    Done { serial: u64 },
    /// It has ended otherwise. `settled`: nothing of it is written any more.
    Failed { serial: u64, why: Refused, settled: bool },
}

/// Why a peer did not do what it was asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refused {
    Cancelled,
    /// A region that is not registered.
    NoRegion,
    /// The parts are not in their regions, or no parts at all.
    Bad,
    /// Too much at a time.
    Busy,
    /// The write failed.
    Failed,
}

/// Parts of a transfer from memory of the receiver of the message to memory of its sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wanted {
    /// The asker's region.
    pub(crate) to: RegionId,
    to_base: u64,
    to_stride: u64,
    /// The pusher's region.
    pub(crate) from: RegionId,
    from_base: u64,
    from_stride: u64,
    pieces: Vec<WantedPiece>,
    /// Slots to and from.
    pairs: Vec<(u32, u32)>,
}

/// A [`Piece`]: offsets to and from, bytes of a run, and two loops of a count and its strides to and from.
type WantedPiece = (u64, u64, u64, [(u64, u64, u64); 2]);

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let bytes = postcard::to_allocvec(self).expect("a plain structure has an encoding");
        debug_assert!(bytes.len() <= FRAME_PAYLOAD_BYTES_MAX);
        bytes
    }

    pub(crate) fn parse(payload: &[u8]) -> Option<Self> {
        postcard::from_bytes(payload).ok()
    }
}

/// The messages that ask for `parts`, whose local side is to be written.
pub(crate) fn read(serial: u64, parts: &[Part]) -> Vec<Message> {
    let mut messages = Vec::new();
    let (mut wanted, mut pairs, mut pieces) = (Vec::new(), 0, 0);
    for part in parts {
        for slots in part.pairs.chunks(PAIRS_MAX) {
            if pairs + slots.len() > PAIRS_MAX || pieces + part.pieces.len() > PIECES_MAX {
                messages.push(Message::Read { serial, last: false, parts: std::mem::take(&mut wanted) });
                (pairs, pieces) = (0, 0);
            }
            (pairs, pieces) = (pairs + slots.len(), pieces + part.pieces.len());
            wanted.push(Wanted::of(part, slots));
        }
    }
    messages.push(Message::Read { serial, last: true, parts: wanted });
    messages
}

impl Wanted {
    fn of(part: &Part, slots: &[SlotPair]) -> Self {
        let dim = |dim: &Dim| (dim.count, dim.local_stride, dim.remote_stride);
        let piece = |piece: &Piece| {
            let dims = [dim(&piece.dims[0]), dim(&piece.dims[1])];
            (piece.local_offset, piece.remote_offset, piece.run_bytes, dims)
        };
        Self {
            to: part.local.id(),
            to_base: part.local_base,
            to_stride: part.local_slot_stride,
            from: part.remote.id(),
            from_base: part.remote_base,
            from_stride: part.remote_slot_stride,
            pieces: part.pieces.iter().map(piece).collect(),
            pairs: slots.iter().map(|pair| (pair.local, pair.remote)).collect(),
        }
    }

    pub(crate) fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// As the pusher has it: its own region is the local one.
    pub(crate) fn part(&self, from: kvferry_wire::Region, to: kvferry_wire::RemoteRegion) -> Part {
        let dim = |&(count, to, from): &(u64, u64, u64)| Dim { count, local_stride: from, remote_stride: to };
        let piece = |(to, from, run_bytes, dims): &WantedPiece| Piece {
            local_offset: *from,
            remote_offset: *to,
            run_bytes: *run_bytes,
            dims: [dim(&dims[0]), dim(&dims[1])],
        };
        Part {
            local: from,
            local_base: self.from_base,
            local_slot_stride: self.from_stride,
            remote: to,
            remote_base: self.to_base,
            remote_slot_stride: self.to_stride,
            pieces: self.pieces.iter().map(piece).collect(),
            pairs: self.pairs.iter().map(|(to, from)| SlotPair { local: *from, remote: *to }).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_none_or_a_message_and_never_a_panic(bytes: Vec<u8>) {
            let _ = Message::parse(&bytes);
        }
    }
}
