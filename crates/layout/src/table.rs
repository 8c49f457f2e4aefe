//! One rank's page table: plain data that can be printed, compared, sent and checked.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::LayoutError;
use crate::mask::LayerMask;

/// A layer's id in the *model*: the same on every rank, whatever its pipeline stage. MTP and draft layers count on from
/// the last hidden layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Layer(pub u32);

/// Index of a pool in [`PageTable::pools`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PoolId(pub u16);

/// Index of a layer group in [`PageTable::groups`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupId(pub u16);

/// Index of one page of a pool. Not a block: a block belongs to a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Slot(pub u32);

/// Where a pool's memory lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MemoryKind {
    /// Host memory.
    Host,
    /// Memory of one CUDA device.
    Cuda {
        /// Ordinal of the device in the owning process.
        device: u32,
    },
}

/// One allocation of equal slots: byte `b` of slot `s` is at `base + s * slot_stride + b`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Host or device.
    pub memory: MemoryKind,
    /// Address of slot 0 in the owner's address space. Builders leave 0; the owner of the memory fills it in.
    pub base: u64,
    /// Number of slots.
    pub slot_count: u32,
    /// Bytes from one slot to the next, at least `slot_bytes`.
    pub slot_stride: u64,
    /// Bytes of a slot that rows may use.
    pub slot_bytes: u64,
}

/// What a row holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Attention keys.
    Key,
    /// Attention values.
    Value,
    /// MLA latent and rope part, one unit.
    Latent,
    /// Sparse-attention indexer keys with their scales.
    IndexerKey,
    /// Block scales of the keys.
    KeyScale,
    /// Block scales of the values.
    ValueScale,
    /// Convolution state of a recurrent layer.
    ConvState,
    /// Recurrent (SSM, linear attention) state.
    SsmState,
    /// Anything else, matched by its name. The builders use it for DeepSeek-V4: `compressed latent`, `compressor state`,
    /// `indexer compressor state`.
    Named(String),
}

/// Element type of a row. A label: two rows match only if it is equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 exponent bits.
    Fp8E4m3,
    /// 8-bit float, 5 exponent bits.
    Fp8E5m2,
    /// 4-bit float, two in a byte.
    Fp4E2m1,
    /// Opaque bytes.
    U8,
}

/// A strided array inside a row, over two axes: unit (heads, channels, or another sharded unit) and token.
///
/// The cell of unit `u` (of the whole model, inside `units`) and place `t` on the token axis is the `cell_bytes` bytes at
/// `row.offset + offset + (u - units.start) * unit_stride + t * token_stride` of a slot.
///
/// In a paged group the token axis has one place a token of the block, or one for every few tokens where the model
/// compresses them into one cell: see [`GroupKind::tokens_per_cell`]. State has no tokens; there the axis is whatever else
/// a unit has several cells along, such as the columns of a convolution, and moves as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plane {
    /// First byte of the plane, from the start of its row.
    pub offset: u64,
    /// Bytes of one (unit, token) cell.
    pub cell_bytes: u64,
    /// Bytes from one unit to the next.
    pub unit_stride: u64,
    /// Bytes from one token to the next.
    pub token_stride: u64,
    /// Units held here, half-open, out of `units_total`.
    pub units: Range<u32>,
    /// Units of the whole model on this plane.
    pub units_total: u32,
    /// Places on the token axis: a divisor of the block's tokens, or for state any number.
    pub tokens: u32,
}

/// The bytes of one `(layer, role)` in a slot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Model layer.
    pub layer: Layer,
    /// What the bytes are.
    pub role: Role,
    /// Element type.
    pub dtype: Dtype,
    /// Pool that holds the row.
    pub pool: PoolId,
    /// First byte, from the start of a slot.
    pub offset: u64,
    /// Bytes of the row.
    pub bytes: u64,
    /// Arrays inside the row.
    pub planes: Vec<Plane>,
}

/// Which blocks of a sequence a rank holds: those whose ordinal leaves `first` when divided by `step`.
///
/// Context-parallel ranks deal the blocks of a sequence out among themselves, block `o` to rank `o % cp_size`. Ordinals
/// count all blocks of the sequence, those of other ranks included.
///
/// ```
/// use kvferry_layout::Ordinals;
///
/// let second_of_four = Ordinals { step: 4, first: 1 };
/// assert!(second_of_four.holds(5) && !second_of_four.holds(4));
/// assert!(Ordinals::ALL.holds(4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ordinals {
    /// Ranks that the blocks are dealt out to; 1 for a rank that holds them all.
    pub step: u32,
    /// Ordinal of the first block that comes to this rank, below `step`.
    pub first: u32,
}

/// Life cycle of a group: what one of its slots stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum GroupKind {
    /// One slot a block of tokens.
    Paged {
        /// Tokens of a block.
        tokens_per_block: u32,
        /// The last tokens of a request that are kept: sliding window; `None` keeps every token. Give what the framework has
        /// blocks for: some free a block when the next token, which is not there yet, no longer sees it, which is one token less.
        window_tokens: Option<u32>,
        /// Which blocks of a sequence this rank has slots for.
        #[serde(default)]
        ordinals: Ordinals,
    },
    /// One slot a request, no token axis.
    State,
}

