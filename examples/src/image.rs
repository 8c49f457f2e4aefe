//! What every byte of one rank's pools should hold: the request's cells, and a background everywhere else.
//!
//! Everything here comes from this rank's own page table and slots. Nothing is taken from the other instance, and nothing
//! from the crate that decides which bytes move, so that neither can hide its own mistake.

use std::collections::BTreeSet;
use std::ops::Range;

use kvferry_layout::{GroupKind, Layer, PageTable, Plane, Pool, PoolId, Row, Slot};

use crate::pattern::Key;

/// One rank's pools, painted byte by byte.
#[derive(Debug)]
pub struct Image<'a> {
    table: &'a PageTable,
    tenants: Vec<Vec<Option<Tenant>>>,
    tokens: u64,
    values: Key,
    background: Key,
    absent: BTreeSet<Layer>,
}

/// Who has a slot: a block of one of the table's groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Index into the table's groups.
    pub group: usize,
    /// The block's ordinal in the request.
    pub ordinal: u64,
}

/// One cell of the request in a slot.
#[derive(Clone, Copy, Debug)]
pub struct Cell<'a> {
    /// The row that holds the cell.
    pub row: &'a Row,
    /// Index into the row's planes.
    pub plane: usize,
    /// Unit of the whole model.
    pub unit: u32,
    /// First token that the cell stands for; for state, which has none, the column.
    pub token: u64,
    /// Whether the request can do without it: it lies past the last token, in a block that is only partly filled, or in
    /// front of its group's window.
    pub spare: bool,
    /// First byte, from the start of the slot.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Why slots cannot belong to one request.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageError {
    /// A slot that a pool does not have. Size the pool for the request.
    #[error("slot {} is not one of the {slot_count} slots of pool {}", slot.0, pool.0)]
    SlotOutOfRange {
        /// Pool that the group's rows name.
        pool: PoolId,
        /// The slot.
        slot: Slot,
        /// Slots of the pool.
        slot_count: u32,
    },
    /// A slot given to two blocks. Hand out each slot once.
    #[error("slot {} of pool {} is given to two blocks", slot.0, pool.0)]
    SlotTaken {
        /// Pool that the group's rows name.
        pool: PoolId,
        /// The slot.
        slot: Slot,
    },
}

impl<'a> Image<'a> {
    /// The image of a rank that holds `tokens` tokens of a request in `slots` (by group, then by block ordinal; those of
    /// blocks that other context-parallel ranks hold are nobody's).
    ///
    /// `values` decides the request's bytes and is the same on every rank; `background` decides all others. With empty
    /// `slots` everything is background.
    ///
    /// # Errors
    ///
    /// [`ImageError`] names the slot that its pool lacks or that two blocks share.
    pub fn new(
        table: &'a PageTable,
        slots: &[Vec<Slot>],
        tokens: u64,
        values: Key,
        background: Key,
    ) -> Result<Self, ImageError> {
        let mut tenants: Vec<Vec<Option<Tenant>>> =
            table.pools.iter().map(|pool| vec![None; index(u64::from(pool.slot_count))]).collect();
        for (group, (layers, slots)) in table.groups.iter().zip(slots).enumerate() {
            let pools: BTreeSet<PoolId> = layers.rows.iter().map(|row| row.pool).collect();
            for pool in pools {
                let of_pool = &mut tenants[usize::from(pool.0)];
                let slot_count = table.pools[usize::from(pool.0)].slot_count;
                let held = |ordinal| match layers.kind {
                    GroupKind::Paged { ordinals, .. } => ordinals.holds(ordinal),
                    GroupKind::State => true,
                };
                for (ordinal, &slot) in (0..).zip(slots).filter(|(ordinal, _)| held(*ordinal)) {
                    let place = of_pool.get_mut(index(u64::from(slot.0)));
                    let place = place.ok_or(ImageError::SlotOutOfRange { pool, slot, slot_count })?;
                    if place.replace(Tenant { group, ordinal }).is_some() {
                        return Err(ImageError::SlotTaken { pool, slot });
                    }
                }
            }
        }
        Ok(Self { table, tenants, tokens, values, background, absent: BTreeSet::new() })
    }

    /// The image without the request's bytes of `layers`, which the other instance does not have.
    #[must_use]
    pub fn without(mut self, layers: impl IntoIterator<Item = Layer>) -> Self {
        self.absent.extend(layers);
        self
    }

