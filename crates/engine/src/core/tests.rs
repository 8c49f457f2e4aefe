//! Two state machines that talk through a script: what each event does.

mod forged;
mod late;

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use kvferry_layout::{
    Digest, Dtype, GroupKind, GroupSpec, Layer, LayerMask, RankSpec, Role, RowSpec, Slot, block_major,
};
use kvferry_match::{BlockMap, Side, assign};
use kvferry_wire::{PutError, Route, RouteReason, Status, TransferStats};

use super::handshake::EARLY_HELLOS_MAX;
use super::{Action, Core, Handle, Introduction, Limits, LinkId, PARTS_MAX, PartSpec, Peer, PutId, Ticket};
use crate::error::{ConnectError, PeerName, PostError, PushError, RequestError, TransferError};
use crate::message::{
    About, Bye, CallId, Done, Hello, Late, Message, Moved, Refusal, Refused, RequestKey, Serial, Stopped, Want, Welcome,
};

const PATIENCE: Duration = Duration::from_secs(10);
const RESEND: Duration = Duration::from_millis(500);
const REQUESTS_MAX: usize = 1 << 14;
const LINK: LinkId = LinkId(0);
const SOURCE: u64 = 100;
const DESTINATION: u64 = 200;
const BYTES: u64 = 2 * 1024;

/// The call that the other side connects with, and this side's.
const CALL: CallId = CallId(77);
const OWN_CALL: CallId = CallId(0);

/// A rank of the other instance, with a template of one key row of 1 KiB a slot.
fn peer() -> Peer {
    static PEER: LazyLock<Peer> = LazyLock::new(make_peer);
    PEER.clone()
}

fn make_peer() -> Peer {
    let key = RowSpec::single(Role::Key, Dtype::U8, LayerMask::all(1), 1, 64).unwrap();
    let kind = GroupKind::paged(16);
    let groups = vec![GroupSpec { kind, slot_count: 4, pools: vec![vec![key]] }];
    let spec = RankSpec { hidden_layers: 1, layers: vec![Layer(0)], tp_rank: 0, tp_size: 1, groups };
    let table = block_major(&spec).unwrap();
    let assignment = &assign([(0, &table)], [(0, &table)]).unwrap()[0];
    let (rows, template) = (assignment.rows(0), assignment.template(0).unwrap());
    Peer { instance: String::new(), rank: 0, born: 0, rows, template, assignment: None }
}

fn new_core() -> Core {
    let mut core = Core::new(Limits { patience: PATIENCE, resend: RESEND, requests_max: REQUESTS_MAX, verify: false });
    core.introduce(Introduction { own_layers: 0..1, ..Introduction::default() });
    core
}

fn key(request: u64) -> RequestKey {
    RequestKey { request, attempt: 0 }
}

fn about(request: u64, serial: u64) -> About {
    About { key: key(request), serial: Serial(serial) }
}

fn ticket(request: u64) -> Ticket {
    Ticket { link: LINK, key: key(request) }
}

fn maps() -> Vec<BlockMap> {
    vec![BlockMap::new(0, vec![Some(Slot(1)), Some(Slot(2))])]
}

fn want(request: u64, serial: u64) -> Want {
    let expectation = peer().template.expectation(&maps(), 0..32).unwrap();
    let (bytes, plan) = (expectation.bytes, expectation.digest);
    Want { about: about(request, serial), tokens: 0..32, bytes, plan, block_maps: maps() }
}

fn hello(source: bool, call: CallId, answers: Option<CallId>) -> Hello {
    let template = peer().template.digest();
    let (instance, card) = (String::new(), vec![1]);
    Hello { call, answers, source, instance, rank: 0, born: 9, template, card }
}

/// The answer to a call, from a rank that has wanted nothing so far.
fn welcome(call: CallId) -> Message {
    Message::Welcome(Welcome { call, floor: 0 })
}

fn other(side: Side) -> u64 {
    if side == Side::Source { DESTINATION } else { SOURCE }
}

fn connecting(now: Instant, side: Side) -> Core {
    let mut core = new_core();
    core.connect(now, LINK, side, 0, BTreeMap::from([(other(side), peer())]));
    core
}

