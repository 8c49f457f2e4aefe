//! Explicit lists between memory of all kinds: the library's and the caller's, of GPUs and of hosts, mixed in one list.

use kvferry_wire::{Context, List, Region, RemoteRegion, Route, RouteReason, Run, TransferId};

use crate::child::{Kind, Setup, Target, other_device};
use crate::end::{End, pattern};
use crate::plan::Random;

/// More than one allocation of a GPU has at the least.
const BYTES: u64 = 3 << 20;

/// Local region and place in it, remote region and place in it, length.
type Listed = (usize, u64, usize, u64, u64);

/// Runs of random lengths, no byte of the targets twice. The places are multiples of `align`, but for some.
fn runs(random: &mut Random, kinds: u64, align: u64) -> Vec<Listed> {
    let mut runs = Vec::new();
    for remote in 0..kinds as usize {
        let mut place = random.below(1000);
        loop {
            let bytes =
                align * random.below(2 + 18000 / align) + if random.below(20) == 0 { random.below(16) } else { 0 };
            if place + bytes > BYTES {
                break;
            }
            runs.push((
                random.below(kinds) as usize,
                random.below((BYTES - bytes) / align) * align,
                remote,
                place,
                bytes,
            ));
            place = (place + bytes).next_multiple_of(align) + align * random.below(3);
        }
    }
    for top in (1..runs.len()).rev() {
        runs.swap(top, random.below(top as u64 + 1) as usize);
    }
    runs
}

/// Moves lists between regions of these kinds on both sides, and compares every byte.
fn check(route: Option<Route>, transports: Option<&str>, from: &[Kind], to: &[Kind], expected: (Route, RouteReason)) {
    check_between((Some(0), Some(other_device())), route, transports, (from, to), expected);
}

/// The same, of sides that have a GPU or none.
pub(crate) fn check_between(
    (here, there): (Option<u32>, Option<u32>),
    route: Option<Route>,
    transports: Option<&str>,
    (from, to): (&[Kind], &[Kind]),
    expected: (Route, RouteReason),
) {
    let transports_of_target = transports.map(str::to_owned);
    let setup = Setup { device: there, transports: transports_of_target, kinds: to.to_vec(), ..Setup::new(BYTES) };
    let mut target = Target::start(&setup);
    let end = End::start_on(here, route, transports, 4096, Context::allocate);
    let locals: Vec<Region> = from.iter().map(|kind| kind.region(&end.context, 0, BYTES)).collect();
    let source = pattern(BYTES + locals.len() as u64 * 8);
    let source: Vec<&[u8]> = (0..locals.len()).map(|index| &source[index * 8..][..BYTES as usize]).collect();
    locals.iter().zip(&source).for_each(|(region, bytes)| region.write(0, bytes).unwrap());
    let endpoint = end.worker.connect(&target.address, target.epoch).unwrap();
    let remotes: Vec<RemoteRegion> =
        target.cards.iter().map(|card| end.worker.import(endpoint, card).unwrap()).collect();
    for (seed, align) in [(1, 512), (2, 16), (3, 4), (4, 1)] {
        let runs = runs(&mut Random(seed), from.len().min(to.len()) as u64, align);
        let at = |base: u64, place: u64, bytes: u64| Run { address: base + place, bytes };
        let here: Vec<Run> = runs.iter().map(|run| at(locals[run.0].base(), run.1, run.4)).collect();
        let there: Vec<Run> = runs.iter().map(|run| at(target.cards[run.2].base, run.3, run.4)).collect();
        let list = List::new(locals.clone(), remotes.clone(), &here, &there).unwrap();
        target.fill(0xee);
        let stats = end.put(endpoint, list.parts()).unwrap();
        assert_eq!((stats.route, stats.reason), expected);
        let mut arrived = vec![0xee; to.len() * BYTES as usize];
        for (local, from, remote, to, bytes) in runs {
            let (from, to) = (from as usize, remote * BYTES as usize + to as usize);
            arrived[to..to + bytes as usize].copy_from_slice(&source[local][from..from + bytes as usize]);
        }
        assert!(target.holds(&arrived), "{route:?}, {align}");
    }
}

const ALL: [Kind; 5] = [Kind::Allocated, Kind::Callers, Kind::Segments, Kind::Host, Kind::CallersHost];

#[test]
#[ignore = "needs CUDA"]
fn land_in_memory_of_all_kinds() {
    check(None, None, &ALL, &ALL, (Route::Landing, RouteReason::GpuNotMapped));
    check(None, None, &[Kind::Callers; 3], &[Kind::Callers; 3], (Route::Landing, RouteReason::GpusOfOneHost));
    check(None, None, &[Kind::CallersHost; 2], &[Kind::Callers; 2], (Route::Landing, RouteReason::GpuNotMapped));
}

#[test]
#[ignore = "needs CUDA"]
fn are_copied_straight_where_all_is_mapped() {
    let mapped = [Kind::Allocated, Kind::Host, Kind::Segments, Kind::Segments, Kind::Host];
    check(Some(Route::Direct), None, &ALL, &mapped, (Route::Direct, RouteReason::Forced));
    check(None, None, &ALL, &mapped, (Route::Direct, RouteReason::TargetMapped));
}

/// The other way round: out of memory that is mapped here, by a kernel of this side.
#[test]
#[ignore = "needs CUDA"]
fn are_pulled_where_all_is_mapped() {
    let mapped = [Kind::Allocated, Kind::Host, Kind::Segments];
    let mut target = Target::start(&Setup { kinds: mapped.to_vec(), ..Setup::new(BYTES) });
    let end = End::start(None, None, 4096);
    let locals: Vec<Region> = ALL.iter().map(|kind| kind.region(&end.context, 0, BYTES)).collect();
    let endpoint = end.worker.connect(&target.address, target.epoch).unwrap();
    let remotes: Vec<RemoteRegion> =
        target.cards.iter().map(|card| end.worker.import(endpoint, card).unwrap()).collect();
    let runs = runs(&mut Random(9), 3, 16);
    for fill in [0x11, 0x77] {
        target.fill(fill);
        locals.iter().for_each(|region| region.write(0, &vec![0xee; BYTES as usize]).unwrap());
        // Each run of the target to where it is from, by which no byte here is written twice.
        let at = |base: u64, place: u64, bytes: u64| Run { address: base + place, bytes };
        let here: Vec<Run> = runs.iter().map(|run| at(locals[run.2].base(), run.3, run.4)).collect();
        let there: Vec<Run> = runs.iter().map(|run| at(target.cards[run.0].base, run.1, run.4)).collect();
        let list = List::new(locals.clone(), remotes.clone(), &here, &there).unwrap();
        end.worker.get(endpoint, TransferId(1), list.parts()).unwrap();
        let stats = end.done().unwrap();
        assert_eq!((stats.route, stats.reason), (Route::Direct, RouteReason::TargetMapped));
        let mut expected = vec![vec![0xee; BYTES as usize]; locals.len()];
        for run in &runs {
            expected[run.2][run.3 as usize..][..run.4 as usize].fill(fill);
        }
        let mut found = vec![0; BYTES as usize];
        for (region, expected) in locals.iter().zip(&expected) {
            region.read(0, &mut found).unwrap();
            assert!(found == *expected);
        }
    }
}

#[test]
#[ignore = "needs CUDA"]
fn are_staged_between_memory_of_all_kinds() {
    check(None, Some("tcp"), &ALL, &ALL, (Route::Staged, RouteReason::GpuNotMapped));
}
