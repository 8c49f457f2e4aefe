//! The fixed header of control messages. Everything in a received frame is a claim until [`parse`] has passed it.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of the control messages. Peers of another version are refused.
pub const PROTOCOL_VERSION: u16 = 4;

/// Most bytes of payload that a frame may carry: a block map of 131,072 blocks and room to spare.
pub const FRAME_PAYLOAD_BYTES_MAX: usize = 1 << 20;

/// Whom a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// The owner of the worker.
    Caller,
    /// The worker itself: an inbox and its users.
    Worker,
}

impl Audience {
    fn magic(self) -> [u8; 4] {
        match self {
            Self::Caller => *b"KVFY",
            Self::Worker => *b"KVFW",
        }
    }

    fn of(magic: [u8; 4]) -> Option<Self> {
        [Self::Caller, Self::Worker].into_iter().find(|audience| audience.magic() == magic)
    }
}

/// The frames of one sending end of a connection, by the numbering of the process that sends them. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct StreamNumber(u64);

impl StreamNumber {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed)) // only uniqueness is asked of it
    }
}

/// What UCX is told of a message: which stream it belongs to. It is known before the message has come whole, so that those of others
/// need not wait for one whose sender is stopped, or dies, in the middle of it. A claim, as the frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(pub(crate) u64);

impl Tag {
    /// Of the frames that `stream` of the worker of epoch `epoch` numbers, and hardly any others: half of each.
    pub(crate) fn new(epoch: u64, stream: StreamNumber) -> Self {
        Self(epoch << 32 | (stream.0 & u64::from(u32::MAX)))
    }

    /// Whether the worker of epoch `epoch` has sent it, and hardly any other.
    pub(crate) fn is_of(self, epoch: u64) -> bool {
        self.0 >> 32 == epoch & u64::from(u32::MAX)
    }
}

/// Where a frame stands among those of its stream, which come by two ways: see [`frames`](crate::frames).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) stream: StreamNumber,
    /// From 1 on.
    pub(crate) number: u64,
}

impl Place {
    /// Of a frame that was sent before a ring was offered, or without one.
    pub(crate) const NONE: Self = Self { stream: StreamNumber(0), number: 0 };
}

/// Bytes of the header in front of the payload.
pub(crate) const HEADER_BYTES: usize = size_of::<Header>();

/// Most bytes of a frame.
pub(crate) const FRAME_BYTES_MAX: usize = HEADER_BYTES + FRAME_PAYLOAD_BYTES_MAX;

/// As it stands in a message, little-endian, no padding.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    source_epoch: U64,
    destination_epoch: U64,
    payload_bytes: U32,
    stream: U64,
    number: U64,
}

const _: () = assert!(HEADER_BYTES == 44);

/// A parsed control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Epoch of the worker that sent it.
    pub source_epoch: u64,
    /// What the payload is. `wire` gives it no meaning.
    pub kind: u16,
    /// At most [`FRAME_PAYLOAD_BYTES_MAX`] bytes.
    pub payload: Vec<u8>,
}

/// Why a received message is not a frame for this worker. The message is dropped; nothing else is affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Shorter than a header, or longer than a frame may be.
    #[error("message of {bytes} B is no frame")]
    Size {
        /// Bytes of the message.
        bytes: u64,
    },
    /// Not sent by this library.
    #[error("frame has magic {found:02x?}")]
    Magic {
        /// What stands in place of the magic.
        found: [u8; 4],
    },
    /// The peer runs another release. Run the same protocol version on both sides.
    #[error("peer speaks protocol version {theirs}, this side {PROTOCOL_VERSION}")]
    Version {
        /// The peer's version.
        theirs: u16,
    },
    /// The header's length is not the message's.
    #[error("frame claims {claimed} B of payload and has {found} B")]
    Length {
        /// From the header.
        claimed: u32,
        /// Received behind the header.
        found: usize,
    },
    /// A message between workers that this one cannot read. The peer runs another release, or something is damaged.
    #[error("message of {bytes} B between workers cannot be read")]
    Unreadable {
        /// Bytes of the payload.
        bytes: usize,
    },
    /// What a peer of this host has written to the memory through which its frames come makes no sense, or does not go with what
    /// has come by UCX. Nothing more is taken from there, and connections to the peer have failed.
    #[error("frames of epoch {epoch:016x} are damaged or missing")]
    Ring {
        /// The peer's epoch.
        epoch: u64,
    },
    /// Meant for an earlier life of this address. The peer must connect again.
    #[error("frame is for epoch {theirs:016x}, this worker is {ours:016x}")]
    StaleEpoch {
        /// The epoch the frame is for.
        theirs: u64,
        /// This worker's epoch.
        ours: u64,
    },
}

