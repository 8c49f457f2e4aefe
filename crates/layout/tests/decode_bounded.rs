//! What a decoder allocates is bounded, whatever the bytes claim. A test binary of its own: it counts every allocation
//! of the process.

use std::alloc::System;

use kvferry_layout::{DecodeError, LayoutError, PageTable, ROWS_MAX, TABLE_BYTES_MAX};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Decodes; returns the result and the bytes allocated on the way, freed ones included.
fn decode(bytes: &[u8]) -> (Result<PageTable, DecodeError>, usize) {
    let region = Region::new(ALLOCATOR);
    let result = PageTable::from_bytes(bytes);
    let stats = region.change();
    (result, stats.bytes_allocated)
}

fn varint(value: usize) -> Vec<u8> {
    postcard::to_allocvec(&value).expect("integers have a varint")
}

/// A table of no pools and one state group, up to the shapes of its rows.
fn head() -> Vec<u8> {
    b"KVT\x02\x04\x00\x00\x00\x01\x01".to_vec()
}

/// The shape of rows of `role`, each with `planes` planes.
fn shape(role: &[u8], planes: usize) -> Vec<u8> {
    let plane = [0, 1, 0, 0, 0, 1, 1, 1];
    [role, &[0, 1], &varint(planes), &plane.repeat(planes)].concat()
}

/// A run of `count` rows of the first shape.
fn run(count: usize) -> Vec<u8> {
    let step = [1, 1, 0, 0];
    [&[0][..], &varint(count), &[0; 4], &step].concat()
}

/// The one shape and the one run of it.
fn rows(shape: &[u8], count: usize) -> Vec<u8> {
    [head(), vec![1], shape.to_vec(), vec![1], run(count)].concat()
}

fn named(bytes: usize) -> Vec<u8> {
    [&[8][..], &varint(bytes), &vec![b'x'; bytes]].concat()
}

/// One test, as tests of one process would count each other's allocations.
#[test]
#[cfg_attr(miri, ignore = "counts bytes by the million, and the allocator is not Miri's own")]
fn allocations_are_bounded() {
    const MIB: usize = 1 << 20;

    // The largest that a few bytes can grow to: as many rows as may be, each as large as may be. Only the missing pool
    // stops it, so all of it has been made.
    let bytes = rows(&shape(&named(64), 8), ROWS_MAX);
    assert!(bytes.len() < 200);
    let (result, allocated) = decode(&bytes);
    assert!(matches!(result, Err(DecodeError::Table(LayoutError::RowPool { .. }))), "{result:?}");
    assert!((4 * MIB..12 * MIB).contains(&allocated), "{allocated} B");

    // Beyond any of the limits nothing is made.
    let (result, allocated) = decode(&rows(&shape(&named(64), 8), ROWS_MAX + 1));
    assert!(matches!(result, Err(DecodeError::Table(LayoutError::TooMany { .. }))), "{result:?}");
    assert!(allocated < MIB, "{allocated} B");
    let (result, allocated) = decode(&rows(&shape(&[0], 100_000), ROWS_MAX));
    assert!(matches!(result, Err(DecodeError::Table(LayoutError::PlaneCount { planes: 100_000, .. }))), "{result:?}");
    assert!(allocated < 32 * MIB, "{allocated} B");
    let (result, allocated) = decode(&rows(&shape(&named(MIB - 100), 1), ROWS_MAX));
    assert!(matches!(result, Err(DecodeError::Table(LayoutError::RoleName { .. }))), "{result:?}");
    assert!(allocated < 8 * MIB, "{allocated} B");

    // Lengths that nothing follows: at each place that has one.
    let huge = varint(usize::MAX >> 1);
    for start in [
        b"KVT\x02\x04\x00".to_vec(),
        b"KVT\x02\x04\x00\x01\x00\x01\x01\x01".to_vec(),
        b"KVT\x02\x04\x00\x00\x00".to_vec(),
        head(),
        [head(), vec![0]].concat(),
        [head(), vec![1, 8]].concat(),
        [head(), vec![1, 0, 0, 1]].concat(),
    ] {
        let (result, allocated) = decode(&[start, huge.clone()].concat());
        assert!(matches!(result, Err(DecodeError::Malformed(_))), "{result:?}");
        assert!(allocated < 8 * MIB, "{allocated} B");
    }

    // As many as possible of the smallest things, in as many bytes as are read.
    let room = TABLE_BYTES_MAX - 64;
    let many = |things: usize, thing: &[u8]| [varint(things), thing.repeat(things)].concat();
    let start = &b"KVT\x02\x04\x00"[..];
    let pool_shapes = [start, &many(room / 4, &[0, 1, 1, 1]), &[0, 0]].concat();
    // Each a run of one pool, at the next place.
    let pool_run = [0, 1, 0, 0, 0, 0];
    let pool_runs = [start, &[1, 0, 1, 1, 1], &many(room / pool_run.len(), &pool_run), &[0]].concat();
    let groups = [start, &[0, 0], &many(room / 3, &[1, 0, 0])].concat();
    let small = shape(&[0], 1);
    let shapes = [head(), many(room / small.len(), &small), vec![0]].concat();
    let empty_run = run(0);
    let runs = [head(), vec![1], small, many(room / empty_run.len(), &empty_run)].concat();
    for bytes in [pool_shapes, pool_runs, groups, shapes, runs] {
        let (result, allocated) = decode(&bytes);
        // Shapes without a run and runs of nothing stand for nothing; the others stand for more than any table has.
        assert!(result.is_err() || result.is_ok_and(|table| table.pools.is_empty() && table.rows().count() == 0));
        assert!(bytes.len() > TABLE_BYTES_MAX - 128, "{} B", bytes.len());
        assert!(allocated < 96 * MIB, "{allocated} B");
    }
    let (result, allocated) = decode(&vec![0; TABLE_BYTES_MAX + 1]);
    assert!(matches!(result, Err(DecodeError::TooLong { .. })) && allocated == 0, "{result:?}, {allocated} B");
}
