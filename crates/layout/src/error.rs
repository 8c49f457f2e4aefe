//! What can be wrong with a page table, or with a question to one.

use std::fmt;
use std::ops::Range;

use crate::check::Extent;
use crate::cut::CutError;
use crate::table::{Dtype, GroupId, Layer, PoolId, Role, Row};

/// Names one row in a message: pool, layer and role.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowName {
    /// Pool that the row says it is in.
    pub pool: PoolId,
    /// Model layer.
    pub layer: Layer,
    /// What the row holds.
    pub role: Role,
}

impl From<&Row> for RowName {
    fn from(row: &Row) -> Self {
        Self { pool: row.pool, layer: row.layer, role: row.role.clone() }
    }
}

impl fmt::Display for RowName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {}, layer {}, {}", self.pool, self.layer, self.role)
    }
}

/// Something that a table may hold only so many of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counted {
    /// Pools of a table.
    Pools,
    /// Groups of a table.
    Groups,
    /// Rows of a table.
    Rows,
    /// Model layers: `hidden_layers`, or the id of a row's layer plus one.
    Layers,
    /// Pairs of planes of different rows whose bytes run through each other.
    InterleavedPlanes,
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pools => "pools",
            Self::Groups => "groups",
            Self::Rows => "rows",
            Self::Layers => "layers",
            Self::InterleavedPlanes => "pairs of interleaved planes",
        })
    }
}

