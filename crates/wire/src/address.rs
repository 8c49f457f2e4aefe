//! What a worker hands out so that peers can connect: UCX's address, and what the routes need to know of it.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use ucx_sys::Version;
use xxhash_rust::xxh3::xxh3_64;

use crate::frame::PROTOCOL_VERSION;
use crate::inbox::chunk_offset;
use crate::region::{OwnerId, RegionCard};

const MAGIC: [u8; 4] = *b"KVFA";

/// Magic, protocol version, digest of the rest.
const HEADER_BYTES: usize = 4 + 2 + 8;

/// From this release on keys carry no entry for transports that need none, and neither side can read the other's
/// (measured between 1.13 to 1.18 and 1.19 to 1.23).
const NEW_KEYS: Version = Version::new(1, 19, 0);

/// Whether two releases of UCX can read each other's keys.
#[must_use]
pub fn keys_agree(a: Version, b: Version) -> bool {
    (a < NEW_KEYS) == (b < NEW_KEYS)
}

/// A parsed address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorkerCard {
    ucx: (u32, u32, u32),
    /// The process of the worker.
    pub(crate) owner: OwnerId,
    pub(crate) ucx_address: Vec<u8>,
    pub(crate) inbox: Option<InboxCard>,
    /// The same in GPU memory.
    pub(crate) slab: Option<InboxCard>,
}

/// Where peers may write what the worker then scatters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InboxCard {
    pub(crate) region: RegionCard,
    pub(crate) chunk_bytes: u32,
}

impl InboxCard {
    /// Where in the region a chunk starts, whether there is one or not.
    pub(crate) fn offset_of(&self, chunk: u32) -> u64 {
        chunk_offset(chunk, self.chunk_bytes)
    }
}

/// Why bytes are no address that this worker can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AddressError {
    /// Not made by [`Worker::address`](crate::Worker::address), or damaged on the way. Ask the peer for it again.
    #[error("these bytes are no address of a worker, or are damaged")]
    Damaged,
    /// The peer runs another release of this library. Run the same protocol version on both sides.
    #[error("the peer speaks protocol version {theirs}, this side {PROTOCOL_VERSION}")]
    Protocol {
        /// The peer's version.
        theirs: u16,
    },
    /// Memory keys of the two UCX releases cannot be exchanged: 1.19 changed them. Run releases of one side of it.
    #[error("the peer's UCX {theirs} and UCX {ours} of this side are divided by 1.19, which changed memory keys")]
    UcxVersions {
        /// The peer's version.
        theirs: Version,
        /// This side's version.
        ours: Version,
    },
}

impl WorkerCard {
    pub(crate) fn new(ucx: Version, ucx_address: Vec<u8>, inbox: Option<InboxCard>, slab: Option<InboxCard>) -> Self {
        let owner = OwnerId::of_this_process();
        Self { ucx: (ucx.major, ucx.minor, ucx.release), owner, ucx_address, inbox, slab }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        seal(&postcard::to_allocvec(self).expect("a plain structure has an encoding"))
    }

    /// Parses an address for a worker whose UCX is `ours`. The digest is what keeps damage from UCX, which reads its part
    /// without checks.
    pub(crate) fn parse(bytes: &[u8], ours: Version) -> Result<Self, AddressError> {
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or(AddressError::Damaged)?;
        let (version, rest) = rest.split_first_chunk::<2>().ok_or(AddressError::Damaged)?;
        let (digest, body) = rest.split_first_chunk::<8>().ok_or(AddressError::Damaged)?;
        if *magic != MAGIC {
            return Err(AddressError::Damaged);
        }
        let theirs = u16::from_le_bytes(*version);
        if theirs != PROTOCOL_VERSION {
            return Err(AddressError::Protocol { theirs });
        }
        if u64::from_le_bytes(*digest) != xxh3_64(body) {
            return Err(AddressError::Damaged);
        }
        let card: Self = postcard::from_bytes(body).map_err(|_| AddressError::Damaged)?;
        let theirs = Version::new(card.ucx.0, card.ucx.1, card.ucx.2);
        if !keys_agree(theirs, ours) {
            return Err(AddressError::UcxVersions { theirs, ours });
        }
        Ok(card)
    }
}

/// A body behind the header that is right for it.
pub(crate) fn seal(body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    bytes.extend_from_slice(&xxh3_64(body).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OLD: Version = Version::new(1, 18, 1);
    const NEW: Version = Version::new(1, 19, 0);

    fn card(ucx: Version) -> WorkerCard {
        WorkerCard::new(ucx, vec![1, 2, 3], None, None)
    }

    #[test]
    fn releases_on_two_sides_of_the_change_of_keys_are_refused() {
        assert_eq!(WorkerCard::parse(&card(OLD).to_bytes(), OLD), Ok(card(OLD)));
        assert_eq!(WorkerCard::parse(&card(NEW).to_bytes(), NEW), Ok(card(NEW)));
        let refused = AddressError::UcxVersions { theirs: OLD, ours: NEW };
        assert_eq!(WorkerCard::parse(&card(OLD).to_bytes(), NEW), Err(refused));
    }

    #[test]
    fn another_protocol_and_any_damage_is_named() {
        let whole = card(NEW).to_bytes();
        let mut other = whole.clone();
        other[4] ^= 3;
        assert_eq!(WorkerCard::parse(&other, NEW), Err(AddressError::Protocol { theirs: PROTOCOL_VERSION ^ 3 }));
        for byte in (0..4).chain(6..whole.len()) {
            let mut damaged = whole.clone();
            damaged[byte] ^= 0x10;
            assert_eq!(WorkerCard::parse(&damaged, NEW), Err(AddressError::Damaged), "byte {byte}");
        }
        assert_eq!(WorkerCard::parse(&whole[..whole.len() - 1], NEW), Err(AddressError::Damaged));
    }

    proptest! {
        #[test]
        fn any_body_under_a_right_digest_is_an_error_and_never_a_panic(body: Vec<u8>) {
            let _ = WorkerCard::parse(&seal(&body), NEW);
        }
    }
}
