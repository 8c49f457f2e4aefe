//! Whether the ranks of a destination hold between them the whole of what they hold parts of.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvferry_layout::{GroupKind, Layer, Ordinals, PageTable, Role, Row};

use crate::classes::classes;
use crate::error::MatchError;
use crate::layers::LayerList;
use crate::units::stretches;

/// The rows of some tables by layer and role, with the life cycle of each.
type Rows<'a> = BTreeMap<(Layer, &'a Role), Vec<(GroupKind, &'a Row)>>;

/// Proves that of each layer and role that ranks of a destination hold, they hold between them all units and all blocks that the
/// source instance has. [`assign`](crate::assign) gives each destination rank what its own table says; what none of their tables
/// says no rank misses, as when two ranks are both cut as the first of two.
///
/// - `sources`, `destinations`: as for [`assign`](crate::assign), with all ranks of the destination's data-parallel parts, each of
///   which is proved for itself.
/// - returns the hidden layers that the source instance holds and a destination part does not. That is legal, and nothing of them
///   moves: worth telling.
///
/// # Errors
///
/// [`MatchError::Unclaimed`] and [`MatchError::UnclaimedBlocks`]: mend the cut of the destination's ranks, or name all of them.
pub fn prove_whole<'a>(
    sources: impl IntoIterator<Item = (u32, &'a PageTable)>,
    destinations: impl IntoIterator<Item = (u32, &'a PageTable)>,
) -> Result<LayerList, MatchError> {
    let sources: Vec<_> = sources.into_iter().collect();
    let mut parts: BTreeMap<u32, Vec<(u32, &PageTable)>> = BTreeMap::new();
    for (rank, table) in destinations {
        parts.entry(table.dp_rank).or_default().push((rank, table));
    }
    let offered = rows(&sources);
    let hidden_layers = sources.first().map_or(0, |(_, table)| table.hidden_layers);
    let mut left = BTreeSet::new();
    for (dp_rank, part) in parts {
        let held = rows(&part);
        for ((layer, role), rows) in &offered {
            match held.get(&(*layer, *role)) {
                Some(holders) => prove_row(dp_rank, (*layer, role), rows, holders)?,
                // Of a layer that both hold `assign` has proved that they have the same roles.
                None if layer.0 < hidden_layers => drop(left.insert(*layer)),
                None => {}
            }
        }
    }
    Ok(left.into_iter().collect())
}

fn rows<'a>(ranks: &[(u32, &'a PageTable)]) -> Rows<'a> {
    let mut rows = Rows::new();
    for group in classes(ranks).0.iter().flat_map(|class| &class.table.groups) {
        for row in &group.rows {
            rows.entry((row.layer, &row.role)).or_default().push((group.kind, row));
        }
    }
    rows
}

fn prove_row(
    dp_rank: u32,
    (layer, role): (Layer, &Role),
    sources: &[(GroupKind, &Row)],
    holders: &[(GroupKind, &Row)],
) -> Result<(), MatchError> {
    let planes = sources.iter().map(|(_, row)| row.planes.len()).max().unwrap_or(0);
    for index in 0..planes {
        let units = |(_, row): &(GroupKind, &Row)| row.planes.get(index).map(|plane| plane.units.clone());
        let claimed: Vec<Range<u32>> = holders.iter().map(|holder| units(holder).unwrap_or(0..0)).collect();
        let offered: BTreeSet<(u32, u32)> =
            sources.iter().filter_map(units).map(|units| (units.start, units.end)).collect();
        for (start, end) in offered {
            for (units, of_units) in stretches(&(start..end), &claimed) {
                let role = || role.clone();
                if of_units.is_empty() {
                    return Err(MatchError::Unclaimed { dp_rank, layer, role: role(), plane: index, units });
                }
                let kinds = of_units.iter().map(|holder| holders[*holder].0);
                if let Some((block_tokens, ordinals)) = unclaimed_blocks(kinds) {
                    return Err(MatchError::UnclaimedBlocks { dp_rank, layer, role: role(), block_tokens, ordinals });
                }
            }
        }
    }
    Ok(())
}

/// Blocks that none of these holds, by their tokens: `None` if there are none. Blocks may be dealt out in several ways, each of
/// which is whole or is not.
fn unclaimed_blocks(kinds: impl Iterator<Item = GroupKind>) -> Option<(u32, Ordinals)> {
    let mut hands: BTreeMap<(u32, u32), BTreeSet<u32>> = BTreeMap::new();
    for kind in kinds {
        match kind {
            GroupKind::Paged { tokens_per_block, ordinals: Ordinals { step, first }, .. } if step > 1 => {
                hands.entry((tokens_per_block, step)).or_default().insert(first);
            }
            GroupKind::Paged { .. } | GroupKind::State => return None,
        }
    }
    let mut missing = None;
    for ((block_tokens, step), dealt) in hands {
        let first = (0..step).find(|hand| !dealt.contains(hand))?;
        missing.get_or_insert((block_tokens, Ordinals { step, first }));
    }
    missing
}
