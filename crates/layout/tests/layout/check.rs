//! What `check` refuses, one table spoilt in one place at a time, and an oracle that looks at every byte.

use std::collections::HashSet;
use std::ops::Range;

use kvferry_layout::{
    Counted, Extent, GroupId, GroupKind, LAYERS_MAX, Layer, LayoutError, Ordinals, PLANES_MAX, PageTable, PoolId,
    ROWS_MAX, Role, RowName, Slot,
};
use proptest::prelude::*;

use crate::tables::{full_table, leaves, tables, with_leaf};

#[track_caller]
fn check(spoil: impl FnOnce(&mut PageTable), expected: &LayoutError, message: &str) {
    let mut table = full_table();
    spoil(&mut table);
    assert_eq!(table.check().as_ref(), Err(expected));
    assert_eq!(expected.to_string(), message);
}

fn key() -> RowName {
    RowName { pool: PoolId(0), layer: Layer(0), role: Role::Key }
}

#[test]
fn spoilt_pools() {
    let pool = PoolId(1);
    check(
        |table| table.pools[1].slot_count = 0,
        &LayoutError::EmptyPool { pool, slot_count: 0, slot_bytes: 64 },
        "pool 1 is empty: 0 slots of 64 B",
    );
    check(
        |table| table.pools[1].slot_bytes = 0,
        &LayoutError::EmptyPool { pool, slot_count: 2, slot_bytes: 0 },
        "pool 1 is empty: 2 slots of 0 B",
    );
    check(
        |table| table.pools[1].slot_stride = 63,
        &LayoutError::SlotStride { pool, slot_stride: 63, slot_bytes: 64 },
        "pool 1: slot stride 63 is below the 64 B of a slot",
    );
    let past_the_end = "pool 1 runs past the end of the address space";
    check(|table| table.pools[1].base = u64::MAX - 127, &LayoutError::PoolExtent { pool }, past_the_end);
    check(|table| table.pools[1].slot_stride = u64::MAX - 63, &LayoutError::PoolExtent { pool }, past_the_end);
}

#[test]
fn a_pool_may_end_with_the_address_space() {
    let mut table = full_table();
    table.pools[1].base = u64::MAX - 128;
    assert_eq!(table.check(), Ok(()));
}

#[test]
fn spoilt_groups() {
    let no_tokens = |table: &mut PageTable| {
        table.groups[0].kind = GroupKind::paged(0);
    };
    let no_window = |table: &mut PageTable| {
        table.groups[0].kind = GroupKind::windowed(4, 0);
    };
    let expected = LayoutError::NoTokens { group: GroupId(0) };
    check(no_tokens, &expected, "group 0: a block or a window of 0 tokens");
    check(no_window, &expected, "group 0: a block or a window of 0 tokens");
    for (step, first) in [(0, 0), (2, 2), (3, 7), (65_537, 3)] {
        let dealt_out = |table: &mut PageTable| {
            let ordinals = Ordinals { step, first };
            table.groups[0].kind = GroupKind::Paged { tokens_per_block: 4, window_tokens: None, ordinals };
        };
        let message = format!("group 0: holds ordinals that leave {first} when divided by {step}");
        check(dealt_out, &LayoutError::Ordinals { group: GroupId(0), step, first }, &message);
    }
    check(|table| table.hidden_layers = 0, &LayoutError::NoLayers, "a model of 0 hidden layers");
}

