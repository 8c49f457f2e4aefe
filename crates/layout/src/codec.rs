//! Tables as bytes for peers and as JSON for people.
//!
//! The binary form is a magic word, a version byte and the postcard message of [`WireTable`].

use crate::error::LayoutError;
use crate::table::PageTable;
use crate::wire::WireTable;

/// Most bytes of an encoded table that [`PageTable::from_bytes`] looks at.
pub const TABLE_BYTES_MAX: usize = 1 << 20;

const MAGIC: [u8; 3] = *b"KVT";
const VERSION: u8 = 2;

/// Why bytes or text are no table. Refuse whoever sent them, naming this.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// More bytes than any table takes.
    #[error("{bytes} B of table, at most {bytes_max} are read")]
    TooLong {
        /// Bytes given.
        bytes: usize,
        /// Bytes allowed.
        bytes_max: usize,
    },

    /// The bytes do not start as a table does.
    #[error("not an encoded page table")]
    Magic,

    /// Written by a release with another format. Run the same release on both sides.
    #[error("page table of format {found}, this side reads {supported}")]
    Version {
        /// Format of the bytes.
        found: u8,
        /// Format read here.
        supported: u8,
    },

    /// The bytes end early or hold an impossible value.
    #[error("malformed page table")]
    Malformed(#[source] postcard::Error),

    /// There is something behind the table.
    #[error("{bytes} B left over behind the page table")]
    Trailing {
        /// How much.
        bytes: usize,
    },

    /// A run of pools leaves the list, an integer range, or a place that another run has taken.
    #[error("run {run} of pools does not fit")]
    PoolRun {
        /// Index of the run.
        run: usize,
    },

    /// A run of rows leaves its group's list, an integer range, or a place that another run has taken.
    #[error("group {group}: run {run} of rows does not fit")]
    Run {
        /// Index of the group.
        group: usize,
        /// Index of the run in the group.
        run: usize,
    },

    /// Not JSON, or not a table's.
    #[error("not a page table in JSON")]
    Json(#[source] serde_json::Error),

    /// A table, but not a valid one.
    #[error(transparent)]
    Table(#[from] LayoutError),
}

impl PageTable {
    /// The compact, versioned form that [`Self::from_bytes`] reads. The same table always gives the same bytes.
    #[expect(clippy::missing_panics_doc, reason = "see the message: no table can cause it")]
    pub fn to_bytes(&self) -> Vec<u8> {
        let wire = WireTable::pack(self);
        let mut bytes = MAGIC.to_vec();
        bytes.push(VERSION);
        postcard::to_extend(&wire, bytes).expect("a Vec takes any length, and no type here refuses to be serialised")
    }

    /// Reads a table from bytes that may come from anyone: it is checked before it is returned, and what is allocated
    /// on the way is bounded by [`TABLE_BYTES_MAX`] and the limits of [`Self::check`], whatever the bytes claim.
    ///
    /// # Errors
    ///
    /// See [`DecodeError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.len() > TABLE_BYTES_MAX {
            return Err(DecodeError::TooLong { bytes: bytes.len(), bytes_max: TABLE_BYTES_MAX });
        }
        let (found, body) = match bytes.strip_prefix(&MAGIC) {
            Some([version, body @ ..]) => (*version, body),
            _ => return Err(DecodeError::Magic),
        };
        if found != VERSION {
            return Err(DecodeError::Version { found, supported: VERSION });
        }
        let (wire, rest) = postcard::take_from_bytes::<WireTable>(body).map_err(DecodeError::Malformed)?;
        if !rest.is_empty() {
            return Err(DecodeError::Trailing { bytes: rest.len() });
        }
        let table = wire.unpack()?;
        table.check()?;
        Ok(table)
    }

    /// The form for people: indented JSON with the field names of [`PageTable`].
    #[expect(clippy::missing_panics_doc, reason = "see the message: no table can cause it")]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings and integers only, and no map with other keys than strings")
    }

    /// Reads what [`Self::to_json`] writes, and checks it.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Json`] or [`DecodeError::Table`].
    pub fn from_json(text: &str) -> Result<Self, DecodeError> {
        let table: Self = serde_json::from_str(text).map_err(DecodeError::Json)?;
        table.check()?;
        Ok(table)
    }
}
