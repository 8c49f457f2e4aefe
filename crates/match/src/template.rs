//! What one source rank copies to one destination rank, for a pair of blocks of any request.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_layout::{Digest, GroupId, GroupKind, Layer, PoolId, Role};

use crate::assign::Part;
use crate::error::TemplateError;
use crate::geometry::Geometry;
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
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) pairings: Vec<Pairing>,
    pub(crate) sections: Vec<Section>,
    pub(crate) source: Arc<Geometry>,
    pub(crate) destination: Arc<Geometry>,
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
    /// The smallest of the pools that these slots are used in, per side.
    pub(crate) source_bound: (PoolId, u32),
    pub(crate) destination_bound: (PoolId, u32),
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
    /// What is copied for a pair of slots, ascending by destination. No two can be merged.
    pub pieces: Arc<[Piece]>,
    /// Bytes copied for a pair of slots.
    pub bytes_per_pair: u64,
    /// Runs copied for a pair of slots.
    pub runs_per_pair: u64,
    /// Index of its pairing in the template.
    pub(crate) pairing: usize,
}

impl Template {
    /// `parts` are those of one source rank; `rows` are what they index.
    pub(crate) fn new(
        parts: &[Part],
        rows: &[(Layer, Role)],
        source: &Arc<Geometry>,
        destination: &Arc<Geometry>,
        rivals: &[Vec<GroupId>],
    ) -> Result<Self, TemplateError> {
        let mut arrays = BTreeMap::new();
        let mut by_groups = BTreeMap::<_, Vec<(usize, &Part)>>::new();
        for part in parts {
            let count = arrays.len();
            let tag = *arrays.entry((&rows[part.row].1, part.plane)).or_insert(count);
            by_groups.entry((part.source.group, part.destination.group)).or_default().push((tag, part));
        }
        let mut inner = Inner {
            rivals: rivals
                .iter()
                .filter(|set| by_groups.keys().any(|(_, destination)| set.contains(destination)))
                .cloned()
                .collect(),
            source: Arc::clone(source),
            destination: Arc::clone(destination),
            ..Inner::default()
        };
        let mut pieces_left = PIECES_MAX;
        for ((source_group, destination_group), parts) in by_groups {
            match (source.kind(source_group), destination.kind(destination_group)) {
                (
                    GroupKind::Paged { tokens_per_block: source_tokens, .. },
                    GroupKind::Paged { tokens_per_block: destination_tokens, .. },
                ) => {
                    let (phase_count, arrays) = (phase_count(source_tokens, destination_tokens), parts.len() as u64);
                    pieces_left = phase_count
                        .checked_mul(arrays)
                        .and_then(|pieces| pieces_left.checked_sub(pieces))
                        .ok_or(TemplateError::TooManyPieces {
                            source_tokens,
                            destination_tokens,
                            phases: phase_count,
                            arrays,
                            pieces_max: PIECES_MAX,
                        })?;
                    for phase in phases(source_tokens, destination_tokens) {
                        inner.add(&parts, phase, source_tokens, destination_tokens);
                    }
                }
                // Rows are matched only if both are paged or both are state, which has one token.
                _ => inner.add(&parts, Phase::STATE, 1, 1),
            }
        }
        inner.digest = digest(&inner.sections);
        Ok(Self { inner: Arc::new(inner) })
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
        Self {
            pairings: Vec::new(),
            sections: Vec::new(),
            source: Arc::default(),
            destination: Arc::default(),
            rivals: Vec::new(),
            digest: digest(&[]),
        }
    }
}

impl Inner {
    /// Adds one phase of a pair of groups: its pairing, and a section for each pair of pools.
    fn add(&mut self, parts: &[(usize, &Part)], phase: Phase, source_tokens: u32, destination_tokens: u32) {
        let tokens = phase.tokens.end - phase.tokens.start;
        // A block of the phase starts at or before the overlap.
        let source_first = phase.tokens.start - phase.source_index * u64::from(source_tokens);
        let destination_first = phase.tokens.start - phase.destination_index * u64::from(destination_tokens);
        let mut by_pools = BTreeMap::<_, Vec<Tagged>>::new();
        for (tag, part) in parts {
            let Part { source, destination, .. } = part;
            // The cells are inside the slots of checked tables, and so are their offsets.
            let piece = Piece::new(
                source.offset + source_first * source.token_stride,
                destination.offset + destination_first * destination.token_stride,
                part.cell_bytes,
                [
                    Dim {
                        count: part.units.len() as u64,
                        source_stride: source.unit_stride,
                        destination_stride: destination.unit_stride,
                    },
                    Dim {
                        count: tokens,
                        source_stride: source.token_stride,
                        destination_stride: destination.token_stride,
                    },
                ],
            );
            by_pools.entry((source.pool, destination.pool)).or_default().push((*tag, piece));
        }
        let Some((_, part)) = parts.first() else { return };
        let (source_group, destination_group) = (part.source.group, part.destination.group);
        let pairing = self.pairings.len();
        self.pairings.push(Pairing {
            source_group,
            destination_group,
            phase: phase.clone(),
            source_bound: self.source.smallest(by_pools.keys().map(|(pool, _)| *pool)),
            destination_bound: self.destination.smallest(by_pools.keys().map(|(_, pool)| *pool)),
        });
        for ((source_pool, destination_pool), pieces) in by_pools {
            let pieces = merge(pieces);
            self.sections.push(Section {
                source_group,
                source_pool,
                destination_group,
                destination_pool,
                phase: phase.clone(),
                bytes_per_pair: pieces.iter().map(|piece| piece.runs() * piece.run_bytes).sum(),
                runs_per_pair: pieces.iter().map(Piece::runs).sum(),
                pieces: pieces.into(),
                pairing,
            });
        }
    }
}

fn digest(sections: &[Section]) -> Digest {
    let mut transcript = Transcript::new("kvferry template 1");
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
