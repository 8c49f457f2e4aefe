//! What one source rank copies to one destination rank, for a pair of blocks of any request.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvferry_layout::{Digest, GroupId, GroupKind, Ordinals, PoolId};

use crate::error::TemplateError;
use crate::geometry::Geometry;
use crate::load::{Along, Load, Part};
use crate::merge::{Tagged, merge};
use crate::phase::{Phase, phase_count, phases};
use crate::piece::{Dim, Piece};
use crate::transcript::Transcript;

/// Most pieces of a template before they are merged. The largest models need some 600 for each phase, and token-granular
/// pools a phase for each token of the other side's blocks.
const PIECES_MAX: u64 = 1 << 18;

/// The pieces that a source rank copies to a destination rank for each pair of overlapping blocks. It knows no request:
/// [`Self::bind`] joins it to block maps. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Template {
    /// What is shared by ranks of equal layout.
    pub(crate) inner: Arc<Inner>,
    pub(crate) source: Arc<Geometry>,
    pub(crate) destination: Arc<Geometry>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) pairings: Vec<Pairing>,
    pub(crate) sections: Vec<Section>,
    /// Destination groups, in sets of which a slot may be in one only. Only sets with a group that is written here.
    pub(crate) rivals: Vec<Vec<GroupId>>,
    digest: Digest,
}

/// A source group, a destination group and one of their phases: what slots are paired by, whatever the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pairing {
    pub(crate) source_group: GroupId,
    pub(crate) destination_group: GroupId,
    pub(crate) phase: Phase,
    /// The last tokens of a request that the destination needs.
    pub(crate) window_tokens: Option<u32>,
}

/// The part of a template that lies in one source pool and one destination pool, for one phase of two groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Group whose block map gives the source's slots.
    pub source_group: GroupId,
    /// Pool that is read.
    pub source_pool: PoolId,
    /// Group whose block map gives the destination's slots.
    pub destination_group: GroupId,
    /// Pool that is written.
    pub destination_pool: PoolId,
    /// Which blocks are paired.
    pub phase: Phase,
    /// The destination's window: of a request only the last so many tokens are needed. `None` needs all.
    pub window_tokens: Option<u32>,
    /// What is copied for a pair of slots, ascending by destination. No two can be merged.
    pub pieces: Arc<[Piece]>,
    /// Bytes copied for a pair of slots.
    pub bytes_per_pair: u64,
    /// Runs copied for a pair of slots.
    pub runs_per_pair: u64,
    /// Index of its pairing in the template.
    pub(crate) pairing: usize,
}

impl Section {
    /// The number of the list of slot pairs that it shares with the sections that differ from it in their pools only.
    pub fn pairing(&self) -> usize {
        self.pairing
    }
}

impl Template {
    pub(crate) fn new(load: &Load, source: &Arc<Geometry>, destination: &Arc<Geometry>) -> Result<Self, TemplateError> {
        Ok(Self::of(&Arc::new(Inner::new(load)?), source, destination))
    }

    pub(crate) fn of(inner: &Arc<Inner>, source: &Arc<Geometry>, destination: &Arc<Geometry>) -> Self {
        Self { inner: Arc::clone(inner), source: Arc::clone(source), destination: Arc::clone(destination) }
    }

    /// What is copied, by pools and phases.
    pub fn sections(&self) -> &[Section] {
        &self.inner.sections
    }

    /// Digest of the sections: of which bytes of a slot go where. It does not depend on how many slots the pools have or
    /// how far apart they are.
    pub fn digest(&self) -> Digest {
        self.inner.digest
    }
}

/// A template of nothing.
impl Default for Inner {
    fn default() -> Self {
        Self { pairings: Vec::new(), sections: Vec::new(), rivals: Vec::new(), digest: digest(&[]) }
    }
}

/// One side of a pair of groups.
#[derive(Clone, Copy)]
struct Blocks {
    group: GroupId,
    tokens: u32,
    ordinals: Ordinals,
    window_tokens: Option<u32>,
}

impl Blocks {
    /// `None` for state.
    fn of(group: GroupId, kinds: &[GroupKind]) -> Option<Self> {
        match kinds[usize::from(group.0)] {
            GroupKind::Paged { tokens_per_block: tokens, window_tokens, ordinals } => {
                Some(Self { group, tokens, ordinals, window_tokens })
            }
            GroupKind::State => None,
        }
    }

    /// Of state: one slot, taken as a block of one token.
    fn state(group: GroupId) -> Self {
        Self { group, tokens: 1, ordinals: Ordinals::ALL, window_tokens: None }
    }
}

