//! Transfers that are given up, endpoints that are closed, workers that stop.

use std::time::{Duration, Instant};

use kvferry_wire::{
    CommandError, Event, Permit, Permitted, PutError, Refusal, Region, RemoteRegion, Route, TransferId,
};

use super::end::{End, Way, bytes, filled, pair, pattern, side_by_side};

const BYTES: u64 = 8 << 20;
const PIECE: u64 = 4096;
const ROUNDS: u64 = 6;
const TOGETHER: u64 = 3;

/// What is given up may be over by then: rounds are added, of more transfers each, until it was not, or there are so many.
const ROUNDS_MAX: u64 = 10 * ROUNDS;

/// Transfers of a round, so many that even the fastest are not over before this thread comes to give them up.
fn together(round: u64) -> u64 {
    TOGETHER * (1 + round / ROUNDS)
}

pub(crate) fn a_closed_endpoint_ends_its_transfers_and_takes_no_more(way: &Way) {
    const TRANSFERS: u64 = 40;
    let [a, b] = pair(&way.roomy());
    let (source, target) = (a.context.allocate(BYTES).unwrap(), b.context.allocate(BYTES).unwrap());
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    let whole = || side_by_side((&source, 0), (remote, 0), PIECE, (BYTES / PIECE) as u32);
    (0..TRANSFERS).for_each(|transfer| a.put(transfer, whole()));
    a.worker.close(a.to_peer).unwrap();
    a.put(TRANSFERS, whole());
    let mut ends: Vec<_> = (0..=TRANSFERS).map(|_| a.ended()).collect();
    ends.sort_by_key(|end| end.0);
    for (id, (transfer, end)) in (0..).zip(&ends) {
        assert_eq!(*transfer, TransferId(id));
        assert!(matches!(end, Ok(_) | Err(PutError::Endpoint { .. })), "{way:?}: {end:?}");
    }
    assert!(matches!(ends[TRANSFERS as usize].1, Err(PutError::Endpoint { .. })), "{way:?}: {:?}", ends.last());
    assert!(matches!(a.worker.import(a.to_peer, &target.card()), Err(CommandError::NoEndpoint)));
    // What was posted may still arrive, so the target must be there for as long as its worker is.
    drop((a, b));
    drop(target);
}

pub(crate) fn a_worker_that_stops_has_sent_its_frames(way: &Way) {
    let [a, b] = pair(way);
    for kind in 0..100 {
        a.worker.send(a.to_peer, kind, vec![0; 1000]).unwrap();
    }
    drop(a);
    let mut heard = 0;
    while heard < 100 {
        match b.event() {
            Event::Frame(frame) => {
                assert_eq!(frame.kind, heard, "{way:?}");
                heard += 1;
            }
            Event::EndpointFailed { .. } => {} // the way back, which ended with its peer
            event => panic!("{way:?}: {event:?} in place of frame {heard}"),
        }
    }
}

/// Two ends, and memory of [`BYTES`] at each.
struct Memory {
    source: Region,
    target: Region,
    remote: RemoteRegion,
}

fn memory([a, b]: &[End; 2]) -> Memory {
    let (source, target) = (filled(&a.context, &pattern(BYTES)), b.context.allocate(BYTES).unwrap());
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    Memory { source, target, remote }
}

fn put_all(a: &End, memory: &Memory, transfer: u64) {
    a.put(transfer, side_by_side((&memory.source, 0), (memory.remote, 0), PIECE, (BYTES / PIECE) as u32));
}

pub(crate) fn once_a_cancel_is_said_to_be_over_not_a_byte_changes(way: &Way) {
    if way.options.route.is_none() {
        return; // one of the others again
    }
    let ends = pair(&way.roomy());
    let (a, memory) = (&ends[0], memory(&ends));
    let canary = vec![0xcc; BYTES as usize];
    // The second time: the first takes the pages.
    let takes = [0, 1].map(|transfer| {
        let start = Instant::now();
        put_all(a, &memory, transfer);
        a.done().1.unwrap();
        start.elapsed()
    })[1];
    let (mut cancelled, mut all) = (0, 0);
    for round in 0..ROUNDS_MAX {
        if round >= ROUNDS && cancelled > 0 {
            break;
        }
        let together = together(round);
        all += together;
        (0..together).for_each(|transfer| put_all(a, &memory, transfer));
        // From at once to the end, in no order, and early rather than late: half of them before a quarter has moved.
        let step = (round * 5 % ROUNDS) as u32;
        std::thread::sleep(takes * (TOGETHER as u32 * step * step) / ((ROUNDS - 1) * (ROUNDS - 1)) as u32);
        (0..together).for_each(|transfer| a.worker.cancel(TransferId(transfer)).unwrap());
        for _ in 0..together {
            match a.done().1 {
                Ok(_) => {}
                Err(PutError::Cancelled) => cancelled += 1,
                Err(error) => panic!("{way:?}: {error:?}"),
            }
        }
        memory.target.write(0, &canary).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert!(bytes(&memory.target) == canary, "{way:?}, round {round}: late bytes");
    }
    println!("{way:?}: {cancelled} of {all} cancelled, a whole one takes {takes:?}");
    assert!(cancelled > 0, "{way:?}: no cancel came in time");
    // What they held is free again.
    put_all(a, &memory, 0);
    a.done().1.unwrap();
    assert!(bytes(&memory.target) == pattern(BYTES), "{way:?}");
}

