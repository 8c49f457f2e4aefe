//! What must hold when something goes wrong, at an operation that a script names:
//!
//! | what goes wrong | what holds |
//! | --- | --- |
//! | a put, a get or a flush fails | its transfer ends with that error, and the next one is whole |
//! | an endpoint fails, or its peer dies | its transfers end with an error each, [`Event::EndpointFailed`] is told once, other endpoints go on |
//! | a message of the inbox is lost | its transfer ends at the stall deadline, or had no need of the message |
//! | such a message comes twice, or late | the bytes are right |
//! | what the target answers through fails | as if the source's endpoint had failed, if the target has one to the source |
//! | a message comes in part, and no more of it | those of other connections come |
//! | a frame is lost, the next of which came by a ring | its connection fails by name, at both ends |
//! | such a message is overtaken or damaged | the transfer ends, and touches nothing outside of what is registered |
//! | anything of that, at random, among many transfers and cancels | each ends once; what ends well is whole |
//!
//! and always: every rule of `ucp.h` that the fake watches is kept.

mod messages;
mod noise;
mod operations;

use std::time::Duration;

use kvferry_fake_ucx::{Act, Fault, Rule, Script, Session, install};
use kvferry_wire::{Event, PutError, Region, RemoteRegion, Route, TransferId};

use crate::VERSION;
use crate::suite::end::{End, Way, bytes, filled, pair, pattern, side_by_side};

pub(crate) use messages::*;
pub(crate) use noise::*;
pub(crate) use operations::*;

/// The tests of the modules here.
macro_rules! faults {
    () => {
        $crate::faults::faults! {
            a_put_that_fails_fails_its_transfer_and_not_the_next
            a_get_that_fails_fails_its_transfer_and_not_the_next
            a_flush_that_fails_fails_its_transfer_and_not_the_next
            an_endpoint_that_fails_ends_its_transfers_and_no_others
            a_peer_that_dies_ends_its_transfers_and_no_others
            a_lost_message_costs_at_most_the_stall_deadline
            a_message_that_comes_twice_or_late_changes_nothing
            a_message_that_is_overtaken_or_damaged_ends_its_transfer_or_changes_nothing
            a_lost_frame_is_missed_and_fails_the_connection
            a_message_that_comes_in_part_holds_up_its_own_connection_only
            a_connection_is_left_when_its_puts_have_landed
            a_cancel_that_is_not_answered_ends_at_the_stall_deadline
            a_source_whose_answers_are_cut_off_is_told
            noise_of_every_kind_loses_transfers_and_never_bytes
        }
    };
    ($($test:ident)*) => { $(
        #[test]
        fn $test() {
            $crate::faults::$test();
        }
    )* };
}

pub(crate) use faults;

/// Runs a behaviour over each way, without faults and with everything late.
pub(crate) fn run(behaviour: fn(&Way)) {
    let late = kvferry_fake_ucx::Noise { seed: 7, one_in: 3, faults: &[Fault::Delay(1), Fault::Delay(40)] };
    for noise in [None, Some(late)] {
        for way in Way::all(None, true) {
            let _session = play(Script { noise, ..Script::default() });
            behaviour(&way);
        }
    }
    let _session = play(Script::default());
    for way in Way::all(None, true) {
        behaviour(&Way { alone: true, ..way });
    }
}

fn play(script: Script) -> Session {
    install(VERSION).play(script)
}

/// One fault of one worker: 0 is the source, 1 the target.
fn once(worker: usize, act: Act, nth: u64, fault: Fault) -> Session {
    play(Script { rules: vec![Rule { worker, act, nth, fault }], ..Script::default() })
}

/// So many chunks that a transfer meets every limit, and few enough for hundreds of tests.
const BYTES: u64 = 20_000;

/// A transfer that waits so long for its peer has waited enough.
const STALL: Duration = Duration::from_millis(200);

/// Two ends with memory of [`BYTES`] each.
struct Stage {
    a: End,
    b: End,
    source: Region,
    target: Region,
    remote: RemoteRegion,
}

fn way(route: Route, stall_deadline: Duration) -> Way {
    let way = Way::all(None, true).into_iter().find(|way| way.options.route == Some(route)).unwrap();
    // Every frame is a message that the script can have its way with.
    Way { options: kvferry_wire::ContextOptions { stall_deadline, ring_bytes: 0, ..way.options.clone() }, ..way }
}

impl Stage {
    fn new(route: Route, stall_deadline: Duration) -> Self {
        Self::over(&way(route, stall_deadline))
    }

    fn over(way: &Way) -> Self {
        let [a, b] = pair(way);
        let (source, target) = (filled(&a.context, &pattern(BYTES)), b.context.allocate(BYTES).unwrap());
        let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
        Self { a, b, source, target, remote }
    }

    /// In place of a connection that has failed.
    fn connect_again(&mut self) {
        self.a.to_peer = self.a.worker.connect(self.b.worker.address(), self.b.epoch).unwrap();
        self.remote = self.a.worker.import(self.a.to_peer, &self.target.card()).unwrap();
    }

    fn put(&self, transfer: u64) {
        self.a.put(transfer, side_by_side((&self.source, 0), (self.remote, 0), 500, (BYTES / 500) as u32));
    }

    /// The other way.
    fn pull(&self, transfer: u64) {
        let part = side_by_side((&self.source, 0), (self.remote, 0), 500, (BYTES / 500) as u32);
        self.a.worker.get(self.a.to_peer, TransferId(transfer), vec![part]).unwrap();
    }

    fn clear(&self) {
        self.target.write(0, &vec![0; BYTES as usize]).unwrap();
    }

    fn is_whole(&self) -> bool {
        bytes(&self.target) == pattern(BYTES)
    }

    /// Moves everything once more, which must go well.
    fn check_next(&self, what: &str) {
        self.source.write(0, &pattern(BYTES)).unwrap();
        self.clear();
        self.put(u64::MAX);
        let (transfer, result) = self.a.ended();
        assert_eq!(transfer, TransferId(u64::MAX), "{what}");
        result.unwrap_or_else(|error| panic!("{what}: {error:?}"));
        assert!(self.is_whole(), "{what}");
    }

    /// The end of the transfer that is under way, and whether the endpoint failed up to then.
    fn end(&self) -> (Result<(), PutError>, bool) {
        let mut failed = false;
        loop {
            match self.a.event() {
                Event::TransferDone { result, .. } => return (result.map(|_| ()), failed),
                Event::EndpointFailed { .. } => failed = true,
                Event::BadFrame(_) => {} // damaged
                event => panic!("{event:?}"),
            }
        }
    }
}