    /// The table that this is the image of.
    pub fn table(&self) -> &'a PageTable {
        self.table
    }

    /// Whether the request's bytes of `layer` are left out.
    pub fn is_absent(&self, layer: Layer) -> bool {
        self.absent.contains(&layer)
    }

    /// Bytes that a transfer writes here at most: the request's cells, those past its end included, absent layers not.
    pub fn moved_bytes_max(&self) -> u64 {
        let of_row = |row: &Row| -> u64 {
            let planes = row.planes.iter();
            planes.map(|plane| plane.cell_bytes * plane.units.len() as u64 * u64::from(plane.tokens)).sum()
        };
        let blocks = |group: usize, pool: PoolId| {
            let tenants = self.tenants[usize::from(pool.0)].iter().flatten();
            tenants.filter(|tenant| tenant.group == group).count() as u64
        };
        let groups = self.table.groups.iter().enumerate();
        let rows = groups.flat_map(|(group, layers)| layers.rows.iter().map(move |row| (group, row)));
        rows.filter(|(_, row)| !self.is_absent(row.layer))
            .map(|(group, row)| of_row(row) * blocks(group, row.pool))
            .sum()
    }

    /// Who has `slot`; `None` if nobody, or if the pool lacks the slot.
    pub fn tenant(&self, pool: PoolId, slot: Slot) -> Option<Tenant> {
        *self.tenants.get(usize::from(pool.0))?.get(index(u64::from(slot.0)))?
    }

    /// The stretches that a pool of `pool_bytes` is painted and compared in: each slot with the slack behind it, then
    /// what is left behind the last.
    pub fn spans(&self, pool: PoolId, pool_bytes: u64) -> impl Iterator<Item = Span> + use<> {
        let Pool { slot_count, slot_stride, .. } = self.table.pools[usize::from(pool.0)];
        let last = (u64::from(slot_count) * slot_stride).min(pool_bytes);
        let slots = (0..slot_count).map(move |slot| Span {
            pool,
            slot: Some(Slot(slot)),
            bytes: (u64::from(slot) * slot_stride).min(last)..((u64::from(slot) + 1) * slot_stride).min(last),
        });
        let behind = Span { pool, slot: None, bytes: last..pool_bytes };
        slots.chain([behind]).filter(|span| !span.bytes.is_empty())
    }

    /// Fills `out` with what the pool should hold at `span`.
    pub fn paint(&self, span: &Span, out: &mut [u8]) {
        self.paint_background(span.pool, span.bytes.start, out);
        self.for_each_cell(span, |cell| {
            if !self.is_absent(cell.row.layer) {
                self.paint_cell(&cell, &mut out[index(cell.offset)..index(cell.offset + cell.bytes)]);
            }
        });
    }

    /// Fills `out` with the background of `pool` from byte `offset` on.
    pub fn paint_background(&self, pool: PoolId, offset: u64, out: &mut [u8]) {
        self.background.part(u64::from(pool.0)).fill(offset, out);
    }

    /// Fills `out` with the request's bytes of `cell`.
    pub fn paint_cell(&self, cell: &Cell<'_>, out: &mut [u8]) {
        let row = self.values.part(u64::from(cell.row.layer.0)).role(&cell.row.role);
        row.part(cell.plane as u64).part(u64::from(cell.unit)).part(cell.token).fill(0, out);
    }

    /// Calls `each` with every cell of the request in `span`, absent layers included.
    pub fn for_each_cell(&self, span: &Span, mut each: impl FnMut(Cell<'a>)) {
        let Some(tenant) = span.slot.and_then(|slot| self.tenant(span.pool, slot)) else {
            return;
        };
        let group = &self.table.groups[tenant.group];
        let (first_token, needed) = match group.kind {
            GroupKind::Paged { tokens_per_block, window_tokens, .. } => {
                let window = window_tokens.map_or(0, |window| self.tokens.saturating_sub(window.into()));
                (tenant.ordinal * u64::from(tokens_per_block), window..self.tokens)
            }
            GroupKind::State => (0, 0..u64::MAX),
        };
        for row in group.rows.iter().filter(|row| row.pool == span.pool) {
            for (plane, shape) in row.planes.iter().enumerate() {
                let tokens_per_cell = u64::from(group.kind.tokens_per_cell(shape).unwrap_or(1));
                for unit in shape.units.clone() {
                    for token in 0..shape.tokens {
                        let offset = row.offset + cell_offset(shape, unit, token);
                        let token = first_token + u64::from(token) * tokens_per_cell;
                        let spare = token >= needed.end || token + tokens_per_cell <= needed.start;
                        each(Cell { row, plane, unit, token, spare, offset, bytes: shape.cell_bytes });
                    }
                }
            }
        }
    }
}

/// A stretch of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The pool.
    pub pool: PoolId,
    /// The slot that the stretch is; `None` behind the last.
    pub slot: Option<Slot>,
    /// Bytes, from the start of the pool.
    pub bytes: Range<u64>,
}

impl Span {
    /// Bytes of the stretch, as a length in memory.
    pub fn len(&self) -> usize {
        index(self.bytes.end - self.bytes.start)
    }

    /// Whether the stretch has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Byte of a cell from the start of its row; `token` counts from the start of the block.
pub(crate) fn cell_offset(plane: &Plane, unit: u32, token: u32) -> u64 {
    plane.offset + u64::from(unit - plane.units.start) * plane.unit_stride + u64::from(token) * plane.token_stride
}

/// An offset in a slot that is in memory, as an index.
pub(crate) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("what is in memory has an index")
}
