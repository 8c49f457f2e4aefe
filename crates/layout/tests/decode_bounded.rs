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

/// A table of no pools and one state group, up to its runs.
fn head() -> Vec<u8> {
    b"KVT\x01\x04\x00\x01\x01".to_vec()
}

/// A run of `count` rows of `role`, each with `planes` planes.
fn run(role: &[u8], planes: usize, count: usize) -> Vec<u8> {
    let plane = [0, 1, 0, 0, 0, 1, 1, 1];
    let step = [1, 1, 0, 0];
    [role, &[0, 1], &varint(planes), &plane.repeat(planes), &varint(count), &[0; 4], &step].concat()
}

fn named(bytes: usize) -> Vec<u8> {
    [&[8][..], &varint(bytes), &vec![b'x'; bytes]].concat()
}

/// One test, as tests of one process would count each other's allocations.
#[test]
fn allocations_are_bounded() {
    const MIB: usize = 1 << 20;

    // The largest that a few bytes can grow to: as many rows as may be, each as large as may be. Only the missing pool
    // stops it, so all of it has been made.
    let bytes = [head(), varint(1), run(&named(64), 8, ROWS_MAX)].concat();
    assert!(bytes.len() < 200);
    let (result, allocated) = decode(&bytes);
    assert!(matches!(result, Err(DecodeError::Table(LayoutError::RowPool { .. }))), "{result:?}");
    assert!((4 * MIB..12 * MIB).contains(&allocated), "{allocated} B");

    // Beyond any of the limits nothing is made.
    let bytes = [head(), varint(1), run(&named(64), 8, ROWS_MAX + 1)].concat();
    let (result, allocated) = decode(&bytes);
    assert!(matches!(result, Err(DecodeError::Table(LayoutError::TooMany { .. }))), "{result:?}");
    assert!(allocated < MIB, "{allocated} B");
    let bytes = [head(), varint(1), run(&[0], 100_000, ROWS_MAX)].concat();
    let (result, allocated) = decode(&bytes);
    assert!(matches!(result, Err(DecodeError::Table(LayoutError::PlaneCount { planes: 100_000, .. }))), "{result:?}");
    assert!(allocated < 32 * MIB, "{allocated} B");
    let bytes = [head(), varint(1), run(&named(MIB - 100), 1, ROWS_MAX)].concat();
    let (result, allocated) = decode(&bytes);
    assert!(matches!(result, Err(DecodeError::Table(LayoutError::RoleName { .. }))), "{result:?}");
    assert!(allocated < 8 * MIB, "{allocated} B");

    // Lengths that nothing follows: at each place that has one.
    let huge = varint(usize::MAX >> 1);
    let plain = |runs: usize| [head(), varint(runs)].concat();
    for bytes in [
        [&b"KVT\x01\x04"[..], &huge].concat(),
        [&b"KVT\x01\x04\x01\x00\x01\x01\x01"[..], &huge].concat(),
        [&b"KVT\x01\x04\x00"[..], &huge].concat(),
        [head(), huge.clone()].concat(),
        [plain(1), vec![8], huge.clone()].concat(),
        [plain(1), vec![0, 0, 1], huge.clone()].concat(),
    ] {
        let (result, allocated) = decode(&bytes);
        assert!(matches!(result, Err(DecodeError::Malformed(_))), "{result:?}");
        assert!(allocated < 8 * MIB, "{allocated} B");
    }

    // As many as possible of the smallest things, in as many bytes as are read.
    let room = TABLE_BYTES_MAX - 64;
    let many = |things: usize, thing: &[u8]| [varint(things), thing.repeat(things)].concat();
    let pools = [&b"KVT\x01\x04"[..], &many(room / 5, &[0, 1, 1, 1, 0]), &[0]].concat();
    let bases = [&b"KVT\x01\x04\x01\x00\x01\x01\x01"[..], &many(room, &[0]), &[0]].concat();
    let groups = [&b"KVT\x01\x04\x00"[..], &many(room / 2, &[1, 0])].concat();
    let empty_run = run(&[0], 0, 0);
    let runs = [head(), many(room / empty_run.len(), &empty_run)].concat();
    for bytes in [pools, bases, groups, runs] {
        let (result, allocated) = decode(&bytes);
        // Runs of nothing stand for nothing; the others stand for more than any table has.
        assert!(result.is_err() || result.is_ok_and(|table| table.pools.is_empty() && table.rows().count() == 0));
        assert!(bytes.len() > TABLE_BYTES_MAX - 128, "{} B", bytes.len());
        assert!(allocated < 64 * MIB, "{allocated} B");
    }
    let (result, allocated) = decode(&vec![0; TABLE_BYTES_MAX + 1]);
    assert!(matches!(result, Err(DecodeError::TooLong { .. })) && allocated == 0, "{result:?}, {allocated} B");
}
