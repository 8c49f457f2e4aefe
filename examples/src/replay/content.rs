//! What every byte of a block holds: decided by the block's name and the place in it, so that it is the same wherever the
//! block lies, and whichever request brought it.

use std::ops::Range;

use kvferry_layout::{GroupKind, PageTable, Pool, PoolId, Slot};
use kvferry_wire::{Region, RegionError};

use crate::image::{cell_offset, index};
use crate::pattern::Key;
use crate::rank::PoolError;
use crate::replay::pool::Frame;
use crate::replay::trace::Block;

/// One rank's pools as room for blocks of the trace.
#[derive(Debug)]
pub struct Content<'a> {
    table: &'a PageTable,
    regions: &'a [Region],
    values: Key,
    slots_per_frame: u32,
}

/// Bytes that are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "block {} of the trace in pool {} slot {}: layer {layer} unit {unit} token {token} is wrong",
    block.id, pool.0, slot.0
)]
pub struct Wrong {
    /// The block.
    pub block: Block,
    /// The pool.
    pub pool: PoolId,
    /// The slot.
    pub slot: Slot,
    /// Model layer.
    pub layer: u32,
    /// Unit of the whole model.
    pub unit: u32,
    /// Token of the block, as scaled.
    pub token: u64,
}

/// Why a block is not known to hold its bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContentError {
    /// It holds others.
    #[error(transparent)]
    Wrong(#[from] Wrong),
    /// Its pool cannot be reached.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// A slot of a block.
#[derive(Clone, Copy, Debug)]
struct Place {
    block: Block,
    pool: PoolId,
    slot: Slot,
    /// Index into the table's groups.
    group: usize,
    /// Which of the block's slots it is.
    sub: u32,
}

/// One cell of a slot.
struct Cell {
    key: Key,
    layer: u32,
    unit: u32,
    /// First token, from the start of the block.
    token: u64,
    bytes: Range<usize>,
}

impl<'a> Content<'a> {
    /// The pools of a table whose blocks are `slots_per_frame` to a block of the trace. `seed` decides the bytes.
    pub fn new(table: &'a PageTable, regions: &'a [Region], slots_per_frame: u32, seed: u64) -> Self {
        Self { table, regions, values: Key::new(seed).part(5), slots_per_frame }
    }

    /// Writes a block into a frame.
    ///
    /// # Errors
    ///
    /// [`PoolError`] if the frame is not one of the pools'.
    pub fn write(&self, block: Block, frame: Frame) -> Result<(), PoolError> {
        let mut bytes = Vec::new();
        for place in self.places(block, frame) {
            let (pool, offset) = self.start(place);
            bytes.clear();
            bytes.resize(index(pool.slot_bytes), 0);
            self.for_each_cell(place, |cell| cell.key.fill(0, &mut bytes[cell.bytes]));
            let write = self.regions[usize::from(place.pool.0)].write(offset, &bytes);
            write.map_err(|source| PoolError { pool: place.pool, offset, source })?;
        }
        Ok(())
    }

    /// Compares the first `tokens` tokens of a block, as scaled, with what it should hold. Returns the bytes compared.
    ///
    /// # Errors
    ///
    /// [`ContentError::Wrong`] names the first cell that differs.
    pub fn check(&self, block: Block, tokens: u64, frame: Frame) -> Result<u64, ContentError> {
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        let mut compared = 0;
        for place in self.places(block, frame) {
            let (pool, offset) = self.start(place);
            found.resize(index(pool.slot_bytes), 0);
            let read: Result<(), RegionError> = self.regions[usize::from(place.pool.0)].read(offset, &mut found);
            read.map_err(|source| PoolError { pool: place.pool, offset, source })?;
            let mut wrong = None;
            self.for_each_cell(place, |cell| {
                if cell.token >= tokens {
                    return;
                }
                expected.resize(cell.bytes.len(), 0);
                cell.key.fill(0, &mut expected);
                compared += cell.bytes.len() as u64;
                if found[cell.bytes] != expected[..] {
                    let (pool, slot) = (place.pool, place.slot);
                    wrong.get_or_insert(Wrong {
                        block,
                        pool,
                        slot,
                        layer: cell.layer,
                        unit: cell.unit,
                        token: cell.token,
                    });
                }
            });
            if let Some(wrong) = wrong {
                return Err(wrong.into());
            }
        }
        Ok(compared)
    }

    /// Flips a bit of the first byte of a block, as far as this rank holds one.
    ///
    /// # Errors
    ///
    /// [`PoolError`] if the frame is not one of the pools'.
    pub fn flip(&self, block: Block, frame: Frame) -> Result<(), PoolError> {
        let Some(place) = self.places(block, frame).next() else { return Ok(()) };
        let (pool, start) = self.start(place);
        let mut first = None;
        self.for_each_cell(place, |cell| {
            first.get_or_insert(cell.bytes.start);
        });
        let offset = start + first.map_or(pool.slot_bytes, |first| first as u64);
        let region = &self.regions[usize::from(place.pool.0)];
        let mut byte = [0];
        let flip = region.read(offset, &mut byte).and_then(|()| region.write(offset, &[byte[0] ^ 1]));
        flip.map_err(|source| PoolError { pool: place.pool, offset, source })
    }

    /// The slots of a frame that this rank holds something of the block in.
    fn places(&self, block: Block, frame: Frame) -> impl Iterator<Item = Place> + '_ {
        let per_frame = self.slots_per_frame;
        let held = move |kind: GroupKind, sub: u32| match kind {
            GroupKind::Paged { ordinals, .. } => ordinals.holds(block.ordinal * u64::from(per_frame) + u64::from(sub)),
            GroupKind::State => false,
        };
        self.table.groups.iter().enumerate().flat_map(move |(group, layers)| {
            let mut pools: Vec<PoolId> = layers.rows.iter().map(|row| row.pool).collect();
            pools.sort_unstable();
            pools.dedup();
            pools.into_iter().flat_map(move |pool| {
                (0..per_frame).filter(move |sub| held(layers.kind, *sub)).map(move |sub| Place {
                    block,
                    pool,
                    slot: slot(frame, per_frame, sub),
                    group,
                    sub,
                })
            })
        })
    }

    /// A place's pool and its first byte in it.
    fn start(&self, place: Place) -> (&'a Pool, u64) {
        let pool = &self.table.pools[usize::from(place.pool.0)];
        (pool, u64::from(place.slot.0) * pool.slot_stride)
    }

    fn for_each_cell(&self, place: Place, mut each: impl FnMut(Cell)) {
        let group = &self.table.groups[place.group];
        let first = u64::from(place.sub) * u64::from(group.kind.tokens());
        let of_block = self.values.part(place.block.id);
        for row in group.rows.iter().filter(|row| row.pool == place.pool) {
            let of_row = of_block.part(u64::from(row.layer.0)).role(&row.role);
            for (plane, shape) in row.planes.iter().enumerate() {
                let tokens_per_cell = u64::from(group.kind.tokens_per_cell(shape).unwrap_or(1));
                for unit in shape.units.clone() {
                    let of_unit = of_row.part(plane as u64).part(u64::from(unit));
                    for cell in 0..shape.tokens {
                        let token = first + u64::from(cell) * tokens_per_cell;
                        let start = index(row.offset + cell_offset(shape, unit, cell));
                        each(Cell {
                            key: of_unit.part(token),
                            layer: row.layer.0,
                            unit,
                            token,
                            bytes: start..start + index(shape.cell_bytes),
                        });
                    }
                }
            }
        }
    }
}

/// One of the slots of a frame.
pub fn slot(frame: Frame, slots_per_frame: u32, sub: u32) -> Slot {
    Slot(frame.0 * slots_per_frame + sub)
}
