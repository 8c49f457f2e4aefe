use super::*;
use crate::replay::made;

const MS: Duration = Duration::from_millis(1);

fn rules(frame_count: u32) -> Rules {
    Rules { in_flight_max: 2, frame_count, speed: Speed::Times(1.0), token_time: MS, seed: 1 }
}

/// Requests by arrival in ms, generated tokens, and ids of full blocks.
fn trace(requests: &[(u64, u64, &[u64])]) -> Trace {
    let request = |(arrival, output, ids): &(u64, u64, &[u64])| {
        Request::new(Duration::from_millis(*arrival), ids.len() as u64 * 512, *output, ids)
    };
    Trace { requests: requests.iter().map(request).collect() }
}

fn begun(begins: &[Begin]) -> Vec<(usize, usize, usize)> {
    begins.iter().map(|begin| (begin.request, begin.computed, begin.reused)).collect()
}

#[test]
fn requests_go_when_they_arrive_and_there_is_room() {
    let trace = trace(&[(5, 0, &[1]), (6, 0, &[1, 2]), (7, 0, &[1, 2, 3]), (9, 0, &[4])]);
    let mut dispatcher = Dispatcher::new(&trace, rules(8));
    assert_eq!(begun(&dispatcher.step(Duration::ZERO, &trace)), [(0, 0, 0)], "time begins with the first arrival");
    assert_eq!(dispatcher.next_step(Duration::ZERO), Some(MS));
    assert_eq!(begun(&dispatcher.step(MS, &trace)), [(1, 0, 0)], "what has not arrived is not used again");
    assert_eq!(begun(&dispatcher.step(2 * MS, &trace)), []);
    assert_eq!((dispatcher.next_step(2 * MS), dispatcher.waiting(2 * MS)), (None, 1));
    dispatcher.ended(2 * MS, 1, End::Arrived);
    assert_eq!(begun(&dispatcher.step(2 * MS, &trace)), [(2, 2, 2)]);
    dispatcher.ended(3 * MS, 0, End::Arrived);
    dispatcher.ended(3 * MS, 2, End::Arrived);
    assert_eq!(begun(&dispatcher.step(3 * MS, &trace)), []);
    assert_eq!(dispatcher.next_step(3 * MS), Some(4 * MS));
    assert!(!dispatcher.is_over());
    dispatcher.step(4 * MS, &trace);
    dispatcher.ended(4 * MS, 3, End::Arrived);
    assert!(dispatcher.is_over());
    assert_eq!(dispatcher.account(), Account { done: 4, rejected: 0, failed: 0 });
}

#[test]
fn frames_are_kept_until_the_last_token_is_generated() {
    // The first needs a frame for its prompt and one for what is generated.
    let trace = trace(&[(0, 100, &[1]), (0, 0, &[2, 3])]);
    let mut dispatcher = Dispatcher::new(&trace, rules(3));
    assert_eq!(begun(&dispatcher.step(Duration::ZERO, &trace)), [(0, 0, 0)]);
    dispatcher.ended(5 * MS, 0, End::Arrived);
    assert_eq!(begun(&dispatcher.step(6 * MS, &trace)), []);
    assert_eq!(dispatcher.next_step(6 * MS), Some(105 * MS), "the second has arrived and waits for frames");
    assert_eq!(begun(&dispatcher.step(104 * MS, &trace)), []);
    assert_eq!(begun(&dispatcher.step(105 * MS, &trace)), [(1, 0, 0)]);
}

#[test]
fn what_no_pool_has_room_for_is_rejected_and_named() {
    let trace = trace(&[(0, 0, &[1, 2, 3]), (0, 0, &[1]), (0, 1, &[1, 2])]);
    let mut dispatcher = Dispatcher::new(&trace, rules(2));
    assert_eq!(begun(&dispatcher.step(Duration::ZERO, &trace)), [(1, 0, 0)]);
    dispatcher.ended(Duration::ZERO, 1, End::Arrived);
    assert_eq!(begun(&dispatcher.step(Duration::ZERO, &trace)), []);
    assert!(dispatcher.is_over());
    assert_eq!(dispatcher.verdicts()[0], Some(Verdict::TooLong { blocks: 3, frames: 2 }));
    assert_eq!(dispatcher.account(), Account { done: 1, rejected: 2, failed: 0 });
}

#[test]
fn a_failed_request_leaves_no_prefix_and_what_is_exposed_is_not_used_again() {
    let trace = trace(&[(0, 0, &[1]), (0, 0, &[1]), (0, 0, &[1, 2, 3])]);
    let mut dispatcher = Dispatcher::new(&trace, rules(3));
    dispatcher.step(Duration::ZERO, &trace);
    let failed = |destination| {
        let exposed = Exposed { source: false, destination };
        End::Failed { line: "lost".into(), exposed }
    };
    dispatcher.ended(MS, 0, failed(false));
    assert_eq!(dispatcher.decode().capacity(), 3);
    dispatcher.ended(MS, 1, failed(true));
    assert_eq!((dispatcher.decode().capacity(), dispatcher.decode().quarantined()), (2, 1));
    assert_eq!(dispatcher.decode().held().count(), 0);
    assert_eq!(begun(&dispatcher.step(MS, &trace)), []);
    assert_eq!(dispatcher.account(), Account { done: 0, rejected: 1, failed: 2 });
}

/// Whatever fails, however long things take: every request of a trace is accounted for, once.
#[test]
fn every_request_is_accounted_for() {
    for (seed, frames, speed) in [(1, 40, Speed::Max), (2, 64, Speed::Times(10.0)), (3, 400, Speed::Times(0.5))] {
        let trace = made::trace(seed, 300);
        let mut dispatcher = Dispatcher::new(&trace, Rules { speed, seed, in_flight_max: 5, ..rules(frames) });
        let mut now = Duration::ZERO;
        // Requests under way, with the step at which each ends.
        let mut moving: VecDeque<(u64, usize)> = VecDeque::new();
        let mut begun = vec![0; trace.requests.len()];
        let mut steps = 0;
        while !dispatcher.is_over() {
            steps += 1;
            assert!(steps < 100_000, "stuck with {:?}", dispatcher.account());
            for begin in dispatcher.step(now, &trace) {
                begun[begin.request] += 1;
                moving.push_back((steps + Key::new(seed).word(steps) % 7, begin.request));
            }
            assert!(dispatcher.in_flight() <= 5);
            if let Some(at) = moving.iter().position(|(end, _)| *end <= steps) {
                let (_, request) = moving.remove(at).unwrap();
                let end = match request % 50 {
                    49 => {
                        let (source, destination) = (request % 150 == 49, request % 100 == 49);
                        End::Failed { line: "stalled".into(), exposed: Exposed { source, destination } }
                    }
                    _ => End::Arrived,
                };
                dispatcher.ended(now, request, end);
            }
            now += 3 * MS;
        }
        let account = dispatcher.account();
        assert_eq!(account.total(), 300);
        assert_eq!(account.failed, (0..300).filter(|request| begun[*request] == 1 && request % 50 == 49).count());
        for (request, verdict) in dispatcher.verdicts().iter().enumerate() {
            let rejected = matches!(verdict, Some(Verdict::TooLong { .. }));
            assert_eq!(begun[request], usize::from(!rejected), "request {request}");
        }
    }
}
