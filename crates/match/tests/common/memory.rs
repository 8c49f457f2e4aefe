//! Memory whose every byte says which byte of which cell it is. Finds cells by the formula of `Plane` alone.

use std::num::NonZeroU64;
use std::ops::Range;

use kvferry_layout::{GroupKind, Layer, PageTable, Role, Row, Slot};
use kvferry_match::BlockMap;

use super::model::SLOTS_SPARE;
use super::shuffled;

/// One byte of the model's cache.
#[derive(Clone, Debug)]
pub(crate) struct CellByte {
    pub(crate) layer: Layer,
    pub(crate) role: Role,
    pub(crate) plane: usize,
    pub(crate) unit: u32,
    /// Ordinal of the block.
    pub(crate) block: u64,
    /// The first one of the cell, of the sequence; for state the place on the axis instead.
    pub(crate) token: u64,
    /// Of the cell.
    pub(crate) byte: u64,
}

/// What a byte of memory says: which byte of the cache it is.
pub(crate) type Tag = NonZeroU64;

impl CellByte {
    /// Different for different bytes: each field has bits of its own, and the models are small.
    fn tag(&self) -> Tag {
        let role = match self.role {
            Role::Key => 1,
            Role::Value => 2,
            Role::Latent => 3,
            Role::IndexerKey => 4,
            Role::ConvState => 5,
            Role::SsmState => 6,
            _ => unreachable!("the models of the tests have no other"),
        };
        let fields =
            [(role, 4), (self.layer.0.into(), 4), (self.plane as u64, 4), (self.unit.into(), 4), (self.byte, 8)];
        let packed = fields.into_iter().fold(self.token, |packed, (field, bits)| {
            assert!(field < 1 << bits);
            packed << bits | field
        });
        NonZeroU64::new(packed | 1 << 63).expect("a bit is set")
    }
}

/// One rank: its table, the block maps of the request, and its pools, a tag or nothing for each byte.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub(crate) table: PageTable,
    pub(crate) maps: Vec<BlockMap>,
    pub(crate) pools: Vec<Vec<Option<Tag>>>,
}

impl Rank {
    /// An empty rank with slots for the blocks that are needed for `tokens`, the last ones of a request, in shuffled order.
    /// Around and between them the maps have some more blocks and holes.
    pub(crate) fn new(table: PageTable, tokens: &Range<u64>, seed: u64) -> Self {
        let maps = (0_u64..)
            .zip(&table.groups)
            .map(|(index, group)| {
                // A slot is valid in each pool of the group.
                let pools = group.rows.iter().map(|row| table.pools[row.pool.0 as usize].slot_count);
                let slot_count = pools.min().unwrap_or(SLOTS_SPARE);
                let mut slots = shuffled(slot_count, seed.wrapping_add(index)).into_iter().map(Slot);
                let needed = blocks(group.kind, tokens);
                let first = needed.start - needed.start.min(seed % 3);
                let entries = (first..needed.end + seed % 4).map(|ordinal| {
                    if !holds(group.kind, ordinal) {
                        // Some other rank's block. Whatever is said of it is not looked at.
                        return (!(seed + ordinal).is_multiple_of(3)).then_some(Slot(u32::MAX - (ordinal % 2) as u32));
                    }
                    let hole = !needed.contains(&ordinal) && (seed + ordinal).is_multiple_of(2);
                    slots.next().filter(|_| !hole)
                });
                BlockMap::new(first, entries.collect())
            })
            .collect();
        let bytes = table.pools.iter().map(|pool| pool.extent_bytes().expect("small pools"));
        let pools = bytes.map(|bytes| vec![None; bytes as usize]).collect();
        Self { table, maps, pools }
    }