impl Inner {
    fn new(load: &Load) -> Result<Self, TemplateError> {
        let mut arrays = BTreeMap::new();
        let mut by_groups = BTreeMap::<_, Vec<(usize, &Part)>>::new();
        for part in &load.parts {
            let count = arrays.len();
            let tag = *arrays.entry((&load.row(part).1, part.plane)).or_insert(count);
            by_groups.entry((part.source.group, part.destination.group)).or_default().push((tag, part));
        }
        let written = |set: &&Vec<GroupId>| by_groups.keys().any(|(_, destination)| set.contains(destination));
        let rivals = load.destination.rivals.iter().filter(written).cloned().collect();
        let mut inner = Self { rivals, ..Self::default() };
        let mut known = HashMap::new();
        let mut pieces_left = PIECES_MAX;
        for ((source, destination), parts) in &by_groups {
            let blocks = (Blocks::of(*source, &load.source_kinds), Blocks::of(*destination, &load.destination.kinds));
            // Rows are matched only if both are paged or both are state.
            let (Some(source), Some(destination)) = blocks else {
                let (source, destination) = (Blocks::state(*source), Blocks::state(*destination));
                inner.add(parts, Phase::STATE, source, destination, &mut known);
                continue;
            };
            let (phase_count, arrays) = (phase_count(source.tokens, destination.tokens), parts.len() as u64);
            pieces_left = phase_count.checked_mul(arrays).and_then(|pieces| pieces_left.checked_sub(pieces)).ok_or(
                TemplateError::TooManyPieces {
                    source_tokens: source.tokens,
                    destination_tokens: destination.tokens,
                    phases: phase_count,
                    arrays,
                    pieces_max: PIECES_MAX,
                },
            )?;
            let phases = phases(source.tokens, destination.tokens);
            for phase in phases.filter_map(|phase| phase.dealt(source.ordinals, destination.ordinals)) {
                inner.add(parts, phase, source, destination, &mut known);
            }
        }
        inner.digest = digest(&inner.sections);
        Ok(inner)
    }

    /// Adds one phase of a pair of groups: its pairing, and a section for each pair of pools. `known` are the lists of
    /// pieces so far: where each layer has pools of its own, they mostly have the same ones.
    fn add(
        &mut self,
        parts: &[(usize, &Part)],
        phase: Phase,
        source: Blocks,
        destination: Blocks,
        known: &mut HashMap<Vec<Piece>, Arc<[Piece]>>,
    ) {
        let tokens = phase.tokens.end - phase.tokens.start;
        // Where the overlap starts in its blocks, which begin at or before it.
        let source_first = phase.tokens.start - phase.source_index * u64::from(source.tokens);
        let destination_first = phase.tokens.start - phase.destination_index * u64::from(destination.tokens);
        let mut by_pools = BTreeMap::<_, Vec<Tagged>>::new();
        for (tag, part) in parts {
            let (ours, theirs) = (&part.source, &part.destination);
            // Blocks are whole cells, and so are their overlaps.
            let (cells, source_cell, destination_cell) = match part.along {
                Along::Tokens(per_cell) => {
                    let per_cell = u64::from(per_cell);
                    (tokens / per_cell, source_first / per_cell, destination_first / per_cell)
                }
                Along::Cells(cells) => (u64::from(cells), 0, 0),
            };
            // The cells are inside the slots of checked tables, and so are their offsets.
            let piece = Piece::new(
                ours.offset + source_cell * ours.token_stride,
                theirs.offset + destination_cell * theirs.token_stride,
                part.cell_bytes,
                [
                    Dim {
                        count: part.units.len() as u64,
                        source_stride: ours.unit_stride,
                        destination_stride: theirs.unit_stride,
                    },
                    Dim { count: cells, source_stride: ours.token_stride, destination_stride: theirs.token_stride },
                ],
            );
            by_pools.entry((ours.pool, theirs.pool)).or_default().push((*tag, piece));
        }
        let (source_group, destination_group) = (source.group, destination.group);
        let window_tokens = destination.window_tokens;
        let pairing = self.pairings.len();
        self.pairings.push(Pairing { source_group, destination_group, phase: phase.clone(), window_tokens });
        for ((source_pool, destination_pool), pieces) in by_pools {
            let pieces = merge(pieces);
            self.sections.push(Section {
                source_group,
                source_pool,
                destination_group,
                destination_pool,
                phase: phase.clone(),
                window_tokens,
                bytes_per_pair: pieces.iter().map(|piece| piece.runs() * piece.run_bytes).sum(),
                runs_per_pair: pieces.iter().map(Piece::runs).sum(),
                pieces: Arc::clone(known.entry(pieces).or_insert_with_key(|pieces| pieces.as_slice().into())),
                pairing,
            });
        }
    }
}

fn digest(sections: &[Section]) -> Digest {
    let mut transcript = Transcript::new("kvferry template 2");
    for section in sections {
        let Phase { period_tokens, tokens, source_step, source_index, destination_step, destination_index } =
            &section.phase;
        transcript.words(&[
            section.source_group.0.into(),
            section.source_pool.0.into(),
            section.destination_group.0.into(),
            section.destination_pool.0.into(),
            *period_tokens,
            tokens.start,
            tokens.end,
            *source_step,
            *source_index,
            *destination_step,
            *destination_index,
            // A window is never 0 tokens.
            section.window_tokens.map_or(0, u64::from),
            section.pieces.len() as u64,
        ]);
        for piece in section.pieces.iter() {
            transcript.words(&[piece.source_offset, piece.destination_offset, piece.run_bytes]);
            for dim in piece.dims {
                transcript.words(&[dim.count, dim.source_stride, dim.destination_stride]);
            }
        }
    }
    transcript.finish()
}
