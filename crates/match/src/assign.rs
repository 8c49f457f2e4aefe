//! Who sends what: for every cell that a destination rank holds, exactly one source rank.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use kvferry_layout::{Digest, GroupId, Layer, PageTable, Role};

use crate::balance::ReplicaSets;
use crate::error::{MatchError, TemplateError};
use crate::geometry::{Geometry, Place};
use crate::layers::LayerList;
use crate::rivals;
use crate::rows::{Matched, Wanted, match_rows};
use crate::template::Template;
use crate::text;
use crate::transcript::Transcript;
use crate::units::stretches;

/// Which source rank sends which cells to one destination rank. Made by [`assign`]; owns all it needs of the tables.
#[derive(Clone, Debug)]
pub struct Assignment {
    destination_rank: u32,
    /// The destination's rows, ascending.
    rows: Vec<(Layer, Role)>,
    /// Ascending by source rank, then row, plane and unit.
    parts: Vec<Part>,
    sources: BTreeMap<u32, Arc<Geometry>>,
    destination: Arc<Geometry>,
    rivals: Arc<[Vec<GroupId>]>,
    one_sided: Vec<Layer>,
    digest: Digest,
}

/// Units of one plane of one row, all of one source rank.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) source_rank: u32,
    /// Index into the rows of the assignment.
    pub(crate) row: usize,
    pub(crate) plane: usize,
    pub(crate) units: Range<u32>,
    pub(crate) cell_bytes: u64,
    pub(crate) source: Place,
    pub(crate) destination: Place,
}

/// Chooses a source rank for every cell (layer, role, plane, unit) that a destination rank holds, and proves that there
/// is one.
///
/// - `sources`: the tables of all ranks of the source instance, in rank order.
/// - `destination`: the table of rank `destination_rank` of the destination instance.
///
/// Every table must have passed [`PageTable::check`]. The result depends on the arguments only, so that each side can
/// compute it and compare [`Assignment::digest`].
///
/// A destination without rows has an assignment without sources. Layers past the hidden ones (MTP, draft layers) that no
/// source rank holds are no error: [`Assignment::one_sided`] lists them.
///
/// # Errors
///
/// The first thing that keeps the destination from being served, see [`MatchError`].
pub fn assign(sources: &[PageTable], destination: &PageTable, destination_rank: u32) -> Result<Assignment, MatchError> {
    let Matched { wanted, one_sided } = match_rows(sources, destination, destination_rank)?;
    let parts = choose(&wanted, destination_rank)?;
    let rows: Vec<_> = wanted.iter().map(|wanted| (wanted.row.row.layer, wanted.row.row.role.clone())).collect();
    let senders: BTreeSet<u32> = parts.iter().map(|part| part.source_rank).collect();
    let digest = digest(destination_rank, &rows, &parts);
    Ok(Assignment {
        destination_rank,
        rows,
        parts,
        sources: (0u32..)
            .zip(sources)
            .filter(|(rank, _)| senders.contains(rank))
            .map(|(rank, table)| (rank, Arc::new(Geometry::of(table))))
            .collect(),
        destination: Arc::new(Geometry::of(destination)),
        rivals: rivals::sets(destination).into(),
        one_sided,
        digest,
    })
}

impl Assignment {
    /// The destination rank that this is for.
    pub fn destination_rank(&self) -> u32 {
        self.destination_rank
    }

    /// Source ranks that send to the destination rank, ascending.
    pub fn sources(&self) -> impl Iterator<Item = u32> + '_ {
        self.sources.keys().copied()
    }

    /// Rows (layer, role) of which `source_rank` sends at least a part; 0 for a rank that sends nothing.
    pub fn rows(&self, source_rank: u32) -> u64 {
        self.parts_of(source_rank).chunk_by(|a, b| a.row == b.row).count() as u64
    }

    /// Layers of the destination rank, all past the hidden ones, that no source rank holds. Nobody writes their rows.
    pub fn one_sided(&self) -> &[Layer] {
        &self.one_sided
    }

    /// Digest of who sends which cells. Both sides have the same one, or they do not speak of the same instances.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// What `source_rank` copies to the destination rank for a pair of blocks.
    ///
    /// # Errors
    ///
    /// [`TemplateError::NotASource`] if it sends nothing; [`TemplateError::TooManyPieces`] if the block sizes of the two
    /// sides fit each other too badly.
    pub fn template(&self, source_rank: u32) -> Result<Template, TemplateError> {
        let destination_rank = self.destination_rank;
        let source = self.sources.get(&source_rank);
        let source = source.ok_or(TemplateError::NotASource { source_rank, destination_rank })?;
        Template::new(self.parts_of(source_rank), &self.rows, source, &self.destination, &self.rivals)
    }

    /// A table for people: which source rank sends which layers and units of which role.
    pub fn explain(&self) -> String {
        let mut lines = BTreeMap::<_, (Vec<Layer>, u64)>::new();
        for part in &self.parts {
            let (layer, role) = &self.rows[part.row];
            let line = lines.entry((part.source_rank, role, part.plane, part.units.start, part.units.end)).or_default();
            line.0.push(*layer);
            let tokens = u64::from(self.destination.kind(part.destination.group).tokens());
            // Bytes of one row fit, those of all pools need not.
            line.1 = line.1.saturating_add(part.cell_bytes * part.units.len() as u64 * tokens);
        }
        let lines = lines.into_iter().map(|((rank, role, plane, start, end), (layers, bytes))| {
            [
                format!("{rank} -> {}", self.destination_rank),
                role.to_string(),
                plane.to_string(),
                format!("{start}..{end}"),
                layers.into_iter().collect::<LayerList>().to_string(),
                bytes.to_string(),
            ]
        });
        text::table(["ranks", "role", "plane", "units", "layers", "bytes a slot"], lines)
    }

    fn parts_of(&self, source_rank: u32) -> &[Part] {
        let start = self.parts.partition_point(|part| part.source_rank < source_rank);
        let end = self.parts.partition_point(|part| part.source_rank <= source_rank);
        &self.parts[start..end]
    }
}

