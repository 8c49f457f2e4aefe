//! Digests by which two sides tell that they speak of the same table.

use std::fmt;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::xxh3_128;

use crate::table::{MemoryKind, PageTable};

/// A 128-bit xxh3 hash. It tells apart tables that differ by accident; it does not stand up to someone who wants two
/// tables with one digest, so it never replaces a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub u128);

impl Digest {
    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxh3_128(bytes))
    }
}

/// 32 hexadecimal digits.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// As text where people may read it (JSON has no integers of this size), as 16 little-endian bytes elsewhere.
impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            self.0.to_le_bytes().serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return Ok(Self(u128::from_le_bytes(Deserialize::deserialize(deserializer)?)));
        }
        let text = String::deserialize(deserializer)?;
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u128::from_str_radix(&text, 16) {
            Ok(digest) if digits => Ok(Self(digest)),
            _ => Err(D::Error::custom("a digest is 32 hexadecimal digits")),
        }
    }
}

impl PageTable {
    /// Digest of every field.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }

    /// Digest of all that decides which bytes of a slot go where: everything but which requests are here, where the pools
    /// are, how many slots they have, and how far apart. Ranks of equal shape share their templates.
    pub fn shape_digest(&self) -> Digest {
        let mut shape = Self { dp_rank: 0, ..self.clone() };
        for pool in &mut shape.pools {
            (pool.memory, pool.base, pool.slot_count, pool.slot_stride) = (MemoryKind::Host, 0, 0, 0);
        }
        shape.digest()
    }
}
