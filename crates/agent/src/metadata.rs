//! What an agent tells of itself so that others can reach it.

use kvferry_wire::{RegionCard, Version, keys_agree};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 4] = *b"KVFN";

/// Of the metadata and of the messages between agents.
pub(crate) const AGENT_VERSION: u16 = 2;

/// Magic, version, digest of the rest.
const HEADER_BYTES: usize = 4 + 2 + 8;

/// Longest name of an agent.
pub(crate) const NAME_BYTES_MAX: usize = 4096;

/// Metadata as it is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) name: String,
    /// The life of the agent.
    pub(crate) epoch: u64,
    /// Its UCX.
    pub(crate) ucx: (u32, u32, u32),
    /// Where its worker is, if that is part of it.
    pub(crate) address: Option<Vec<u8>>,
    /// Whether these are all of its regions.
    pub(crate) whole: bool,
    pub(crate) regions: Vec<RegionCard>,
}

/// Why bytes are no metadata that this agent can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// Not made by [`Agent::metadata`](crate::Agent::metadata), or damaged on the way. Ask for it again.
    #[error("these {bytes} B are no metadata of an agent, or are damaged")]
    Damaged {
        /// How many there are.
        bytes: usize,
    },
    /// The peer runs another release. Run the same on both sides.
    #[error("the metadata is of version {theirs}, this side has {AGENT_VERSION}")]
    Version {
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

impl Metadata {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let body = postcard::to_allocvec(self).expect("a plain structure has an encoding");
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&AGENT_VERSION.to_le_bytes());
        bytes.extend_from_slice(&xxh3_64(&body).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Parses metadata for an agent whose UCX is `ours`. The digest keeps damage from UCX, which reads its part unchecked.
    pub(crate) fn parse(bytes: &[u8], ours: Version) -> Result<Self, MetadataError> {
        let damaged = MetadataError::Damaged { bytes: bytes.len() };
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or(damaged)?;
        let (version, rest) = rest.split_first_chunk::<2>().ok_or(damaged)?;
        let (digest, body) = rest.split_first_chunk::<8>().ok_or(damaged)?;
        if *magic != MAGIC {
            return Err(damaged);
        }
        let theirs = u16::from_le_bytes(*version);
        if theirs != AGENT_VERSION {
            return Err(MetadataError::Version { theirs });
        }
        if u64::from_le_bytes(*digest) != xxh3_64(body) {
            return Err(damaged);
        }
        let metadata: Self = postcard::from_bytes(body).map_err(|_| damaged)?;
        if metadata.name.is_empty() || metadata.name.len() > NAME_BYTES_MAX {
            return Err(damaged);
        }
        let theirs = Version::new(metadata.ucx.0, metadata.ucx.1, metadata.ucx.2);
        if !keys_agree(theirs, ours) {
            return Err(MetadataError::UcxVersions { theirs, ours });
        }
        Ok(metadata)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UCX: Version = Version::new(1, 22, 0);

    fn metadata() -> Metadata {
        let address = Some(vec![1, 2, 3]);
        Metadata { name: "a".to_owned(), epoch: 7, ucx: (1, 22, 0), address, whole: true, regions: Vec::new() }
    }

    #[test]
    fn damage_another_version_and_another_ucx_are_named() {
        let whole = metadata().to_bytes();
        assert_eq!(Metadata::parse(&whole, UCX), Ok(metadata()));
        let mut other = whole.clone();
        other[4] ^= 3;
        assert_eq!(Metadata::parse(&other, UCX), Err(MetadataError::Version { theirs: AGENT_VERSION ^ 3 }));
        let damaged = Err(MetadataError::Damaged { bytes: whole.len() });
        for byte in (0..4).chain(6..whole.len()) {
            let mut bytes = whole.clone();
            bytes[byte] ^= 0x10;
            assert_eq!(Metadata::parse(&bytes, UCX), damaged, "byte {byte}");
        }
        let old = Version::new(1, 13, 1);
        let refused = MetadataError::UcxVersions { theirs: UCX, ours: old };
        assert_eq!(Metadata::parse(&whole, old), Err(refused));
    }

    proptest! {
        #[test]
        fn any_body_under_a_right_digest_is_an_error_and_never_a_panic(body: Vec<u8>) {
            let mut bytes = MAGIC.to_vec();
            bytes.extend_from_slice(&AGENT_VERSION.to_le_bytes());
            bytes.extend_from_slice(&xxh3_64(&body).to_le_bytes());
            bytes.extend_from_slice(&body);
            let _ = Metadata::parse(&bytes, UCX);
        }
    }
}