/// Cells of one row that the same source ranks hold.
struct Share {
    row: usize,
    /// Indices into the row's holders, ascending.
    holders: Vec<usize>,
    bytes: u64,
    cells: Vec<(usize, Range<u32>)>,
}

/// One source rank for each share of each row.
fn choose(wanted: &[Wanted<'_>], destination_rank: u32) -> Result<Vec<Part>, MatchError> {
    let mut shares = Vec::with_capacity(wanted.len());
    for row in 0..wanted.len() {
        shares.extend(share_out(wanted, row)?);
    }
    let mut replicas = ReplicaSets::default();
    let sets: Vec<usize> = shares
        .iter()
        .map(|share| {
            let Wanted { row, holders } = &wanted[share.row];
            let ranks = share.holders.iter().map(|holder| holders[*holder].rank).collect();
            replicas.add(row.group, ranks, share.bytes)
        })
        .collect();

    let mut parts = Vec::with_capacity(shares.len());
    for (share, set) in shares.into_iter().zip(sets) {
        let Wanted { row: destination, holders } = &wanted[share.row];
        let source = holders[share.holders[replicas.next(set, share.bytes, destination_rank)]];
        for (plane, units) in share.cells {
            let (source_plane, destination_plane) = (&source.row.planes[plane], &destination.row.planes[plane]);
            parts.push(Part {
                source_rank: source.rank,
                row: share.row,
                plane,
                cell_bytes: destination_plane.cell_bytes,
                source: Place::new(source.group, source.row, source_plane, units.start),
                destination: Place::new(destination.group, destination.row, destination_plane, units.start),
                units,
            });
        }
    }
    parts.sort_by_key(|part| part.source_rank);
    Ok(parts)
}

/// The cells of one wanted row, by the ranks that hold them. Proves that every cell has at least one.
fn share_out(wanted: &[Wanted<'_>], row: usize) -> Result<Vec<Share>, MatchError> {
    let Wanted { row: destination, holders } = &wanted[row];
    let mut shares: Vec<Share> = Vec::new();
    for (index, plane) in destination.row.planes.iter().enumerate() {
        let held: Vec<Range<u32>> = holders.iter().map(|holder| holder.row.planes[index].units.clone()).collect();
        for (units, holders) in stretches(&plane.units, &held) {
            if holders.is_empty() {
                return Err(uncovered(wanted, destination.row.role.clone(), index, units));
            }
            // Cells of a checked table do not overlap, so those of a row add up to less than its slot.
            let bytes = plane.cell_bytes * units.len() as u64 * u64::from(plane.tokens);
            match shares.iter_mut().find(|share| share.holders == holders) {
                Some(share) => {
                    share.bytes += bytes;
                    share.cells.push((index, units));
                }
                None => shares.push(Share { row, holders, bytes, cells: vec![(index, units)] }),
            }
        }
    }
    Ok(shares)
}

/// The error for units that nobody holds, with every layer where that is so.
fn uncovered(wanted: &[Wanted<'_>], role: Role, plane: usize, units: Range<u32>) -> MatchError {
    let touches = |held: &Range<u32>| held.start < units.end && units.start < held.end;
    let layers = wanted
        .iter()
        .filter(|wanted| wanted.row.row.role == role)
        .filter(|wanted| wanted.row.row.planes.get(plane).is_some_and(|plane| touches(&plane.units)))
        .filter(|wanted| !wanted.holders.iter().any(|holder| touches(&holder.row.planes[plane].units)))
        .map(|wanted| wanted.row.row.layer)
        .collect();
    MatchError::Uncovered { role, layers, plane, units }
}

fn digest(destination_rank: u32, rows: &[(Layer, Role)], parts: &[Part]) -> Digest {
    let mut transcript = Transcript::new("kvferry assignment 1");
    transcript.word(destination_rank);
    for part in parts {
        let (layer, role) = &rows[part.row];
        transcript.role(role);
        transcript.words(&[
            layer.0.into(),
            part.source_rank.into(),
            part.plane as u64,
            part.units.start.into(),
            part.units.end.into(),
            part.cell_bytes,
        ]);
    }
    transcript.finish()
}
