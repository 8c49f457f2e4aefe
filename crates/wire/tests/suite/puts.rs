//! Bytes arrive, all of them, and nowhere else.

use std::sync::Arc;

use kvferry_wire::{
    Dim, Part, Piece, PutError, Region, RemoteRegion, RouteReason, SlotPair, TransferError, TransferId,
};

use super::end::{Way, bytes, filled, pair, pattern, side_by_side};

/// 7 pairs of slots, a piece of two loops and a plain one.
pub(crate) fn strided(local: &Region, remote: RemoteRegion) -> Part {
    let dims = [
        Dim { count: 3, local_stride: 400, remote_stride: 300 },
        Dim { count: 4, local_stride: 60, remote_stride: 50 },
    ];
    let plain = Piece { local_offset: 1300, remote_offset: 1001, run_bytes: 77, dims: [Dim::ONE; 2] };
    Part {
        local: local.clone(),
        local_base: 64,
        local_slot_stride: 1500,
        remote,
        remote_base: 10,
        remote_slot_stride: 1100,
        pieces: Arc::new([Piece { local_offset: 5, remote_offset: 0, run_bytes: 33, dims }, plain]),
        pairs: (0..7).map(|i| SlotPair { local: i * 3 % 7, remote: 6 - i }).collect(),
    }
}

/// Bytes of the regions that [`strided`] fits into.
pub(crate) const STRIDED_BYTES: (u64, u64) = (64 + 7 * 1500, 10 + 7 * 1100);

/// What [`strided`] makes of the remote side, by loops that share nothing with the crate.
pub(crate) fn stride(local: &[u8], remote: &mut [u8]) {
    for i in 0..7 {
        let (from, to) = (64 + 1500 * (i * 3 % 7), 10 + 1100 * (6 - i));
        for outer in 0..3 {
            for inner in 0..4 {
                for byte in 0..33 {
                    remote[to + outer * 300 + inner * 50 + byte] = local[from + 5 + outer * 400 + inner * 60 + byte];
                }
            }
        }
        remote[to + 1001..to + 1078].copy_from_slice(&local[from + 1300..from + 1377]);
    }
}

pub(crate) fn strided_pieces_land_where_they_belong_and_nowhere_else(way: &Way) {
    let [a, b] = pair(way);
    let sent = pattern(STRIDED_BYTES.0);
    let source = filled(&a.context, &sent);
    let mut wanted = vec![0xcc; STRIDED_BYTES.1 as usize];
    let target = filled(&b.context, &wanted);
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    a.put(9, strided(&source, remote));
    let (id, result) = a.done();
    let stats = result.unwrap();
    assert_eq!((id, stats.bytes, stats.runs), (TransferId(9), 7 * (12 * 33 + 77), 7 * 13), "{way:?}");
    if let Some(route) = way.options.route {
        assert_eq!((stats.route, stats.reason), (route, RouteReason::Forced), "{way:?}");
    }
    stride(&sent, &mut wanted);
    assert!(bytes(&target) == wanted, "{way:?}");
}

pub(crate) fn a_large_run_and_many_small_ones_arrive_whole(way: &Way) {
    const BYTES: u64 = 12 << 20;
    let [a, b] = pair(&way.roomy());
    let sent = pattern(BYTES);
    let source = filled(&a.context, &sent);
    for run_bytes in [BYTES, 4096] {
        let target = b.context.allocate(BYTES).unwrap();
        let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
        a.put(1, side_by_side((&source, 0), (remote, 0), run_bytes, (BYTES / run_bytes) as u32));
        assert_eq!(a.done().1.unwrap().bytes, BYTES, "{way:?}");
        assert!(bytes(&target) == sent, "{way:?}, runs of {run_bytes} B");
    }
}

pub(crate) fn one_byte_odd_lengths_and_odd_addresses_arrive_exactly(way: &Way) {
    let [a, b] = pair(way);
    let sent = pattern(100_000);
    let (from, to) = (filled(&a.context, &sent), b.context.allocate(100_000).unwrap());
    let remote = a.worker.import(a.to_peer, &to.card()).unwrap();
    for (run, pairs) in [(1, 1), (1, 300), (4097, 1), (4097, 20), (63, 64), (4096, 1)] {
        for (local, other) in [(0, 0), (1, 0), (0, 3), (17, 4093)] {
            to.write(0, &vec![0xcc; 100_000]).unwrap();
            a.put(0, side_by_side((&from, local), (remote, other), run, pairs));
            let count = run * u64::from(pairs);
            assert_eq!(a.done().1.unwrap().bytes, count);
            let (count, local, other) = (count as usize, local as usize, other as usize);
            let mut expected = vec![0xcc; 100_000];
            expected[other..other + count].copy_from_slice(&sent[local..local + count]);
            assert!(bytes(&to) == expected, "{way:?} {run} x {pairs} at {local}, {other}");
        }
    }
}