#[test]
fn spoilt_rows() {
    check(
        |table| table.groups[0].rows[0].pool = PoolId(2),
        &LayoutError::RowPool { row: RowName { pool: PoolId(2), ..key() }, pool_count: 2 },
        "pool 2, layer 0, key: the table has 2 pools",
    );
    check(
        |table| table.groups[1].rows[0] = table.groups[0].rows[0].clone(),
        &LayoutError::DuplicateRow { row: key() },
        "pool 0, layer 0, key: a second row for this layer and role",
    );
    check(
        |table| table.groups[0].rows[0].offset = 81,
        &LayoutError::RowOutsideSlot { row: key(), offset: 81, bytes: 32, slot_bytes: 112 },
        "pool 0, layer 0, key: 32 B at 81 do not fit in a slot of 112 B",
    );
    let offset = u64::MAX - 31;
    check(
        |table| table.groups[0].rows[0].offset = offset,
        &LayoutError::RowOutsideSlot { row: key(), offset, bytes: 32, slot_bytes: 112 },
        "pool 0, layer 0, key: 32 B at 18446744073709551584 do not fit in a slot of 112 B",
    );
    check(
        |table| table.groups[0].rows[0].offset = 1,
        &LayoutError::RowsOverlap { row: RowName { role: Role::Value, ..key() }, other: key() },
        "pool 0, layer 0, value: overlaps the key row of layer 0",
    );
    let bytes_max = 64;
    for name in ["", "x".repeat(65).as_str(), "tab\t", "\u{fc}ber"] {
        check(
            |table| table.groups[1].rows[1].role = Role::Named(name.to_owned()),
            &LayoutError::RoleName { pool: PoolId(1), layer: Layer(1), bytes_max },
            "pool 1, layer 1: a role's name must be 1 to 64 characters of printable ASCII",
        );
    }
    let planes_max = PLANES_MAX;
    check(
        |table| table.groups[0].rows[0].planes.clear(),
        &LayoutError::PlaneCount { row: key(), planes: 0, planes_max },
        "pool 0, layer 0, key: 0 planes, 1 to 8 are allowed",
    );
    check(
        |table| {
            let planes = &mut table.groups[0].rows[0].planes;
            *planes = vec![planes[0].clone(); PLANES_MAX + 1];
        },
        &LayoutError::PlaneCount { row: key(), planes: 9, planes_max },
        "pool 0, layer 0, key: 9 planes, 1 to 8 are allowed",
    );
}

#[test]
fn rows_of_two_groups_may_use_the_same_bytes() {
    // The fixture's state group lies over the bytes of its paged group: a slot belongs to one group at a time.
    let table = full_table();
    assert_eq!((table.groups[0].rows[0].pool, table.groups[1].rows[0].pool), (PoolId(0), PoolId(0)));
    assert_eq!((table.groups[0].rows[0].offset, table.groups[1].rows[0].offset), (0, 0));
}

#[test]
fn spoilt_planes() {
    let row = key;
    check(
        |table| table.groups[0].rows[0].planes[0].cell_bytes = 0,
        &LayoutError::EmptyCell { row: row(), plane: 0 },
        "pool 0, layer 0, key: plane 0 has cells of 0 B",
    );
    let units = |units: Range<u32>| LayoutError::Units { row: row(), plane: 0, units, units_total: 4 };
    check(
        |table| table.groups[0].rows[0].planes[0].units = 2..5,
        &units(2..5),
        "pool 0, layer 0, key: plane 0 holds units 2..5 of 4",
    );
    check(
        |table| table.groups[0].rows[0].planes[0].units = 2..2,
        &units(2..2),
        "pool 0, layer 0, key: plane 0 holds units 2..2 of 4",
    );
    for tokens in [0, 3, 5, 8] {
        check(
            |table| table.groups[0].rows[0].planes[0].tokens = tokens,
            &LayoutError::Tokens { row: row(), plane: 0, tokens, group_tokens: 4 },
            &format!("pool 0, layer 0, key: plane 0 has {tokens} cells for the 4 tokens of a slot"),
        );
    }
    check(
        |table| table.groups[0].rows[0].planes[0].offset = 1,
        &LayoutError::PlaneOutsideRow { row: row(), plane: 0, row_bytes: 32 },
        "pool 0, layer 0, key: plane 0 ends past the 32 B of its row",
    );
    check(
        |table| table.groups[0].rows[0].planes[0].unit_stride = u64::MAX,
        &LayoutError::PlaneOutsideRow { row: row(), plane: 0, row_bytes: 32 },
        "pool 0, layer 0, key: plane 0 ends past the 32 B of its row",
    );
    check(
        |table| table.groups[0].rows[0].planes[0].unit_stride = 15,
        &LayoutError::CellsOverlap { row: row(), plane: 0, cell_bytes: 4, unit_stride: 15, token_stride: 4 },
        "pool 0, layer 0, key: plane 0: cells of 4 B are not kept apart by unit stride 15 and token stride 4",
    );
    check(
        |table| table.groups[0].rows[2].planes[1].offset = 7,
        &LayoutError::PlanesOverlap {
            row: RowName { layer: Layer(2), role: Role::IndexerKey, ..key() },
            first: 0,
            second: 1,
        },
        "pool 0, layer 2, indexer key: planes 0 and 1 overlap",
    );
    let mut state = full_table();
    state.groups[1].rows[0].planes[0].tokens = 0;
    assert!(matches!(state.check(), Err(LayoutError::Tokens { tokens: 0, group_tokens: 1, .. })));
}

