//! Compares every byte of the destination's pools with what its own image says.

use std::fmt;

use kvferry_layout::{Layer, PoolId, Role, Slot};
use serde::{Deserialize, Serialize};

use crate::image::{Cell, Image, Span, index};

/// What a check found in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Bytes of the request that hold their values.
    pub request_bytes: u64,
    /// Bytes past the request's last token, in its last block, that hold the values of those tokens: a source block that
    /// is moved whole brings them along.
    pub spare_bytes: u64,
    /// Bytes that still hold the canary.
    pub canary_bytes: u64,
}

/// Why a check failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError<E> {
    /// The pool could not be read. Nothing is known about its bytes.
    #[error("pool {} cannot be read back", pool.0)]
    Read {
        /// The pool.
        pool: PoolId,
        /// What reading it returned.
        source: E,
    },
    /// Bytes differ. The cache must not be used.
    #[error("{bytes} of {of_bytes} bytes are wrong, first {first}")]
    Different {
        /// The first, in the order of pools and offsets.
        first: Box<Difference>,
        /// Bytes that differ.
        bytes: u64,
        /// Bytes compared.
        of_bytes: u64,
    },
}

/// One byte that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The pool.
    pub pool: PoolId,
    /// The slot; `None` behind the last.
    pub slot: Option<Slot>,
    /// The byte, from the start of the slot, or from the start of the pool behind the last slot.
    pub byte: u64,
    /// What the byte is for.
    pub place: Place,
    /// What it should be.
    pub expected: u8,
    /// What it is.
    pub found: u8,
}

/// What a byte is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A cell of the request.
    Cell {
        /// Model layer.
        layer: Layer,
        /// Role of the row.
        role: Role,
        /// Index into the row's planes.
        plane: usize,
        /// Unit of the whole model.
        unit: u32,
        /// Token of the request.
        token: u64,
        /// Byte of the cell.
        byte: u64,
        /// What was expected there, and what was found.
        kind: CellKind,
    },
    /// A slot of the request, but none of its cells.
    Gap,
    /// A slot that the request does not have.
    OtherSlot,
    /// Between the end of a slot and the start of the next, or behind the last.
    Slack,
}

/// What was expected in a cell, and what was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellKind {
    /// Its value was expected and something else was found.
    Wrong,
    /// Its value was expected and the canary was found: nobody wrote it.
    Unwritten,
    /// A token past the request's last: neither the canary nor the value was found.
    Tail,
    /// A layer that the other instance does not have: the canary was expected.
    OneSided,
}

/// Compares `pool_bytes` bytes of each pool with the image, which must have been canary before the transfer.
///
/// `read` gets the pool, the offset in it, and the buffer to fill; `progress` gets the bytes compared so far. Cells of
/// tokens past the request's last may hold either the canary or their value, each cell as a whole.
///
/// # Errors
///
/// [`CheckError::Different`] names the first byte that differs, after all were compared; [`CheckError::Read`] what `read`
/// returned.
pub fn check<E>(
    image: &Image<'_>,
    pool_bytes: &[u64],
    mut read: impl FnMut(PoolId, u64, &mut [u8]) -> Result<(), E>,
    mut progress: impl FnMut(u64),
) -> Result<Verified, CheckError<E>> {
    let mut found = Vec::new();
    let mut expected = Vec::new();
    let mut verified = Verified::default();
    let mut first = None;
    let (mut bytes, mut of_bytes) = (0, 0);
    for (pool, &bytes_of_pool) in (0..).map(PoolId).zip(pool_bytes) {
        for span in image.spans(pool, bytes_of_pool) {
            found.resize(span.len(), 0);
            expected.resize(span.len(), 0);
            read(pool, span.bytes.start, &mut found).map_err(|source| CheckError::Read { pool, source })?;
            expect(image, &span, &found, &mut expected, &mut verified);
            if found != expected {
                bytes += found.iter().zip(&expected).map(|(found, expected)| u64::from(found != expected)).sum::<u64>();
                first = first.or_else(|| first_difference(image, &span, &found, &expected).map(Box::new));
            }
            of_bytes += span.bytes.end - span.bytes.start;
            progress(of_bytes);
        }
    }
    match first {
        Some(first) => Err(CheckError::Different { first, bytes, of_bytes }),
        None => Ok(verified),
    }
}

