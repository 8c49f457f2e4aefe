//! Tables as bytes for peers and as JSON for people.
//!
//! The binary form is a magic word, a version byte and a postcard message. Rows are stored as runs: rows alike in all but
//! layer, pool and offset, in which these three and the place in the group's list go up by equal steps. A model of equal
//! layers is then one run a role, however many layers it has.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::check::{GROUPS_MAX, POOLS_MAX, ROWS_MAX, check_row_limits};
use crate::error::{Counted, LayoutError};
use crate::table::{Dtype, GroupKind, Layer, LayerGroup, MemoryKind, PageTable, Plane, Pool, PoolId, Role, Row};

/// Most bytes of an encoded table that [`PageTable::from_bytes`] looks at.
pub const TABLE_BYTES_MAX: usize = 1 << 20;

const MAGIC: [u8; 3] = *b"KVT";
const VERSION: u8 = 1;

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

#[derive(Serialize, Deserialize)]
struct WireTable {
    hidden_layers: u32,
    pools: Vec<WirePools>,
    groups: Vec<WireGroup>,
}

/// Adjacent pools alike in all but their base.
#[derive(Serialize, Deserialize)]
struct WirePools {
    memory: MemoryKind,
    slot_count: u32,
    slot_stride: u64,
    slot_bytes: u64,
    bases: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
struct WireGroup {
    kind: GroupKind,
    runs: Vec<WireRun>,
}

#[derive(Serialize, Deserialize)]
struct WireRun {
    role: Role,
    dtype: Dtype,
    bytes: u64,
    planes: Vec<Plane>,
    count: u32,
    first: Place,
    step: Place,
}

/// What differs from row to row of a run; also the difference itself.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    /// Index in the group's list of rows.
    index: u32,
    layer: u32,
    pool: u16,
    offset: u64,
}

impl Place {
    /// `None` if something would go down: such rows start a new run.
    fn minus(self, other: Self) -> Option<Self> {
        Some(Self {
            index: self.index.checked_sub(other.index)?,
            layer: self.layer.checked_sub(other.layer)?,
            pool: self.pool.checked_sub(other.pool)?,
            offset: self.offset.checked_sub(other.offset)?,
        })
    }

    fn plus(self, other: Self) -> Option<Self> {
        Some(Self {
            index: self.index.checked_add(other.index)?,
            layer: self.layer.checked_add(other.layer)?,
            pool: self.pool.checked_add(other.pool)?,
            offset: self.offset.checked_add(other.offset)?,
        })
    }
}

