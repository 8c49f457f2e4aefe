//! A peer that is dead or frozen before it has connected: the survivor is told who, in time, and connects to the next life, or
//! to the same one once it goes on.

use std::time::{Duration, Instant};

use kvferry::ConnectError;
use kvferry_test_process::within;

use crate::child::Other;
use crate::rank::{Rank, WAYS, Way, key};

const PATIENCE: Duration = Duration::from_secs(2);

const LATE: Duration = Duration::from_secs(1);

#[test]
fn a_source_that_does_not_connect_is_named_in_time() {
    who_does_not_connect_is_named_in_time(true);
}

#[test]
fn a_destination_that_does_not_connect_is_named_in_time() {
    who_does_not_connect_is_named_in_time(false);
}

/// `sends`: the other process is the source.
fn who_does_not_connect_is_named_in_time(sends: bool) {
    for way in WAYS {
        for killed in [true, false] {
            within(PATIENCE + LATE, || who_does_not_connect_is_named(sends, way, killed));
        }
    }
}

/// How long the survivor waited.
fn who_does_not_connect_is_named(sends: bool, way: Way, killed: bool) -> Duration {
    let (mut other, here) = (Other::start(way, 0, PATIENCE), Rank::start(way, 0, PATIENCE));
    if killed {
        other.process.kill()
    } else {
        other.process.stop()
    }
    let cards = |other: &Other| {
        let [here, other] = [here.card(), other.card.clone()];
        if sends { [other, here] } else { [here, other] }
    };
    let [from, to] = cards(&other);
    let asked = Instant::now();
    let error = here.engine.connect(&from, &to).unwrap_err();
    let took = asked.elapsed();
    println!("{way:?}, killed {killed}: {error} after {took:?}");
    let name = if sends { "source rank 0" } else { "destination rank 0" };
    assert!(error.to_string().contains(name), "{way:?}: {error}");
    assert!(killed || matches!(error, ConnectError::NoAnswer { .. }), "{way:?}: {error}");
    if killed {
        other = Other::start(way, 0, PATIENCE);
    } else {
        other.process.go_on();
    }
    let [from, to] = cards(&other);
    let link = other.connect([&from, &to], || {
        let until = Instant::now() + 5 * PATIENCE;
        loop {
            match here.engine.connect(&from, &to) {
                Ok(link) => break link,
                Err(error) => assert!(Instant::now() < until, "{way:?}: {error}"),
            }
        }
    });
    if sends {
        let receive = here.receive(link, key(1, 0), &[3, 5]).unwrap();
        other.send(key(1, 0), &[3, 5], 7).unwrap();
        assert!(receive.wait(5 * PATIENCE).unwrap().is_ok(), "{way:?}");
        assert!(here.holds(&[3, 5], 7), "{way:?}");
    } else {
        other.receive(key(1, 0), &[3, 5]).unwrap();
        let send = here.send(link, key(1, 0), &[3, 5]).unwrap();
        assert!(send.wait(5 * PATIENCE).unwrap().is_ok(), "{way:?}");
        assert_eq!(other.outcome(key(1, 0)), Ok(()), "{way:?}");
    }
    took
}
