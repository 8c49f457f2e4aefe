//! What a rank stores, before it is decided where: the input of the builders.

use std::ops::Range;

use crate::error::LayoutError;
use crate::mask::LayerMask;
use crate::table::{Dtype, GroupKind, Layer, Role};

/// One strided array of a row, as the whole model has it. Start from [`PlaneSpec::of`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneSpec {
    /// Units of the model. They are split over tensor-parallel ranks; a single one is on every rank.
    pub units_total: u32,
    /// How many neighbouring units are never split: the channels of a head, say. Divides `units_total`.
    pub units_together: u32,
    /// Bytes of one cell.
    pub cell_bytes: u64,
    /// In paged groups, how many tokens share a cell. Divides the tokens of a block. 1 for state.
    pub tokens_per_cell: u32,
    /// In state groups, how many cells a unit has. 1 for paged groups.
    pub columns: u32,
}

impl PlaneSpec {
    /// `units_total` units, split one by one, with one cell for each token, or a single one in a state group.
    pub fn of(units_total: u32, cell_bytes: u64) -> Self {
        Self { units_total, units_together: 1, cell_bytes, tokens_per_cell: 1, columns: 1 }
    }

    /// Cells of a unit in a slot of a group of this kind; `None` if the plane is not one for it.
    pub(crate) fn cells(&self, kind: GroupKind) -> Option<u32> {
        match kind {
            GroupKind::Paged { tokens_per_block, .. } => {
                let even = self.columns == 1 && tokens_per_block.checked_rem(self.tokens_per_cell) == Some(0);
                even.then(|| tokens_per_block / self.tokens_per_cell)
            }
            GroupKind::State => (self.tokens_per_cell == 1 && self.columns > 0).then_some(self.columns),
        }
    }

    /// The units that tensor-parallel rank `tp_rank` of `tp_size` holds. `None` if there is no such rank, or if the units
    /// do not go together evenly.
    pub(crate) fn share(&self, tp_rank: u32, tp_size: u32) -> Option<Range<u32>> {
        let together = self.units_together;
        if self.units_total.checked_rem(together) != Some(0) {
            return None;
        }
        let share = unit_share(self.units_total / together, tp_rank, tp_size)?;
        // Saturates only past what `check` then finds outside of the model's units.
        Some(share.start.saturating_mul(together)..share.end.saturating_mul(together))
    }
}

/// One role of a model: which layers own a row of it, and what a row is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSpec {
    /// What the bytes are.
    pub role: Role,
    /// Element type.
    pub dtype: Dtype,
    /// Layers that own a row.
    pub owners: LayerMask,
    /// Arrays of a row, in the order in which they are stored.
    pub planes: Vec<PlaneSpec>,
}

impl RowSpec {
    /// A row of one plane of `units_total` units of `elements` each: keys, values, or a latent (one unit).
    ///
    /// # Errors
    ///
    /// [`LayoutError::CellBytes`] if the elements of a cell do not fill whole bytes.
    pub fn single(
        role: Role,
        dtype: Dtype,
        owners: LayerMask,
        units_total: u32,
        elements: u32,
    ) -> Result<Self, LayoutError> {
        let cell_bytes = cell_bytes(&role, dtype, elements)?;
        Ok(Self { role, dtype, owners, planes: vec![PlaneSpec::of(units_total, cell_bytes)] })
    }

    /// The same row where `tokens_per_cell` tokens share each cell.
    pub fn compressed(mut self, tokens_per_cell: u32) -> Self {
        for plane in &mut self.planes {
            plane.tokens_per_cell = tokens_per_cell;
        }
        self
    }

    /// A row of sparse-attention indexer keys: one key a token, all keys first, then for each token 4 B of scales for every
    /// `quant_block` elements of its key: one 32-bit float, or for 4-bit keys four 8-bit exponents.
    ///
    /// # Errors
    ///
    /// [`LayoutError::CellBytes`] if a key does not fill whole bytes, [`LayoutError::QuantBlock`] if `quant_block` is 0.
    pub fn indexer(dtype: Dtype, owners: LayerMask, head_dim: u32, quant_block: u32) -> Result<Self, LayoutError> {
        let role = Role::IndexerKey;
        let key_bytes = cell_bytes(&role, dtype, head_dim)?;
        if quant_block == 0 {
            return Err(LayoutError::QuantBlock { role });
        }
        let scales = head_dim.div_ceil(quant_block);
        let scale_bytes = cell_bytes(&role, Dtype::F32, scales)?;
        Ok(Self { role, dtype, owners, planes: vec![PlaneSpec::of(1, key_bytes), PlaneSpec::of(1, scale_bytes)] })
    }
}

/// One life cycle, and the rows that live it, those that belong together listed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// Paged or state.
    pub kind: GroupKind,
    /// Slots of each pool.
    pub slot_count: u32,
    /// For each pool the roles that it holds. A pool none of whose roles the rank owns a row of does not come to be. Other
    /// storage than block-major makes several pools of each: see [`crate::Pooling`].
    pub pools: Vec<Vec<RowSpec>>,
}

