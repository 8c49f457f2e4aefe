//! The layer axis: which source rows hold what each destination row wants.

use std::collections::BTreeMap;

use kvferry_layout::{GroupId, GroupKind, Layer, LayerMask, PageTable, Role, Row};

use crate::classes::Class;
use crate::compatible::Mismatch;
use crate::error::{MatchError, Side};

/// A row with what its table says around it.
#[derive(Clone, Copy)]
pub(crate) struct Located<'a> {
    pub(crate) class: usize,
    pub(crate) group: GroupId,
    pub(crate) kind: GroupKind,
    pub(crate) row: &'a Row,
}

/// A destination row and the source rows of its layer and role, ascending by class.
pub(crate) struct Wanted<'a> {
    pub(crate) row: Located<'a>,
    pub(crate) holders: Vec<Located<'a>>,
}

/// The rows of one destination class that are to be written, and what is known of the rest.
pub(crate) struct Matched<'a> {
    /// Ascending by layer and role. Each has compatible holders, or none: that is for the unit axis to find.
    pub(crate) wanted: Vec<Wanted<'a>>,
    /// Layers of the destination past the hidden ones that the source does not have.
    pub(crate) one_sided: Vec<Layer>,
}

/// All rows of a source instance by layer and role.
pub(crate) struct SourceRows<'a> {
    classes: &'a [Class<'a>],
    by_layer: BTreeMap<Layer, BTreeMap<&'a Role, Vec<Located<'a>>>>,
}

impl<'a> SourceRows<'a> {
    pub(crate) fn new(classes: &'a [Class<'a>]) -> Self {
        let mut by_layer = BTreeMap::<_, BTreeMap<_, Vec<_>>>::new();
        for (index, class) in classes.iter().enumerate() {
            for source in located(index, class.table) {
                by_layer.entry(source.row.layer).or_default().entry(&source.row.role).or_default().push(source);
            }
        }
        Self { classes, by_layer }
    }

    pub(crate) fn classes(&self) -> &'a [Class<'a>] {
        self.classes
    }

    /// Finds the holders of every row of a destination class. Proves that they are compatible, and that each layer which
    /// both sides hold has the same roles on both.
    pub(crate) fn wanted_by(&self, index: usize, destination: &Class<'a>) -> Result<Matched<'a>, MatchError> {
        let destination_rank = destination.ranks[0];
        let hidden_layers = destination.table.hidden_layers;
        if let Some(source) = self.classes.iter().find(|class| class.table.hidden_layers != hidden_layers) {
            return Err(MatchError::HiddenLayers {
                source_rank: source.ranks[0],
                source_layers: source.table.hidden_layers,
                destination_rank,
                destination_layers: hidden_layers,
            });
        }
        let holders = |row: &Row| self.by_layer.get(&row.layer)?.get(&row.role).cloned();
        let mut wanted: Vec<Wanted<'a>> = located(index, destination.table)
            .map(|row| Wanted { row, holders: holders(row.row).unwrap_or_default() })
            .collect();
        wanted.sort_by_key(|wanted| (wanted.row.row.layer, &wanted.row.row.role));
        self.prove_compatible(&wanted, destination_rank)?;
        self.prove_same_roles(&wanted, destination)?;

        let mut one_sided: Vec<Layer> = wanted.iter().map(|wanted| wanted.row.row.layer).collect();
        one_sided.dedup();
        one_sided.retain(|layer| layer.0 >= hidden_layers && !self.by_layer.contains_key(layer));
        wanted.retain(|wanted| one_sided.binary_search(&wanted.row.row.layer).is_err());
        Ok(Matched { wanted, one_sided })
    }

    fn prove_compatible(&self, wanted: &[Wanted<'_>], destination_rank: u32) -> Result<(), MatchError> {
        for Wanted { row, holders } in wanted {
            for holder in holders {
                if let Some(mismatch) = Mismatch::between((holder.kind, holder.row), (row.kind, row.row)) {
                    return Err(MatchError::Incompatible {
                        source_rank: self.classes[holder.class].ranks[0],
                        destination_rank,
                        layer: row.row.layer,
                        role: row.row.role.clone(),
                        mismatch,
                    });
                }
            }
        }
        Ok(())
    }

    fn prove_same_roles(&self, wanted: &[Wanted<'_>], destination: &Class<'_>) -> Result<(), MatchError> {
        for of_layer in wanted.chunk_by(|a, b| a.row.row.layer == b.row.row.layer) {
            let layer = of_layer[0].row.row.layer;
            let Some(theirs) = self.by_layer.get(&layer) else {
                continue; // the layer is one-sided, or not covered
            };
            let ours: Vec<&Role> = of_layer.iter().map(|wanted| &wanted.row.row.role).collect();
            let destination_lacks = theirs.keys().filter(|role| !ours.contains(role));
            let destination_lacks = destination_lacks.map(|role| (*role, Side::Destination));
            let source_lacks = ours.iter().filter(|role| !theirs.contains_key(*role));
            let source_lacks = source_lacks.map(|role| (*role, Side::Source));
            if let Some((role, lacking)) = destination_lacks.chain(source_lacks).min_by_key(|(role, _)| *role) {
                return Err(self.missing_role(destination, layer, role, lacking));
            }
        }
        Ok(())
    }

    fn missing_role(&self, destination: &Class<'_>, layer: Layer, role: &Role, lacking: Side) -> MatchError {
        let hidden_layers = destination.table.hidden_layers;
        let of_role = self.by_layer.iter().filter(|(_, roles)| roles.contains_key(role)).map(|(layer, _)| *layer);
        let held = LayerMask::new(hidden_layers, destination.table.rows().map(|(_, row)| row.layer));
        MatchError::MissingRole {
            destination_rank: destination.ranks[0],
            layer,
            role: role.clone(),
            lacking,
            source_mask: LayerMask::new(hidden_layers, of_role).restricted_to(held.owners()),
            destination_mask: destination.table.role_mask(role),
        }
    }
}

fn located(class: usize, table: &PageTable) -> impl Iterator<Item = Located<'_>> {
    let groups = (0..=u16::MAX).map(GroupId).zip(&table.groups);
    groups.flat_map(move |(group, layers)| {
        layers.rows.iter().map(move |row| Located { class, group, kind: layers.kind, row })
    })
}
