//! A worker that is moved along by the threads that wait for it.

use std::thread;
use std::time::Instant;

use kvferry_wire::{Event, TransferId};

use super::end::{DEADLINE, End, Way, bytes, filled, pair, pattern, side_by_side};

/// And a transfer that nobody polls for any more ends all the same.
pub(crate) fn whoever_polls_or_waits_gets_what_it_waits_for(way: &Way) {
    const BYTES: u64 = 60_000;
    let [a, b] = pair(&way.roomy());
    let (source, target) = (filled(&a.context, &pattern(BYTES)), b.context.allocate(BYTES).unwrap());
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    let part = || side_by_side((&source, 0), (remote, 0), BYTES / 30, 30);
    let polled = |end: &End| {
        let start = Instant::now();
        loop {
            match end.events.try_recv() {
                Ok(Event::Progress { .. }) => {}
                Ok(event) => return event,
                Err(_) => assert!(start.elapsed() < DEADLINE, "{way:?}"),
            }
            if !end.worker.progress() {
                thread::yield_now(); // the other end may have to share this core
            }
        }
    };
    let waited_for = |end: &End| {
        let event = end.worker.drive(Instant::now() + DEADLINE, || end.events.try_recv().ok());
        event.unwrap_or_else(|| end.event())
    };
    for kind in 0..20 {
        target.write(0, &vec![0; BYTES as usize]).unwrap();
        a.worker.put_then_send(a.to_peer, TransferId(0), vec![part()], kind, Vec::new()).unwrap();
        // Alone, the two come to the same queue in either order.
        let events = thread::scope(|scope| {
            let frame = scope.spawn(|| waited_for(&b));
            [polled(&a), frame.join().unwrap()]
        });
        for event in events {
            assert!(
                matches!(&event, Event::Frame(frame) if frame.kind == kind)
                    || matches!(event, Event::TransferDone { result: Ok(_), .. }),
                "{way:?}: {event:?}"
            );
        }
        assert!(bytes(&target) == pattern(BYTES), "{way:?}");
    }
    target.write(0, &vec![0; BYTES as usize]).unwrap();
    a.put(1, part());
    for _ in 0..3 {
        a.worker.progress();
    }
    a.ended().1.unwrap();
    assert!(bytes(&target) == pattern(BYTES), "{way:?}");
}