#[test]
fn tables_larger_than_any_real_one() {
    let too_many = |what, found, max| LayoutError::TooMany { what, found, max };
    check(
        |table| table.groups[0].rows = vec![table.groups[0].rows[0].clone(); ROWS_MAX],
        &too_many(Counted::Rows, ROWS_MAX + 2, ROWS_MAX),
        "8194 rows, at most 8192 are allowed",
    );
    check(
        |table| table.pools = vec![table.pools[0].clone(); 4097],
        &too_many(Counted::Pools, 4097, 4096),
        "4097 pools, at most 4096 are allowed",
    );
    check(
        |table| table.groups = vec![table.groups[0].clone(); 257],
        &too_many(Counted::Groups, 257, 256),
        "257 groups, at most 256 are allowed",
    );
    check(
        |table| table.hidden_layers = LAYERS_MAX + 1,
        &too_many(Counted::Layers, 65_537, 65_536),
        "65537 layers, at most 65536 are allowed",
    );
    check(
        |table| table.groups[0].rows[0].layer = Layer(LAYERS_MAX),
        &too_many(Counted::Layers, 65_537, 65_536),
        "65537 layers, at most 65536 are allowed",
    );
}

#[test]
fn regions() {
    let table = full_table();
    // 3 slots, 128 B apart, of which the last one's padding belongs to nobody: 2 * 128 + 112 B from 4096 on.
    let exact = [Extent { base: 4096, bytes: 368 }, Extent { base: 65_536, bytes: 128 }];
    assert_eq!(table.check_regions(&exact), Ok(()));
    let roomy = [Extent { base: 0, bytes: u64::MAX }, Extent { base: 65_000, bytes: 10_000 }];
    assert_eq!(table.check_regions(&roomy), Ok(()));

    let refused = |region| {
        let error = table.check_regions(&[region, exact[1]]).unwrap_err();
        assert_eq!(error, LayoutError::OutsideRegion { pool: PoolId(0), pool_extent: exact[0], region });
    };
    refused(Extent { base: 4096, bytes: 367 });
    refused(Extent { base: 4097, bytes: 368 });
    refused(Extent { base: 4096, bytes: u64::MAX });
    let error = table.check_regions(&[Extent { base: 4096, bytes: 64 }, exact[1]]).unwrap_err();
    assert_eq!(error.to_string(), "pool 0: 0x1000+368 B is not inside its region 0x1000+64 B");

    let count = LayoutError::RegionCount { pool_count: 2, region_count: 1 };
    assert_eq!(table.check_regions(&exact[..1]), Err(count));
    let mut spoilt = full_table();
    spoilt.pools[0].slot_count = 0;
    assert!(matches!(spoilt.check_regions(&exact), Err(LayoutError::EmptyPool { .. })));
}

