//! A GPU on one side, and none on the other: what is offloaded to a host, and what comes back.

use std::time::Duration;

use kvferry_test_process::{Process, setup};
use kvferry_wire::{Context, PutError, RegionCard, Route, RouteReason, TransferId};

use crate::child::{Kind, Setup, Target, other_device};
use crate::end::{End, pattern};
use crate::lists::check_between;
use crate::plan::{Random, Shape};
use crate::right::{check_cancelled, check_random, check_sizes};

const BYTES: u64 = 4 << 20;

/// A source with a GPU and a target without, or the other way round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Into memory that is mapped, or not.
    ToHost(Kind),
    ToGpu(Kind),
}

const WAYS: [Way; 2] = [Way::ToHost(Kind::CallersHost), Way::ToGpu(Kind::Allocated)];

impl Way {
    fn setup(self, bytes: u64, transports: Option<&str>) -> Setup {
        let (device, kind) = match self {
            Self::ToHost(kind) => (None, kind),
            Self::ToGpu(kind) => (Some(other_device()), kind),
        };
        Setup { device, kinds: vec![kind], transports: transports.map(str::to_owned), ..Setup::new(bytes) }
    }

    fn start(self, route: Option<Route>, transports: Option<&str>, bytes: u64) -> End {
        match self {
            Self::ToHost(_) => End::start_on(Some(0), route, transports, bytes, Context::allocate_device),
            Self::ToGpu(_) => End::start_on(None, route, transports, bytes, Context::allocate),
        }
    }

    fn reason(self) -> RouteReason {
        match self {
            Self::ToHost(_) => RouteReason::HostNotMapped,
            Self::ToGpu(_) => RouteReason::NoGpu,
        }
    }
}

fn check(way: Way, transports: Option<&str>, expected: (Route, RouteReason)) {
    let mut target = Target::start(&way.setup(BYTES, transports));
    let end = way.start(None, transports, BYTES);
    let (endpoint, remote) = end.connect(&target);
    let part = Shape::blocks(4096, 100, &mut Random(1)).part(&end.pool, remote);
    let stats = end.put(endpoint, vec![part]).unwrap();
    assert_eq!((stats.route, stats.reason), expected);
    check_sizes(&end, &mut target);
    check_random(&end, &mut target, 2);
}

#[test]
#[ignore = "needs CUDA"]
fn land_in_the_inbox() {
    for way in [WAYS[0], WAYS[1], Way::ToGpu(Kind::Callers)] {
        check(way, None, (Route::Landing, way.reason()));
    }
}

/// As between hosts.
#[test]
#[ignore = "needs CUDA"]
fn are_staged_over_tcp() {
    for way in WAYS {
        check(way, Some("tcp"), (Route::Staged, way.reason()));
    }
}

#[test]
#[ignore = "needs CUDA"]
fn go_straight_into_host_memory_that_is_mapped() {
    check(Way::ToHost(Kind::Host), None, (Route::Direct, RouteReason::TargetMapped));
}

/// Parts of one transfer in memory of different kinds.
#[test]
#[ignore = "needs CUDA"]
fn lists_of_all_kinds() {
    let (gpu, host) = ([Kind::Allocated, Kind::CallersHost, Kind::Callers], [Kind::Host, Kind::CallersHost]);
    let other = Some(other_device());
    for (transports, route) in [(None, Route::Landing), (Some("tcp"), Route::Staged)] {
        check_between((Some(0), None), None, transports, (&gpu, &host), (route, RouteReason::HostNotMapped));
        check_between((None, other), None, transports, (&host, &gpu), (route, RouteReason::NoGpu));
    }
}

/// Chunks that are no whole number of units, and few of them.
#[test]
#[ignore = "needs CUDA"]
fn an_inbox_of_odd_chunks() {
    for way in WAYS {
        for route in [Route::Landing, Route::Staged] {
            let mut target = Target::start(&Setup { chunk_bytes: 3000, ..way.setup(BYTES, None) });
            let end = way.start(Some(route), None, BYTES);
            check_random(&end, &mut target, 1);
        }
    }
}

/// A target that has no room for a unit takes nothing, and says so.
#[test]
#[ignore = "needs CUDA"]
fn an_inbox_of_tiny_chunks_is_refused() {
    for way in WAYS {
        let target = Target::start(&Setup { chunk_bytes: 500, ..way.setup(BYTES, None) });
        let end = way.start(None, None, BYTES);
        let (endpoint, remote) = end.connect(&target);
        let part = Shape::blocks(4096, 100, &mut Random(1)).part(&end.pool, remote);
        let refused = end.put(endpoint, vec![part]);
        assert!(matches!(refused, Err(PutError::RouteUnavailable { .. } | PutError::Refused { .. })), "{refused:?}");
    }
}

#[test]
#[ignore = "needs CUDA"]
fn what_is_cancelled_is_over() {
    let bytes = 16 << 20;
    for (way, route) in WAYS.into_iter().flat_map(|way| [(way, Route::Landing), (way, Route::Staged)]) {
        let mut target = Target::start(&way.setup(bytes, None));
        let end = way.start(Some(route), None, bytes);
        check_cancelled(&end, &mut target, (0..10).map(|round| Duration::from_micros(300 * round)));
    }
}

/// Sources that die in the middle: what they were granted serves others.
#[test]
#[ignore = "needs CUDA"]
fn sources_that_die() {
    for to_host in [true, false] {
        let way = WAYS[usize::from(!to_host)];
        let mut target = Target::start(&way.setup(BYTES, None));
        for _ in 0..2 {
            let setup = (to_host, &target.address, target.epoch, &target.card);
            let (mut source, mut begun) = Process::start::<()>("one_sided::source", &setup, |_| {});
            begun.next().unwrap();
            source.kill();
        }
        let end = way.start(None, None, BYTES);
        let shape = Shape::blocks(4096, (BYTES / 4096) as u32, &mut Random(2));
        let (endpoint, remote) = end.connect(&target);
        end.put(endpoint, vec![shape.part(&end.pool, remote)]).unwrap();
        let mut expected = vec![0; BYTES as usize];
        shape.apply(&pattern(BYTES), &mut expected);
        assert!(target.holds(&expected));
    }
}

#[test]
#[ignore = "a process that is killed; does nothing by itself"]
fn source() {
    let Some((to_host, address, epoch, card)) = setup::<(bool, Vec<u8>, u64, RegionCard)>() else { return };
    let end = WAYS[usize::from(!to_host)].start(None, None, BYTES);
    let endpoint = end.worker.connect(&address, epoch).unwrap();
    let remote = end.worker.import(endpoint, &card).unwrap();
    let shape = Shape::blocks(4096, (BYTES / 4096) as u32, &mut Random(1));
    for round in 0.. {
        (0..4).for_each(|id| end.worker.put(endpoint, TransferId(id), vec![shape.part(&end.pool, remote)]).unwrap());
        for _ in 0..4 {
            end.done().unwrap();
        }
        if round == 3 {
            kvferry_test_process::say(&());
        }
    }
}
