//! What can be wrong when two instances are matched, a template is made or block maps are bound to it.

use std::fmt;
use std::ops::Range;

use kvferry_layout::{GroupId, GroupKind, Layer, LayerMask, Ordinals, PoolId, Role, Slot};

use crate::compatible::Mismatch;
use crate::layers::LayerList;

/// Which of the two instances a value belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The instance that has the bytes.
    Source,
    /// The instance that gets them.
    Destination,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// Why a destination instance cannot be served by a source instance. Nothing may move between the two: fix their set-up.
///
/// Of ranks with equal layout the first one is named.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MatchError {
    /// The two sides serve different models, or count hidden layers differently.
    #[error(
        "source rank {source_rank} has {source_layers} hidden layers, destination rank {destination_rank} has \
         {destination_layers}"
    )]
    HiddenLayers {
        /// First source rank that differs.
        source_rank: u32,
        /// Its hidden layers.
        source_layers: u32,
        /// The destination rank.
        destination_rank: u32,
        /// Its hidden layers.
        destination_layers: u32,
    },

    /// The source ranks serve different requests between them. Give those of one data-parallel part.
    #[error(
        "source rank {source_rank} is of data-parallel part {dp_rank}, source rank {other_rank} of part {other_dp_rank}"
    )]
    SourceParts {
        /// First source rank.
        source_rank: u32,
        /// Its part.
        dp_rank: u32,
        /// First source rank of another part.
        other_rank: u32,
        /// Its part.
        other_dp_rank: u32,
    },

    /// The same row is stored in ways between which bytes cannot be copied. Start one side with the other's settings.
    #[error(
        "{role} of layer {layer}: source rank {source_rank} and destination rank {destination_rank} differ in {mismatch}"
    )]
    Incompatible {
        /// Source rank whose row differs.
        source_rank: u32,
        /// Destination rank whose row it is compared with.
        destination_rank: u32,
        /// Layer of the row.
        layer: Layer,
        /// Role of the row.
        role: Role,
        /// What differs.
        mismatch: Mismatch,
    },

    /// Both sides hold the layer, but only one has a row of this role for it. Give both the same layer mask.
    #[error(
        "{role} of layer {layer}: only the {} has it, though both hold the layer (of the layers of destination rank \
         {destination_rank} the source has {source_mask}, the destination {destination_mask})",
        if *lacking == Side::Source { Side::Destination } else { Side::Source }
    )]
    MissingRole {
        /// The destination rank.
        destination_rank: u32,
        /// First layer where the two differ.
        layer: Layer,
        /// Role that one side lacks there.
        role: Role,
        /// The side without it.
        lacking: Side,
        /// Of the layers that the destination rank holds, those whose row some source rank has.
        source_mask: LayerMask,
        /// The layers whose row the destination rank has.
        destination_mask: LayerMask,
    },

    /// The destination's ranks hold parts of these rows, but none holds these units, which the source has. Mend the cut of the
    /// destination's ranks, or name all of them.
    #[error(
        "{role} of layer {layer}: no rank of the destination's data-parallel part {dp_rank} holds units {}..{} of plane {plane}",
        units.start, units.end
    )]
    Unclaimed {
        /// The destination's part.
        dp_rank: u32,
        /// First layer where it is so.
        layer: Layer,
        /// Role of the cells.
        role: Role,
        /// Plane of the row.
        plane: usize,
        /// Units that nobody holds.
        units: Range<u32>,
    },

    /// The same of blocks that the destination's ranks deal out among themselves.
    #[error(
        "{role} of layer {layer}: no rank of the destination's data-parallel part {dp_rank} holds block {} of every {}, of \
         {block_tokens} tokens each",
        ordinals.first, ordinals.step
    )]
    UnclaimedBlocks {
        /// The destination's part.
        dp_rank: u32,
        /// First layer where it is so.
        layer: Layer,
        /// Role of the row.
        role: Role,
        /// Tokens of a block.
        block_tokens: u32,
        /// The blocks that nobody holds.
        ordinals: Ordinals,
    },

    /// No source rank holds these cells. Name every rank of the source instance, or mend its cut.
    #[error(
        "{role} of layers {layers}: no source rank holds units {}..{} of plane {plane} for destination rank \
         {destination_rank}",
        units.start, units.end
    )]
    Uncovered {
        /// Destination rank that wants them.
        destination_rank: u32,
        /// Role of the cells.
        role: Role,
        /// Every layer that lacks them.
        layers: LayerList,
        /// Plane of the row.
        plane: usize,
        /// Units that nobody holds.
        units: Range<u32>,
    },

    /// No source rank holds these blocks. Name every context-parallel rank of the source instance.
    #[error(
        "{role} of layer {layer}: no source rank holds block {} of every {}, of {block_tokens} tokens each, for destination \
         rank {destination_rank}",
        ordinals.first, ordinals.step
    )]
    UncoveredBlocks {
        /// Destination rank that wants them.
        destination_rank: u32,
        /// Layer of the row.
        layer: Layer,
        /// Role of the row.
        role: Role,
        /// Tokens of a block of the source ranks that hold the other blocks.
        block_tokens: u32,
        /// Blocks that nobody holds.
        ordinals: Ordinals,
    },

    /// Ranks of the source deal out the blocks of one row in different ways. Start them with the same settings.
    #[error(
        "{role} of layer {layer}: source ranks {source_rank} and {other_rank} deal out its blocks in different ways \
         ({}, {})",
        dealt(kind),
        dealt(other_kind)
    )]
    DealtUnevenly {
        /// Layer of the row.
        layer: Layer,
        /// Role of the row.
        role: Role,
        /// A source rank.
        source_rank: u32,
        /// Kind of its group.
        kind: GroupKind,
        /// Another one.
        other_rank: u32,
        /// Kind of its group.
        other_kind: GroupKind,
    },
}