#[test]
fn questions_about_what_is_not_there() {
    let table = full_table();
    let message = |error: LayoutError| error.to_string();
    assert_eq!(message(table.row(Layer(1), &Role::Key).unwrap_err()), "no key row for layer 1");
    assert_eq!(message(table.pool(PoolId(2)).unwrap_err()), "no pool 2: the table has 2");
    assert_eq!(message(table.group(GroupId(2)).unwrap_err()), "no group 2: the table has 2");
    assert_eq!(table.row(Layer(1), &Role::Named("gate".to_owned())).unwrap().0, GroupId(1));
    assert_eq!(table.role_mask(&Role::IndexerKey).to_string(), "FFT");
    // Keys, values of two tokens a cell, indexer keys and scales.
    assert_eq!(table.bytes_per_token(), 2 * 4 + 2 * 8 / 2 + 8 + 4);
    assert_eq!(table.groups[0].bytes_per_slot(), 4 * 28);
    assert_eq!((table.groups[1].bytes_per_token(), table.groups[1].bytes_per_slot()), (0, 2 * (2 * 2 + 3) + 64));
    // Keys of 8 B a token, and for four tokens one value of 5 B for each of two heads: a share of 10.5 B, rounded up.
    let mut group = table.groups[0].clone();
    group.rows.truncate(2);
    (group.rows[1].planes[0].tokens, group.rows[1].planes[0].cell_bytes) = (1, 5);
    assert_eq!((group.bytes_per_slot(), group.bytes_per_token()), (42, 11));
    let [keys, values] = [0, 1].map(|row| &table.groups[0].rows[row].planes[0]);
    let kind = table.groups[0].kind;
    assert_eq!((kind.tokens_per_cell(keys), kind.tokens_per_cell(values)), (Some(1), Some(2)));
    assert_eq!(GroupKind::State.tokens_per_cell(keys), None);
    assert_eq!(GroupKind::paged(6).tokens_per_cell(keys), None);
}

#[test]
fn slots_of_a_pool() {
    let pool = &full_table().pools[0];
    let offsets: Vec<_> = (0..4).map(|slot| pool.slot_offset(Slot(slot))).collect();
    assert_eq!(offsets, [Some(0), Some(128), Some(256), None]);
    assert_eq!(pool.extent_bytes(), Some(368));
}

/// Looks at every byte of every cell of a table of small sizes: each inside its row and slot, in no other cell of the
/// same group, and in a slot that is inside the pool.
pub(crate) fn sound_by_scan(table: &PageTable) -> bool {
    let mut names = HashSet::new();
    for group in &table.groups {
        let mut taken = HashSet::new();
        for row in &group.rows {
            let Some(pool) = table.pools.get(usize::from(row.pool.0)) else {
                return false;
            };
            if !names.insert((row.layer, row.role.clone())) || pool.slot_stride < pool.slot_bytes {
                return false;
            }
            for plane in &row.planes {
                for unit in 0..u128::from(plane.units.end - plane.units.start) {
                    for token in 0..u128::from(plane.tokens) {
                        let strides = unit * u128::from(plane.unit_stride) + token * u128::from(plane.token_stride);
                        let in_row = u128::from(plane.offset) + strides;
                        for byte in in_row..in_row + u128::from(plane.cell_bytes) {
                            let in_slot = u128::from(row.offset) + byte;
                            let inside = byte < row.bytes.into() && in_slot < pool.slot_bytes.into();
                            if !inside || !taken.insert((row.pool, in_slot)) {
                                return false;
                            }
                        }
                    }
                }
            }
        }
    }
    true
}

proptest! {
    #[test]
    fn sound_tables_pass(table in tables()) {
        prop_assert!(sound_by_scan(&table));
        prop_assert_eq!(table.check(), Ok(()));
    }

    #[test]
    fn a_table_that_passes_keeps_every_cell_apart(
        table in tables(),
        leaf in any::<prop::sample::Index>(),
        number in prop_oneof![0..40u64, Just(u64::from(u16::MAX))],
    ) {
        let leaves = leaves(&table);
        let spoilt = with_leaf(&table, &leaves[leaf.index(leaves.len())], number);
        // The scan takes its time over large counts; the check is bounded by none.
        if spoilt.check().is_ok() {
            prop_assert!(sound_by_scan(&spoilt));
        }
    }
}
