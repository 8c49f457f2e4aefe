//! A rank that is killed and started anew under its name: the survivor does nothing but try again.

use std::time::{Duration, Instant};

use kvferry_test_process::within;

use crate::child::{Other, with_destination, with_source};
use crate::rank::{WAYS, all_slots, key};

const PATIENCE: Duration = Duration::from_secs(20);

/// How soon the first request must succeed once the rank is back.
const BACK: Duration = Duration::from_secs(2);

#[test]
fn a_restarted_source_serves_the_survivor_at_once() {
    for way in WAYS {
        let (mut source, destination, link) = with_source(way, PATIENCE);
        let slots = all_slots();
        let mut requests = 0..;
        let mut next_life = || {
            let request = requests.next().unwrap();
            let receive = destination.receive(link, key(request, 0), &slots).unwrap();
            // In the middle of a request, which is lost.
            let _ = source.send(key(request, 0), &slots, 1);
            source.process.kill();
            let _ = receive.wait(PATIENCE).unwrap();
            source = Other::start(way, 0, PATIENCE);
            let (from, to) = (source.card.clone(), destination.card());
            source.connect([&from, &to], || ());
            let back = Instant::now();
            for attempt in 1.. {
                assert!(back.elapsed() < PATIENCE, "{way:?}: nothing moved within {:?}", back.elapsed());
                let key = key(request, attempt);
                let Ok(receive) = destination.receive(link, key, &slots[..4]) else { continue };
                let _ = source.send(key, &slots[..4], 9);
                if receive.wait(PATIENCE).unwrap().is_ok() {
                    assert!(destination.holds(&slots[..4], 9));
                    println!("{way:?}: moved {:?} after it was back, attempt {attempt}", back.elapsed());
                    break;
                }
            }
            back.elapsed()
        };
        (0..3).for_each(|_| within(BACK, &mut next_life));
    }
}

#[test]
fn a_restarted_destination_is_served_by_the_survivor_at_once() {
    for way in WAYS {
        let (source, mut destination, link) = with_destination(way, PATIENCE);
        let slots = all_slots();
        source.fill(&slots, 5);
        let mut requests = 0..;
        let mut next_life = || {
            let request = requests.next().unwrap();
            destination.process.kill();
            destination = Other::start(way, 0, PATIENCE);
            let (from, to) = (source.card(), destination.card.clone());
            destination.connect([&from, &to], || ());
            let back = Instant::now();
            for attempt in 1.. {
                assert!(back.elapsed() < PATIENCE, "{way:?}: nothing moved within {:?}", back.elapsed());
                let key = key(request, attempt);
                let Ok(()) = destination.receive(key, &slots[..4]) else { continue };
                let Ok(send) = source.send(link, key, &slots[..4]) else {
                    destination.cancel(key);
                    continue;
                };
                if send.wait(PATIENCE).unwrap().is_ok() {
                    assert_eq!(destination.outcome(key), Ok(()));
                    println!("{way:?}: moved {:?} after it was back, attempt {attempt}", back.elapsed());
                    break;
                }
            }
            back.elapsed()
        };
        (0..2).for_each(|_| within(BACK, &mut next_life));
    }
}
