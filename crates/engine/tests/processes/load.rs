//! Mixed load with faults: a destination that goes on while its two sources are killed, stopped, continued and restarted
//! under it. Nothing is lost, nothing is stuck, memory stays flat.

use std::time::{Duration, Instant};

use kvferry::Receive;

use crate::child::{Other, footprint};
use crate::rank::{Rank, Way, all_slots, key};

/// How long; nightly runs have more.
const SECONDS: &str = "KVFERRY_FAULTS_SECONDS";

const PATIENCE: Duration = Duration::from_secs(2);

/// Time for whatever is under way to end, once nothing goes wrong any more.
const LONG: Duration = Duration::from_secs(30);

/// Sources of one instance each, so that the death of one is no concern of the other's.
const SOURCES: u32 = 2;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn a_destination_survives_its_sources() {
    let seconds = std::env::var(SECONDS).map_or(12, |seconds| seconds.parse().expect("a number of seconds"));
    let (mut random, end) = (Random(0x9e37_79b9), Instant::now() + Duration::from_secs(seconds));
    let destination = Rank::start(Way::Direct, 0, PATIENCE);
    destination.guard(&all_slots());
    let to = [destination.card()];
    let mut sources: Vec<(Other, kvferry::Link, bool)> = Vec::new();
    for rank in 0..SOURCES {
        let mut source = Other::start(Way::Direct, rank, PATIENCE);
        let from = [source.card.clone()];
        let link = source.connect([&from, &to], || destination.engine.connect(&from, &to).unwrap());
        sources.push((source, link, false));
    }
    let (mut well, mut badly, mut refused, mut restarts) = (0u32, 0u32, 0u32, 0u32);
    let mut before = None;
    // Each source has a share of the slots; a receive has some of them until they are quiet.
    let share = 32u32;
    let mut free: Vec<Vec<u32>> = (0..SOURCES).map(|source| (source * share..(source + 1) * share).collect()).collect();
    let mut held: Vec<(usize, Vec<u32>, Receive)> = Vec::new();
    let mut request = 0;
    while Instant::now() < end {
        let index = usize::try_from(random.below(u64::from(SOURCES))).unwrap();
        let (source, link, frozen) = &mut sources[index];
        match random.below(100) {
            0 => {
                source.go_on();
                source.kill();
                let rank = u32::try_from(index).unwrap();
                *source = Other::start(Way::Direct, rank, PATIENCE);
                let from = [source.card.clone()];
                source.connect([&from, &to], || ());
                (*frozen, restarts) = (false, restarts + 1);
            }
            1..=2 => {
                if *frozen {
                    source.go_on()
                } else {
                    source.stop()
                }
                *frozen ^= true;
            }
            3..=9 => {
                if let Some((.., receive)) = held.get(usize::try_from(random.below(8)).unwrap()) {
                    receive.cancel();
                }
            }
            10..=59 if free[index].len() >= 4 => {
                request += 1;
                let count = usize::try_from(1 + random.below(4)).unwrap();
                let slots: Vec<u32> = free[index].drain(..count).collect();
                // They are nobody's: what was there before has not changed.
                assert!(destination.is_untouched(&slots), "{slots:?} were written");
                match destination.receive(*link, key(request, 0), &slots) {
                    Ok(receive) => {
                        if !*frozen {
                            let _ = source.send(key(request, 0), &slots, 7);
                        }
                        held.push((index, slots, receive));
                    }
                    Err(_) => {
                        refused += 1;
                        free[index].extend(slots);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            }
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
        held.retain_mut(|(index, slots, receive)| {
            let back = receive.poll_quiet().is_ok();
            if back {
                match receive.poll().expect("quiet requests have ended") {
                    Ok(_) => {
                        assert!(destination.holds(slots, 7), "{slots:?} are said to be whole");
                        well += 1;
                    }
                    Err(_) => badly += 1,
                }
                destination.guard(slots);
                free[*index].append(slots);
            }
            !back
        });
        if before.is_none() && restarts == 2 {
            before = Some(footprint());
        }
    }
    for (source, _, frozen) in &sources {
        if *frozen {
            source.go_on();
        }
    }
    let until = Instant::now() + LONG;
    for (_, slots, receive) in held {
        assert!(receive.wait(until.saturating_duration_since(Instant::now())).is_some(), "{slots:?} never ended");
        let quiet = receive.wait_quiet(until.saturating_duration_since(Instant::now()));
        assert!(quiet.is_ok(), "{quiet:?}: {:?}", destination.engine.quarantine());
    }
    println!("{seconds} s: {well} well, {badly} badly, {refused} not posted, {restarts} restarts");
    assert!(well > 20, "{well} requests went well");
    if let Some((descriptors, bytes)) = before {
        let (descriptors_now, bytes_now) = footprint();
        println!("descriptors {descriptors} -> {descriptors_now}, resident {bytes} -> {bytes_now}");
        assert!(descriptors_now <= descriptors + 40, "{descriptors} descriptors grew to {descriptors_now}");
        assert!(bytes_now <= bytes + (96 << 20), "{bytes} B grew to {bytes_now} B");
    }
}
