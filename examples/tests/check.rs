//! Fills and checks pools that are plain vectors: whatever differs by one byte, or sits where another thing belongs, is
//! seen and named.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test they help")]

use std::convert::Infallible;

use kvferry_examples::check::{CellKind, CheckError, Difference, Place, Verified, check};
use kvferry_examples::fill::fill;
use kvferry_examples::image::{Image, ImageError};
use kvferry_examples::pattern::Key;
use kvferry_layout::{
    Dtype, GroupKind, GroupSpec, Layer, LayerMask, PageTable, PoolId, RankSpec, Role, RowSpec, Slot, block_major,
};

const TOKENS_PER_BLOCK: u32 = 4;
/// Two full blocks, and one of which three tokens are past the end.
const TOKENS: u64 = 9;
const SLACK_BYTES: u64 = 5;

/// Three layers, the last one past the hidden ones: keys and values of two heads, and an indexer without layer 1.
fn table() -> PageTable {
    let all = LayerMask::all(3);
    let kv = |role| RowSpec::single(role, Dtype::F16, all.clone(), 2, 3).unwrap();
    let indexer = RowSpec::indexer(Dtype::Fp8E4m3, LayerMask::from_bools([true, false, true]), 8, 8).unwrap();
    let mut table = block_major(&RankSpec {
        hidden_layers: 2,
        layers: (0..3).map(Layer).collect(),
        tp_rank: 0,
        tp_size: 1,
        groups: vec![GroupSpec {
            kind: GroupKind::paged(TOKENS_PER_BLOCK),
            slot_count: 5,
            pools: vec![vec![kv(Role::Key), kv(Role::Value)], vec![indexer]],
        }],
    })
    .unwrap();
    for pool in &mut table.pools {
        pool.slot_stride += SLACK_BYTES;
    }
    table
}

fn slots() -> Vec<Vec<Slot>> {
    vec![[3, 0, 4].map(Slot).into()]
}

fn image<'a>(table: &'a PageTable, slots: &[Vec<Slot>], values: u64) -> Image<'a> {
    Image::new(table, slots, TOKENS, Key::new(values), Key::new(99)).unwrap()
}

type Pools = Vec<Vec<u8>>;

/// Pool sizes with a few bytes behind the last slot.
fn pool_bytes(table: &PageTable) -> Vec<u64> {
    table.pools.iter().map(|pool| u64::from(pool.slot_count) * pool.slot_stride + 3).collect()
}

fn filled(image: &Image<'_>) -> Pools {
    let bytes = pool_bytes(image.table());
    let mut pools: Pools = bytes.iter().map(|&bytes| vec![0; usize::try_from(bytes).unwrap()]).collect();
    let mut last = 0;
    let write = |pool: PoolId, offset: u64, data: &[u8]| {
        let start = usize::try_from(offset).unwrap();
        pools[usize::from(pool.0)][start..start + data.len()].copy_from_slice(data);
        Ok::<(), Infallible>(())
    };
    fill(image, &bytes, write, |done| last = done).unwrap();
    assert_eq!(last, bytes.iter().sum::<u64>());
    pools
}

fn checked(image: &Image<'_>, pools: &Pools) -> Result<Verified, Difference> {
    let read = |pool: PoolId, offset: u64, out: &mut [u8]| {
        let start = usize::try_from(offset).unwrap();
        out.copy_from_slice(&pools[usize::from(pool.0)][start..start + out.len()]);
        Ok::<(), Infallible>(())
    };
    match check(image, &pool_bytes(image.table()), read, |_| {}) {
        Ok(verified) => Ok(verified),
        Err(CheckError::Different { first, .. }) => Err(*first),
        Err(error) => panic!("{error}"),
    }
}