/// One life cycle: one list of slots a request, valid in each pool that its rows name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerGroup {
    /// Paged or state.
    pub kind: GroupKind,
    /// Rows, only those that exist: a layer that owns none of a role has no row for it.
    pub rows: Vec<Row>,
}

/// One rank's description of its pools: which `(layer, role)` lives where in a slot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageTable {
    /// Hidden layers of the model. A layer id at or past this is an MTP or draft layer, which one side may lack.
    pub hidden_layers: u32,
    /// Data-parallel rank: tables of one instance with the same number here hold the same requests between them, tables
    /// with another number hold other requests. 0 where an instance is not divided so.
    #[serde(default)]
    pub dp_rank: u32,
    /// Allocations.
    pub pools: Vec<Pool>,
    /// Life cycles.
    pub groups: Vec<LayerGroup>,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "key",
            Self::Value => "value",
            Self::Latent => "latent",
            Self::IndexerKey => "indexer key",
            Self::KeyScale => "key scale",
            Self::ValueScale => "value scale",
            Self::ConvState => "conv state",
            Self::SsmState => "ssm state",
            Self::Named(name) => name,
        })
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::Fp4E2m1 => "fp4_e2m1",
            Self::U8 => "u8",
        })
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Dtype {
    /// Bits of one element.
    pub fn bits(self) -> u32 {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::U8 => 8,
            Self::Fp4E2m1 => 4,
        }
    }

    /// Bytes of `elements` elements side by side; `None` if they do not fill whole bytes or do not fit in a `u64`.
    pub fn bytes_of(self, elements: u64) -> Option<u64> {
        let bits = elements.checked_mul(u64::from(self.bits()))?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl Pool {
    /// Bytes from the start of slot 0 to the end of the last slot's usable bytes; `None` past `u64`.
    ///
    /// The padding after the last slot (`slot_stride - slot_bytes`) is not counted: nothing reads or writes it.
    pub fn extent_bytes(&self) -> Option<u64> {
        match self.slot_count.checked_sub(1) {
            Some(last) => u64::from(last).checked_mul(self.slot_stride)?.checked_add(self.slot_bytes),
            None => Some(0),
        }
    }

    /// First byte of `slot`, from the start of the pool; `None` if the pool has no such slot.
    pub fn slot_offset(&self, slot: Slot) -> Option<u64> {
        if slot.0 >= self.slot_count {
            return None;
        }
        u64::from(slot.0).checked_mul(self.slot_stride)
    }
}

impl Ordinals {
    /// Every block.
    pub const ALL: Self = Self { step: 1, first: 0 };

    /// Whether the block with this ordinal is among them.
    pub fn holds(self, ordinal: u64) -> bool {
        ordinal.checked_rem(u64::from(self.step)) == Some(u64::from(self.first))
    }
}

impl Default for Ordinals {
    fn default() -> Self {
        Self::ALL
    }
}

impl GroupKind {
    /// A paged group of blocks of `tokens_per_block` tokens, all of them kept and held here.
    pub const fn paged(tokens_per_block: u32) -> Self {
        Self::Paged { tokens_per_block, window_tokens: None, ordinals: Ordinals::ALL }
    }

    /// A paged group that keeps the last `window_tokens` tokens.
    pub const fn windowed(tokens_per_block: u32, window_tokens: u32) -> Self {
        Self::Paged { tokens_per_block, window_tokens: Some(window_tokens), ordinals: Ordinals::ALL }
    }

    /// Tokens that a slot stands for: those of a block, or 1 for state.
    pub fn tokens(self) -> u32 {
        match self {
            Self::Paged { tokens_per_block, .. } => tokens_per_block,
            Self::State => 1,
        }
    }

    /// Tokens that each cell of `plane` stands for: 1, or more where the model compresses several into one.
    ///
    /// `None` for state, which has no tokens, and for a plane whose cells do not divide a block of this group evenly.
    pub fn tokens_per_cell(self, plane: &Plane) -> Option<u32> {
        match self {
            Self::Paged { tokens_per_block, .. } if tokens_per_block.checked_rem(plane.tokens) == Some(0) => {
                Some(tokens_per_block / plane.tokens)
            }
            Self::Paged { .. } | Self::State => None,
        }
    }
}

impl Plane {
    /// Bytes of all cells, without what may lie between them; `None` past `u64`.
    pub fn cells_bytes(&self) -> Option<u64> {
        let units = u64::from(self.units.end.saturating_sub(self.units.start));
        self.cell_bytes.checked_mul(units)?.checked_mul(u64::from(self.tokens))
    }
}

impl LayerGroup {
    /// Bytes of all cells of a slot, over all rows and pools: what moves when a block, or a request's state, moves.
    ///
    /// Padding between cells is not counted. Saturates, which no table that passed [`PageTable::check`] and fits in
    /// memory can reach.
    pub fn bytes_per_slot(&self) -> u64 {
        self.rows
            .iter()
            .flat_map(|row| &row.planes)
            .map(|plane| plane.cells_bytes().unwrap_or(u64::MAX))
            .fold(0, u64::saturating_add)
    }

    /// Bytes that one token takes in the rows of a paged group; 0 for state, which no token adds to.
    ///
    /// The share of one token in [`Self::bytes_per_slot`], rounded up: only compressed rows need rounding.
    pub fn bytes_per_token(&self) -> u64 {
        match self.kind {
            GroupKind::State => 0,
            GroupKind::Paged { tokens_per_block, .. } => {
                self.bytes_per_slot().div_ceil(u64::from(tokens_per_block.max(1)))
            }
        }
    }
}

impl PageTable {
    /// Every row with its group, in the order of the table.
    pub fn rows(&self) -> impl Iterator<Item = (GroupId, &Row)> {
        // `check` bounds the number of groups far below `u16::MAX`; ids past it do not exist and are left out.
        (0..=u16::MAX)
            .zip(&self.groups)
            .flat_map(|(group, layers)| layers.rows.iter().map(move |row| (GroupId(group), row)))
    }

    /// The row that holds `role` of `layer`.
    ///
    /// # Errors
    ///
    /// [`LayoutError::NoSuchRow`] if this rank holds none: a layer without one has no row, never row 0.
    pub fn row(&self, layer: Layer, role: &Role) -> Result<(GroupId, &Row), LayoutError> {
        self.rows()
            .find(|(_, row)| row.layer == layer && row.role == *role)
            .ok_or_else(|| LayoutError::NoSuchRow { layer, role: role.clone() })
    }

    /// The pool with this id.
    ///
    /// # Errors
    ///
    /// [`LayoutError::NoSuchPool`].
    pub fn pool(&self, id: PoolId) -> Result<&Pool, LayoutError> {
        self.pools.get(usize::from(id.0)).ok_or(LayoutError::NoSuchPool { pool: id, pool_count: self.pools.len() })
    }

    /// The group with this id.
    ///
    /// # Errors
    ///
    /// [`LayoutError::NoSuchGroup`].
    pub fn group(&self, id: GroupId) -> Result<&LayerGroup, LayoutError> {
        self.groups.get(usize::from(id.0)).ok_or(LayoutError::NoSuchGroup { group: id, group_count: self.groups.len() })
    }

    /// The layers that hold a row of `role` here.
    pub fn role_mask(&self, role: &Role) -> LayerMask {
        LayerMask::new(self.hidden_layers, self.rows().filter(|(_, row)| row.role == *role).map(|(_, row)| row.layer))
    }

    /// Makes a table of pools and rows that someone else laid out, and [checks](Self::check) it: for a framework that owns
    /// the memory and says with its real strides where things are.
    ///
    /// ```
    /// use kvferry_layout::*;
    ///
    /// // A tensor [2, slots, tokens, heads, head_dim] of 16-bit elements for keys and values of a layer, with the strides
    /// // that the framework reports: here it keeps heads outside of tokens. Rank 1 of 2 has heads 4..8 of 8.
    /// let address = 0x7f00_0000_0000;
    /// let [slots, tokens, heads] = [1000, 16, 4];
    /// let strides = [1000 * 8192, 8192, 128, 2048, 1].map(|elements| 2 * elements);
    /// let [role_stride, slot_stride, token_stride, unit_stride, element_bytes] = strides;
    ///
    /// let row_bytes = slot_stride;
    /// let pool = |nth| Pool {
    ///     memory: MemoryKind::Cuda { device: 0 },
    ///     base: address + nth * role_stride,
    ///     slot_count: slots,
    ///     slot_stride,
    ///     slot_bytes: row_bytes,
    /// };
    /// let row = |role, pool| Row {
    ///     layer: Layer(0),
    ///     role,
    ///     dtype: Dtype::Bf16,
    ///     pool: PoolId(pool),
    ///     offset: 0,
    ///     bytes: row_bytes,
    ///     planes: vec![Plane {
    ///         offset: 0,
    ///         cell_bytes: 128 * element_bytes,
    ///         unit_stride,
    ///         token_stride,
    ///         units: 4..4 + heads,
    ///         units_total: 8,
    ///         tokens,
    ///     }],
    /// };
    /// let rows = vec![row(Role::Key, 0), row(Role::Value, 1)];
    /// let groups = vec![LayerGroup { kind: GroupKind::paged(tokens), rows }];
    /// let table = PageTable::new(1, vec![pool(0), pool(1)], groups)?;
    /// // Both pools lie in the one registration of the tensor.
    /// let region = Extent { base: address, bytes: 2 * role_stride };
    /// table.check_regions(&[region, region])?;
    /// # Ok::<(), LayoutError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn new(hidden_layers: u32, pools: Vec<Pool>, groups: Vec<LayerGroup>) -> Result<Self, LayoutError> {
        let table = Self { hidden_layers, dp_rank: 0, pools, groups };
        table.check()?;
        Ok(table)
    }

    /// Bytes that one token takes on this rank, over all paged groups. Saturates like [`LayerGroup::bytes_per_token`].
    pub fn bytes_per_token(&self) -> u64 {
        self.groups.iter().map(LayerGroup::bytes_per_token).fold(0, u64::saturating_add)
    }
}
