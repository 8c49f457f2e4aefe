//! A peer as the wire sees it: an endpoint, its memory, and the pieces between its pools and ours.

use std::sync::Arc;

use kvferry_layout::{PageTable, Pool};
use kvferry_match::{Plan, Side};
use kvferry_wire::{CommandError, Dim, EndpointId, Part, Piece, Region, RegionCard, RemoteRegion, SlotPair, Worker};

use crate::card::Card;
use crate::core::Peer;

#[derive(Debug)]
pub(crate) struct WirePeer {
    pub(crate) endpoint: EndpointId,
    pools: Vec<Pool>,
    regions: Vec<RegionCard>,
    /// One a pool; none at a source, which nobody here writes to.
    remotes: Vec<RemoteRegion>,
    /// The wire's form of the pieces, one a section of the template.
    pieces: Vec<Arc<[Piece]>>,
}

impl WirePeer {
    /// Makes the endpoint, and imports the peer's memory if this `side` writes to it. Nothing is left behind on an error.
    pub(crate) fn connect(
        worker: &Worker,
        side: Side,
        epoch: u64,
        card: Card,
        peer: &Peer,
    ) -> Result<Self, CommandError> {
        let endpoint = worker.connect(&card.address, epoch)?;
        let writes = side == Side::Source;
        let imports = card.regions.iter().filter(|_| writes).map(|region| worker.import(endpoint, region));
        let remotes = imports.collect::<Result<Vec<_>, _>>().inspect_err(|_| {
            let _ = worker.close(endpoint); // stopped: closed with everything else
        })?;
        let pieces =
            peer.template.sections().iter().map(|section| section.pieces.iter().map(piece).collect()).collect();
        Ok(Self { endpoint, pools: card.table.pools, regions: card.regions, remotes, pieces })
    }

    /// The plan in addresses: from `own` memory to the peer's. Plan and tables are those that the peer was connected with.
    pub(crate) fn parts(&self, own: &PageTable, regions: &[Region], plan: &Plan) -> Vec<Part> {
        let sections = plan.sections().zip(&self.pieces);
        // Sections that differ only in their pools have one list of pairs, which stays one.
        let mut last: Option<(*const kvferry_match::SlotPair, Arc<[SlotPair]>)> = None;
        let part =
            |((section, pairs), pieces): ((&kvferry_match::Section, &[kvferry_match::SlotPair]), &Arc<[Piece]>)| {
                let (from, to) = (usize::from(section.source_pool.0), usize::from(section.destination_pool.0));
                let (local, remote) = (&own.pools[from], &self.pools[to]);
                let pairs = match &last {
                    Some((first, list)) if *first == pairs.as_ptr() && list.len() == pairs.len() => list.clone(),
                    _ => {
                        let pair = |pair: &kvferry_match::SlotPair| SlotPair {
                            local: pair.source.0,
                            remote: pair.destination.0,
                        };
                        let list: Arc<[SlotPair]> = pairs.iter().map(pair).collect();
                        last.insert((pairs.as_ptr(), list)).1.clone()
                    }
                };
                Part {
                    local: regions[from].clone(),
                    local_base: local.base - regions[from].base(),
                    local_slot_stride: local.slot_stride,
                    remote: self.remotes[to],
                    remote_base: remote.base - self.regions[to].base,
                    remote_slot_stride: remote.slot_stride,
                    pieces: pieces.clone(),
                    pairs,
                }
            };
        sections.map(part).collect()
    }
}

fn piece(piece: &kvferry_match::Piece) -> Piece {
    let dims = piece.dims.map(|dim| Dim {
        count: dim.count,
        local_stride: dim.source_stride,
        remote_stride: dim.destination_stride,
    });
    let (local_offset, remote_offset) = (piece.source_offset, piece.destination_offset);
    Piece { local_offset, remote_offset, run_bytes: piece.run_bytes, dims }
}