impl PageTable {
    /// The compact, versioned form that [`Self::from_bytes`] reads. The same table always gives the same bytes.
    #[expect(clippy::missing_panics_doc, reason = "see the message: no table can cause it")]
    pub fn to_bytes(&self) -> Vec<u8> {
        let wire = WireTable {
            hidden_layers: self.hidden_layers,
            pools: pack_pools(&self.pools),
            groups: self
                .groups
                .iter()
                .map(|group| WireGroup { kind: group.kind, runs: pack_rows(&group.rows) })
                .collect(),
        };
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

fn pack_pools(pools: &[Pool]) -> Vec<WirePools> {
    let alike = |a: &Pool, b: &Pool| {
        (a.memory, a.slot_count, a.slot_stride, a.slot_bytes) == (b.memory, b.slot_count, b.slot_stride, b.slot_bytes)
    };
    let runs = pools.chunk_by(alike).filter_map(|run| Some((run.first()?, run)));
    runs.map(|(first, run)| WirePools {
        memory: first.memory,
        slot_count: first.slot_count,
        slot_stride: first.slot_stride,
        slot_bytes: first.slot_bytes,
        bases: run.iter().map(|pool| pool.base).collect(),
    })
    .collect()
}

/// Each row goes to the last run of its kind if it continues it, and starts one otherwise.
fn pack_rows(rows: &[Row]) -> Vec<WireRun> {
    let mut runs: Vec<(WireRun, Place)> = Vec::new();
    let mut last_of_kind: HashMap<(&Role, Dtype, u64, &[Plane]), usize> = HashMap::new();
    for (index, row) in (0..=u32::MAX).zip(rows) {
        let place = Place { index, layer: row.layer.0, pool: row.pool.0, offset: row.offset };
        let kind = (&row.role, row.dtype, row.bytes, row.planes.as_slice());
        let open = last_of_kind.get(&kind).and_then(|run| runs.get_mut(*run));
        if let Some((run, last)) = open
            && let Some(step) = place.minus(*last)
            && (run.count == 1 || step == run.step)
        {
            run.step = step;
            run.count += 1;
            *last = place;
            continue;
        }
        last_of_kind.insert(kind, runs.len());
        let run = WireRun {
            role: row.role.clone(),
            dtype: row.dtype,
            bytes: row.bytes,
            planes: row.planes.clone(),
            count: 1,
            first: place,
            step: Place { index: 0, layer: 0, pool: 0, offset: 0 },
        };
        runs.push((run, place));
    }
    runs.into_iter().map(|(run, _)| run).collect()
}

impl WireTable {
    /// Counts what the runs stand for before any of it is made.
    fn unpack(self) -> Result<PageTable, DecodeError> {
        let too_many = |what, found: u64, max: usize| {
            let found = usize::try_from(found).unwrap_or(usize::MAX);
            if found > max { Err(LayoutError::TooMany { what, found, max }) } else { Ok(()) }
        };
        let pool_count = self.pools.iter().map(|run| run.bases.len() as u64).sum();
        let row_count = self.groups.iter().flat_map(|group| &group.runs).map(|run| u64::from(run.count)).sum();
        too_many(Counted::Pools, pool_count, POOLS_MAX)?;
        too_many(Counted::Groups, self.groups.len() as u64, GROUPS_MAX)?;
        too_many(Counted::Rows, row_count, ROWS_MAX)?;

        let pools = self.pools.into_iter().flat_map(WirePools::unpack).collect();
        let groups = self.groups.into_iter().enumerate().map(|(index, group)| group.unpack(index));
        Ok(PageTable { hidden_layers: self.hidden_layers, pools, groups: groups.collect::<Result<_, _>>()? })
    }
}

impl WirePools {
    fn unpack(self) -> impl Iterator<Item = Pool> {
        let Self { memory, slot_count, slot_stride, slot_bytes, bases } = self;
        bases.into_iter().map(move |base| Pool { memory, base, slot_count, slot_stride, slot_bytes })
    }
}

impl WireGroup {
    fn unpack(self, group: usize) -> Result<LayerGroup, DecodeError> {
        let row_count = self.runs.iter().map(|run| run.count as usize).sum();
        let mut rows: Vec<Option<Row>> = vec![None; row_count];
        for (index, run) in self.runs.into_iter().enumerate() {
            let (count, first, step) = (run.count, run.first, run.step);
            let row = run.into_first_row();
            check_row_limits(&row)?;
            unpack_run(&row, count, first, step, &mut rows).ok_or(DecodeError::Run { group, run: index })?;
        }
        // Each run has filled as many empty places as it has rows, so none is left empty.
        Ok(LayerGroup { kind: self.kind, rows: rows.into_iter().flatten().collect() })
    }
}

impl WireRun {
    fn into_first_row(self) -> Row {
        let Self { role, dtype, bytes, planes, first: Place { layer, pool, offset, .. }, .. } = self;
        Row { layer: Layer(layer), role, dtype, pool: PoolId(pool), offset, bytes, planes }
    }
}

fn unpack_run(row: &Row, count: u32, first: Place, step: Place, rows: &mut [Option<Row>]) -> Option<()> {
    let mut place = first;
    for nth in 0..count {
        if nth > 0 {
            place = place.plus(step)?;
        }
        let Place { index, layer, pool, offset } = place;
        let empty = rows.get_mut(index as usize).filter(|row| row.is_none())?;
        *empty = Some(Row { layer: Layer(layer), pool: PoolId(pool), offset, ..row.clone() });
    }
    Some(())
}
