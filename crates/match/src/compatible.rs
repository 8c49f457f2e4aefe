//! Whether bytes of a row may be copied between two tables at all.

use std::fmt;

use kvferry_layout::{Dtype, GroupKind, Row};

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
        source.planes.iter().zip(&destination.planes).enumerate().find_map(|(plane, (ours, theirs))| {
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
            Self::UnitsTotal { plane, source, destination } => {
                write!(f, "units of plane {plane}: {source} against {destination}")
            }
        }
    }
}

fn kind_name(kind: GroupKind) -> &'static str {
    match kind {
        GroupKind::Paged { .. } => "paged",
        GroupKind::State => "state",
    }
}
