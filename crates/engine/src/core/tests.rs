//! Two state machines that talk through a script: what each event does, and that no order of events leaves a request
//! without its one end.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use kvferry_layout::{
    Digest, Dtype, GroupKind, GroupSpec, Layer, LayerMask, RankSpec, Role, RowSpec, Slot, block_major,
};
use kvferry_match::{BlockMap, Side, assign};
use kvferry_wire::{PutError, Route, RouteReason, Status, TransferStats};
use proptest::prelude::*;

use super::handshake::EARLY_HELLOS_MAX;
use super::{Action, Core, LinkId, Peer, PutId, Ticket};
use crate::error::{ConnectError, PostError, RequestError, TransferError};
use crate::message::{CallId, Done, Hello, Message, Moved, Refusal, Refused, RequestKey, Want};

const PATIENCE: Duration = Duration::from_secs(10);
const LINK: LinkId = LinkId(0);
const SOURCE: u64 = 100;
const DESTINATION: u64 = 200;
const BYTES: u64 = 2 * 1024;

/// A rank of the other instance, with a template of one key row of 1 KiB a slot.
fn peer() -> Peer {
    static PEER: LazyLock<Peer> = LazyLock::new(make_peer);
    PEER.clone()
}

fn make_peer() -> Peer {
    let key = RowSpec::single(Role::Key, Dtype::U8, LayerMask::all(1), 1, 64).unwrap();
    let kind = GroupKind::paged(16);
    let groups = vec![GroupSpec { kind, slot_count: 4, pools: vec![vec![key]] }];
    let layers = vec![Layer(0)];
    let spec = RankSpec { hidden_layers: 1, layers, tp_rank: 0, tp_size: 1, groups };
    let table = block_major(&spec).unwrap();
    let assignment = &assign([(0, &table)], [(0, &table)]).unwrap()[0];
    Peer { rank: 0, rows: assignment.rows(0), template: assignment.template(0).unwrap() }
}

fn key(request: u64) -> RequestKey {
    RequestKey { request, attempt: 0 }
}

fn ticket(request: u64) -> Ticket {
    Ticket { link: LINK, key: key(request) }
}

fn maps() -> Vec<BlockMap> {
    vec![BlockMap::new(0, vec![Some(Slot(1)), Some(Slot(2))])]
}

fn core(now: Instant, side: Side) -> (Core, Vec<Action>) {
    let mut core = Core::new(PATIENCE);
    let epoch = if side == Side::Source { DESTINATION } else { SOURCE };
    let actions = core.connect(now, LINK, side, 0, BTreeMap::from([(epoch, peer())]));
    (core, actions)
}

/// The call that the other side connects with.
const CALL: CallId = CallId(77);

/// This side's call: that of its first link.
const OWN_CALL: CallId = CallId(0);

fn hello(call: CallId) -> Message {
    Message::Hello(Hello { call, rank: 0, template: peer().template.digest() })
}

/// A connected side of a pair.
fn connected(now: Instant, side: Side) -> Core {
    let (mut core, _) = core(now, side);
    let epoch = if side == Side::Source { DESTINATION } else { SOURCE };
    assert_eq!(*said(&core.heard(now, epoch, hello(CALL))), Message::Welcome(CALL));
    let actions = core.heard(now, epoch, Message::Welcome(OWN_CALL));
    assert!(matches!(actions[..], [Action::Connected { link: LINK }]), "{actions:?}");
    core
}

/// The only message that the actions say.
fn said(actions: &[Action]) -> &Message {
    let mut said = actions.iter().filter_map(|action| match action {
        Action::Say { message, .. } => Some(message),
        _ => None,
    });
    match (said.next(), said.next()) {
        (Some(message), None) => message,
        _ => panic!("{actions:?}"),
    }
}

/// What moved, or the only error.
fn only<R>(outcome: &Result<Vec<R>, RequestError>) -> Result<&[R], &TransferError> {
    match outcome {
        Ok(moved) => Ok(moved),
        Err(error) if error.errors.len() == 1 => Err(&error.errors[0]),
        Err(error) => panic!("{error}"),
    }
}

fn sent(actions: &[Action]) -> Option<Result<&[crate::Sent], &TransferError>> {
    actions.iter().find_map(|action| match action {
        Action::Sent { outcome, .. } => Some(only(outcome)),
        _ => None,
    })
}