/// A connected side of a pair.
fn connected(now: Instant, side: Side) -> Core {
    let mut core = connecting(now, side);
    let greeting = hello(side != Side::Source, CALL, None);
    assert_eq!(said(&core.heard(now, other(side), Message::Hello(greeting))), [welcome(CALL)]);
    let actions = core.heard(now, other(side), welcome(OWN_CALL));
    assert!(matches!(actions[..], [Action::Connected { link: LINK }]), "{actions:?}");
    core
}

/// A send of the whole request.
fn send(core: &mut Core, now: Instant, request: u64) -> Result<Vec<Action>, PostError> {
    let mut actions = core.send(now, ticket(request), maps(), 0..32)?;
    let whole = PartSpec { tokens: 0..32, ..PartSpec::default() };
    actions.extend(core.push(now, ticket(request), whole, true).map_or_else(|_| Vec::new(), |(_, pushed)| pushed));
    Ok(actions)
}

fn receive(core: &mut Core, now: Instant, request: u64) -> Result<Vec<Action>, PostError> {
    core.receive(now, key(request), &[LINK], &maps(), &(0..32))
}

fn said(actions: &[Action]) -> Vec<Message> {
    let said = actions.iter().filter_map(|action| match action {
        Action::Say { message, .. } => Some(message.clone()),
        _ => None,
    });
    said.collect()
}

fn put(actions: &[Action]) -> PutId {
    let put = actions.iter().find_map(|action| match action {
        Action::Put { epoch: DESTINATION, put, plan, .. } if plan.bytes() == BYTES => Some(*put),
        _ => None,
    });
    put.unwrap_or_else(|| panic!("{actions:?}"))
}

/// The error of a request that has ended with one.
fn failure(actions: &[Action]) -> &TransferError {
    let outcome = actions.iter().find_map(|action| match action {
        Action::Sent { outcome: Err(error), .. } | Action::Received { outcome: Err(error), .. } => Some(error),
        _ => None,
    });
    match outcome {
        Some(RequestError { errors, .. }) if errors.len() == 1 => &errors[0].error,
        _ => panic!("{actions:?}"),
    }
}

fn is_quiet(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::Quiet { .. }))
}

fn stats() -> TransferStats {
    let (route, reason) = (Route::Direct, RouteReason::TargetMapped);
    TransferStats { bytes: BYTES, runs: 2, elapsed: Duration::from_millis(3), route, reason }
}

/// A source with a write in flight, as asked for by a real destination.
fn moving(now: Instant) -> (Core, Core, PutId) {
    let (mut source, mut destination) = (connected(now, Side::Source), connected(now, Side::Destination));
    let wants = said(&receive(&mut destination, now, 7).unwrap());
    let got = said(&source.heard(now, DESTINATION, wants[0].clone()));
    assert_eq!(got, [Message::Got(about(7, 0))], "no send is posted yet");
    assert!(destination.heard(now, SOURCE, got[0].clone()).is_empty());
    let put = put(&send(&mut source, now, 7).unwrap());
    (source, destination, put)
}

#[test]
fn a_request_goes_through_want_put_done_and_acknowledgement() {
    let now = Instant::now();
    let (mut source, mut destination, put) = moving(now);
    let moved = said(&source.put_progress(now, put, 1024));
    let actions = destination.heard(now, SOURCE, moved[0].clone());
    assert!(matches!(actions[..], [Action::Progress { moved: 1024, .. }]), "{actions:?}");
    // The wire was told to say the report the moment that the write ends.
    assert!(said(&source.put_done(now, put, Ok(stats()))).is_empty());
    let plan = want(7, 0).plan;
    let done =
        Done { about: about(7, 0), bytes: BYTES, plan, carried: vec![stats()], note: vec![3], checks: Vec::new() };
    let actions = destination.heard(now + Duration::from_secs(1), SOURCE, Message::Done(done.clone()));
    let Some(Action::Received { outcome: Ok(received), .. }) = actions.get(2) else { panic!("{actions:?}") };
    assert_eq!((received[0].bytes, received[0].elapsed), (BYTES, Duration::from_secs(1)));
    assert_eq!((&received[0].carried, received[0].times.total), (&vec![stats()], Duration::from_secs(1)));
    assert!(is_quiet(&actions));
    let again = said(&destination.heard(now, SOURCE, Message::Done(done)));
    assert_eq!(again, [Message::DoneAck(about(7, 0))], "a report that is heard twice is answered twice");
    let actions = source.heard(now, DESTINATION, again[0].clone());
    let Some(Action::Sent { outcome: Ok(sent), .. }) = actions.first() else { panic!("{actions:?}") };
    assert_eq!((sent[0].bytes, sent[0].runs, sent[0].elapsed), (BYTES, 2, Duration::from_millis(3)));
    assert_eq!(sent[0].carried, [stats()], "both ends tell the same");
    assert!(is_quiet(&actions));
    assert_eq!((source.next_deadline(), destination.next_deadline()), (None, None), "nothing is left to wait for");
    assert!(matches!(receive(&mut destination, now, 7), Err(PostError::Over(_))), "an attempt ends once");
    assert!(matches!(send(&mut source, now, 7), Err(PostError::Over(_))));
}