    /// Names every byte of every cell of every block that the maps have: what it is, pool, and byte of the pool.
    pub(crate) fn for_each_byte(&self, mut name: impl FnMut(&CellByte, usize, usize)) {
        for (group, map) in self.table.groups.iter().zip(&self.maps) {
            for row in &group.rows {
                let pool = &self.table.pools[row.pool.0 as usize];
                for (index, plane) in row.planes.iter().enumerate() {
                    let (layer, role) = (row.layer, row.role.clone());
                    let mut cell = CellByte { layer, role, plane: index, unit: 0, block: 0, token: 0, byte: 0 };
                    let cell_tokens = match group.kind {
                        GroupKind::Paged { tokens_per_block, .. } => u64::from(tokens_per_block / plane.tokens),
                        GroupKind::State => 1,
                    };
                    for (block, slot) in (map.first()..).zip(map.slots()) {
                        let Some(slot) = slot.filter(|_| holds(group.kind, block)) else { continue };
                        for unit in plane.units.clone() {
                            for token in 0..u64::from(plane.tokens) {
                                let first = u64::from(slot.0) * pool.slot_stride
                                    + row.offset
                                    + plane.offset
                                    + u64::from(unit - plane.units.start) * plane.unit_stride
                                    + token * plane.token_stride;
                                let of_sequence = (block * u64::from(plane.tokens) + token) * cell_tokens;
                                for byte in 0..plane.cell_bytes {
                                    (cell.unit, cell.block, cell.token, cell.byte) = (unit, block, of_sequence, byte);
                                    name(&cell, row.pool.0 as usize, (first + byte) as usize);
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// Writes all cells, as a prefill would.
    pub(crate) fn fill(&mut self) {
        let mut pools = std::mem::take(&mut self.pools);
        self.for_each_byte(|cell, pool, byte| pools[pool][byte] = Some(cell.tag()));
        self.pools = pools;
    }

    /// Kind of the group that holds a row, if this rank does.
    fn kind(&self, layer: Layer, role: &Role) -> Option<GroupKind> {
        let holds = |row: &Row| row.layer == layer && row.role == *role;
        self.table.groups.iter().find(|group| group.rows.iter().any(holds)).map(|group| group.kind)
    }

    /// What the pools must be after `tokens`, the last ones of a request, have come from `sources` to this rank while it
    /// was empty.
    pub(crate) fn expected(&self, sources: &[Rank], tokens: &Range<u64>) -> Vec<Vec<Option<Tag>>> {
        let mut pools: Vec<Vec<Option<Tag>>> = self.pools.iter().map(|pool| vec![None; pool.len()]).collect();
        let mut row = None;
        let mut kinds = (None, None);
        self.for_each_byte(|cell, pool, byte| {
            if row.as_ref() != Some(&(cell.layer, cell.role.clone())) {
                row = Some((cell.layer, cell.role.clone()));
                kinds.0 = sources.iter().find_map(|rank| rank.kind(cell.layer, &cell.role));
                kinds.1 = self.kind(cell.layer, &cell.role);
            }
            let moved = match kinds {
                (
                    Some(GroupKind::Paged { tokens_per_block: theirs, .. }),
                    Some(GroupKind::Paged { tokens_per_block: ours, window_tokens, .. }),
                ) => {
                    let needed = window(tokens, window_tokens);
                    // The tokens that share both blocks with this one move together.
                    let (theirs, ours) = (u64::from(theirs), u64::from(ours));
                    let start = (cell.token / theirs * theirs).max(cell.token / ours * ours);
                    let end = ((cell.token / theirs + 1) * theirs).min((cell.token / ours + 1) * ours);
                    (start..end).any(|token| needed.contains(&token))
                }
                // Of state there is one.
                (Some(GroupKind::State), Some(GroupKind::State)) => cell.block == 0,
                _ => false,
            };
            if moved {
                pools[pool][byte] = Some(cell.tag());
            }
        });
        pools
    }
}

/// The blocks of which `tokens`, the last ones of a request, need some token, of a kind of group.
fn blocks(kind: GroupKind, tokens: &Range<u64>) -> Range<u64> {
    match kind {
        GroupKind::Paged { tokens_per_block, window_tokens, .. } => {
            let (block, tokens) = (u64::from(tokens_per_block), window(tokens, window_tokens));
            let touched = |ordinal: &u64| (ordinal * block..(ordinal + 1) * block).any(|token| tokens.contains(&token));
            let first = (0..=tokens.end).find(touched).unwrap_or(0);
            first..first + (first..=tokens.end).take_while(touched).count() as u64
        }
        GroupKind::State => 0..1,
    }
}

/// Those of the tokens that are within a window of the last one.
fn window(tokens: &Range<u64>, window_tokens: Option<u32>) -> Range<u64> {
    let left_behind = window_tokens.map_or(0, |window_tokens| tokens.end.saturating_sub(window_tokens.into()));
    tokens.start.max(left_behind)..tokens.end
}

/// Whether blocks of this ordinal are dealt to a rank.
fn holds(kind: GroupKind, ordinal: u64) -> bool {
    match kind {
        GroupKind::Paged { ordinals, .. } => ordinal % u64::from(ordinals.step) == u64::from(ordinals.first),
        GroupKind::State => true,
    }
}