fn received(actions: &[Action]) -> Option<Result<&[crate::Received], &TransferError>> {
    actions.iter().find_map(|action| match action {
        Action::Received { outcome, .. } => Some(only(outcome)),
        _ => None,
    })
}

fn put(actions: &[Action]) -> PutId {
    match actions {
        [Action::Put { epoch: DESTINATION, put, plan }] if plan.bytes() == BYTES => *put,
        _ => panic!("{actions:?}"),
    }
}

fn stats() -> TransferStats {
    TransferStats {
        bytes: BYTES,
        runs: 2,
        elapsed: Duration::from_millis(3),
        route: Route::Direct,
        reason: RouteReason::TargetMapped,
    }
}

const BROKEN: PutError = PutError::Endpoint { source: Status::ERR_CANCELED };

/// A source with a write in flight, as asked for by a real destination.
fn moving(now: Instant) -> (Core, Core, PutId) {
    let (mut source, mut destination) = (connected(now, Side::Source), connected(now, Side::Destination));
    let want = said(&destination.receive(now, ticket(7), &maps(), &(0..32)).unwrap()).clone();
    assert!(source.heard(now, DESTINATION, want).is_empty(), "no send is posted yet");
    let put = put(&source.send(now, ticket(7), maps(), 0..32).unwrap());
    (source, destination, put)
}

#[test]
fn a_request_goes_through_want_put_done_and_acknowledgement() {
    let now = Instant::now();
    let (mut source, mut destination, put) = moving(now);
    let actions = source.put_progress(now, put, 1024);
    assert!(matches!(actions[..], [Action::Say { .. }, Action::Progress { moved: 1024, .. }]), "{actions:?}");
    let actions = destination.heard(now, SOURCE, said(&actions).clone());
    assert!(matches!(actions[..], [Action::Progress { moved: 1024, .. }]), "{actions:?}");
    let actions = source.put_done(now, put, Ok(stats()));
    assert!(sent(&actions).is_none(), "not before the destination has checked the count");
    let actions = destination.heard(now + Duration::from_secs(1), SOURCE, said(&actions).clone());
    let outcome = received(&actions).unwrap().unwrap();
    assert_eq!((outcome[0].bytes, outcome[0].elapsed), (BYTES, Duration::from_secs(1)));
    let actions = source.heard(now, DESTINATION, said(&actions).clone());
    let outcome = sent(&actions).unwrap().unwrap();
    assert_eq!((outcome[0].bytes, outcome[0].runs, outcome[0].elapsed), (BYTES, 2, Duration::from_millis(3)));
    assert_eq!((outcome[0].route, outcome[0].reason), (Route::Direct, RouteReason::TargetMapped));
    assert_eq!((source.next_deadline(), destination.next_deadline()), (None, None), "nothing is left to wait for");
}

#[test]
fn a_link_is_up_when_each_side_has_answered_the_others_call() {
    let now = Instant::now();
    // A greeting ahead of the call is answered with it; it does not stand for the answer to this side's own.
    let mut early = Core::new(PATIENCE);
    assert!(early.heard(now, DESTINATION, hello(CALL)).is_empty());
    let actions = early.connect(now, LINK, Side::Source, 0, BTreeMap::from([(DESTINATION, peer())]));
    let welcome = |action: &Action| matches!(action, Action::Say { message: Message::Welcome(CALL), .. });
    assert!(matches!(&actions[..], [Action::Say { message: Message::Hello(_), .. }, a] if welcome(a)), "{actions:?}");
    let early_ticket = early.send(now, ticket(1), maps(), 0..32);
    assert!(matches!(early_ticket, Err(PostError::NoLink)), "a link that is not up takes no request");
    // An answer to another call is not one.
    assert!(early.heard(now, DESTINATION, Message::Welcome(CallId(5))).is_empty());
    let actions = early.heard(now, DESTINATION, Message::Welcome(OWN_CALL));
    assert!(matches!(actions[..], [Action::Connected { link: LINK }]), "{actions:?}");
}

#[test]
fn a_peer_that_matched_otherwise_is_refused() {
    let now = Instant::now();
    let template = peer().template.digest();
    for hello in [Hello { call: CALL, rank: 1, template }, Hello { call: CALL, rank: 0, template: Digest(1) }] {
        let (mut core, _) = core(now, Side::Source);
        let actions = core.heard(now, DESTINATION, Message::Hello(hello));
        let [bye, Action::Forget { epoch: DESTINATION }, Action::NotConnected { error, .. }] = &actions[..] else {
            panic!("{actions:?}")
        };
        assert!(matches!(bye, Action::Say { message: Message::Bye(OWN_CALL), .. }), "{bye:?}");
        assert!(matches!(error, ConnectError::PlansDiffer { .. }), "{error:?}");
        assert!(core.known(DESTINATION).is_none() && core.next_deadline().is_none());
    }
}