#[test]
fn what_is_not_answered_is_said_again_less_and_less_often() {
    let now = Instant::now();
    let mut destination = connected(now, Side::Destination);
    receive(&mut destination, now, 7).unwrap();
    let mut times = Vec::new();
    for tick in 1..90 {
        let then = now + tick * Duration::from_millis(100);
        times.extend(said(&destination.tick(then)).iter().map(|message| {
            assert!(matches!(message, Message::Want(_)), "{message:?}");
            tick
        }));
    }
    assert_eq!(times, [5, 15, 35, 75]);
    destination.heard(now, SOURCE, Message::Got(about(7, 0)));
    assert_eq!(destination.next_deadline(), Some(now + PATIENCE), "only progress is waited for now");
}

#[test]
fn a_link_is_up_when_each_side_has_answered_the_others_call() {
    let now = Instant::now();
    // A greeting ahead of the call is answered with it; it does not stand for the answer to this side's own.
    let mut early = new_core();
    assert!(early.heard(now, DESTINATION, Message::Hello(hello(false, CALL, None))).is_empty());
    let actions = early.connect(now, LINK, Side::Source, 0, BTreeMap::from([(DESTINATION, peer())]));
    assert!(
        matches!(said(&actions)[..], [Message::Hello(_), Message::Welcome(Welcome { call: CALL, .. })]),
        "{actions:?}"
    );
    assert!(matches!(send(&mut early, now, 1), Err(PostError::NoLink)), "a link that is not up takes no request");
    // An answer to another call is not one.
    assert!(early.heard(now, DESTINATION, welcome(CallId(5))).is_empty());
    let actions = early.heard(now, DESTINATION, welcome(OWN_CALL));
    assert!(matches!(actions[..], [Action::Connected { link: LINK }]), "{actions:?}");
}

#[test]
fn a_peer_that_matched_otherwise_is_refused() {
    let now = Instant::now();
    let of_peer = hello(false, CALL, None);
    for hello in [Hello { rank: 1, ..of_peer.clone() }, Hello { template: Digest(1), ..of_peer }] {
        let mut core = connecting(now, Side::Source);
        let actions = core.heard(now, DESTINATION, Message::Hello(hello));
        let Some(Action::NotConnected { error, .. }) = actions.last() else { panic!("{actions:?}") };
        assert!(matches!(error, ConnectError::PlansDiffer { .. }), "{error:?}");
        assert_eq!(said(&actions), [Message::Bye(Bye { call: OWN_CALL, settled: true })]);
        assert!(core.known(DESTINATION).is_none() && core.next_deadline().is_none());
    }
}

#[test]
fn early_greetings_are_bounded_and_do_not_outlive_the_patience_of_who_sent_them() {
    let now = Instant::now();
    let mut core = new_core();
    let hello = || Message::Hello(hello(true, CALL, None));
    for epoch in 0..2 * EARLY_HELLOS_MAX as u64 {
        core.heard(now + Duration::from_nanos(epoch), 1000 + epoch, hello());
    }
    assert_eq!(core.early_hellos.len(), EARLY_HELLOS_MAX);
    assert!(core.early_hellos.contains_key(&(999 + 2 * EARLY_HELLOS_MAX as u64)), "the latest is kept");
    core.heard(now + 2 * PATIENCE, 5, hello());
    assert_eq!(core.early_hellos.len(), 1);
    core.heard(now + 2 * PATIENCE, 5, Message::Bye(Bye { call: CALL, settled: true }));
    assert_eq!(core.early_hellos.len(), 0);
}