pub(crate) fn what_moves_nothing_ends_well(way: &Way) {
    let [a, b] = pair(way);
    let (from, to) = (a.context.allocate(4096).unwrap(), b.context.allocate(4096).unwrap());
    let remote = a.worker.import(a.to_peer, &to.card()).unwrap();
    let no_pairs = side_by_side((&from, 0), (remote, 0), 1, 0);
    let no_pieces = Part { pieces: [].into(), ..side_by_side((&from, 0), (remote, 0), 1, 1) };
    for parts in [Vec::new(), vec![no_pairs.clone()], vec![no_pieces, no_pairs]] {
        a.worker.put(a.to_peer, TransferId(1), parts).unwrap();
        let stats = a.done().1.unwrap();
        assert_eq!((stats.bytes, stats.runs, stats.reason), (0, 0, RouteReason::Empty), "{way:?}");
    }
}

/// Three parts of two sets. The pairs that they are prepared with are not looked at.
pub(crate) fn prepared_parts_move_for_the_slots_of_each_transfer(way: &Way) {
    const EACH: u64 = 100;
    let [a, b] = pair(way);
    let sent = pattern(3000);
    let (source, target) = (filled(&a.context, &sent), b.context.allocate(3000).unwrap());
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    let of_set = [side_by_side((&source, 0), (remote, 0), EACH, 99), side_by_side((&source, 0), (remote, 0), EACH, 0)];
    let part =
        |part: u64, set: usize| Part { local_base: part * 1000, remote_base: part * 1000, ..of_set[set].clone() };
    let prepared = a.worker.prepare(a.to_peer, vec![part(0, 0), part(1, 1), part(2, 0)]).unwrap();
    assert_eq!(prepared.set_count(), 2);
    let pairs = |pairs: &[(u32, u32)]| -> Arc<[SlotPair]> {
        pairs.iter().map(|&(local, remote)| SlotPair { local, remote }).collect()
    };
    for (transfer, sets) in
        [(0, [pairs(&[(0, 3), (9, 9)]), pairs(&[(4, 0)])]), (1, [pairs(&[]), pairs(&[(2, 7), (1, 1)])])]
    {
        let mut expected = vec![0xcc; 3000];
        target.write(0, &expected).unwrap();
        for (part, set) in [(0, 0), (1, 1), (2, 0)] {
            for SlotPair { local, remote } in sets[set].iter() {
                let at = |slot: u32| part * 1000 + slot as usize * EACH as usize;
                let moved = &sent[at(*local)..][..EACH as usize];
                expected[at(*remote)..][..EACH as usize].copy_from_slice(moved);
            }
        }
        let count = (2 * sets[0].len() + sets[1].len()) as u64;
        a.worker.put_prepared(TransferId(transfer), &prepared, sets.to_vec(), None).unwrap();
        assert_eq!(a.done().1.unwrap().bytes, count * EACH, "{way:?}");
        assert!(bytes(&target) == expected, "{way:?}");
    }
    let put = |sets| a.worker.put_prepared(TransferId(2), &prepared, sets, None).unwrap_err();
    assert!(matches!(put(vec![pairs(&[])]), TransferError::Sets { sets: 1, prepared: 2 }));
    let outside = put(vec![pairs(&[(0, 0), (0, 10)]), pairs(&[])]);
    assert!(matches!(outside, TransferError::OutsideRemote { part: 2, pair: 1, slot: 10, .. }), "{outside:?}");
}

/// Each with its own place, a tenth of them cancelled, and more of them refused before they begin.
pub(crate) fn many_small_transfers_end_once_each_failures_among_them(way: &Way) {
    const TRANSFERS: u64 = 400;
    const EACH: u64 = 1500;
    let [a, b] = pair(way);
    let sent = pattern(TRANSFERS * EACH);
    let (source, target) = (filled(&a.context, &sent), b.context.allocate(TRANSFERS * EACH).unwrap());
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    for transfer in 0..TRANSFERS {
        let base = transfer * EACH;
        a.put(transfer, side_by_side((&source, base), (remote, base), EACH / 3, 3));
        if transfer % 10 == 3 {
            a.worker.cancel(TransferId(transfer)).unwrap();
        }
        let outside = side_by_side((&source, base), (remote, base), TRANSFERS * EACH + 1, 1);
        assert!(a.worker.put(a.to_peer, TransferId(transfer), vec![outside]).is_err(), "{way:?}");
    }
    let mut ended = vec![0; TRANSFERS as usize];
    for _ in 0..TRANSFERS {
        let (TransferId(transfer), result) = a.done();
        let place = (transfer * EACH) as usize..((transfer + 1) * EACH) as usize;
        ended[transfer as usize] += 1;
        match result {
            Ok(_) => assert!(bytes(&target)[place.clone()] == sent[place], "{way:?}, transfer {transfer}"),
            Err(PutError::Cancelled) => assert_eq!(transfer % 10, 3, "{way:?}"),
            Err(error) => panic!("{way:?}, transfer {transfer}: {error}"),
        }
    }
    assert_eq!(ended, vec![1; TRANSFERS as usize], "{way:?}");
}
