//! What one source rank sends to one destination rank, cell by cell range: what a template is made of.

use std::ops::Range;
use std::sync::Arc;

use kvferry_layout::{Digest, GroupId, GroupKind, Layer, PageTable, Role};

use crate::geometry::Place;
use crate::rivals;
use crate::rows::Wanted;
use crate::shares::Share;
use crate::transcript::Transcript;

/// The cells that ranks of one source class send to ranks of one destination class. Equal loads make equal templates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Load {
    /// Ascending by row, plane and unit.
    pub(crate) parts: Vec<Part>,
    /// Of the source's groups.
    pub(crate) source_kinds: Vec<GroupKind>,
    pub(crate) destination: Arc<Wants>,
}

/// What there is to know of a destination class once its rows are matched.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wants {
    /// Ascending.
    pub(crate) rows: Vec<(Layer, Role)>,
    /// Of the groups.
    pub(crate) kinds: Vec<GroupKind>,
    /// Groups, in sets of which a slot may be in one only.
    pub(crate) rivals: Vec<Vec<GroupId>>,
    pub(crate) one_sided: Vec<Layer>,
}

/// Units of one plane of one row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Part {
    /// Index into the rows of the destination.
    pub(crate) row: usize,
    pub(crate) plane: usize,
    pub(crate) units: Range<u32>,
    pub(crate) cell_bytes: u64,
    pub(crate) along: Along,
    pub(crate) source: Place,
    pub(crate) destination: Place,
}

/// How many cells of a unit lie along the token axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Along {
    /// One for so many tokens.
    Tokens(u32),
    /// This many, whatever the tokens: state.
    Cells(u32),
}

impl Wants {
    pub(crate) fn new(table: &PageTable, wanted: &[Wanted<'_>], one_sided: Vec<Layer>) -> Self {
        Self {
            rows: wanted.iter().map(|wanted| (wanted.row.row.layer, wanted.row.row.role.clone())).collect(),
            kinds: kinds(table),
            rivals: rivals::sets(table),
            one_sided,
        }
    }
}

impl Load {
    /// The cells of some shares, which ranks of `class`, with this table, hold.
    pub(crate) fn new<'a>(
        class: usize,
        table: &PageTable,
        wanted: &[Wanted<'_>],
        destination: &Arc<Wants>,
        shares: impl Iterator<Item = &'a Share>,
    ) -> Self {
        let mut parts = Vec::new();
        for share in shares {
            let Wanted { row: destination, holders } = &wanted[share.row];
            for source in share.holders.iter().map(|holder| holders[*holder]).filter(|holder| holder.class == class) {
                for (plane, units) in &share.cells {
                    let (source_plane, destination_plane) =
                        (&source.row.planes[*plane], &destination.row.planes[*plane]);
                    let along = match destination.kind.tokens_per_cell(destination_plane) {
                        Some(tokens) => Along::Tokens(tokens),
                        None => Along::Cells(destination_plane.tokens),
                    };
                    parts.push(Part {
                        row: share.row,
                        plane: *plane,
                        cell_bytes: destination_plane.cell_bytes,
                        along,
                        source: Place::new(source.group, source.row, source_plane, units.start),
                        destination: Place::new(destination.group, destination.row, destination_plane, units.start),
                        units: units.clone(),
                    });
                }
            }
        }
        Self { parts, source_kinds: kinds(table), destination: Arc::clone(destination) }
    }

    /// The parts in some layers.
    pub(crate) fn of_layers(&self, layers: &Range<u32>) -> Self {
        let parts = self.parts.iter().filter(|part| layers.contains(&self.row(part).0.0)).cloned().collect();
        Self { parts, source_kinds: self.source_kinds.clone(), destination: Arc::clone(&self.destination) }
    }

    /// The row of a part.
    pub(crate) fn row(&self, part: &Part) -> &(Layer, Role) {
        &self.destination.rows[part.row]
    }

    /// Rows of which at least a part is sent.
    pub(crate) fn rows(&self) -> u64 {
        self.parts.chunk_by(|a, b| a.row == b.row).count() as u64
    }

    /// Digest of which cells are sent.
    pub(crate) fn digest(&self) -> Digest {
        let mut transcript = Transcript::new("kvferry load 1");
        for part in &self.parts {
            let (layer, role) = self.row(part);
            transcript.role(role);
            transcript.words(&[
                layer.0.into(),
                part.plane as u64,
                part.units.start.into(),
                part.units.end.into(),
                part.cell_bytes,
            ]);
            match self.source_kinds[usize::from(part.source.group.0)] {
                GroupKind::Paged { tokens_per_block, ordinals, .. } => {
                    transcript.words(&[tokens_per_block.into(), ordinals.step.into(), ordinals.first.into()]);
                }
                GroupKind::State => transcript.words(&[0; 3]),
            }
        }
        transcript.finish()
    }
}

fn kinds(table: &PageTable) -> Vec<GroupKind> {
    table.groups.iter().map(|group| group.kind).collect()
}