#[test]
fn a_peer_that_starts_anew_is_lost_and_its_greeting_waits() {
    let now = Instant::now();
    for again in [hello(CallId(78)), Message::Bye(CALL)] {
        let (mut source, _, put) = moving(now);
        assert!(source.heard(now, DESTINATION, again.clone()).is_empty(), "the write goes on to its end");
        let actions = source.put_done(now, put, Ok(stats()));
        assert!(matches!(sent(&actions), Some(Err(TransferError::Lost { .. }))), "{actions:?}");
        assert!(matches!(source.send(now, ticket(8), maps(), 0..32), Err(PostError::Lost(_))));
        let actions = source.disconnect(LINK).unwrap();
        assert!(matches!(said(&actions), Message::Bye(OWN_CALL)), "{actions:?}");
        let peers = BTreeMap::from([(DESTINATION, peer())]);
        let actions = source.connect(now, LinkId(1), Side::Source, 0, peers);
        let welcomes = actions.iter().any(|action| matches!(action, Action::Say { message: Message::Welcome(_), .. }));
        assert_eq!(welcomes, again == hello(CallId(78)));
        let actions = source.heard(now, DESTINATION, Message::Welcome(CallId(1)));
        assert!(matches!(actions[..], [Action::Connected { link: LinkId(1) }]), "{actions:?}");
    }
}

#[test]
fn early_greetings_are_bounded_and_do_not_outlive_the_patience_of_who_sent_them() {
    let now = Instant::now();
    let mut core = Core::new(PATIENCE);
    for epoch in 0..2 * EARLY_HELLOS_MAX as u64 {
        core.heard(now + Duration::from_nanos(epoch), 1000 + epoch, hello(CALL));
    }
    assert_eq!(core.early_hellos.len(), EARLY_HELLOS_MAX);
    assert!(core.early_hellos.contains_key(&(999 + 2 * EARLY_HELLOS_MAX as u64)), "the latest is kept");
    core.heard(now + 2 * PATIENCE, 5, hello(CALL));
    assert_eq!(core.early_hellos.len(), 1);
    core.heard(now + 2 * PATIENCE, 5, Message::Bye(CALL));
    assert_eq!(core.early_hellos.len(), 0);
}

#[test]
fn a_peer_that_is_silent_or_dies_while_connecting_is_named() {
    let now = Instant::now();
    let (mut silent, _) = core(now, Side::Source);
    assert!(silent.tick(now + PATIENCE - Duration::from_nanos(1)).is_empty());
    let actions = silent.tick(now + PATIENCE);
    assert!(
        matches!(
            actions.last(),
            Some(Action::NotConnected { error: ConnectError::NoAnswer { waited: PATIENCE, .. }, .. })
        ),
        "{actions:?}"
    );
    let (mut dies, _) = core(now, Side::Source);
    let actions = dies.lost(DESTINATION, Status::ERR_CONNECTION_RESET);
    let lost = ConnectError::Lost {
        peer: crate::PeerName { side: Side::Destination, rank: 0 },
        source: Status::ERR_CONNECTION_RESET,
    };
    match actions.last() {
        Some(Action::NotConnected { error, .. }) => assert_eq!(error.to_string(), lost.to_string()),
        action => panic!("{action:?}"),
    }
}

#[test]
fn a_source_that_reports_other_bytes_or_another_plan_is_not_believed() {
    let now = Instant::now();
    for lie in [|done: &mut Done| done.bytes -= 1, |done: &mut Done| done.plan = Digest(0)] {
        let (mut source, mut destination, put) = moving(now);
        let Message::Done(mut done) = *said(&source.put_done(now, put, Ok(stats()))) else { panic!("no report") };
        lie(&mut done);
        let actions = destination.heard(now, SOURCE, Message::Done(done));
        assert!(matches!(received(&actions), Some(Err(TransferError::PlansDiffer { expected: BYTES, .. }))));
        let actions = source.heard(now, DESTINATION, said(&actions).clone());
        let refused = TransferError::Refused {
            peer: crate::PeerName { side: Side::Destination, rank: 0 },
            source: Refusal::PlansDiffer,
        };
        assert_eq!(sent(&actions).unwrap().unwrap_err().to_string(), refused.to_string());
    }
}

