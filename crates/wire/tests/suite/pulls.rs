//! The other way: the end that wants the bytes fetches them.

use std::time::Duration;

use kvferry_wire::{Part, Piece, PutError, Route, SlotPair, TransferError, TransferId};

use super::end::{Way, bytes, filled, pair, pattern, side_by_side};
use super::puts::{STRIDED_BYTES, stride, strided};

/// Whether the bytes can come this way; else it is refused by name.
fn can_pull(way: &Way) -> bool {
    let mapped = way.options.transports.as_deref() != Some("tcp");
    mapped && way.options.route.is_none() || matches!(way.options.route, Some(Route::Direct | Route::Runs))
}

/// A part the other way round.
fn turned(part: Part) -> Part {
    let piece = |piece: &Piece| {
        let dims = piece.dims.map(|mut dim| {
            std::mem::swap(&mut dim.local_stride, &mut dim.remote_stride);
            dim
        });
        Piece { local_offset: piece.remote_offset, remote_offset: piece.local_offset, dims, ..*piece }
    };
    Part {
        local_base: part.remote_base,
        local_slot_stride: part.remote_slot_stride,
        remote_base: part.local_base,
        remote_slot_stride: part.local_slot_stride,
        pieces: part.pieces.iter().map(piece).collect(),
        pairs: part.pairs.iter().map(|pair| SlotPair { local: pair.remote, remote: pair.local }).collect(),
        ..part
    }
}

pub(crate) fn pulled_pieces_land_where_they_belong_and_nowhere_else(way: &Way) {
    let [a, b] = pair(way);
    let sent = pattern(STRIDED_BYTES.0);
    let source = filled(&b.context, &sent);
    let mut wanted = vec![0xcc; STRIDED_BYTES.1 as usize];
    let target = filled(&a.context, &wanted);
    let remote = a.worker.import(a.to_peer, &source.card()).unwrap();
    a.worker.get(a.to_peer, TransferId(5), vec![turned(strided(&target, remote))]).unwrap();
    let (id, result) = a.done();
    assert_eq!(id, TransferId(5));
    if !can_pull(way) {
        let route = way.options.route.unwrap_or(Route::Runs);
        assert_eq!(result, Err(PutError::RouteUnavailable { route }));
        return;
    }
    assert_eq!(result.unwrap().bytes, 7 * (12 * 33 + 77), "{way:?}");
    stride(&sent, &mut wanted);
    assert!(bytes(&target) == wanted, "{way:?}");
}

pub(crate) fn pulls_of_all_sizes_arrive_and_a_bad_one_is_refused(way: &Way) {
    if !can_pull(way) {
        return;
    }
    const BYTES: u64 = 6 << 20;
    let [a, b] = pair(&way.roomy());
    let sent = pattern(BYTES);
    let (source, target) = (filled(&b.context, &sent), a.context.allocate(BYTES).unwrap());
    let remote = a.worker.import(a.to_peer, &source.card()).unwrap();
    let pull = |run_bytes, pairs, base| {
        let part = side_by_side((&target, base), (remote, base), run_bytes, pairs);
        a.worker.get(a.to_peer, TransferId(1), vec![part])
    };
    for (run_bytes, pairs, base) in
        [(1, 1, 3), (4097, 1, 0), (4097, 20, 17), (1, 300, 1), (BYTES, 1, 0), (4096, 1536, 0)]
    {
        target.write(0, &vec![0xcc; BYTES as usize]).unwrap();
        pull(run_bytes, pairs, base).unwrap();
        let count = run_bytes * u64::from(pairs);
        assert_eq!(a.done().1.unwrap().bytes, count, "{way:?}");
        let mut expected = vec![0xcc; BYTES as usize];
        let place = base as usize..(base + count) as usize;
        expected[place.clone()].copy_from_slice(&sent[place]);
        assert!(bytes(&target) == expected, "{way:?}, {pairs} of {run_bytes} B at {base}");
    }
    pull(1, 0, 0).unwrap();
    assert_eq!(a.done().1.unwrap().bytes, 0, "{way:?}");
    let refused = pull(BYTES, 1, 1);
    assert!(matches!(refused, Err(TransferError::OutsideLocal { .. })), "{way:?}: {refused:?}");
}

pub(crate) fn once_a_pull_is_cancelled_not_a_byte_changes(way: &Way) {
    if !can_pull(way) || way.options.route.is_none() {
        return;
    }
    const BYTES: u64 = 8 << 20;
    let [a, b] = pair(&way.roomy());
    let (source, target) = (filled(&b.context, &pattern(BYTES)), a.context.allocate(BYTES).unwrap());
    let remote = a.worker.import(a.to_peer, &source.card()).unwrap();
    let part = || side_by_side((&target, 0), (remote, 0), 4096, (BYTES / 4096) as u32);
    let canary = vec![0xcc; BYTES as usize];
    let mut cancelled = 0;
    for round in 0..40 {
        if round >= 4 && cancelled > 0 {
            break;
        }
        // All may be over before this thread comes to cancel them: then there are more, until they are not.
        let together = 4 + round;
        (0..together).for_each(|transfer| a.worker.get(a.to_peer, TransferId(transfer), vec![part()]).unwrap());
        std::thread::sleep(Duration::from_millis(round % 4));
        (0..together).for_each(|transfer| a.worker.cancel(TransferId(transfer)).unwrap());
        for _ in 0..together {
            match a.done().1 {
                Ok(_) => {}
                Err(PutError::Cancelled) => cancelled += 1,
                Err(error) => panic!("{way:?}: {error:?}"),
            }
        }
        target.write(0, &canary).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert!(bytes(&target) == canary, "{way:?}, round {round}: late bytes");
    }
    assert!(cancelled > 0, "{way:?}: no cancel came in time");
    a.worker.get(a.to_peer, TransferId(9), vec![part()]).unwrap();
    a.done().1.unwrap();
    assert!(bytes(&target) == pattern(BYTES), "{way:?}");
}