#[test]
fn a_peer_that_is_silent_or_dies_while_connecting_is_named() {
    let now = Instant::now();
    let mut silent = connecting(now, Side::Source);
    for tick in 1..100 {
        let said = said(&silent.tick(now + tick * PATIENCE / 100));
        assert!(said.iter().all(|message| matches!(message, Message::Hello(_))), "{said:?}");
    }
    let actions = silent.tick(now + PATIENCE);
    let Some(Action::NotConnected { error, .. }) = actions.last() else { panic!("{actions:?}") };
    assert!(matches!(error, ConnectError::NoAnswer { waited: PATIENCE, .. }), "{error}");
    let mut dies = connecting(now, Side::Source);
    let actions = dies.lost(now, DESTINATION, Status::ERR_CONNECTION_RESET);
    let Some(Action::NotConnected { error, .. }) = actions.last() else { panic!("{actions:?}") };
    let named = PeerName { side: Side::Destination, rank: 0 };
    assert!(matches!(error, ConnectError::Lost { peer, .. } if *peer == named), "{error}");
}

#[test]
fn a_source_that_reports_other_bytes_or_another_plan_is_not_believed() {
    let now = Instant::now();
    let Want { bytes, plan, .. } = want(7, 0);
    for (bytes, plan) in [(bytes - 1, plan), (bytes, Digest(0))] {
        let (_, mut destination, _) = moving(now);
        let done = Done { about: about(7, 0), bytes, plan, carried: Vec::new(), note: Vec::new(), checks: Vec::new() };
        let actions = destination.heard(now, SOURCE, Message::Done(done));
        assert!(matches!(failure(&actions), TransferError::PlansDiffer { expected: BYTES, .. }));
        assert!(is_quiet(&actions), "the source writes no more, whatever it has written");
        let reason = Refusal::PlansDiffer;
        assert_eq!(said(&actions), [Message::Refused(Refused { about: about(7, 0), reason })]);
    }
}

#[test]
fn a_want_with_another_plan_is_refused_before_a_byte_moves() {
    let now = Instant::now();
    let mut source = connected(now, Side::Source);
    source.heard(now, DESTINATION, Message::Want(Want { plan: Digest(9), ..want(7, 0) }));
    let actions = send(&mut source, now, 7).unwrap();
    assert!(!actions.iter().any(|action| matches!(action, Action::Put { .. })), "{actions:?}");
    let (about, reason) = (about(7, 0), Refusal::PlansDiffer);
    assert_eq!(said(&actions), [Message::Stopped(Stopped { about, reason, late: Late::Nothing })]);
    assert!(matches!(failure(&actions), TransferError::PlansDiffer { .. }));
}

#[test]
fn only_new_bytes_buy_patience() {
    let now = Instant::now();
    let mut destination = connected(now, Side::Destination);
    receive(&mut destination, now, 7).unwrap();
    let moved = |bytes| Message::Moved(Moved { about: about(7, 0), bytes, inbox: false });
    let second = Duration::from_secs(1);
    assert_eq!(destination.heard(now + second, SOURCE, moved(10)).len(), 1);
    assert_eq!(destination.heard(now + 5 * second, SOURCE, moved(10)).len(), 0);
    assert_eq!(destination.next_deadline(), Some(now + second + PATIENCE));
    // A claim beyond the request is cut to it, and buys nothing twice.
    assert_eq!(destination.heard(now + 6 * second, SOURCE, moved(u64::MAX)).len(), 1);
    assert_eq!(destination.heard(now + 7 * second, SOURCE, moved(u64::MAX)).len(), 0);
    let actions = destination.tick(now + 6 * second + PATIENCE);
    assert!(matches!(failure(&actions), TransferError::Stalled { moved: BYTES, .. }));
    assert!(!is_quiet(&actions), "the source may still write");
    assert_eq!(said(&actions), [Message::Cancel(about(7, 0))]);
}