#[test]
fn a_want_with_another_plan_is_refused_before_a_byte_moves() {
    let now = Instant::now();
    let mut source = connected(now, Side::Source);
    let want = Want { key: key(7), tokens: 0..32, bytes: BYTES, plan: Digest(9), block_maps: maps() };
    source.heard(now, DESTINATION, Message::Want(want));
    let actions = source.send(now, ticket(7), maps(), 0..32).unwrap();
    assert_eq!(*said(&actions), Message::Refused(Refused { key: key(7), reason: Refusal::PlansDiffer }));
    assert!(matches!(sent(&actions), Some(Err(TransferError::PlansDiffer { .. }))));
}

#[test]
fn a_report_for_a_request_that_has_ended_is_answered_as_unknown() {
    let now = Instant::now();
    let (mut source, mut destination, put) = moving(now);
    let actions = destination.tick(now + PATIENCE);
    assert!(matches!(received(&actions), Some(Err(TransferError::Stalled { moved: 0, expected: BYTES, .. }))));
    let later = now + PATIENCE;
    // The write is under way: the destination's word does not end it.
    assert!(source.heard(later, DESTINATION, said(&actions).clone()).is_empty());
    let actions = source.put_done(later, put, Ok(stats()));
    let actions = destination.heard(later, SOURCE, said(&actions).clone());
    assert_eq!(*said(&actions), Message::Refused(Refused { key: key(7), reason: Refusal::Unknown }));
    let actions = source.heard(later, DESTINATION, said(&actions).clone());
    assert!(matches!(sent(&actions), Some(Err(TransferError::Refused { source: Refusal::Unknown, .. }))));
}

#[test]
fn only_new_bytes_buy_patience() {
    let now = Instant::now();
    let mut destination = connected(now, Side::Destination);
    destination.receive(now, ticket(7), &maps(), &(0..32)).unwrap();
    let moved = |bytes| Message::Moved(Moved { key: key(7), bytes });
    let second = Duration::from_secs(1);
    assert_eq!(destination.heard(now + second, SOURCE, moved(10)).len(), 1);
    assert_eq!(destination.heard(now + 5 * second, SOURCE, moved(10)).len(), 0);
    assert_eq!(destination.next_deadline(), Some(now + second + PATIENCE));
    // A claim beyond the request is cut to it, and buys nothing twice.
    assert_eq!(destination.heard(now + 6 * second, SOURCE, moved(u64::MAX)).len(), 1);
    assert_eq!(destination.heard(now + 7 * second, SOURCE, moved(u64::MAX)).len(), 0);
    assert!(received(&destination.tick(now + 6 * second + PATIENCE)).is_some());
}

#[test]
fn a_write_that_stalls_is_cut_and_ends_with_what_the_wire_says() {
    let now = Instant::now();
    let (mut source, _, put) = moving(now);
    source.send(now, ticket(8), maps(), 0..32).unwrap();
    let actions = source.tick(now + PATIENCE);
    assert!(actions.iter().any(|action| matches!(action, Action::Cut { epoch: DESTINATION })), "{actions:?}");
    let ended = |action: &Action| matches!(action, Action::Sent { ticket: t, .. } if *t == ticket(7));
    assert!(!actions.iter().any(ended), "its bytes are still being read");
    assert!(sent(&actions).is_some_and(|outcome| outcome.is_err()), "the other request of the peer ends at once");
    let want = Want { key: key(9), tokens: 0..32, bytes: BYTES, plan: Digest(9), block_maps: maps() };
    assert!(source.heard(now + PATIENCE, DESTINATION, Message::Want(want)).is_empty(), "a lost peer wants nothing");
    let next = source.send(now + PATIENCE, ticket(9), maps(), 0..32);
    assert!(matches!(next, Err(PostError::Lost(_))), "{next:?}");
    let actions = source.put_done(now + PATIENCE, put, Err(BROKEN));
    assert!(matches!(sent(&actions), Some(Err(TransferError::Stalled { expected: BYTES, .. }))), "{actions:?}");
}

