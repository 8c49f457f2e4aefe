//! Connections and imported memory, as callers name them.

use crate::region::{MemoryKind, RegionCard, RegionId};

/// One connection of one worker. Never reused: a peer that comes back gets another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(pub(crate) u64);

/// One of the transports that UCX uses for an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// As in `UCX_TLS`, or the transport behind such a name.
    pub transport: String,
    /// As in `UCX_NET_DEVICES`.
    pub device: String,
}

/// A peer's region, reachable through one endpoint. Plain data; the key behind it lives as long as the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    pub(crate) endpoint: EndpointId,
    pub(crate) key: KeyId,
    pub(crate) id: RegionId,
    base: u64,
    bytes: u64,
    kind: MemoryKind,
    mapped: bool,
}

/// An unpacked key of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct KeyId(pub(crate) u64);

impl RemoteRegion {
    /// `None` if the claimed range is empty or wraps: then no offset inside of it could be trusted.
    pub(crate) fn new(endpoint: EndpointId, key: KeyId, card: &RegionCard) -> Option<Self> {
        let (base, bytes, kind) = (card.base, card.bytes, card.kind());
        let sound = bytes > 0 && base.checked_add(bytes).is_some();
        sound.then_some(Self { endpoint, key, id: card.id, base, bytes, kind, mapped: false })
    }

    /// The peer's name for the region.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Notes that the memory is mapped here.
    pub(crate) fn mapped(self) -> Self {
        Self { mapped: true, ..self }
    }

    /// Whether it is host memory that is mapped here: then it is pulled from without the peer, and never after the peer has
    /// undone its registration.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Where the memory is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// First address in the peer's address space.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Length, at least 1.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
