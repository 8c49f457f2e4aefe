//! The layer axis: which source rows hold what each destination row wants.

use kvferry_layout::{GroupId, GroupKind, Layer, LayerMask, PageTable, Role, Row};

use crate::compatible::Mismatch;
use crate::error::{MatchError, Side};

/// A row with what its table says around it.
#[derive(Clone, Copy)]
pub(crate) struct Located<'a> {
    pub(crate) rank: u32,
    pub(crate) group: GroupId,
    pub(crate) kind: GroupKind,
    pub(crate) row: &'a Row,
}

/// A destination row and the source rows of its layer and role, ascending by rank.
pub(crate) struct Wanted<'a> {
    pub(crate) row: Located<'a>,
    pub(crate) holders: Vec<Located<'a>>,
}

/// The rows of one destination rank that are to be written, and what is known of the rest.
pub(crate) struct Matched<'a> {
    /// Ascending by layer and role. Each has compatible holders, or none: that is for the unit axis to find.
    pub(crate) wanted: Vec<Wanted<'a>>,
    /// Layers of the destination rank past the hidden ones that the source does not have.
    pub(crate) one_sided: Vec<Layer>,
}

/// Finds the holders of every destination row. Proves that they are compatible, and that each layer which both sides
/// hold has the same roles on both.
pub(crate) fn match_rows<'a>(
    sources: &'a [PageTable],
    destination: &'a PageTable,
    destination_rank: u32,
) -> Result<Matched<'a>, MatchError> {
    let hidden_layers = destination.hidden_layers;
    let mut wanted: Vec<Wanted<'a>> =
        located(destination_rank, destination).map(|row| Wanted { row, holders: Vec::new() }).collect();
    wanted.sort_by_key(|wanted| key(wanted.row.row));

    let mut unasked: Vec<&'a Row> = Vec::new();
    for (rank, table) in (0u32..).zip(sources) {
        if table.hidden_layers != hidden_layers {
            return Err(MatchError::HiddenLayers {
                source_rank: rank,
                source_layers: table.hidden_layers,
                destination_layers: hidden_layers,
            });
        }
        for source in located(rank, table) {
            match wanted.binary_search_by_key(&key(source.row), |wanted| key(wanted.row.row)) {
                Ok(index) => wanted[index].holders.push(source),
                Err(_) => unasked.push(source.row),
            }
        }
    }
    prove_compatible(&wanted)?;

    let source_rows = sources.iter().flat_map(|table| &table.groups).flat_map(|group| &group.rows);
    let source_layers = layers(hidden_layers, source_rows);
    let destination_layers = layers(hidden_layers, wanted.iter().map(|wanted| wanted.row.row));
    let destination_lacks = unasked.into_iter().filter(|row| destination_layers.owns(row.layer));
    let source_lacks = wanted.iter().filter(|wanted| wanted.holders.is_empty()).map(|wanted| wanted.row.row);
    let lacking = destination_lacks
        .map(|row| (row, Side::Destination))
        .chain(source_lacks.filter(|row| source_layers.owns(row.layer)).map(|row| (row, Side::Source)))
        .min_by_key(|(row, _)| key(row));
    if let Some((row, lacking)) = lacking {
        return Err(missing_role(sources, destination, &destination_layers, row, lacking));
    }

    let past_hidden = destination_layers.owners().filter(|layer| layer.0 >= hidden_layers);
    let one_sided: Vec<Layer> = past_hidden.filter(|layer| !source_layers.owns(*layer)).collect();
    wanted.retain(|wanted| one_sided.binary_search(&wanted.row.row.layer).is_err());
    Ok(Matched { wanted, one_sided })
}

fn missing_role(
    sources: &[PageTable],
    destination: &PageTable,
    destination_layers: &LayerMask,
    row: &Row,
    lacking: Side,
) -> MatchError {
    let mask = |tables: &[PageTable]| {
        let rows = tables.iter().flat_map(PageTable::rows).map(|(_, row)| row);
        layers(destination.hidden_layers, rows.filter(|other| other.role == row.role))
    };
    MatchError::MissingRole {
        layer: row.layer,
        role: row.role.clone(),
        lacking,
        source_mask: mask(sources).restricted_to(destination_layers.owners()),
        destination_mask: mask(std::slice::from_ref(destination)),
    }
}

fn located(rank: u32, table: &PageTable) -> impl Iterator<Item = Located<'_>> {
    let groups = (0..=u16::MAX).map(GroupId).zip(&table.groups);
    groups.flat_map(move |(group, layers)| {
        layers.rows.iter().map(move |row| Located { rank, group, kind: layers.kind, row })
    })
}

fn key(row: &Row) -> (Layer, &Role) {
    (row.layer, &row.role)
}

fn layers<'a>(hidden_layers: u32, rows: impl Iterator<Item = &'a Row>) -> LayerMask {
    LayerMask::new(hidden_layers, rows.map(|row| row.layer))
}

fn prove_compatible(wanted: &[Wanted<'_>]) -> Result<(), MatchError> {
    for Wanted { row, holders } in wanted {
        for holder in holders {
            if let Some(mismatch) = Mismatch::between((holder.kind, holder.row), (row.kind, row.row)) {
                return Err(MatchError::Incompatible {
                    source_rank: holder.rank,
                    layer: row.row.layer,
                    role: row.row.role.clone(),
                    mismatch,
                });
            }
        }
    }
    Ok(())
}
