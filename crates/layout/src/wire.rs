//! Tables with repetition taken out: what is encoded.
//!
//! Pools and rows are stored as runs. The rows of a run are alike in all but layer, pool and offset, and in these three and
//! in the place in the group's list they go up by equal steps; likewise pools, with their base. A model of equal layers is
//! then one run a role, however many layers it has, and whether they share a pool or not. What the rows of several runs have
//! in common is stored once.

use std::collections::HashMap;
use std::hash::Hash;

use serde::{Deserialize, Serialize};

use crate::check::{GROUPS_MAX, POOLS_MAX, ROWS_MAX, check_row_limits};
use crate::codec::DecodeError;
use crate::error::{Counted, LayoutError};
use crate::table::{Dtype, GroupKind, Layer, LayerGroup, MemoryKind, PageTable, Plane, Pool, PoolId, Role, Row};

#[derive(Serialize, Deserialize)]
pub(crate) struct WireTable {
    hidden_layers: u32,
    dp_rank: u32,
    pools: Runs<PoolShape, PoolPlace>,
    groups: Vec<WireGroup>,
}

#[derive(Serialize, Deserialize)]
struct WireGroup {
    kind: GroupKind,
    rows: Runs<RowShape, RowPlace>,
}

#[derive(Serialize, Deserialize)]
struct Runs<Shape, Place> {
    shapes: Vec<Shape>,
    runs: Vec<Run<Place>>,
}

#[derive(Serialize, Deserialize)]
struct Run<Place> {
    /// Index of the shape.
    shape: u32,
    count: u32,
    first: Place,
    step: Place,
}

/// What the pools of a run have in common.
#[derive(PartialEq, Eq, Hash, Serialize, Deserialize)]
struct PoolShape {
    memory: MemoryKind,
    slot_count: u32,
    slot_stride: u64,
    slot_bytes: u64,
}

/// What the rows of a run have in common.
#[derive(PartialEq, Eq, Hash, Serialize, Deserialize)]
struct RowShape {
    role: Role,
    dtype: Dtype,
    bytes: u64,
    planes: Vec<Plane>,
}

/// What differs from thing to thing of a run; also the difference itself.
trait Place: Copy + PartialEq {
    const ZERO: Self;
    /// `None` if there is no step from `before` to here: such things start a new run.
    fn minus(self, before: Self) -> Option<Self>;
    fn plus(self, step: Self) -> Option<Self>;
    /// Place in the list that is encoded.
    fn index(self) -> usize;
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct PoolPlace {
    index: u32,
    /// Steps go round at the end of the address space: allocations come in any order.
    base: i64,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct RowPlace {
    index: u32,
    layer: u32,
    pool: u16,
    offset: u64,
}

impl Place for PoolPlace {
    const ZERO: Self = Self { index: 0, base: 0 };

    fn minus(self, before: Self) -> Option<Self> {
        Some(Self { index: self.index.checked_sub(before.index)?, base: self.base.wrapping_sub(before.base) })
    }

    fn plus(self, step: Self) -> Option<Self> {
        Some(Self { index: self.index.checked_add(step.index)?, base: self.base.wrapping_add(step.base) })
    }

    fn index(self) -> usize {
        self.index as usize
    }
}

impl Place for RowPlace {
    const ZERO: Self = Self { index: 0, layer: 0, pool: 0, offset: 0 };

    fn minus(self, before: Self) -> Option<Self> {
        Some(Self {
            index: self.index.checked_sub(before.index)?,
            layer: self.layer.checked_sub(before.layer)?,
            pool: self.pool.checked_sub(before.pool)?,
            offset: self.offset.checked_sub(before.offset)?,
        })
    }

    fn plus(self, step: Self) -> Option<Self> {
        Some(Self {
            index: self.index.checked_add(step.index)?,
            layer: self.layer.checked_add(step.layer)?,
            pool: self.pool.checked_add(step.pool)?,
            offset: self.offset.checked_add(step.offset)?,
        })
    }

    fn index(self) -> usize {
        self.index as usize
    }
}

impl<Shape: Eq + Hash, P: Place> Runs<Shape, P> {
    /// Each thing goes to the last run of its shape if it continues it, and starts one otherwise.
    fn pack(things: impl Iterator<Item = (Shape, P)>) -> Self {
        let mut runs: Vec<(Run<P>, P)> = Vec::new();
        let mut shapes: HashMap<Shape, (u32, usize)> = HashMap::new();
        for (shape, place) in things {
            // No table has as many shapes as fit in a `u32`: `check` bounds its pools and rows far below.
            let next = u32::try_from(shapes.len()).unwrap_or(u32::MAX);
            let (shape, last_run) = shapes.entry(shape).or_insert((next, usize::MAX));
            if let Some((run, last)) = runs.get_mut(*last_run)
                && let Some(step) = place.minus(*last)
                && (run.count == 1 || step == run.step)
            {
                run.step = step;
                run.count += 1;
                *last = place;
                continue;
            }
            *last_run = runs.len();
            runs.push((Run { shape: *shape, count: 1, first: place, step: P::ZERO }, place));
        }
        let mut shapes: Vec<_> = shapes.into_iter().collect();
        shapes.sort_unstable_by_key(|(_, (index, _))| *index);
        let shapes = shapes.into_iter().map(|(shape, _)| shape).collect();
        Self { shapes, runs: runs.into_iter().map(|(run, _)| run).collect() }
    }

    /// How many things the runs stand for.
    fn count(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.count)).sum()
    }