/// Address of a cell in its pool.
fn cell(table: &PageTable, layer: u32, role: &Role, plane: usize, unit: u32, token: u64) -> (usize, usize, usize) {
    let (_, row) = table.row(Layer(layer), role).unwrap();
    let plane = &row.planes[plane];
    let per_block = u64::from(TOKENS_PER_BLOCK);
    let slot = slots()[0][usize::try_from(token / per_block).unwrap()];
    let start = table.pool(row.pool).unwrap().slot_offset(slot).unwrap() + row.offset + plane.offset;
    let start = start + u64::from(unit) * plane.unit_stride + token % per_block * plane.token_stride;
    (usize::from(row.pool.0), usize::try_from(start).unwrap(), usize::try_from(plane.cell_bytes).unwrap())
}

#[test]
fn what_was_filled_is_verified() {
    let table = table();
    let image = image(&table, &slots(), 1);
    // A layer's token: two heads x (key + value) of 6 B, and for two of the layers 8 B of index key and 4 B of scale.
    let per_token = 3 * 2 * 2 * 6 + 2 * 12;
    let tail_tokens = 3;
    let verified = checked(&image, &filled(&image)).unwrap();
    assert_eq!((verified.request_bytes, verified.spare_bytes), (per_token * TOKENS, per_token * tail_tokens));
    let all = pool_bytes(&table).iter().sum::<u64>();
    assert_eq!(verified.request_bytes + verified.spare_bytes + verified.canary_bytes, all);
}

/// The pattern is no accident of the seed: another seed, request or rank shares no cell with it.
#[test]
fn another_request_is_seen() {
    let table = table();
    let other = filled(&image(&table, &slots(), 2));
    let difference = checked(&image(&table, &slots(), 1), &other).unwrap_err();
    assert!(matches!(difference.place, Place::Cell { kind: CellKind::Wrong, .. }), "{difference}");
}

#[test]
fn every_flipped_byte_is_seen_where_it_is() {
    let table = table();
    let image = image(&table, &slots(), 1);
    let mut pools = filled(&image);
    for pool in 0..pools.len() {
        let shape = &table.pools[pool];
        for byte in 0..pools[pool].len() {
            pools[pool][byte] ^= 0x10;
            let difference = checked(&image, &pools).unwrap_err();
            pools[pool][byte] ^= 0x10;
            let behind = byte as u64 >= u64::from(shape.slot_count) * shape.slot_stride;
            let in_pool = difference.slot.map_or(0, |slot| u64::from(slot.0) * shape.slot_stride) + difference.byte;
            assert_eq!((usize::from(difference.pool.0), in_pool), (pool, byte as u64));
            assert_eq!(difference.slot.is_none(), behind);
            assert_eq!(difference.expected, difference.found ^ 0x10);
            let in_slot = byte as u64 % shape.slot_stride;
            let has_slot = difference.slot.is_some_and(|slot| slots()[0].contains(&slot));
            let as_it_should = match &difference.place {
                Place::Cell { kind: CellKind::Wrong, token, .. } => has_slot && *token < TOKENS,
                Place::Cell { kind: CellKind::Tail, token, .. } => has_slot && *token >= TOKENS,
                Place::OtherSlot => !has_slot && !behind && in_slot < shape.slot_bytes,
                Place::Slack => behind || in_slot >= shape.slot_bytes,
                _ => false,
            };
            assert!(as_it_should, "{difference}");
        }
    }
}