/// Why a table cannot be built or used, or why a lookup in one found nothing.
///
/// A table that fails a check moves nothing: fix the builder's input, or refuse the peer that sent it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// This rank holds no such row. Ask only for rows that [`crate::PageTable::rows`] lists.
    #[error("no {role} row for layer {layer}")]
    NoSuchRow {
        /// Layer asked for.
        layer: Layer,
        /// Role asked for.
        role: Role,
    },

    /// No pool has this id. Use ids of this very table.
    #[error("no pool {pool}: the table has {pool_count}")]
    NoSuchPool {
        /// Id asked for.
        pool: PoolId,
        /// Pools of the table.
        pool_count: usize,
    },

    /// No group has this id. Use ids of this very table.
    #[error("no group {group}: the table has {group_count}")]
    NoSuchGroup {
        /// Id asked for.
        group: GroupId,
        /// Groups of the table.
        group_count: usize,
    },

    /// The table is larger than any real one. Refuse it.
    #[error("{found} {what}, at most {max} are allowed")]
    TooMany {
        /// What there is too much of.
        what: Counted,
        /// How many the table has.
        found: usize,
        /// How many it may have.
        max: usize,
    },

    /// `hidden_layers` is 0. State the layer count of the model.
    #[error("a model of 0 hidden layers")]
    NoLayers,

    /// A pool has no slots or slots of no bytes. Leave out a pool that holds nothing.
    #[error("pool {pool} is empty: {slot_count} slots of {slot_bytes} B")]
    EmptyPool {
        /// The pool.
        pool: PoolId,
        /// Its slots.
        slot_count: u32,
        /// Their bytes.
        slot_bytes: u64,
    },

    /// Slots would overlap. Fix the stride.
    #[error("pool {pool}: slot stride {slot_stride} is below the {slot_bytes} B of a slot")]
    SlotStride {
        /// The pool.
        pool: PoolId,
        /// Its stride.
        slot_stride: u64,
        /// Bytes of its slots.
        slot_bytes: u64,
    },

    /// The pool does not end inside the address space. Fix base, count or stride.
    #[error("pool {pool} runs past the end of the address space")]
    PoolExtent {
        /// The pool.
        pool: PoolId,
    },

    /// One region a pool is needed, in the order of the pools.
    #[error("{pool_count} pools, but {region_count} registered regions")]
    RegionCount {
        /// Pools of the table.
        pool_count: usize,
        /// Regions given.
        region_count: usize,
    },

    /// The pool names memory that was not registered. Refuse the table, or register all of it.
    #[error("pool {pool}: {pool_extent} is not inside its region {region}")]
    OutsideRegion {
        /// The pool.
        pool: PoolId,
        /// Where the table says the pool lies.
        pool_extent: Extent,
        /// What was registered.
        region: Extent,
    },

    /// A group of blocks of 0 tokens, or with a window of 0 tokens. Fix the group.
    #[error("group {group}: a block or a window of 0 tokens")]
    NoTokens {
        /// The group.
        group: GroupId,
    },

    /// A group holds blocks of no ordinal, or they are dealt out to more ranks than an instance has. `first` counts from 0 up
    /// to `step`, exclusive, and `step` up to [`crate::RANKS_MAX`].
    #[error("group {group}: holds ordinals that leave {first} when divided by {step}")]
    Ordinals {
        /// The group.
        group: GroupId,
        /// Ranks that blocks are dealt out to.
        step: u32,
        /// Remainder of the ordinals held.
        first: u32,
    },

    /// The name of a role is empty, too long or not printable ASCII. Rename it.
    #[error("pool {pool}, layer {layer}: a role's name must be 1 to {bytes_max} characters of printable ASCII")]
    RoleName {
        /// Pool of the row.
        pool: PoolId,
        /// Its layer.
        layer: Layer,
        /// Most bytes of a name.
        bytes_max: usize,
    },

    /// A row names a pool that is not there.
    #[error("{row}: the table has {pool_count} pools")]
    RowPool {
        /// The row.
        row: RowName,
        /// Pools of the table.
        pool_count: usize,
    },

    /// Two rows claim the same layer and role.
    #[error("{row}: a second row for this layer and role")]
    DuplicateRow {
        /// The later of the two.
        row: RowName,
    },

    /// The row ends past the usable bytes of a slot.
    #[error("{row}: {bytes} B at {offset} do not fit in a slot of {slot_bytes} B")]
    RowOutsideSlot {
        /// The row.
        row: RowName,
        /// Its offset.
        offset: u64,
        /// Its bytes.
        bytes: u64,
        /// Bytes of the pool's slots.
        slot_bytes: u64,
    },

    /// Two rows of one group share bytes of a slot, or interleave in a way that is not provably free of it.
    #[error("{row}: overlaps the {} row of layer {}", other.role, other.layer)]
    RowsOverlap {
        /// The row at the higher offset.
        row: RowName,
        /// The row that it runs into.
        other: RowName,
    },

    /// A row has no planes or more than any real one.
    #[error("{row}: {planes} planes, 1 to {planes_max} are allowed")]
    PlaneCount {
        /// The row.
        row: RowName,
        /// Planes it has.
        planes: usize,
        /// Planes it may have.
        planes_max: usize,
    },

    /// A plane of cells of 0 bytes.
    #[error("{row}: plane {plane} has cells of 0 B")]
    EmptyCell {
        /// The row.
        row: RowName,
        /// Index of the plane in its row.
        plane: usize,
    },

    /// The units of a plane are none, or not inside the model's.
    #[error("{row}: plane {plane} holds units {}..{} of {units_total}", units.start, units.end)]
    Units {
        /// The row.
        row: RowName,
        /// Index of the plane in its row.
        plane: usize,
        /// Units it says it holds.
        units: Range<u32>,
        /// Units of the model.
        units_total: u32,
    },

    /// The cells of a plane do not divide a block evenly, or there are none.
    #[error("{row}: plane {plane} has {tokens} cells for the {group_tokens} tokens of a slot")]
    Tokens {
        /// The row.
        row: RowName,
        /// Index of the plane in its row.
        plane: usize,
        /// Places on the plane's token axis.
        tokens: u32,
        /// Tokens of a block of the group, 1 for state.
        group_tokens: u32,
    },

    /// A plane ends past its row.
    #[error("{row}: plane {plane} ends past the {row_bytes} B of its row")]
    PlaneOutsideRow {
        /// The row.
        row: RowName,
        /// Index of the plane in its row.
        plane: usize,
        /// Bytes of the row.
        row_bytes: u64,
    },

    /// The strides of a plane do not keep its cells apart: one stride must clear a cell, the other a whole line of them.
    #[error(
        "{row}: plane {plane}: cells of {cell_bytes} B are not kept apart by unit stride {unit_stride} and token \
         stride {token_stride}"
    )]
    CellsOverlap {
        /// The row.
        row: RowName,
        /// Index of the plane in its row.
        plane: usize,
        /// Bytes of a cell.
        cell_bytes: u64,
        /// Bytes from unit to unit.
        unit_stride: u64,
        /// Bytes from token to token.
        token_stride: u64,
    },

    /// Two planes of a row share bytes, or are interleaved in a way that is not provably free of it.
    #[error("{row}: planes {first} and {second} overlap")]
    PlanesOverlap {
        /// The row.
        row: RowName,
        /// Index of the one plane in the row.
        first: usize,
        /// Index of the other.
        second: usize,
    },

    /// The cut does not fit the model, or the rank is not one of the cut's.
    #[error(transparent)]
    Cut(#[from] CutError),

    /// The layers given to a builder are not in ascending order.
    #[error("layer {layer} is out of order: give each layer once, ascending")]
    LayerOrder {
        /// The first layer that is not above the one before it.
        layer: Layer,
    },

    /// The TP coordinates given to a builder are none.
    #[error("tp rank {tp_rank} of {tp_size}")]
    TpRank {
        /// Rank given.
        tp_rank: u32,
        /// Ranks given.
        tp_size: u32,
    },

    /// Units that belong together do not make up all units. Correct the spec.
    #[error("{role}: {units_total} units do not divide into {units_together} that belong together")]
    UnitsTogether {
        /// Role of the row.
        role: Role,
        /// Units of the model.
        units_total: u32,
        /// Units never split.
        units_together: u32,
    },

    /// The cells of a plane do not fit its group: a block is not a multiple of the tokens that share a cell (choose another
    /// block size), or the columns are none, differ between the planes of a row, or are given for a paged group.
    #[error("{role}: cells of {tokens_per_cell} tokens in {columns} columns do not fit a slot of {tokens} tokens")]
    Cells {
        /// Role of the row.
        role: Role,
        /// Tokens of a slot.
        tokens: u32,
        /// Tokens that share a cell.
        tokens_per_cell: u32,
        /// Cells of a unit of state.
        columns: u32,
    },

    /// Elements of this type do not fill whole bytes, or too many bytes. Choose another type or size.
    #[error("{role}: {elements} elements of {dtype} are not a whole number of bytes below 2^64")]
    CellBytes {
        /// Role of the row.
        role: Role,
        /// Elements of a cell.
        elements: u64,
        /// Element type.
        dtype: Dtype,
    },

    /// Scales of blocks of 0 elements. Choose the block size of the quantisation.
    #[error("{role}: a quantisation block of 0 elements")]
    QuantBlock {
        /// Role of the row.
        role: Role,
    },

    /// No engine seen stores these rows as this type. Choose another, or describe the rows by hand.
    #[error("{role}: no builder for a cache of {dtype}")]
    CacheDtype {
        /// Role of the row.
        role: Role,
        /// Type asked for.
        dtype: Dtype,
    },

    /// Sizes add up past `u64`. Choose smaller ones.
    #[error("layer {layer}, {role}: the slot would not fit in 2^64 bytes")]
    TooLarge {
        /// Layer at which it overflowed.
        layer: Layer,
        /// Role at which it overflowed.
        role: Role,
    },
}