/// How the blocks of a group are dealt out, in words.
fn dealt(kind: &GroupKind) -> String {
    match kind {
        GroupKind::Paged { tokens_per_block, ordinals, .. } => {
            format!("blocks of {tokens_per_block} tokens to {} ranks", ordinals.step)
        }
        GroupKind::State => "state".to_owned(),
    }
}

/// Why there is no template for a pair of ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// This rank sends nothing to the destination rank. Ask only for ranks that [`crate::Assignment::sources`] lists.
    #[error("source rank {source_rank} sends nothing to destination rank {destination_rank}")]
    NotASource {
        /// Rank asked for.
        source_rank: u32,
        /// Rank of the assignment.
        destination_rank: u32,
    },

    /// The block sizes have next to nothing in common. Choose sizes of which one divides the other, or nearly.
    #[error(
        "blocks of {source_tokens} and {destination_tokens} tokens overlap in {phases} ways; for {arrays} arrays that is \
         more than {pieces_max} pieces"
    )]
    TooManyPieces {
        /// Tokens of a source block.
        source_tokens: u32,
        /// Tokens of a destination block.
        destination_tokens: u32,
        /// Different overlaps of a source block and a destination block.
        phases: u64,
        /// Strided arrays to move for each of them.
        arrays: u64,
        /// Most pieces before merging.
        pieces_max: u64,
    },
}

/// Why a template cannot be bound to block maps. Nothing is to be moved: the request's block maps or tokens are wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Give one block map for each group of the side's page table, in its order.
    #[error("{maps} block maps for the {groups} groups of the {side}")]
    MapCount {
        /// Side of the maps.
        side: Side,
        /// Groups of its table.
        groups: usize,
        /// Maps given.
        maps: usize,
    },

    /// The tokens need a block that the map does not reach. Give a longer map, or fewer tokens.
    #[error("{side} group {group}: block {ordinal} is needed, the block map holds {first}..{end}")]
    OutOfMap {
        /// Side of the map.
        side: Side,
        /// Group of the map.
        group: GroupId,
        /// Ordinal that is needed.
        ordinal: u64,
        /// First ordinal of the map.
        first: u64,
        /// The ordinal after its last.
        end: u64,
    },

    /// The tokens need a block that the map says is not there. Fill the hole, or give fewer tokens.
    #[error("{side} group {group}: block {ordinal} is needed, the block map has a hole there")]
    Hole {
        /// Side of the map.
        side: Side,
        /// Group of the map.
        group: GroupId,
        /// Ordinal of the hole.
        ordinal: u64,
    },

    /// The map names a slot that its pool does not have. Mend the map.
    #[error("{side} group {group}: block {ordinal} is in slot {slot}, pool {pool} has {slot_count}")]
    SlotOutOfRange {
        /// Side of the map.
        side: Side,
        /// Group of the map.
        group: GroupId,
        /// Ordinal of the block.
        ordinal: u64,
        /// Its slot.
        slot: Slot,
        /// Pool that lacks the slot.
        pool: PoolId,
        /// Slots of that pool.
        slot_count: u32,
    },

    /// Two blocks would be written to the same slot. Mend the destination's maps.
    #[error(
        "destination slot {slot} is named twice: for block {earlier_ordinal} of group {earlier_group} and for block \
         {ordinal} of group {group}"
    )]
    SlotTwice {
        /// The slot.
        slot: Slot,
        /// Group of the later block.
        group: GroupId,
        /// Its ordinal.
        ordinal: u64,
        /// Group of the earlier block.
        earlier_group: GroupId,
        /// Its ordinal.
        earlier_ordinal: u64,
    },

    /// The chunk goes on past the end of its request. Give the tokens of the whole request as its end.
    #[error("tokens up to {end} of a request of {request_tokens} tokens")]
    PastEnd {
        /// End of the chunk.
        end: u64,
        /// End of the request.
        request_tokens: u64,
    },

    /// The bytes do not fit in 64 bits: the pools are not real memory. Refuse the tables.
    #[error("the bytes of the plan do not fit in 64 bits")]
    TooManyBytes,
}
