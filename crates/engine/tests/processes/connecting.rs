//! A peer that is dead or frozen before it has connected: the survivor is told who, in time, and connects to the next life, or
//! to the same one once it goes on.

use std::time::{Duration, Instant};

use kvferry::ConnectError;

use crate::child::Other;
use crate::rank::{Rank, WAYS, key};

const PATIENCE: Duration = Duration::from_secs(2);

#[test]
fn who_does_not_connect_is_named_in_time() {
    for way in WAYS {
        for killed in [true, false] {
            let (mut source, destination) = (Other::start(way, 0, PATIENCE), Rank::start(way, 0, PATIENCE));
            let to = destination.card();
            if killed {
                source.process.kill()
            } else {
                source.process.stop()
            }
            let asked = Instant::now();
            let error = destination.engine.connect(&source.card, &to).unwrap_err();
            let took = asked.elapsed();
            println!("{way:?}, killed {killed}: {error} after {took:?}");
            assert!(error.to_string().contains("source rank 0"), "{way:?}: {error}");
            assert!(killed || matches!(error, ConnectError::NoAnswer { .. }), "{way:?}: {error}");
            assert!(took < PATIENCE + Duration::from_secs(1), "{way:?}: {error} after {took:?}");
            if killed {
                source = Other::start(way, 0, PATIENCE);
            } else {
                source.process.go_on();
            }
            let from = source.card.clone();
            let link = source.connect([&from, &to], || {
                let until = Instant::now() + 5 * PATIENCE;
                loop {
                    match destination.engine.connect(&from, &to) {
                        Ok(link) => break link,
                        Err(error) => assert!(Instant::now() < until, "{way:?}: {error}"),
                    }
                }
            });
            let receive = destination.receive(link, key(1, 0), &[3, 5]).unwrap();
            source.send(key(1, 0), &[3, 5], 7).unwrap();
            assert!(receive.wait(5 * PATIENCE).unwrap().is_ok(), "{way:?}");
            assert!(destination.holds(&[3, 5], 7), "{way:?}");
        }
    }
}