#[test]
fn a_lost_destination_ends_a_moving_send_only_when_the_write_has_ended() {
    let now = Instant::now();
    for result in [Err(BROKEN), Ok(stats())] {
        let (mut source, _, put) = moving(now);
        assert!(source.lost(DESTINATION, Status::ERR_CONNECTION_RESET).is_empty());
        let actions = source.put_done(now, put, result);
        let lost =
            matches!(sent(&actions), Some(Err(TransferError::Lost { source: Status::ERR_CONNECTION_RESET, .. })));
        assert!(lost, "{actions:?}");
    }
}

#[test]
fn every_peer_that_failed_is_named_in_the_order_of_ranks() {
    let now = Instant::now();
    let mut destination = Core::new(PATIENCE);
    // Epochs descend as ranks ascend.
    let peers = [(90, 0), (80, 1), (70, 2)].map(|(epoch, rank)| (epoch, Peer { rank, ..peer() }));
    destination.connect(now, LINK, Side::Destination, 0, BTreeMap::from(peers));
    for epoch in [90, 80, 70] {
        destination.heard(now, epoch, Message::Welcome(OWN_CALL));
    }
    destination.receive(now, ticket(7), &maps(), &(0..32)).unwrap();
    let refused = Message::Refused(Refused { key: key(7), reason: Refusal::BlockMaps });
    assert!(destination.heard(now, 90, refused).is_empty());
    assert!(destination.lost(70, Status::ERR_CONNECTION_RESET).is_empty());
    let actions = destination.tick(now + PATIENCE);
    let Some(Action::Received { outcome: Err(error), .. }) = actions.last() else { panic!("{actions:?}") };
    let ranks: Vec<u32> = error.errors.iter().filter_map(|error| Some(error.peer()?.rank)).collect();
    assert_eq!(ranks, [0, 1, 2]);
    assert_eq!(error.may_still_write().map(|peer| peer.rank).collect::<Vec<_>>(), [1, 2]);
    let line = error.to_string();
    assert!(line.contains("source rank 0 ended the request: the block maps cannot be bound; source rank 1"), "{line}");
}

#[test]
fn a_peer_cannot_post_without_end() {
    let now = Instant::now();
    let mut source = connected(now, Side::Source);
    let want = |request| {
        Message::Want(Want { key: key(request), tokens: 0..32, bytes: 1, plan: Digest(1), block_maps: vec![] })
    };
    for request in 0..4096 {
        assert!(source.heard(now, DESTINATION, want(request)).is_empty());
    }
    let actions = source.heard(now, DESTINATION, want(4096));
    assert_eq!(*said(&actions), Message::Refused(Refused { key: key(4096), reason: Refusal::TooMany }));
}

/// Something that happens to one of the two sides.
#[derive(Clone, Debug)]
enum Step {
    Receive(u64),
    Send(u64),
    /// Delivers a message that waits on the way to the source or the destination.
    Deliver(bool, usize),
    /// Loses one.
    Drop(bool, usize),
    /// Delivers one twice.
    Repeat(bool, usize),
    /// Ends a write.
    Finish(usize, bool),
    Lose(bool),
    Wait(u64),
    /// A message that nobody sent.
    Forge(bool, Message),
}

