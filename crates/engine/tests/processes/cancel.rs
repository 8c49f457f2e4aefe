//! Requests that are cancelled at any moment, by either side, and slots that are used again the moment that they are quiet.

use std::thread;
use std::time::Duration;

use kvferry::Quiet;

use crate::child::with_source;
use crate::rank::{WAYS, key};

const PATIENCE: Duration = Duration::from_secs(20);

/// How many cancellations, over each way; nightly runs have more.
const TRIALS: &str = "KVFERRY_CANCEL_TRIALS";

fn trials() -> u64 {
    std::env::var(TRIALS).map_or(150, |trials| trials.parse().expect("a number"))
}

#[test]
fn nothing_is_written_once_a_cancelled_request_is_quiet() {
    for way in WAYS {
        let (mut source, destination, link) = with_source(way, PATIENCE);
        let (mut whole, mut cancelled) = (0, 0);
        // Half of the slots move while the others are watched.
        let halves = [(0..8).collect::<Vec<u32>>(), (8..16).collect()];
        let mut watched: Option<(Vec<u32>, Quiet)> = None;
        for trial in 0..trials() {
            let slots = &halves[usize::try_from(trial % 2).unwrap()];
            let key = key(trial, 0);
            let receive = destination.receive(link, key, slots).unwrap();
            let of_source = trial % 5 == 4;
            source.send(key, slots, 3).unwrap();
            // From before the first byte until after the last.
            thread::sleep(Duration::from_micros(trial * 97 % 2500));
            if of_source {
                source.cancel(key)
            } else {
                receive.cancel()
            }
            match receive.wait(PATIENCE).unwrap() {
                Ok(_) => whole += u32::from(destination.holds(slots, 3)),
                Err(_) => cancelled += 1,
            }
            let quiet = receive.wait_quiet(PATIENCE).unwrap_or_else(|error| {
                panic!("{way:?} trial {trial}: {error}: {:?}", destination.engine.quarantine())
            });
            assert_eq!(quiet.key(), key);
            destination.guard(slots);
            if let Some((slots, quiet)) = watched.replace((slots.clone(), quiet)) {
                assert!(destination.is_untouched(&slots), "{way:?}: written after {:?} was quiet", quiet.key());
            }
            let _ = source.outcome(key);
            source.quiet(key, PATIENCE).unwrap();
        }
        destination.watch(&(0..16).collect::<Vec<_>>(), Duration::from_millis(300));
        assert_eq!(whole + cancelled, u32::try_from(trials()).unwrap(), "{way:?}: a success that is none");
        assert!(destination.engine.quarantine().is_empty());
        println!("{way:?}: {whole} whole, {cancelled} cancelled");
    }
}
