//! Messages that nobody sent, in any order.

use proptest::prelude::*;

use super::*;

/// Something that happens to one of the two sides.
#[derive(Clone, Debug)]
enum Step {
    Receive(u64),
    Send(u64),
    Cancel(bool, u64),
    /// Delivers a message that waits on the way to the source or the destination.
    Deliver(bool, usize),
    /// Ends a write.
    Finish(usize, bool),
    Wait(u64),
    /// A message that nobody sent.
    Forge(bool, Message),
}

fn forged() -> impl Strategy<Value = Message> {
    let about = (0..4u64, 0..6u64).prop_map(|(request, serial)| about(request, serial));
    let key = (0..4u64).prop_map(key);
    let call = prop_oneof![Just(CALL), Just(OWN_CALL), any::<u64>().prop_map(CallId)];
    prop_oneof![
        (any::<bool>(), call.clone(), any::<u32>())
            .prop_map(|(source, call, rank)| { Message::Hello(Hello { rank: rank % 2, ..hello(source, call, None) }) }),
        (call.clone(), any::<bool>()).prop_map(|(call, settled)| Message::Bye(Bye { call, settled })),
        (call, any::<u64>()).prop_map(|(call, floor)| Message::Welcome(Welcome { call, floor })),
        (about.clone(), any::<u64>(), any::<bool>()).prop_map(|(about, bytes, inbox)| Message::Moved(Moved {
            about,
            bytes,
            inbox
        })),
        (about.clone(), any::<u64>()).prop_map(|(about, bytes)| {
            Message::Done(Done {
                about,
                bytes,
                plan: Digest(0),
                carried: Vec::new(),
                note: vec![1],
                checks: Vec::new(),
            })
        }),
        about.clone().prop_map(Message::DoneAck),
        about.clone().prop_map(Message::Got),
        about.clone().prop_map(Message::Cancel),
        about.clone().prop_map(Message::StopAck),
        about.clone().prop_map(|about| Message::Refused(Refused { about, reason: Refusal::Failed })),
        (about.clone(), prop_oneof![Just(Late::Nothing), Just(Late::Inbox), Just(Late::Anything)])
            .prop_map(|(about, late)| { Message::Stopped(Stopped { about, reason: Refusal::Failed, late }) }),
        key.clone().prop_map(Message::Announce),
        key.prop_map(Message::Release),
        (about, any::<u64>(), any::<u64>()).prop_map(|(about, end, bytes)| {
            Message::Want(Want { about, tokens: 0..end, bytes, plan: Digest(0), block_maps: maps() })
        }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let place = 0..16usize;
    prop_oneof![
        3 => (0..4u64).prop_map(Step::Receive),
        3 => (0..4u64).prop_map(Step::Send),
        1 => (any::<bool>(), 0..4u64).prop_map(|(side, request)| Step::Cancel(side, request)),
        8 => (any::<bool>(), place.clone()).prop_map(|(to, place)| Step::Deliver(to, place)),
        4 => (place, any::<bool>()).prop_map(|(place, well)| Step::Finish(place, well)),
        2 => (0..6u64).prop_map(Step::Wait),
        3 => (any::<bool>(), forged()).prop_map(|(to, message)| Step::Forge(to, message)),
    ]
}

/// The two sides, what is on its way between them, and how often each request has ended.
struct World {
    now: Instant,
    sides: [Core; 2],
    on_the_way: [Vec<Message>; 2],
    puts: Vec<(PutId, Option<Message>)>,
    posted: BTreeMap<Handle, u32>,
    ended: BTreeMap<Handle, u32>,
    quiet: BTreeMap<Handle, u32>,
}

impl World {
    fn act(&mut self, side: usize, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Say { message, .. } => self.on_the_way[1 - side].push(message),
                Action::Put { put, then, .. } => self.puts.push((put, then)),
                Action::Sent { ticket, .. } => *self.ended.entry(Handle::Send(ticket)).or_default() += 1,
                Action::Received { key, .. } => *self.ended.entry(Handle::Receive(key)).or_default() += 1,
                Action::Quiet { handle } => *self.quiet.entry(handle).or_default() += 1,
                _ => {}
            }
        }
    }

    fn step(&mut self, step: Step) {
        let now = self.now;
        match step {
            Step::Receive(request) => {
                if let Ok(actions) = receive(&mut self.sides[1], now, request) {
                    *self.posted.entry(Handle::Receive(key(request))).or_default() += 1;
                    self.act(1, actions);
                }
            }
            Step::Send(request) => {
                if let Ok(actions) = send(&mut self.sides[0], now, request) {
                    *self.posted.entry(Handle::Send(ticket(request))).or_default() += 1;
                    self.act(0, actions);
                }
            }
            Step::Cancel(true, request) => {
                let actions = self.sides[1].cancel_receive(now, key(request));
                self.act(1, actions);
            }
            Step::Cancel(false, request) => {
                let actions = self.sides[0].cancel_send(now, ticket(request));
                self.act(0, actions);
            }
            Step::Deliver(to, place) => {
                let side = usize::from(to);
                if !self.on_the_way[side].is_empty() {
                    let place = place % self.on_the_way[side].len();
                    let message = self.on_the_way[side].remove(place);
                    self.hear(side, message);
                }
            }
            Step::Finish(place, well) => {
                if !self.puts.is_empty() {
                    let (put, then) = self.puts.remove(place % self.puts.len());
                    self.on_the_way[1].extend(then.filter(|_| well));
                    let result = if well { Ok(stats()) } else { Err(PutError::Cancelled) };
                    let actions = self.sides[0].put_done(now, put, result);
                    self.act(0, actions);
                }
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

    fn hear(&mut self, side: usize, message: Message) {
        let from = [DESTINATION, SOURCE][side];
        let actions = self.sides[side].heard(self.now, from, message);
        self.act(side, actions);
    }
}

proptest! {
    /// Whatever is said in whatever order, by whomever: nothing panics, each posted request ends exactly once, at the latest
    /// when its patience has run out, and its slots come back at most once, and not before.
    #[test]
    fn every_request_ends_once(steps in prop::collection::vec(step(), 0..80)) {
        let now = Instant::now();
        let sides = [connected(now, Side::Source), connected(now, Side::Destination)];
        let (posted, ended, quiet) = Default::default();
        let mut world = World { now, sides, on_the_way: [Vec::new(), Vec::new()], puts: Vec::new(), posted, ended, quiet };
        for step in steps {
            world.step(step);
            prop_assert!(world.quiet.keys().all(|handle| world.ended.contains_key(handle)));
        }
        world.step(Step::Wait(2 * PATIENCE.as_secs()));
        while !world.puts.is_empty() {
            world.step(Step::Finish(0, false));
        }
        world.step(Step::Wait(2 * PATIENCE.as_secs()));
        prop_assert_eq!(&world.posted, &world.ended);
        prop_assert!(world.quiet.values().all(|times| *times == 1));
    }
}