#[test]
fn a_write_that_stalls_ends_its_send_at_once_and_frees_the_slots_when_it_ends() {
    let now = Instant::now();
    let (mut source, mut destination, put) = moving(now);
    let actions = source.tick(now + PATIENCE);
    assert!(matches!(failure(&actions), TransferError::Stalled { expected: BYTES, .. }));
    assert!(actions.iter().any(|action| matches!(action, Action::CancelPut { put: p } if *p == put)), "{actions:?}");
    assert!(!is_quiet(&actions) && said(&actions).is_empty(), "its bytes are still being read");
    assert_eq!(source.under_way(LINK), Some(key(7)));
    let actions = source.put_done(now + PATIENCE, put, Err(PutError::Cancelled));
    assert!(is_quiet(&actions));
    let (about, reason) = (about(7, 0), Refusal::Failed);
    let stopped = Message::Stopped(Stopped { about, reason, late: Late::Nothing });
    assert_eq!(said(&actions), std::slice::from_ref(&stopped));
    // The destination gets its slots back by this word, and the source is told that it was heard.
    let actions = destination.heard(now, SOURCE, stopped);
    assert!(is_quiet(&actions) && matches!(failure(&actions), TransferError::Refused { .. }), "{actions:?}");
    assert_eq!(said(&actions), [Message::StopAck(about)]);
    source.heard(now, DESTINATION, Message::StopAck(about));
    assert_eq!((source.next_deadline(), source.under_way(LINK)), (None, None));
}

#[test]
fn the_first_source_that_fails_ends_the_receive_and_the_others_are_asked_to_stop() {
    let now = Instant::now();
    let mut destination = new_core();
    // Epochs descend as ranks ascend.
    let peers = [(90, 0), (80, 1), (70, 2)].map(|(epoch, rank)| (epoch, Peer { rank, ..peer() }));
    destination.connect(now, LINK, Side::Destination, 0, BTreeMap::from(peers));
    for (epoch, rank, call) in [(70, 2, 0), (80, 1, 1), (90, 0, 2)] {
        destination.heard(now, epoch, Message::Hello(Hello { rank, ..hello(true, CALL, None) }));
        destination.heard(now, epoch, welcome(CallId(call)));
    }
    receive(&mut destination, now, 7).unwrap();
    let actions = destination.lost(now, 80, Status::ERR_CONNECTION_RESET);
    let lost = PeerName { side: Side::Source, rank: 1 };
    assert!(matches!(failure(&actions), TransferError::Lost { peer, .. } if *peer == lost), "{actions:?}");
    let cancels = said(&actions).iter().filter(|message| matches!(message, Message::Cancel(_))).count();
    assert_eq!(cancels, 2, "the lost one cannot be asked");
    let exposed = |core: &Core| core.quarantine().iter().map(|entry| entry.peer.rank).collect::<Vec<_>>();
    assert_eq!(exposed(&destination), [2, 1, 0]);
    let stopped = |serial| {
        let (about, reason) = (about(7, serial), Refusal::Cancelled);
        Message::Stopped(Stopped { about, reason, late: Late::Nothing })
    };
    assert!(!is_quiet(&destination.heard(now, 70, stopped(0))));
    assert!(!is_quiet(&destination.heard(now, 90, stopped(2))));
    assert_eq!(exposed(&destination), [1]);
    // Of the lost one only its death is a proof.
    assert!(!is_quiet(&destination.tick(now + 100 * PATIENCE)));
    assert!(is_quiet(&destination.died(now, 80)));
    assert!(exposed(&destination).is_empty());
}

#[test]
fn a_receive_that_is_given_up_before_anybody_was_asked_is_quiet_at_once() {
    let now = Instant::now();
    let (mut destination, links, _) = with_two_sources(now);
    let actions = destination.receive(now, key(7), &links, &maps(), &(0..32)).unwrap();
    assert!(actions.is_empty(), "nobody has announced to send it: {actions:?}");
    let actions = destination.cancel_receive(now, key(7));
    assert!(is_quiet(&actions) && said(&actions).is_empty(), "{actions:?}");
    // A source that comes later is let go.
    assert_eq!(said(&destination.heard(now, SOURCE, Message::Announce(key(7)))), [Message::Release(key(7))]);
    // Nobody comes for another.
    destination.receive(now, key(8), &links, &maps(), &(0..32)).unwrap();
    let actions = destination.tick(now + PATIENCE);
    assert!(matches!(failure(&actions), TransferError::NobodySends { .. }) && is_quiet(&actions), "{actions:?}");
}

/// A destination with two links, and the two sources.
fn with_two_sources(now: Instant) -> (Core, [LinkId; 2], [u64; 2]) {
    let mut destination = connected(now, Side::Destination);
    destination.connect(now, LinkId(1), Side::Destination, 0, BTreeMap::from([(101, peer())]));
    destination.heard(now, 101, Message::Hello(hello(true, CALL, None)));
    destination.heard(now, 101, welcome(CallId(1)));
    (destination, [LINK, LinkId(1)], [SOURCE, 101])
}

