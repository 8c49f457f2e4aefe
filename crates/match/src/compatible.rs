//! Whether bytes of a row may be copied between two tables at all.

use std::fmt;

use kvferry_layout::{Dtype, GroupKind, Plane, Row};

/// What keeps two rows of the same layer and role from being copied into each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mismatch {
    /// The one is paged, the other state.
    Kind {
        /// Life cycle of the source's row.
        source: GroupKind,
        /// Life cycle of the destination's row.
        destination: GroupKind,
    },
    /// Element types differ. Nothing is converted.
    Dtype {
        /// The source's.
        source: Dtype,
        /// The destination's.
        destination: Dtype,
    },
    /// Rows are made of different numbers of planes.
    Planes {
        /// The source's.
        source: usize,
        /// The destination's.
        destination: usize,
    },
    /// Cells of a plane differ in size.
    CellBytes {
        /// The plane.
        plane: usize,
        /// The source's.
        source: u64,
        /// The destination's.
        destination: u64,
    },
    /// Cells of a plane stand for different numbers of tokens, or a plane of state has different numbers of cells a unit.
    CellTokens {
        /// The plane.
        plane: usize,
        /// The source's.
        source: u32,
        /// The destination's.
        destination: u32,
    },
    /// The source keeps fewer of the last tokens than the destination needs; `None` keeps, or needs, all. A table that
    /// names the model's window asks for no more than that, whatever its blocks could hold.
    Window {
        /// Tokens that the source keeps.
        source_tokens: Option<u32>,
        /// Tokens that the destination needs.
        destination_tokens: Option<u32>,
    },
    /// A plane is cut out of different numbers of units: the models differ.
    UnitsTotal {
        /// The plane.
        plane: usize,
        /// The source's.
        source: u32,
        /// The destination's.
        destination: u32,
    },
}

impl Mismatch {
    /// The first difference between two rows of one layer and role, if there is any.
    pub(crate) fn between(source: (GroupKind, &Row), destination: (GroupKind, &Row)) -> Option<Self> {
        let ((source_kind, source), (destination_kind, destination)) = (source, destination);
        if (source_kind == GroupKind::State) != (destination_kind == GroupKind::State) {
            return Some(Self::Kind { source: source_kind, destination: destination_kind });
        }
        if source.dtype != destination.dtype {
            return Some(Self::Dtype { source: source.dtype, destination: destination.dtype });
        }
        if source.planes.len() != destination.planes.len() {
            return Some(Self::Planes { source: source.planes.len(), destination: destination.planes.len() });
        }
        let (source_tokens, destination_tokens) = (window(source_kind), window(destination_kind));
        if source_tokens.unwrap_or(u32::MAX) < destination_tokens.unwrap_or(u32::MAX) {
            return Some(Self::Window { source_tokens, destination_tokens });
        }
        // Of state, whose cells stand for no tokens, the cells themselves are counted.
        let cell_tokens = |kind: GroupKind, plane: &Plane| kind.tokens_per_cell(plane).unwrap_or(plane.tokens);
        source.planes.iter().zip(&destination.planes).enumerate().find_map(|(plane, (ours, theirs))| {
            let (source, destination) = (cell_tokens(source_kind, ours), cell_tokens(destination_kind, theirs));
            if source != destination {
                return Some(Self::CellTokens { plane, source, destination });
            }
            if ours.cell_bytes != theirs.cell_bytes {
                let (source, destination) = (ours.cell_bytes, theirs.cell_bytes);
                return Some(Self::CellBytes { plane, source, destination });
            }
            if ours.units_total != theirs.units_total {
                let (source, destination) = (ours.units_total, theirs.units_total);
                return Some(Self::UnitsTotal { plane, source, destination });
            }
            None
        })
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind { source, destination } => {
                write!(f, "life cycle: {} against {}", kind_name(*source), kind_name(*destination))
            }
            Self::Dtype { source, destination } => write!(f, "element type: {source} against {destination}"),
            Self::Planes { source, destination } => write!(f, "planes: {source} against {destination}"),
            Self::CellBytes { plane, source, destination } => {
                write!(f, "bytes of a cell of plane {plane}: {source} against {destination}")
            }
            Self::CellTokens { plane, source, destination } => {
                write!(f, "tokens of a cell of plane {plane}: {source} against {destination}")
            }
            Self::Window { source_tokens, destination_tokens } => {
                let name = |tokens: &Option<u32>| tokens.map_or("all".to_owned(), |tokens| tokens.to_string());
                let (source, destination) = (name(source_tokens), name(destination_tokens));
                write!(f, "window: {source} tokens kept, {destination} needed")
            }
            Self::UnitsTotal { plane, source, destination } => {
                write!(f, "units of plane {plane}: {source} against {destination}")
            }
        }
    }
}

fn window(kind: GroupKind) -> Option<u32> {
    match kind {
        GroupKind::Paged { window_tokens, .. } => window_tokens,
        GroupKind::State => None,
    }
}

fn kind_name(kind: GroupKind) -> &'static str {
    match kind {
        GroupKind::Paged { .. } => "paged",
        GroupKind::State => "state",
    }
}