fn forged() -> impl Strategy<Value = Message> {
    let key = (0..4u64).prop_map(key);
    prop_oneof![
        (any::<u64>(), any::<u32>(), any::<u128>()).prop_map(|(call, rank, digest)| {
            Message::Hello(Hello { call: CallId(call), rank, template: Digest(digest) })
        }),
        any::<u64>().prop_map(|call| hello(CallId(call))),
        (76..79u64).prop_map(|call| Message::Bye(CallId(call))),
        any::<u64>().prop_map(|call| Message::Welcome(CallId(call))),
        (key.clone(), any::<u64>()).prop_map(|(key, bytes)| Message::Moved(Moved { key, bytes })),
        (key.clone(), any::<u64>()).prop_map(|(key, bytes)| Message::Done(Done { key, bytes, plan: Digest(0) })),
        key.clone().prop_map(Message::DoneAck),
        key.clone().prop_map(|key| Message::Refused(Refused { key, reason: Refusal::Failed })),
        (key, any::<u64>(), any::<u64>()).prop_map(|(key, end, bytes)| {
            Message::Want(Want { key, tokens: 0..end, bytes, plan: Digest(0), block_maps: maps() })
        }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let place = 0..16usize;
    prop_oneof![
        3 => (0..4u64).prop_map(Step::Receive),
        3 => (0..4u64).prop_map(Step::Send),
        8 => (any::<bool>(), place.clone()).prop_map(|(to, place)| Step::Deliver(to, place)),
        1 => (any::<bool>(), place.clone()).prop_map(|(to, place)| Step::Drop(to, place)),
        1 => (any::<bool>(), place.clone()).prop_map(|(to, place)| Step::Repeat(to, place)),
        4 => (place, any::<bool>()).prop_map(|(place, well)| Step::Finish(place, well)),
        1 => any::<bool>().prop_map(Step::Lose),
        2 => (0..6u64).prop_map(Step::Wait),
        2 => (any::<bool>(), forged()).prop_map(|(to, message)| Step::Forge(to, message)),
    ]
}

/// The two sides, what is on its way between them, and how often each request has ended.
struct World {
    now: Instant,
    sides: [Core; 2],
    on_the_way: [Vec<Message>; 2],
    puts: Vec<PutId>,
    posted: [BTreeMap<u64, u32>; 2],
    ended: [BTreeMap<u64, u32>; 2],
}

impl World {
    fn act(&mut self, side: usize, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Say { message, .. } => self.on_the_way[1 - side].push(message),
                Action::Put { put, .. } => self.puts.push(put),
                Action::Sent { ticket, .. } | Action::Received { ticket, .. } => {
                    *self.ended[side].entry(ticket.key.request).or_default() += 1;
                }
                _ => {}
            }
        }
    }

    fn hear(&mut self, side: usize, message: Message) {
        let from = [DESTINATION, SOURCE][side];
        let actions = self.sides[side].heard(self.now, from, message);
        self.act(side, actions);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Receive(request) => {
                if let Ok(actions) = self.sides[1].receive(self.now, ticket(request), &maps(), &(0..32)) {
                    *self.posted[1].entry(request).or_default() += 1;
                    self.act(1, actions);
                }
            }
            Step::Send(request) => {
                if let Ok(actions) = self.sides[0].send(self.now, ticket(request), maps(), 0..32) {
                    *self.posted[0].entry(request).or_default() += 1;
                    self.act(0, actions);
                }
            }
            Step::Deliver(to, place) | Step::Drop(to, place) | Step::Repeat(to, place) => {
                let side = usize::from(to);
                if self.on_the_way[side].is_empty() {
                    return;
                }
                let place = place % self.on_the_way[side].len();
                match step {
                    Step::Repeat(..) => self.hear(side, self.on_the_way[side][place].clone()),
                    Step::Drop(..) => drop(self.on_the_way[side].remove(place)),
                    _ => {
                        let message = self.on_the_way[side].remove(place);
                        self.hear(side, message);
                    }
                }
            }
            Step::Finish(place, well) => {
                if !self.puts.is_empty() {
                    let put = self.puts.remove(place % self.puts.len());
                    let actions = self.sides[0].put_done(self.now, put, if well { Ok(stats()) } else { Err(BROKEN) });
                    self.act(0, actions);
                }
            }
            Step::Lose(side) => {
                let peer = [DESTINATION, SOURCE][usize::from(side)];
                let actions = self.sides[usize::from(side)].lost(peer, Status::ERR_CONNECTION_RESET);
                self.act(usize::from(side), actions);
            }
            Step::Wait(seconds) => {
                self.now += Duration::from_secs(seconds);
                for side in 0..2 {
                    let actions = self.sides[side].tick(self.now);
                    self.act(side, actions);
                }
            }
            Step::Forge(to, message) => self.hear(usize::from(to), message),
        }
    }
}

proptest! {
    /// Whatever happens in whatever order, each posted request ends exactly once: at the latest when its patience has run out
    /// and the wire has said how its write ended.
    #[test]
    fn every_request_ends_once(steps in prop::collection::vec(step(), 0..60)) {
        let now = Instant::now();
        let mut world = World {
            now,
            sides: [connected(now, Side::Source), connected(now, Side::Destination)],
            on_the_way: [Vec::new(), Vec::new()],
            puts: Vec::new(),
            posted: [BTreeMap::new(), BTreeMap::new()],
            ended: [BTreeMap::new(), BTreeMap::new()],
        };
        for step in steps {
            world.step(step);
        }
        world.step(Step::Wait(2 * PATIENCE.as_secs()));
        while !world.puts.is_empty() {
            world.step(Step::Finish(0, false));
        }
        world.step(Step::Wait(2 * PATIENCE.as_secs()));
        prop_assert_eq!(&world.posted, &world.ended);
        prop_assert_eq!([0, 1].map(|side| world.sides[side].next_deadline()), [None, None]);
    }
}
