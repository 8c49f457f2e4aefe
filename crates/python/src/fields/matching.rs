//! Why two instances cannot serve each other, or block maps do not fit their tables.

use kvferry_match::{BindError, MatchError, MatrixError, TemplateError};

use crate::failure::{Describe, Described, Value};

impl Describe for MatchError {
    fn describe(&self) -> Described {
        let described = Described::of("MatchError", self);
        match self {
            Self::HiddenLayers { source_rank, source_layers, destination_rank, destination_layers } => {
                described.with(fields!(source_rank, source_layers, destination_rank, destination_layers))
            }
            Self::SourceParts { source_rank, dp_rank, other_rank, other_dp_rank } => {
                described.with(fields!(source_rank, dp_rank, other_rank, other_dp_rank))
            }
            Self::Incompatible { source_rank, destination_rank, layer, role, mismatch } => {
                let mismatch = mismatch.to_string();
                described.with(fields!(source_rank, destination_rank, layer, role, mismatch))
            }
            Self::MissingRole { destination_rank, layer, role, lacking, source_mask, destination_mask } => {
                let (lacking, source_mask) = (lacking.to_string(), source_mask.to_string());
                let destination_mask = destination_mask.to_string();
                described.with(fields!(destination_rank, layer, role, lacking, source_mask, destination_mask))
            }
            Self::Unclaimed { dp_rank, layer, role, plane, units } => {
                described.with(fields!(dp_rank, layer, role, plane, units))
            }
            Self::UnclaimedBlocks { dp_rank, layer, role, block_tokens, ordinals } => {
                let ordinals = Value::Range((ordinals.step.into(), ordinals.first.into()));
                described.with(fields!(dp_rank, layer, role, block_tokens, ordinals))
            }
            Self::Uncovered { destination_rank, role, layers, plane, units } => {
                let layers = Value::Layers(layers.layers().iter().map(|layer| layer.0).collect());
                described.with(fields!(destination_rank, role, layers, plane, units))
            }
            Self::UncoveredBlocks { destination_rank, layer, role, block_tokens, ordinals } => {
                let ordinals = Value::Range((ordinals.step.into(), ordinals.first.into()));
                described.with(fields!(destination_rank, layer, role, block_tokens, ordinals))
            }
            // The kinds of the groups are in the message.
            Self::DealtUnevenly { layer, role, source_rank, other_rank, .. } => {
                described.with(fields!(layer, role, source_rank, other_rank))
            }
            _ => described,
        }
    }
}

impl Describe for TemplateError {
    fn describe(&self) -> Described {
        let described = Described::of("MatchError", self);
        match self {
            Self::NotASource { source_rank, destination_rank } => {
                described.with(fields!(source_rank, destination_rank))
            }
            Self::TooManyPieces { source_tokens, destination_tokens, phases, arrays, pieces_max } => {
                described.with(fields!(source_tokens, destination_tokens, phases, arrays, pieces_max))
            }
            _ => described,
        }
    }
}

impl Describe for BindError {
    fn describe(&self) -> Described {
        let described = Described::of("MatchError", self);
        match self {
            Self::MapCount { side, groups, maps } => {
                let side = side.to_string();
                described.with(fields!(side, groups, maps))
            }
            Self::OutOfMap { side, group, ordinal, first, end } => {
                let (side, group) = (side.to_string(), u64::from(group.0));
                described.with(fields!(side, group, ordinal, first, end))
            }
            Self::Hole { side, group, ordinal } => {
                let (side, group) = (side.to_string(), u64::from(group.0));
                described.with(fields!(side, group, ordinal))
            }
            Self::SlotOutOfRange { side, group, ordinal, slot, pool, slot_count } => {
                let (side, group, slot, pool) = (side.to_string(), u64::from(group.0), slot.0, u64::from(pool.0));
                described.with(fields!(side, group, ordinal, slot, pool, slot_count))
            }
            Self::SlotTwice { slot, group, ordinal, earlier_group, earlier_ordinal } => {
                let (slot, group, earlier_group) = (slot.0, u64::from(group.0), u64::from(earlier_group.0));
                described.with(fields!(slot, group, ordinal, earlier_group, earlier_ordinal))
            }
            Self::PastEnd { end, request_tokens } => described.with(fields!(end, request_tokens)),
            _ => described,
        }
    }
}

impl Describe for MatrixError {
    fn describe(&self) -> Described {
        let described = Described::of("MatchError", self);
        match self {
            Self::Template { source_rank, destination_rank, source } => {
                described.with(fields!(source_rank, destination_rank)).because(source.describe())
            }
            Self::Chunk(source) => described.because(source.describe()),
            _ => described,
        }
    }
}
