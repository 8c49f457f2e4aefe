//! A rank's card: everything that another engine needs to reach it. Opaque and versioned outside, a claim until parsed.

use kvferry_layout::{Digest, Extent, PageTable};
use kvferry_wire::{PROTOCOL_VERSION, RegionCard, Version};
use serde::{Deserialize, Serialize};

use crate::error::CardError;
use crate::workers::WORKERS_MAX;

/// What the card of one rank begins with.
const MAGIC: [u8; 8] = *b"kvferry\n";

/// Magic, version and digest in front of the contents.
const HEADER_BYTES: usize = 8 + 2 + 16;

/// Encodes the contents of a card and puts magic, version and digest in front.
pub(crate) fn seal(magic: [u8; 8], contents: &impl Serialize) -> Vec<u8> {
    let contents = postcard::to_allocvec(contents).expect("plain data in memory always encodes");
    let mut card = Vec::with_capacity(HEADER_BYTES + contents.len());
    card.extend_from_slice(&magic);
    card.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    card.extend_from_slice(&Digest::of(&contents).0.to_le_bytes());
    card.extend_from_slice(&contents);
    card
}

/// The contents of a card, if it has come undamaged. The digest guards against damage, not against malice.
pub(crate) fn open(magic: [u8; 8], bytes: &[u8]) -> Result<&[u8], CardError> {
    let not_a_card = CardError::NotACard { bytes: bytes.len() };
    let Some(rest) = bytes.strip_prefix(&magic) else { return Err(not_a_card) };
    let Some((version, rest)) = rest.split_first_chunk() else { return Err(not_a_card) };
    let theirs = u16::from_le_bytes(*version);
    if theirs != PROTOCOL_VERSION {
        return Err(CardError::Version { theirs, ours: PROTOCOL_VERSION });
    }
    let Some((digest, contents)) = rest.split_first_chunk() else { return Err(not_a_card) };
    if Digest::of(contents) != Digest(u128::from_le_bytes(*digest)) {
        return Err(CardError::Damaged);
    }
    Ok(contents)
}

/// A parsed and checked card.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Card {
    /// Name of the instance.
    pub(crate) instance: String,
    pub(crate) rank: u32,
    /// Whether the rank makes checksums of what it sends, and checks those of what it gets.
    pub(crate) verify: bool,
    pub(crate) epoch: u64,
    /// When this life of the rank began, in microseconds by its clock.
    pub(crate) born: u64,
    pub(crate) ucx: Version,
    /// One a worker.
    pub(crate) addresses: Vec<Vec<u8>>,
    pub(crate) table: PageTable,
    /// One a pool.
    pub(crate) regions: Vec<RegionCard>,
    /// A little memory that sources write to when they connect.
    pub(crate) probe: RegionCard,
}

/// The contents as they are encoded.
#[derive(Serialize, Deserialize)]
struct Contents {
    instance: String,
    rank: u32,
    verify: bool,
    epoch: u64,
    born: u64,
    ucx: (u32, u32, u32),
    addresses: Vec<Vec<u8>>,
    table: Vec<u8>,
    regions: Vec<RegionCard>,
    probe: RegionCard,
}

impl Card {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let contents = Contents {
            instance: self.instance.clone(),
            rank: self.rank,
            verify: self.verify,
            epoch: self.epoch,
            born: self.born,
            ucx: (self.ucx.major, self.ucx.minor, self.ucx.release),
            addresses: self.addresses.clone(),
            table: self.table.to_bytes(),
            regions: self.regions.clone(),
            probe: self.probe.clone(),
        };
        seal(MAGIC, &contents)
    }

    /// Parses and checks what a peer sent.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, CardError> {
        let contents = open(MAGIC, bytes)?;
        let (contents, []) = postcard::take_from_bytes::<Contents>(contents).map_err(|_| CardError::Undecodable)?
        else {
            return Err(CardError::Undecodable);
        };
        let workers = contents.addresses.len();
        if !(1..=WORKERS_MAX).contains(&workers) {
            return Err(CardError::Workers { workers });
        }
        let table = PageTable::from_bytes(&contents.table)?;
        if table.pools.len() != contents.regions.len() {
            return Err(CardError::Regions { pools: table.pools.len(), regions: contents.regions.len() });
        }
        let extents = contents.regions.iter().map(|region| Extent { base: region.base, bytes: region.bytes });
        table.check_regions(&extents.collect::<Vec<_>>())?;
        let (major, minor, release) = contents.ucx;
        Ok(Self {
            instance: contents.instance,
            rank: contents.rank,
            verify: contents.verify,
            epoch: contents.epoch,
            born: contents.born,
            ucx: Version { major, minor, release },
            addresses: contents.addresses,
            table,
            regions: contents.regions,
            probe: contents.probe,
        })
    }
}
