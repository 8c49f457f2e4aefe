//! Why a page table cannot be built, read or used.

use kvferry_layout::{
    ConfigError, Cut, CutError, DecodeError, Dtype, Extent, GroupId, Layer, LayoutError, PoolId, Role, RowName,
};

use crate::failure::{Describe, Described, Value};

impl Describe for LayoutError {
    fn describe(&self) -> Described {
        let described = Described::of("TableError", self);
        match self {
            Self::NoSuchRow { layer, role } | Self::TooLarge { layer, role } => described.with(fields!(layer, role)),
            Self::NoSuchPool { pool, pool_count } => described.with(fields!(pool, pool_count)),
            Self::NoSuchGroup { group, group_count } => described.with(fields!(group, group_count)),
            Self::TooMany { what, found, max } => {
                let what = what.to_string();
                described.with(fields!(what, found, max))
            }
            Self::EmptyPool { pool, slot_count, slot_bytes } => described.with(fields!(pool, slot_count, slot_bytes)),
            Self::SlotStride { pool, slot_stride, slot_bytes } => {
                described.with(fields!(pool, slot_stride, slot_bytes))
            }
            Self::PoolExtent { pool } => described.with(fields!(pool)),
            Self::RegionCount { pool_count, region_count } => described.with(fields!(pool_count, region_count)),
            Self::OutsideRegion { pool, pool_extent, region } => described.with(fields!(pool, pool_extent, region)),
            Self::NoTokens { group } => described.with(fields!(group)),
            Self::Ordinals { group, step, first } => described.with(fields!(group, step, first)),
            Self::RoleName { pool, layer, bytes_max } => described.with(fields!(pool, layer, bytes_max)),
            Self::RowPool { row, pool_count } => described.with(fields!(row, pool_count)),
            Self::DuplicateRow { row } => described.with(fields!(row)),
            Self::RowOutsideSlot { row, offset, bytes, slot_bytes } => {
                described.with(fields!(row, offset, bytes, slot_bytes))
            }
            Self::RowsOverlap { row, other } => described.with(fields!(row, other)),
            Self::PlaneCount { row, planes, planes_max } => described.with(fields!(row, planes, planes_max)),
            Self::EmptyCell { row, plane } => described.with(fields!(row, plane)),
            Self::Units { row, plane, units, units_total } => described.with(fields!(row, plane, units, units_total)),
            Self::Tokens { row, plane, tokens, group_tokens } => {
                described.with(fields!(row, plane, tokens, group_tokens))
            }
            Self::PlaneOutsideRow { row, plane, row_bytes } => described.with(fields!(row, plane, row_bytes)),
            Self::CellsOverlap { row, plane, cell_bytes, unit_stride, token_stride } => {
                described.with(fields!(row, plane, cell_bytes, unit_stride, token_stride))
            }
            Self::PlanesOverlap { row, first, second } => described.with(fields!(row, first, second)),
            Self::Cut(source) => source.describe(),
            Self::LayerOrder { layer } => described.with(fields!(layer)),
            Self::TpRank { tp_rank, tp_size } => described.with(fields!(tp_rank, tp_size)),
            Self::UnitsTogether { role, units_total, units_together } => {
                described.with(fields!(role, units_total, units_together))
            }
            Self::Cells { role, tokens, tokens_per_cell, columns } => {
                described.with(fields!(role, tokens, tokens_per_cell, columns))
            }
            Self::CellBytes { role, elements, dtype } => described.with(fields!(role, elements, dtype)),
            Self::QuantBlock { role } => described.with(fields!(role)),
            Self::CacheDtype { role, dtype } => described.with(fields!(role, dtype)),
            _ => described,
        }
    }
}