    /// The things, made from their shape's `model` and their place. On failure the index of the run at fault.
    ///
    /// The caller has bounded [`Self::count`] and what a model takes.
    fn unpack<T: Clone>(&self, models: &[T], make: impl Fn(&T, P) -> T) -> Result<Vec<T>, usize> {
        // No more than there are places, and each must be filled once, so none is left empty.
        let mut things: Vec<Option<T>> = vec![None; usize::try_from(self.count()).unwrap_or(0)];
        for (index, run) in self.runs.iter().enumerate() {
            let mut place = run.first;
            for nth in 0..run.count {
                if nth > 0 {
                    place = place.plus(run.step).ok_or(index)?;
                }
                let model = models.get(run.shape as usize).ok_or(index)?;
                let empty = things.get_mut(place.index()).filter(|thing| thing.is_none()).ok_or(index)?;
                *empty = Some(make(model, place));
            }
        }
        Ok(things.into_iter().flatten().collect())
    }
}

impl WireTable {
    pub(crate) fn pack(table: &PageTable) -> Self {
        let pools = (0..=u32::MAX).zip(&table.pools).map(|(index, pool)| {
            let Pool { memory, base, slot_count, slot_stride, slot_bytes } = *pool;
            let shape = PoolShape { memory, slot_count, slot_stride, slot_bytes };
            (shape, PoolPlace { index, base: base.cast_signed() })
        });
        let rows = |group: &LayerGroup| {
            Runs::pack((0..=u32::MAX).zip(&group.rows).map(|(index, row)| {
                let Row { layer, role, dtype, pool, offset, bytes, planes } = row.clone();
                let shape = RowShape { role, dtype, bytes, planes };
                (shape, RowPlace { index, layer: layer.0, pool: pool.0, offset })
            }))
        };
        let groups = table.groups.iter().map(|group| WireGroup { kind: group.kind, rows: rows(group) });
        Self {
            hidden_layers: table.hidden_layers,
            dp_rank: table.dp_rank,
            pools: Runs::pack(pools),
            groups: groups.collect(),
        }
    }

    /// Counts what the runs stand for before any of it is made.
    pub(crate) fn unpack(self) -> Result<PageTable, DecodeError> {
        let too_many = |what, found: u64, max: usize| {
            let found = usize::try_from(found).unwrap_or(usize::MAX);
            if found > max { Err(LayoutError::TooMany { what, found, max }) } else { Ok(()) }
        };
        let row_count = self.groups.iter().map(|group| group.rows.count()).fold(0, u64::saturating_add);
        too_many(Counted::Pools, self.pools.count(), POOLS_MAX)?;
        too_many(Counted::Groups, self.groups.len() as u64, GROUPS_MAX)?;
        too_many(Counted::Rows, row_count, ROWS_MAX)?;

        let pools = unpack_pools(&self.pools)?;
        let groups = self.groups.into_iter().enumerate().map(|(index, group)| group.unpack(index));
        let (hidden_layers, dp_rank) = (self.hidden_layers, self.dp_rank);
        Ok(PageTable { hidden_layers, dp_rank, pools, groups: groups.collect::<Result<_, _>>()? })
    }
}

fn unpack_pools(pools: &Runs<PoolShape, PoolPlace>) -> Result<Vec<Pool>, DecodeError> {
    let models: Vec<Pool> = pools
        .shapes
        .iter()
        .map(|&PoolShape { memory, slot_count, slot_stride, slot_bytes }| Pool {
            memory,
            base: 0,
            slot_count,
            slot_stride,
            slot_bytes,
        })
        .collect();
    let make = |model: &Pool, place: PoolPlace| Pool { base: place.base.cast_unsigned(), ..model.clone() };
    pools.unpack(&models, make).map_err(|run| DecodeError::PoolRun { run })
}

impl WireGroup {
    fn unpack(mut self, group: usize) -> Result<LayerGroup, DecodeError> {
        let mut models = Vec::new();
        for (index, RowShape { role, dtype, bytes, planes }) in (0..).zip(self.rows.shapes.drain(..)) {
            let mut model = Row { layer: Layer(0), role, dtype, pool: PoolId(0), offset: 0, bytes, planes };
            // Bounds what each of its rows takes.
            if check_row_limits(&model).is_err() {
                let first =
                    self.rows.runs.iter().find(|run| run.shape == index).map_or(RowPlace::ZERO, |run| run.first);
                (model.layer, model.pool) = (Layer(first.layer), PoolId(first.pool));
                check_row_limits(&model)?;
            }
            models.push(model);
        }
        let make = |model: &Row, place: RowPlace| Row {
            layer: Layer(place.layer),
            pool: PoolId(place.pool),
            offset: place.offset,
            ..model.clone()
        };
        let rows = self.rows.unpack(&models, make).map_err(|run| DecodeError::Run { group, run })?;
        Ok(LayerGroup { kind: self.kind, rows })
    }
}