#[test]
fn a_request_that_was_moved_to_another_source_is_asked_of_that_one() {
    let start = Instant::now();
    let second = |seconds| start + Duration::from_secs(seconds);
    for (first, then) in [(0, 1), (1, 0)] {
        let (mut destination, links, sources) = with_two_sources(start);
        assert!(destination.heard(start, sources[first], Message::Announce(key(7))).is_empty());
        assert!(destination.heard(second(1), sources[then], Message::Announce(key(7))).is_empty());
        let actions = destination.receive(second(1), key(7), &links, &maps(), &(0..32)).unwrap();
        let asked = actions.iter().find_map(|action| match action {
            Action::Say { epoch, message: Message::Want(_) } => Some(*epoch),
            _ => None,
        });
        assert_eq!(asked, Some(sources[then]));
    }
    // What a source has not said again for long it has given up.
    let (mut destination, links, sources) = with_two_sources(start);
    destination.heard(start, sources[0], Message::Announce(key(7)));
    assert!(destination.receive(second(10), key(7), &links, &maps(), &(0..32)).unwrap().is_empty());
    assert!(!destination.heard(second(11), sources[1], Message::Announce(key(7))).is_empty());
}

#[test]
fn announcements_that_were_given_up_make_room_for_others() {
    let start = Instant::now();
    let (mut destination, links, sources) = with_two_sources(start);
    for request in 0..1 << 16 {
        destination.heard(start, sources[0], Message::Announce(key(1000 + request)));
    }
    let later = start + Duration::from_secs(10);
    destination.heard(later, sources[0], Message::Announce(key(7)));
    assert!(!destination.receive(later, key(7), &links, &maps(), &(0..32)).unwrap().is_empty());
}

#[test]
fn sums_that_differ_fail_the_request() {
    let now = Instant::now();
    for same in [true, false] {
        let mut destination = connected(now, Side::Destination);
        destination.limits.verify = true;
        receive(&mut destination, now, 7).unwrap();
        let Want { about, bytes, plan, .. } = want(7, 0);
        let done =
            Message::Done(Done { about, bytes, plan, carried: Vec::new(), note: Vec::new(), checks: Vec::new() });
        let actions = destination.heard(now, SOURCE, done.clone());
        assert!(matches!(actions[..], [Action::Verify { epoch: SOURCE, .. }]), "{actions:?}");
        assert!(destination.heard(now, SOURCE, done).is_empty(), "it is being looked at");
        let actions = destination.verified(now, SOURCE, about, same);
        assert!(is_quiet(&actions));
        if same {
            assert_eq!(said(&actions), [Message::DoneAck(about)]);
        } else {
            assert!(matches!(failure(&actions), TransferError::Corrupted { .. }));
        }
    }
}

#[test]
fn nobody_loses_patience_with_itself() {
    let now = Instant::now();
    let (later, mut destination) = (now + 2 * PATIENCE, connected(now, Side::Destination));
    destination.limits.verify = true;
    receive(&mut destination, now, 7).unwrap();
    let Want { about, bytes, plan, .. } = want(7, 0);
    let done = Message::Done(Done { about, bytes, plan, carried: Vec::new(), note: Vec::new(), checks: Vec::new() });
    destination.heard(now, SOURCE, done);
    assert!(destination.tick(later).is_empty(), "it is this side that compares the sums");
    assert!(is_quiet(&destination.verified(later, SOURCE, about, true)));

    let mut source = connected(now, Side::Source);
    source.limits.verify = true;
    source.heard(now, DESTINATION, Message::Want(want(7, 0)));
    let actions = send(&mut source, now, 7).unwrap();
    let plan = peer().template.bind(&maps(), &maps(), 0..32).unwrap();
    let Some(Action::Sum { put, .. }) = actions.last() else { panic!("{actions:?}") };
    assert!(source.tick(later).is_empty(), "it is this side that makes the sums");
    let actions = source.summed(later, *put, plan, 0);
    assert!(matches!(actions[..], [Action::Put { .. }]), "{actions:?}");
    assert!(matches!(failure(&source.tick(later + PATIENCE)), TransferError::Stalled { .. }));
}