/// Header and payload in one buffer. The caller has checked the payload against [`FRAME_PAYLOAD_BYTES_MAX`].
pub(crate) fn encode(
    audience: Audience,
    source_epoch: u64,
    destination_epoch: u64,
    place: Place,
    kind: u16,
    payload: &[u8],
) -> Vec<u8> {
    let payload_bytes = u32::try_from(payload.len()).expect("checked against FRAME_PAYLOAD_BYTES_MAX");
    let header = Header {
        magic: audience.magic(),
        version: U16::new(PROTOCOL_VERSION),
        kind: U16::new(kind),
        source_epoch: U64::new(source_epoch),
        destination_epoch: U64::new(destination_epoch),
        payload_bytes: U32::new(payload_bytes),
        stream: U64::new(place.stream.0),
        number: U64::new(place.number),
    };
    let mut frame = Vec::with_capacity(HEADER_BYTES + payload.len());
    frame.extend_from_slice(header.as_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Parses a message received by the worker of epoch `epoch`.
pub(crate) fn parse(epoch: u64, mut message: Vec<u8>) -> Result<(Audience, Place, Frame), FrameError> {
    let bytes = message.len() as u64;
    let Ok((header, payload)) = Header::read_from_prefix(&message) else { return Err(FrameError::Size { bytes }) };
    let Some(audience) = Audience::of(header.magic) else {
        return Err(FrameError::Magic { found: header.magic });
    };
    if header.version.get() != PROTOCOL_VERSION {
        return Err(FrameError::Version { theirs: header.version.get() });
    }
    let claimed = header.payload_bytes.get();
    if usize::try_from(claimed) != Ok(payload.len()) {
        return Err(FrameError::Length { claimed, found: payload.len() });
    }
    if payload.len() > FRAME_PAYLOAD_BYTES_MAX {
        return Err(FrameError::Size { bytes });
    }
    if header.destination_epoch.get() != epoch {
        return Err(FrameError::StaleEpoch { theirs: header.destination_epoch.get(), ours: epoch });
    }
    message.drain(..HEADER_BYTES);
    let (source_epoch, kind) = (header.source_epoch.get(), header.kind.get());
    let place = Place { stream: StreamNumber(header.stream.get()), number: header.number.get() };
    Ok((audience, place, Frame { source_epoch, kind, payload: message }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn altered(byte: usize, xor: u8) -> Result<Frame, FrameError> {
        let mut message = encode(Audience::Caller, 1, 2, Place::NONE, 3, b"payload");
        message[byte] ^= xor;
        parse(2, message).map(|(_, _, frame)| frame)
    }

    #[test]
    fn each_claim_of_the_header_is_checked() {
        assert_eq!(altered(6, 0), Ok(Frame { source_epoch: 1, kind: 3, payload: b"payload".to_vec() }));
        assert_eq!(altered(0, 1), Err(FrameError::Magic { found: *b"JVFY" }));
        assert_eq!(altered(4, 3), Err(FrameError::Version { theirs: PROTOCOL_VERSION ^ 3 }));
        assert_eq!(altered(16, 1), Err(FrameError::StaleEpoch { theirs: 3, ours: 2 }));
        assert_eq!(altered(24, 1), Err(FrameError::Length { claimed: 6, found: 7 }));
        assert_eq!(parse(2, vec![0; HEADER_BYTES - 1]), Err(FrameError::Size { bytes: 43 }));
        let long = encode(Audience::Caller, 1, 2, Place::NONE, 3, &vec![0; FRAME_PAYLOAD_BYTES_MAX + 1]);
        assert!(matches!(parse(2, long), Err(FrameError::Size { .. })));
    }

    proptest! {
        #[test]
        fn what_is_sent_is_what_arrives(
            source: u64, destination: u64, stream: u64, number: u64, kind: u16, payload: Vec<u8>,
        ) {
            let place = Place { stream: StreamNumber(stream), number };
            for audience in [Audience::Caller, Audience::Worker] {
                let message = encode(audience, source, destination, place, kind, &payload);
                let frame = Frame { source_epoch: source, kind, payload: payload.clone() };
                prop_assert_eq!(parse(destination, message), Ok((audience, place, frame)));
            }
        }

        #[test]
        fn any_bytes_are_an_error_and_never_a_panic(mut message: Vec<u8>, keep_magic: bool) {
            if keep_magic && message.len() >= 6 {
                message[..4].copy_from_slice(&Audience::Caller.magic());
                message[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
            }
            if let Ok((_, _, frame)) = parse(0, message) {
                prop_assert!(frame.payload.len() <= FRAME_PAYLOAD_BYTES_MAX);
            }
        }
    }
}