/// Two cells in each other's place: the first is named.
#[test]
fn swapped_cells_are_seen() {
    let table = table();
    let image = image(&table, &slots(), 1);
    let cases = [
        ("layers", (0, Role::Key, 0, 1, 5), (1, Role::Key, 0, 1, 5)),
        ("roles", (1, Role::Key, 0, 0, 2), (1, Role::Value, 0, 0, 2)),
        ("heads", (0, Role::Value, 0, 0, 7), (0, Role::Value, 0, 1, 7)),
        ("tokens", (0, Role::Key, 0, 0, 1), (0, Role::Key, 0, 0, 2)),
        ("blocks", (0, Role::Key, 0, 0, 1), (0, Role::Key, 0, 0, 5)),
        ("index rows", (0, Role::IndexerKey, 0, 0, 3), (2, Role::IndexerKey, 0, 0, 3)),
        ("index scales", (0, Role::IndexerKey, 1, 0, 3), (0, Role::IndexerKey, 1, 0, 4)),
    ];
    for (what, one, other) in cases {
        let mut pools = filled(&image);
        let (pool, first, bytes) = cell(&table, one.0, &one.1, one.2, one.3, one.4);
        let (other_pool, second, other_bytes) = cell(&table, other.0, &other.1, other.2, other.3, other.4);
        assert_eq!((pool, bytes), (other_pool, other_bytes));
        for byte in 0..bytes {
            pools[pool].swap(first + byte, second + byte);
        }
        let difference = checked(&image, &pools).unwrap_err();
        assert!(matches!(difference.place, Place::Cell { kind: CellKind::Wrong, .. }), "{what}: {difference}");
    }
}

/// Two whole slots in each other's place.
#[test]
fn swapped_slots_are_seen() {
    let table = table();
    let mut swapped = slots();
    swapped[0].swap(0, 1);
    let pools = filled(&image(&table, &swapped, 1));
    assert!(checked(&image(&table, &slots(), 1), &pools).is_err());
}

#[test]
fn tail_cells_may_be_untouched_but_not_half() {
    let table = table();
    let image = image(&table, &slots(), 1);
    let mut pools = filled(&image);
    let canary = filled(&Image::new(&table, &[], 0, Key::new(1), Key::new(99)).unwrap());
    let (pool, start, bytes) = cell(&table, 1, &Role::Key, 0, 0, TOKENS);
    pools[pool][start..start + bytes].copy_from_slice(&canary[pool][start..start + bytes]);
    let verified = checked(&image, &pools).unwrap();
    assert_eq!(verified.spare_bytes, checked(&image, &filled(&image)).unwrap().spare_bytes - bytes as u64);
    pools[pool][start] ^= 1;
    let difference = checked(&image, &pools).unwrap_err();
    assert!(matches!(difference.place, Place::Cell { kind: CellKind::Tail, .. }), "{difference}");
}

#[test]
fn what_was_never_written_is_called_so() {
    let table = table();
    let canary = filled(&Image::new(&table, &[], 0, Key::new(1), Key::new(99)).unwrap());
    let difference = checked(&image(&table, &slots(), 1), &canary).unwrap_err();
    assert!(matches!(difference.place, Place::Cell { kind: CellKind::Unwritten, .. }), "{difference}");
}

/// A layer that the sender lacks keeps its canary, and a write there is seen.
#[test]
fn one_sided_layers_stay_untouched() {
    let table = table();
    let whole = image(&table, &slots(), 1);
    let without = image(&table, &slots(), 1).without([Layer(2)]);
    let verified = checked(&without, &filled(&without)).unwrap();
    assert_eq!(verified.request_bytes, (2 * 2 * 2 * 6 + 12) * TOKENS);
    let difference = checked(&without, &filled(&whole)).unwrap_err();
    assert_eq!(
        difference.to_string().split(": expected").next().unwrap(),
        "at pool 0 slot 0 byte 192 (layer 2 key plane 0 unit 0 token 4 byte 0, which the sender does not have)"
    );
}

#[test]
fn slots_that_cannot_be_are_errors() {
    let table = table();
    let error = |slots: [u32; 2]| {
        let slots = vec![slots.map(Slot).to_vec()];
        Image::new(&table, &slots, TOKENS, Key::new(1), Key::new(2)).unwrap_err()
    };
    let pool = PoolId(0);
    assert_eq!(error([0, 5]), ImageError::SlotOutOfRange { pool, slot: Slot(5), slot_count: 5 });
    assert_eq!(error([2, 2]), ImageError::SlotTaken { pool, slot: Slot(2) });
}
