//! The unit and the token axis: which source ranks have the cells of a destination row. Proves that each cell has one.

use std::collections::HashMap;
use std::ops::Range;

use kvferry_layout::{GroupKind, Ordinals, Role};

use crate::classes::Class;
use crate::error::MatchError;
use crate::phase::overlap;
use crate::rows::Wanted;
use crate::units::stretches;

/// Cells of one destination row that the same source ranks hold.
#[derive(Debug)]
pub(crate) struct Share {
    /// Index of the row.
    pub(crate) row: usize,
    /// Indices into the row's holders, ascending, at least one. Any of them may send the cells.
    pub(crate) holders: Vec<usize>,
    /// Bytes in a slot of the destination.
    pub(crate) bytes: u64,
    /// By plane.
    pub(crate) cells: Vec<(usize, Range<u32>)>,
}

/// Finds the shares of the rows that one destination class wants.
pub(crate) struct Sharing<'a> {
    sources: &'a [Class<'a>],
    destination: &'a Class<'a>,
    wanted: &'a [Wanted<'a>],
    /// Which hands of a source's deal a destination group wants. The same for all its rows.
    hands: HashMap<(Deal, GroupKind), Vec<u32>>,
}

/// How blocks are dealt out to ranks: block `o` of so many tokens to hand `o % hand_count`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Deal {
    block_tokens: u32,
    hand_count: u32,
}

impl<'a> Sharing<'a> {
    pub(crate) fn new(sources: &'a [Class<'a>], destination: &'a Class<'a>, wanted: &'a [Wanted<'a>]) -> Self {
        Self { sources, destination, wanted, hands: HashMap::new() }
    }

    /// The shares, by row.
    pub(crate) fn shares(&mut self) -> Result<Vec<Share>, MatchError> {
        let mut shares = Vec::with_capacity(self.wanted.len());
        for row in 0..self.wanted.len() {
            self.add_row(row, &mut shares)?;
        }
        Ok(shares)
    }

    fn add_row(&mut self, row: usize, shares: &mut Vec<Share>) -> Result<(), MatchError> {
        let wanted = self.wanted;
        let Wanted { row: destination, holders } = &wanted[row];
        let first_of_row = shares.len();
        for (index, plane) in destination.row.planes.iter().enumerate() {
            let held: Vec<Range<u32>> = holders.iter().map(|holder| holder.row.planes[index].units.clone()).collect();
            for (units, of_units) in stretches(&plane.units, &held) {
                if of_units.is_empty() {
                    return Err(self.uncovered_units(&destination.row.role, index, units));
                }
                // Cells of a checked table do not overlap, so those of a row add up to less than its slot.
                let bytes = plane.cell_bytes * units.len() as u64 * u64::from(plane.tokens);
                for holders in self.by_hand(row, of_units)? {
                    match shares[first_of_row..].iter_mut().find(|share| share.holders == holders) {
                        Some(share) => {
                            share.bytes += bytes;
                            share.cells.push((index, units.clone()));
                        }
                        None => shares.push(Share { row, holders, bytes, cells: vec![(index, units.clone())] }),
                    }
                }
            }
        }
        Ok(())
    }

    /// The token axis. Sorts the holders of some units of a row by the blocks that they hold: those of one list hold the
    /// same ones, and the lists between them hold, each once, all that the destination wants.
    fn by_hand(&mut self, row: usize, of_units: Vec<usize>) -> Result<Vec<Vec<usize>>, MatchError> {
        let wanted = self.wanted;
        let Wanted { row: destination, holders } = &wanted[row];
        let dealt = |holder: &usize| match holders[*holder].kind {
            GroupKind::Paged { ordinals: Ordinals { step: 1, .. }, .. } | GroupKind::State => None,
            GroupKind::Paged { tokens_per_block: block_tokens, ordinals: Ordinals { step, first }, .. } => {
                Some((Deal { block_tokens, hand_count: step }, first))
            }
        };
        // Who holds all blocks needs no help of those who hold some.
        let (whole, parts): (Vec<usize>, Vec<usize>) = of_units.iter().partition(|holder| dealt(holder).is_none());
        let Some((deal, _)) = parts.first().and_then(dealt).filter(|_| whole.is_empty()) else {
            return Ok(vec![whole]);
        };
        if let Some(other) = parts.iter().find(|holder| dealt(holder).is_some_and(|(other, _)| other != deal)) {
            let named = |holder: usize| (self.sources[holders[holder].class].ranks[0], holders[holder].kind);
            let ((source_rank, kind), (other_rank, other_kind)) = (named(parts[0]), named(*other));
            let (layer, role) = (destination.row.layer, destination.row.role.clone());
            return Err(MatchError::DealtUnevenly { layer, role, source_rank, kind, other_rank, other_kind });
        }
        let mut lists = Vec::new();
        for &hand in self.hands(deal, destination.kind) {
            let of_hand = parts.iter().copied().filter(|holder| dealt(holder).is_some_and(|(_, first)| first == hand));
            let of_hand: Vec<usize> = of_hand.collect();
            if of_hand.is_empty() {
                return Err(MatchError::UncoveredBlocks {
                    destination_rank: self.destination.ranks[0],
                    layer: destination.row.layer,
                    role: destination.row.role.clone(),
                    block_tokens: deal.block_tokens,
                    ordinals: Ordinals { step: deal.hand_count, first: hand },
                });
            }
            lists.push(of_hand);
        }
        Ok(lists)
    }

    /// The hands of a deal that have a token which a destination group wants.
    fn hands(&mut self, deal: Deal, destination: GroupKind) -> &[u32] {
        let wants = |hand: &u32| match destination {
            GroupKind::Paged { tokens_per_block, ordinals, .. } => {
                let hand = Ordinals { step: deal.hand_count, first: *hand };
                overlap((deal.block_tokens, hand), (tokens_per_block, ordinals))
            }
            GroupKind::State => true,
        };
        let hands = self.hands.entry((deal, destination));
        hands.or_insert_with(|| (0..deal.hand_count).filter(wants).collect())
    }

    /// The error for units that nobody holds, with every layer where that is so.
    fn uncovered_units(&self, role: &Role, plane: usize, units: Range<u32>) -> MatchError {
        let touches = |held: &Range<u32>| held.start < units.end && units.start < held.end;
        let layers = self
            .wanted
            .iter()
            .filter(|wanted| wanted.row.row.role == *role)
            .filter(|wanted| wanted.row.row.planes.get(plane).is_some_and(|plane| touches(&plane.units)))
            .filter(|wanted| !wanted.holders.iter().any(|holder| touches(&holder.row.planes[plane].units)))
            .map(|wanted| wanted.row.row.layer)
            .collect();
        let destination_rank = self.destination.ranks[0];
        MatchError::Uncovered { destination_rank, role: role.clone(), layers, plane, units }
    }
}
