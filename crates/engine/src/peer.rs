//! A peer as the wire sees it: an endpoint, its memory, and the pieces between its pools and ours.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvferry_layout::PageTable;
use kvferry_match::{Plan, Side, Template};
use kvferry_wire::{
    CommandError, Dim, EndpointId, Part, Piece, Prepared, Region, RemoteRegion, SlotPair, TransferError, Worker,
};

use crate::card::Card;
use crate::workers::Workers;

#[derive(Debug)]
pub(crate) struct WirePeer {
    /// The number of the worker that serves the peer.
    pub(crate) worker: usize,
    pub(crate) endpoint: EndpointId,
    /// The endpoint has failed, and the wire has closed it.
    pub(crate) failed: bool,
    /// Those that have failed before it. The wire says of them when the peer has died.
    pub(crate) earlier: Vec<EndpointId>,
    pub(crate) card: Arc<Card>,
    /// One a pool; none at a source, which nobody here writes to.
    remotes: Vec<RemoteRegion>,
    /// What is written to when this side connects; likewise.
    probe: Option<RemoteRegion>,
    /// The wire's form of lists of pieces, by the address of the list, which is kept so that no other gets it.
    pieces: BTreeMap<usize, Translated>,
    /// What has been moved before, but for its slots.
    prepared: HashMap<Key, Known>,
}

/// Kept for a peer, at most. Beyond, all of it is given up, to be prepared again when it comes again.
const PREPARED_MAX: usize = 256;

/// A template, by the address of its sections, and which of its pairings move something.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    template: usize,
    pairings: Vec<usize>,
}

#[derive(Debug)]
struct Known {
    prepared: Prepared,
    /// Kept, so that no other gets its address.
    _template: Template,
}

/// What of a transfer comes again, and the pairs of slots of each of its sets.
type Ready<'a> = (&'a Prepared, Vec<Arc<[SlotPair]>>);

/// Bytes of the memory that each rank lets others write to when they connect. What is in it means nothing.
pub(crate) const PROBE_BYTES: u64 = 64;

/// A list of pieces and the wire's form of it.
type Translated = (Arc<[kvferry_match::Piece]>, Arc<[Piece]>);

/// Makes an endpoint to a peer, and imports its memory if this `side` writes to it. Nothing is left behind on an error.
fn open(
    worker: &Worker,
    address: &[u8],
    side: Side,
    card: &Card,
) -> Result<(EndpointId, Vec<RemoteRegion>), CommandError> {
    let endpoint = worker.connect(address, card.epoch)?;
    let writes = side == Side::Source;
    let regions = card.regions.iter().chain([&card.probe]).filter(|_| writes);
    let imports = regions.map(|region| worker.import(endpoint, region));
    let remotes = imports.collect::<Result<Vec<_>, _>>().inspect_err(|_| {
        let _ = worker.close(endpoint); // stopped: closed with everything else
    })?;
    Ok((endpoint, remotes))
}

impl WirePeer {
    /// Connects this `side` to a peer.
    pub(crate) fn connect(workers: &Workers, side: Side, card: Arc<Card>) -> Result<Self, CommandError> {
        let worker = workers.number_for(&card);
        let (endpoint, mut remotes) = open(workers.get(worker), workers.address_of(&card), side, &card)?;
        let probe = remotes.pop();
        Ok(Self {
            worker,
            endpoint,
            failed: false,
            earlier: Vec::new(),
            card,
            remotes,
            probe,
            pieces: BTreeMap::new(),
            prepared: HashMap::new(),
        })
    }

    /// Takes the place of an earlier connection to the same life of the peer.
    pub(crate) fn succeed(&mut self, workers: &Workers, earlier: Self) {
        self.earlier = earlier.earlier;
        if earlier.failed {
            self.earlier.push(earlier.endpoint);
        } else {
            let _ = workers.get(earlier.worker).close(earlier.endpoint); // stopped: closed with everything else
        }
    }

    /// A write of a few bytes to the peer's probe: as good as any to see whether writes arrive. `None` at a source.
    pub(crate) fn probe(&self, local: &Region) -> Option<Part> {
        let dims = [Dim { count: 1, local_stride: 0, remote_stride: 0 }; 2];
        let piece = Piece { local_offset: 0, remote_offset: 0, run_bytes: PROBE_BYTES, dims };
        Some(Part {
            local: local.clone(),
            local_base: 0,
            local_slot_stride: PROBE_BYTES,
            remote: self.probe?,
            remote_base: 0,
            remote_slot_stride: PROBE_BYTES,
            pieces: [piece].into(),
            pairs: Arc::new([SlotPair { local: 0, remote: 0 }]),
        })
    }

    /// The plan in addresses, from `own` memory to the peer's: what of it comes again, and the slots of each of its sets. Plan and
    /// tables are those that the peer was connected with.
    pub(crate) fn prepare(
        &mut self,
        worker: &Worker,
        own: &PageTable,
        regions: &[Region],
        plan: &Plan,
    ) -> Result<Ready<'_>, TransferError> {
        let pair = |pair: &kvferry_match::SlotPair| SlotPair { local: pair.source.0, remote: pair.destination.0 };
        let list = |pairs: &[kvferry_match::SlotPair]| pairs.iter().map(pair).collect();
        let (pairings, sets) = plan.pairings().map(|(pairing, pairs)| (pairing, list(pairs))).unzip();
        let key = Key { template: plan.template().sections().as_ptr().addr(), pairings };
        if !self.prepared.contains_key(&key) {
            let prepared = worker.prepare(self.endpoint, self.parts(own, regions, plan))?;
            if self.prepared.len() >= PREPARED_MAX {
                self.prepared.clear();
            }
            let known = Known { prepared, _template: plan.template().clone() };
            self.prepared.insert(key.clone(), known);
        }
        let known = self.prepared.get(&key).expect("it was there, or has been inserted");
        Ok((&known.prepared, sets))
    }

    /// The parts of a plan, without its slots: those of one pairing have one list, which stands for any.
    fn parts(&mut self, own: &PageTable, regions: &[Region], plan: &Plan) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut last: Option<(usize, Arc<[SlotPair]>)> = None;
        for (section, _) in plan.sections().filter(|(_, pairs)| !pairs.is_empty()) {
            let (from, to) = (usize::from(section.source_pool.0), usize::from(section.destination_pool.0));
            let (local, remote) = (&own.pools[from], &self.card.table.pools[to]);
            let pairs = match &last {
                Some((pairing, list)) if *pairing == section.pairing() => list.clone(),
                _ => last.insert((section.pairing(), Arc::new([SlotPair { local: 0, remote: 0 }]))).1.clone(),
            };
            let place = Arc::as_ptr(&section.pieces).cast::<()>().addr();
            let (_, pieces) = self
                .pieces
                .entry(place)
                .or_insert_with(|| (section.pieces.clone(), section.pieces.iter().map(piece).collect()));
            parts.push(Part {
                local: regions[from].clone(),
                local_base: local.base - regions[from].base(),
                local_slot_stride: local.slot_stride,
                remote: self.remotes[to],
                remote_base: remote.base - self.card.regions[to].base,
                remote_slot_stride: remote.slot_stride,
                pieces: pieces.clone(),
                pairs,
            });
        }
        parts
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