impl Describe for CutError {
    fn describe(&self) -> Described {
        let described = Described::of("TableError", self);
        match self {
            Self::Syntax { text } => described.with(fields!(text)),
            Self::TooFewStages { stages } => described.with(fields!(stages)),
            Self::TooManyRanks { ranks_max } => described.with(fields!(ranks_max)),
            Self::Rank { rank, rank_count, cut } => described.with(fields!(rank, rank_count, cut)),
            Self::Coverage { covered, hidden_layers } => described.with(fields!(covered, hidden_layers)),
            Self::MoreStagesThanLayers { stages, hidden_layers } => described.with(fields!(stages, hidden_layers)),
            Self::LayerTooHigh { layer, layers_max } => described.with(fields!(layer, layers_max)),
            Self::LayerTwice { layer } => described.with(fields!(layer)),
            Self::LayerMissing { layer, hidden_layers } | Self::LayerPastModel { layer, hidden_layers } => {
                described.with(fields!(layer, hidden_layers))
            }
            _ => described,
        }
    }
}

impl Describe for ConfigError {
    fn describe(&self) -> Described {
        let described = Described::of("TableError", self);
        match self {
            Self::UnknownArchitecture { found, known } | Self::UnknownModelType { found, known } => {
                described.with(fields!(found, known))
            }
            Self::MissingKey { key } => described.with(fields!(key)),
            Self::WrongType { key, expected } => described.with(fields!(key, expected)),
            Self::OutOfRange { key, value, min, max } => described.with(fields!(key, value, min, max)),
            Self::HeadDim { hidden_size, attention_heads } => described.with(fields!(hidden_size, attention_heads)),
            Self::IndexHeadDim { head_dim, quant_block } => described.with(fields!(head_dim, quant_block)),
            Self::SlidingWindow { window_tokens, model_type } => described.with(fields!(window_tokens, model_type)),
            Self::LayerType { key, layer, found, known } => described.with(fields!(key, layer, found, known)),
            Self::LayerConflict { layer, first_key, second_key } => {
                described.with(fields!(layer, first_key, second_key))
            }
            Self::LayerNumber { first_key, second_key, number, times } => {
                described.with(fields!(first_key, second_key, number, times))
            }
            Self::UnknownDtype { key, found } => described.with(fields!(key, found)),
            Self::MaskLength { key, entries, hidden_layers } => described.with(fields!(key, entries, hidden_layers)),
            Self::MaskEntry { key, layer, found, expected } => described.with(fields!(key, layer, found, expected)),
            Self::MaskConflict { layer, owning_key, sharing_key } => {
                described.with(fields!(layer, owning_key, sharing_key))
            }
            _ => described,
        }
    }
}

impl Describe for DecodeError {
    fn describe(&self) -> Described {
        let described = Described::of("TableError", self);
        match self {
            Self::TooLong { bytes, bytes_max } => described.with(fields!(bytes, bytes_max)),
            Self::Version { found, supported } => described.with(fields!(found, supported)),
            Self::Trailing { bytes } => described.with(fields!(bytes)),
            Self::PoolRun { run } => described.with(fields!(run)),
            Self::Run { group, run } => described.with(fields!(group, run)),
            Self::Table(source) => source.describe(),
            _ => described,
        }
    }
}

/// What is a number in Python.
macro_rules! numbers {
    ($($name:ident),*) => {
        $(impl From<&$name> for Value {
            fn from(value: &$name) -> Self {
                Self::Count(value.0.into())
            }
        })*
    };
}
numbers!(Layer, PoolId, GroupId);

/// What is text in Python.
macro_rules! texts {
    ($($name:ident),*) => {
        $(impl From<&$name> for Value {
            fn from(value: &$name) -> Self {
                Self::Text(value.to_string())
            }
        })*
    };
}
texts!(Role, Dtype, Cut);

impl From<&RowName> for Value {
    fn from(value: &RowName) -> Self {
        Self::Row((value.pool.0.into(), value.layer.0, value.role.to_string()))
    }
}

impl From<&Extent> for Value {
    fn from(value: &Extent) -> Self {
        Self::Range((value.base, value.base.saturating_add(value.bytes)))
    }
}

impl From<&Vec<&'static str>> for Value {
    fn from(value: &Vec<&'static str>) -> Self {
        Self::Texts(value.iter().map(|text| (*text).to_owned()).collect())
    }
}