pub(crate) fn a_cancel_ends_the_transfer_that_it_names_and_no_other(way: &Way) {
    let ends = pair(&way.roomy());
    let (a, memory) = (&ends[0], memory(&ends));
    a.worker.cancel(TransferId(1)).unwrap(); // not known
    (1..=6).for_each(|transfer| put_all(a, &memory, transfer));
    (4..=6).for_each(|transfer| a.worker.cancel(TransferId(transfer)).unwrap());
    a.worker.cancel(TransferId(5)).unwrap(); // again
    let mut ended: Vec<_> = (0..6).map(|_| a.done()).collect();
    ended.sort_by_key(|(transfer, _)| *transfer);
    for (expected, (transfer, result)) in (1..=6).zip(ended) {
        assert_eq!(transfer, TransferId(expected), "{way:?}");
        match result {
            Ok(_) => {}
            Err(PutError::Cancelled) if expected >= 4 => {}
            Err(error) => panic!("{way:?}, {transfer:?}: {error:?}"),
        }
    }
    a.worker.cancel(TransferId(1)).unwrap(); // over
    put_all(a, &memory, 1);
    assert!(a.done().1.is_ok(), "{way:?}: a cancel from before the transfer is not for it");
    assert!(a.events.try_recv().is_err(), "{way:?}");
}

pub(crate) fn what_its_target_has_revoked_changes_not_a_byte_more(way: &Way) {
    if way.alone || !matches!(way.options.route, Some(Route::Landing | Route::Staged)) {
        return; // no other way has a part for the target to play
    }
    let ends = pair(&way.roomy());
    let ([a, b], memory) = (&ends, memory(&ends));
    let canary = vec![0xcc; BYTES as usize];
    let refused = PutError::Refused { refusal: Refusal::Revoked };
    let put = |transfer: u64, permit| {
        let part = side_by_side((&memory.source, 0), (memory.remote, 0), PIECE, (BYTES / PIECE) as u32);
        let permitted = Permitted { permit, inbox_only: transfer.is_multiple_of(2) };
        a.worker.put_permitted(a.to_peer, TransferId(transfer), vec![part], permitted, None).unwrap();
    };
    let (mut cut, mut all) = (0, 0);
    for round in 0..ROUNDS_MAX {
        if round >= ROUNDS && cut > 0 {
            break;
        }
        let (permit, together) = (Permit(round), together(round));
        all += together;
        b.worker.permit(a.epoch, permit);
        (0..together).for_each(|transfer| put(transfer, permit));
        std::thread::sleep(Duration::from_millis(round % ROUNDS));
        b.worker.revoke(a.epoch, permit).unwrap();
        match b.event() {
            Event::Revoked { epoch, permit: of } => assert_eq!((epoch, of), (a.epoch, permit)),
            event => panic!("{way:?}: {event:?} in place of a revocation"),
        }
        memory.target.write(0, &canary).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert!(bytes(&memory.target) == canary, "{way:?}, round {round}: late bytes");
        let (mut over, mut told) = (0, 0);
        while over < together {
            match a.event() {
                Event::TakesInbox { .. } => told += 1,
                Event::TransferDone { result: Ok(_), .. } => over += 1,
                Event::TransferDone { result: Err(error), .. } => {
                    assert_eq!(error, refused, "{way:?}");
                    (over, cut) = (over + 1, cut + 1);
                }
                event => panic!("{way:?}: {event:?}"),
            }
        }
        assert_eq!(told, together, "{way:?}");
        assert!(bytes(&memory.target) == canary, "{way:?}, round {round}: late bytes");
    }
    println!("{way:?}: {cut} of {all} cut off");
    assert!(cut > 0, "{way:?}: nothing was revoked in time");
    // What they held is free again.
    let permit = Permit(ROUNDS_MAX);
    b.worker.permit(a.epoch, permit);
    put(0, permit);
    a.ended().1.unwrap();
    assert!(bytes(&memory.target) == pattern(BYTES), "{way:?}");
    b.worker.expire(a.epoch, permit);
    put(0, permit);
    assert_eq!(a.ended().1, Err(refused), "{way:?}: what is over is not let in");
}