#[test]
fn a_send_has_no_more_parts_than_its_report_can_tell() {
    let now = Instant::now();
    let mut source = connected(now, Side::Source);
    source.send(now, ticket(7), maps(), 0..32).unwrap();
    let mut push = || source.push(now, ticket(7), PartSpec::default(), true).map(|_| ());
    for _ in 0..PARTS_MAX {
        push().unwrap();
    }
    assert!(matches!(push(), Err(PushError::TooManyParts { parts_max: PARTS_MAX })));
}

#[test]
fn slots_are_not_quiet_while_they_are_compared_with_their_sums() {
    let now = Instant::now();
    let Want { about, bytes, plan, .. } = want(7, 0);
    let done = Message::Done(Done { about, bytes, plan, carried: Vec::new(), note: Vec::new(), checks: Vec::new() });
    let stopped = Message::Stopped(Stopped { about, reason: Refusal::Failed, late: Late::Nothing });
    // A report that is said again; its source has lost its patience, or leaves, or is dead.
    type Happens<'a> = &'a dyn Fn(&mut Core) -> Vec<Action>;
    let events: [Happens<'_>; 4] = [
        &|core| core.heard(now, SOURCE, done.clone()),
        &|core| core.heard(now, SOURCE, stopped.clone()),
        &|core| core.heard(now, SOURCE, Message::Bye(Bye { call: CALL, settled: true })),
        &|core| core.died(now, SOURCE),
    ];
    for (number, event) in events.iter().enumerate() {
        for cancelled in [true, false] {
            let mut destination = connected(now, Side::Destination);
            destination.limits.verify = true;
            receive(&mut destination, now, 7).unwrap();
            let actions = destination.heard(now, SOURCE, done.clone());
            assert!(matches!(actions[..], [Action::Verify { .. }]), "{actions:?}");
            if cancelled {
                assert!(!is_quiet(&destination.cancel_receive(now, key(7))));
            }
            let actions = event(&mut destination);
            assert!(!is_quiet(&actions), "event {number}: {actions:?}");
            assert!(is_quiet(&destination.verified(now, SOURCE, about, true)), "event {number}");
        }
    }
}

#[test]
fn tokens_that_end_before_they_begin_are_refused_at_once() {
    let now = Instant::now();
    let reversed = || std::ops::Range { start: 32, end: 16 };
    let mut source = connected(now, Side::Source);
    assert!(matches!(source.send(now, ticket(7), maps(), reversed()), Err(PostError::Tokens { .. })));
    let mut destination = connected(now, Side::Destination);
    let posted = destination.receive(now, key(7), &[LINK], &maps(), &reversed());
    assert!(matches!(posted, Err(PostError::Tokens { .. })));
    assert_eq!((source.next_deadline(), destination.next_deadline()), (None, None));
}

#[test]
fn as_many_requests_are_known_to_be_over_as_may_be_under_way() {
    let now = Instant::now();
    let mut destination = connected(now, Side::Destination);
    for request in 0..REQUESTS_MAX as u64 {
        receive(&mut destination, now, request).unwrap();
        destination.cancel_receive(now, key(request));
        let (about, reason) = (about(request, request), Refusal::Cancelled);
        let stopped = Message::Stopped(Stopped { about, reason, late: Late::Nothing });
        assert!(is_quiet(&destination.heard(now, SOURCE, stopped)));
    }
    assert!(matches!(receive(&mut destination, now, 0), Err(PostError::Over(_))));
}

#[test]
fn a_peer_cannot_post_without_end() {
    let now = Instant::now();
    let mut source = connected(now, Side::Source);
    let small = |serial| Message::Want(Want { bytes: 1, block_maps: Vec::new(), ..want(serial, serial) });
    for serial in 0..1 << 16 {
        assert_eq!(said(&source.heard(now, DESTINATION, small(serial))), [Message::Got(about(serial, serial))]);
    }
    let about = about(1 << 16, 1 << 16);
    let refused = Message::Stopped(Stopped { about, reason: Refusal::TooMany, late: Late::Nothing });
    assert_eq!(said(&source.heard(now, DESTINATION, small(1 << 16))), [refused]);
    let mut destination = connected(now, Side::Destination);
    let requests = REQUESTS_MAX as u64;
    for request in 0..requests {
        receive(&mut destination, now, request).unwrap();
    }
    assert!(matches!(receive(&mut destination, now, requests), Err(PostError::TooMany { requests_max: REQUESTS_MAX })));
}