/// All that one rank stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSpec {
    /// Hidden layers of the model.
    pub hidden_layers: u32,
    /// Model layers of this rank, ascending.
    pub layers: Vec<Layer>,
    /// This rank's place among those that share its layers.
    pub tp_rank: u32,
    /// How many share its layers.
    pub tp_size: u32,
    /// Life cycles.
    pub groups: Vec<GroupSpec>,
}

/// The units that tensor-parallel rank `tp_rank` of `tp_size` holds of `units_total`.
///
/// From `tp_rank * units_total / tp_size`, rounded down, to where the next rank starts, but one unit at least: with
/// more ranks than units, consecutive ranks hold the same one. A size that does not divide the units gives ranks of
/// unequal shares. `None` if there is no such rank.
pub fn unit_share(units_total: u32, tp_rank: u32, tp_size: u32) -> Option<Range<u32>> {
    if tp_rank >= tp_size {
        return None;
    }
    // Below 2^64, and once divided not above `units_total`, as `tp_rank < tp_size`.
    let start_of = |rank: u64| u32::try_from(rank * u64::from(units_total) / u64::from(tp_size)).ok();
    let start = start_of(u64::from(tp_rank))?;
    let next = start_of(u64::from(tp_rank) + 1)?;
    Some(start..next.max(start.saturating_add(1)))
}

pub(crate) fn cell_bytes(role: &Role, dtype: Dtype, elements: u32) -> Result<u64, LayoutError> {
    let elements = u64::from(elements);
    dtype.bytes_of(elements).ok_or_else(|| LayoutError::CellBytes { role: role.clone(), elements, dtype })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shares() {
        let check = |units, tp_size, expected: &[Range<u32>]| {
            let shares: Vec<_> = (0..tp_size).map(|tp_rank| unit_share(units, tp_rank, tp_size).unwrap()).collect();
            assert_eq!(shares, expected);
        };
        check(8, 2, &[0..4, 4..8]);
        check(8, 3, &[0..2, 2..5, 5..8]);
        check(4, 8, &[0..1, 0..1, 1..2, 1..2, 2..3, 2..3, 3..4, 3..4]);
        check(4, 6, &[0..1, 0..1, 1..2, 2..3, 2..3, 3..4]);
        check(1, 3, &[0..1, 0..1, 0..1]);
        assert_eq!(unit_share(8, 2, 2), None);
        assert_eq!(unit_share(8, 0, 0), None);
        assert_eq!(unit_share(u32::MAX, u32::MAX - 1, u32::MAX), Some(u32::MAX - 1..u32::MAX));
    }

    proptest! {
        #[test]
        fn shares_cover_all_units_and_are_as_equal_as_can_be(units in 1..100u32, tp_size in 1..100u32) {
            let shares: Vec<_> = (0..tp_size).map(|tp_rank| unit_share(units, tp_rank, tp_size).unwrap()).collect();
            let holders = |unit| shares.iter().filter(|share| share.contains(&unit)).count();
            let fair = (tp_size / units).max(1) as usize;
            for unit in 0..units {
                // Replicas of a unit differ by one rank at most; with units enough for all there are none.
                let most = if tp_size <= units { 1 } else { fair + 1 };
                prop_assert!((fair..=most).contains(&holders(unit)));
            }
            for share in &shares {
                let size = share.end - share.start;
                prop_assert!(size >= 1 && share.end <= units);
                prop_assert!(size == (units / tp_size).max(1) || (tp_size < units && size == units.div_ceil(tp_size)));
            }
            prop_assert!(shares.is_sorted_by_key(|share| share.start));
        }
    }

    #[test]
    fn indexer_rows() {
        let row = |dtype, head_dim, quant_block| {
            let row = RowSpec::indexer(dtype, LayerMask::all(1), head_dim, quant_block)?;
            Ok(row.planes.iter().map(|plane| plane.cell_bytes).collect::<Vec<_>>())
        };
        assert_eq!(row(Dtype::Fp8E4m3, 128, 128), Ok(vec![128, 4]));
        assert_eq!(row(Dtype::Fp4E2m1, 128, 128), Ok(vec![64, 4]));
        assert_eq!(row(Dtype::Fp8E4m3, 256, 128), Ok(vec![256, 8]));
        assert_eq!(row(Dtype::Fp8E4m3, 100, 64), Ok(vec![100, 8]));
        assert_eq!(row(Dtype::Fp8E4m3, 128, 0), Err(LayoutError::QuantBlock { role: Role::IndexerKey }));
        let odd = LayoutError::CellBytes { role: Role::IndexerKey, elements: 127, dtype: Dtype::Fp4E2m1 };
        assert_eq!(row(Dtype::Fp4E2m1, 127, 128), Err(odd));
    }
}