/// Fills `expected` with what `span` should hold and counts it; spare cells found as canary are expected so.
fn expect(image: &Image<'_>, span: &Span, found: &[u8], expected: &mut [u8], verified: &mut Verified) {
    image.paint(span, expected);
    let (mut request_bytes, mut spare_bytes) = (0, 0);
    let mut canary = Vec::new();
    image.for_each_cell(span, |cell| {
        if image.is_absent(cell.row.layer) {
            return;
        }
        if !cell.spare {
            request_bytes += cell.bytes;
            return;
        }
        let range = index(cell.offset)..index(cell.offset + cell.bytes);
        canary.resize(range.len(), 0);
        image.paint_background(span.pool, span.bytes.start + cell.offset, &mut canary);
        if found[range.clone()] == canary {
            expected[range].copy_from_slice(&canary);
        } else {
            spare_bytes += cell.bytes;
        }
    });
    verified.request_bytes += request_bytes;
    verified.spare_bytes += spare_bytes;
    verified.canary_bytes += span.bytes.end - span.bytes.start - request_bytes - spare_bytes;
}

/// The first byte of `span` that differs.
fn first_difference(image: &Image<'_>, span: &Span, found: &[u8], expected: &[u8]) -> Option<Difference> {
    let at = found.iter().zip(expected).position(|(found, expected)| found != expected)?;
    let byte = at as u64;
    let base = if span.slot.is_some() { 0 } else { span.bytes.start };
    let slot_bytes = image.table().pools[usize::from(span.pool.0)].slot_bytes;
    let place = match span.slot {
        Some(slot) if byte < slot_bytes && image.tenant(span.pool, slot).is_some() => {
            cell_place(image, span, byte, found).unwrap_or(Place::Gap)
        }
        Some(_) if byte < slot_bytes => Place::OtherSlot,
        _ => Place::Slack,
    };
    let (expected, found) = (expected[at], found[at]);
    Some(Difference { pool: span.pool, slot: span.slot, byte: base + byte, place, expected, found })
}

/// The cell that holds `byte` of `span`, if one does.
fn cell_place(image: &Image<'_>, span: &Span, byte: u64, found: &[u8]) -> Option<Place> {
    let mut place = None;
    image.for_each_cell(span, |cell| {
        if (cell.offset..cell.offset + cell.bytes).contains(&byte) {
            place = Some(Place::Cell {
                layer: cell.row.layer,
                role: cell.row.role.clone(),
                plane: cell.plane,
                unit: cell.unit,
                token: cell.token,
                byte: byte - cell.offset,
                kind: cell_kind(image, span, &cell, found),
            });
        }
    });
    place
}

fn cell_kind(image: &Image<'_>, span: &Span, cell: &Cell<'_>, found: &[u8]) -> CellKind {
    if image.is_absent(cell.row.layer) {
        return CellKind::OneSided;
    }
    if cell.spare {
        return CellKind::Tail;
    }
    let mut canary = vec![0; index(cell.bytes)];
    image.paint_background(span.pool, span.bytes.start + cell.offset, &mut canary);
    if found[index(cell.offset)..][..canary.len()] == canary { CellKind::Unwritten } else { CellKind::Wrong }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, slot, byte, place, expected, found } = self;
        match slot {
            Some(slot) => write!(f, "at pool {} slot {} byte {byte}", pool.0, slot.0)?,
            None => write!(f, "at pool {} byte {byte}", pool.0)?,
        }
        write!(f, " ({place}): expected {expected:#04x}, found {found:#04x}")
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cell { layer, role, plane, unit, token, byte, kind } => {
                write!(f, "layer {} {role} plane {plane} unit {unit} token {token} byte {byte}{kind}", layer.0)
            }
            Self::Gap => f.write_str("in no cell of the request"),
            Self::OtherSlot => f.write_str("not a slot of the request"),
            Self::Slack => f.write_str("slack behind a slot"),
        }
    }
}

impl fmt::Display for CellKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wrong => "",
            Self::Unwritten => ", never written",
            Self::Tail => ", past the request's end",
            Self::OneSided => ", which the sender does not have",
        })
    }
}
