//! Requests that move in parts, that are given up, and that nobody has been chosen for: over real UCX, in one process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use kvferry::{
    ConnectError, Engine, EngineOptions, InstanceCard, Link, NotQuiet, PartSpec, PostError, PushError, Ready, Refusal,
    RequestKey, TransferError,
};
use kvferry_layout::{Cut, Dtype, ModelFacts, Slot, TableOptions, build};
use kvferry_match::BlockMap;
use kvferry_wire::{PutError, Region, Route};

const PATIENCE: Duration = Duration::from_secs(20);
const TOKENS: u64 = 16;
const SLOTS: u32 = 16;

struct Rank {
    engine: Engine,
    regions: Vec<Region>,
}

/// Rank `rank` of a small model of 4 layers with sliding windows nowhere, cut and stored as told.
fn rank(options: EngineOptions, cut: &str, block_tokens: u32) -> Rank {
    let facts = r#"{"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32}"#;
    let facts = ModelFacts::from_config(facts).unwrap();
    let table_options = TableOptions::new(block_tokens, Dtype::F16, SLOTS);
    let rank = options.rank;
    let engine = Engine::start(options.patience(PATIENCE)).unwrap();
    let mut table = build(&facts, &cut.parse::<Cut>().unwrap(), rank, &table_options).unwrap();
    let regions = engine.allocate(&mut table).unwrap();
    engine.publish(table, regions.clone()).unwrap();
    Rank { engine, regions }
}

/// The card of an instance of one rank, numbered 0.
fn alone(rank: &Rank) -> InstanceCard {
    InstanceCard::new([0], rank.engine.card()).unwrap()
}

fn connect(ranks: [&Rank; 2]) -> [Link; 2] {
    let [from, to] = ranks.map(alone);
    thread::scope(|scope| {
        let asked = ranks.map(|rank| scope.spawn(|| rank.engine.connect(&from, &to).unwrap()));
        asked.map(|asked| asked.join().unwrap())
    })
}

fn key(request: u64) -> RequestKey {
    RequestKey { request, attempt: 0 }
}

fn map(slots: impl IntoIterator<Item = u32>) -> Vec<BlockMap> {
    vec![BlockMap::dense(0, slots.into_iter().map(Slot))]
}

fn fill(rank: &Rank, seed: u64) {
    for region in &rank.regions {
        let byte = |i: u64| ((i ^ (seed << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33).to_le_bytes()[0];
        region.write(0, &(0..region.bytes()).map(byte).collect::<Vec<_>>()).unwrap();
    }
}

fn bytes(rank: &Rank) -> Vec<Vec<u8>> {
    let read = |region: &Region| {
        let mut bytes = vec![0; usize::try_from(region.bytes()).unwrap()];
        region.read(0, &mut bytes).unwrap();
        bytes
    };
    rank.regions.iter().map(read).collect()
}

/// The bytes of some slots are those of the source, and all others are 0.
fn only_slots_arrived(source: &Rank, destination: &Rank, slots: std::ops::Range<usize>) {
    for (ours, theirs) in bytes(source).iter().zip(bytes(destination)) {
        let slot_bytes = ours.len() / usize::try_from(SLOTS).unwrap();
        for (slot, (ours, theirs)) in ours.chunks(slot_bytes).zip(theirs.chunks(slot_bytes)).enumerate() {
            if slots.contains(&slot) {
                assert!(ours == theirs, "slot {slot} differs");
            } else {
                assert!(theirs.iter().all(|byte| *byte == 0), "slot {slot} was written");
            }
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread, without any runtime.
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    let deadline = Instant::now() + 2 * PATIENCE;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        assert!(Instant::now() < deadline, "the future does not end");
        thread::park_timeout(PATIENCE);
    }
}

#[test]
fn chunks_and_layers_move_as_they_get_ready_and_make_the_whole() {
    for verify in [false, true] {
        let options = || EngineOptions::new(0).verify(verify);
        // Blocks of the two sides differ, so bounds of chunks round down in different places.
        let (source, destination) = (rank(options(), "tp1", 16), rank(options(), "tp1", 16));
        let [out, into] = connect([&source, &destination]);
        fill(&source, 1);
        let tokens = 0..5 * TOKENS;
        let receive = destination.engine.receive(into, key(1), &map(0..5), tokens.clone()).unwrap();
        let send = source.engine.send_in_parts(out, key(1), map(0..5), tokens.clone()).unwrap();
        let part = |tokens, layers, note: &[u8]| PartSpec { tokens, layers, block_maps: None, note: note.to_vec() };
        // The second chunk, layer by layer, in an order of its own.
        send.push(part(0..20, None, &[]), Ready::now()).unwrap();
        let (first, first_ready) = Ready::later();
        let (second, second_ready) = Ready::later();
        send.push(part(20..80, Some(0..1), &[]), first_ready).unwrap();
        send.push(part(20..80, Some(1..3), &[]), second_ready).unwrap();
        let wrong = send.push(part(20..80, Some(2..4), &[]), Ready::now());
        assert!(matches!(wrong, Err(PushError::Layers { next: Some(3), .. })), "{wrong:?}");
        let early = send.push(part(20..80, Some(3..4), &[7; 4097]), Ready::now());
        assert!(matches!(early, Err(PushError::Note { bytes: 4097, .. })), "{early:?}");
        send.push(part(20..80, Some(3..4), b"first token"), Ready::now()).unwrap();
        assert!(matches!(send.push(part(80..80, None, &[]), Ready::now()), Err(PushError::Tokens { next: 80, .. })));
        assert!(receive.wait(Duration::from_millis(50)).is_none(), "two layers are missing");
        second.set();
        first.set();
        let received = receive.wait(PATIENCE).unwrap().unwrap();
        assert_eq!((received[0].bytes, &received[0].note[..]), (5 * TOKENS * 4 * 2 * 2 * 32 * 2, &b"first token"[..]));
        assert_eq!(send.wait(PATIENCE).unwrap().unwrap()[0].bytes, received[0].bytes);
        only_slots_arrived(&source, &destination, 0..5);
        // Ended well, both are quiet already.
        assert!(receive.wait_quiet(PATIENCE).is_ok() && send.wait_quiet(PATIENCE).is_ok());
    }
}

#[test]
fn a_destination_that_holds_the_prefix_gets_the_rest() {
    let (source, destination) = (rank(EngineOptions::new(0), "tp1", 16), rank(EngineOptions::new(0), "tp1", 16));
    let [out, into] = connect([&source, &destination]);
    fill(&source, 2);
    let send = source.engine.send(out, key(1), map(0..4), 0..4 * TOKENS).unwrap();
    let rest = vec![BlockMap::dense(2, [2, 3].map(Slot))];
    let receive = destination.engine.receive(into, key(1), &rest, 2 * TOKENS..4 * TOKENS).unwrap();
    assert!(receive.wait(PATIENCE).unwrap().is_ok() && send.wait(PATIENCE).unwrap().is_ok());
    only_slots_arrived(&source, &destination, 2..4);
}

#[test]
fn futures_end_without_a_runtime_and_slots_come_back_once() {
    let (source, destination) = (rank(EngineOptions::new(0), "tp1", 16), rank(EngineOptions::new(0), "tp1", 16));
    let [out, into] = connect([&source, &destination]);
    let mut receive = destination.engine.receive(into, key(1), &map([1]), 0..TOKENS).unwrap();
    assert_eq!(receive.poll_quiet(), Err(NotQuiet::Waiting));
    let sender = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        let mut send = source.engine.send(out, key(1), map([1]), 0..TOKENS).unwrap();
        let sent = block_on(&mut send).unwrap();
        (block_on(send.until_quiet()).unwrap().key(), sent[0].bytes, source)
    });
    let received = block_on(&mut receive).unwrap();
    assert_eq!(block_on(receive.until_quiet()).map(|quiet| quiet.key()), Ok(key(1)));
    assert_eq!(block_on(receive.until_quiet()), Err(NotQuiet::Given));
    let (quiet, bytes, _source) = sender.join().unwrap();
    assert_eq!((quiet, bytes), (key(1), received[0].bytes));
}

#[test]
fn what_is_given_up_ends_on_both_sides_and_is_quiet() {
    let (source, destination) = (rank(EngineOptions::new(0), "tp1", 16), rank(EngineOptions::new(0), "tp1", 16));
    let [out, into] = connect([&source, &destination]);
    let only = |error: &kvferry::RequestError| match &error.errors[..] {
        [part] => format!("{:?}", part.error),
        errors => panic!("{errors:?}"),
    };
    // By the destination, with the source waiting for a part.
    let receive = destination.engine.receive(into, key(1), &map([1]), 0..TOKENS).unwrap();
    let send = source.engine.send_in_parts(out, key(1), map([1]), 0..TOKENS).unwrap();
    thread::sleep(Duration::from_millis(20));
    receive.cancel();
    let error = receive.wait(Duration::ZERO).unwrap().unwrap_err();
    assert!(matches!(error.errors[..], [ref part] if matches!(part.error, TransferError::Cancelled)), "{error}");
    assert!(receive.wait_quiet(PATIENCE).is_ok());
    let error = send.wait(PATIENCE).unwrap().unwrap_err();
    assert!(only(&error).contains("Refused") && only(&error).contains("Cancelled"), "{error}");
    assert!(send.wait_quiet(PATIENCE).is_ok());
    // By the source.
    let receive = destination.engine.receive(into, key(2), &map([1]), 0..TOKENS).unwrap();
    let send = source.engine.send_in_parts(out, key(2), map([1]), 0..TOKENS).unwrap();
    thread::sleep(Duration::from_millis(20));
    send.cancel();
    assert!(send.wait_quiet(Duration::ZERO).is_ok(), "nothing was being written");
    let error = receive.wait(PATIENCE).unwrap().unwrap_err();
    assert!(only(&error).contains("Refused"), "{error}");
    assert!(receive.wait_quiet(PATIENCE).is_ok());
    // An attempt ends once.
    let again = destination.engine.receive(into, key(2), &map([1]), 0..TOKENS);
    assert!(matches!(again, Err(PostError::Over(_))), "{again:?}");
    assert!(matches!(
        source.engine.send(out, key(2), map([1]), 0..TOKENS),
        Err(PostError::Over(_) | PostError::UnderWay(_))
    ));
    assert!(destination.engine.quarantine().is_empty());
}

#[test]
fn whoever_announces_the_request_serves_it_and_the_others_are_let_go() {
    let of = |instance: &str| EngineOptions::new(0).instance(instance);
    let sources = ["first", "second"].map(|name| rank(of(name), "tp1", 16));
    let destination = rank(of("decode"), "tp1", 16);
    let links = [0, 1].map(|i| connect([&sources[i], &destination]));
    fill(&sources[1], 3);
    let into = links.map(|[_, into]| into);
    // One is here before the receive is posted.
    let send = sources[1].engine.send(links[1][0], key(1), map([4]), 0..TOKENS).unwrap();
    thread::sleep(Duration::from_millis(20));
    let receive = destination.engine.receive_from_any(&into, key(1), &map([4]), 0..TOKENS).unwrap();
    assert!(receive.wait(PATIENCE).unwrap().is_ok() && send.wait(PATIENCE).unwrap().is_ok());
    only_slots_arrived(&sources[1], &destination, 4..5);
    // One comes while it waits, and another too late.
    let receive = destination.engine.receive_from_any(&into, key(2), &map([4]), 0..TOKENS).unwrap();
    let send = sources[1].engine.send(links[1][0], key(2), map([4]), 0..TOKENS).unwrap();
    assert!(receive.wait(PATIENCE).unwrap().is_ok() && send.wait(PATIENCE).unwrap().is_ok());
    let late = sources[0].engine.send(links[0][0], key(2), map([4]), 0..TOKENS).unwrap();
    let error = late.wait(PATIENCE).unwrap().unwrap_err();
    let let_go = |error: &TransferError| matches!(error, TransferError::Refused { source: Refusal::NotChosen, .. });
    assert!(error.errors.iter().all(|part| let_go(&part.error)), "{error}");
    assert!(late.wait_quiet(PATIENCE).is_ok());
}

#[test]
fn sums_are_made_on_both_sides_or_on_neither_and_over_every_route() {
    let source = rank(EngineOptions::new(0).verify(true), "tp1", 16);
    let destination = rank(EngineOptions::new(0), "tp1", 16);
    let [from, to] = [&source, &destination].map(alone);
    let refused = source.engine.connect(&from, &to);
    assert!(matches!(refused, Err(ConnectError::Verify { theirs: false, ours: true, .. })), "{refused:?}");
    for route in [Route::Direct, Route::Landing, Route::Staged] {
        let options = || EngineOptions::new(0).verify(true).route(route);
        let (source, destination) = (rank(options(), "tp1", 16), rank(options(), "tp1", 32));
        let [out, into] = connect([&source, &destination]);
        fill(&source, 4);
        let receive = destination.engine.receive(into, key(1), &map([3, 1]), 0..50).unwrap();
        let send = source.engine.send(out, key(1), map([3, 1, 0, 2]), 0..50).unwrap();
        let (received, sent) = (receive.wait(PATIENCE).unwrap().unwrap(), send.wait(PATIENCE).unwrap().unwrap());
        assert_eq!(received[0].bytes, sent[0].bytes);
        assert_eq!(received[0].carried, sent[0].carried);
        assert!(sent[0].carried.iter().all(|carried| carried.route == route), "{sent:?}");
    }
}

#[test]
fn a_route_that_cannot_be_taken_is_found_out_when_the_ranks_connect() {
    let options = || EngineOptions::new(0).transports("tcp").route(Route::Direct);
    let (source, destination) = (rank(options(), "tp1", 16), rank(options(), "tp1", 16));
    let [from, to] = [&source, &destination].map(alone);
    let (out, into) = thread::scope(|scope| {
        let into = scope.spawn(|| destination.engine.connect(&from, &to));
        (source.engine.connect(&from, &to), into.join().unwrap())
    });
    let unavailable = |error: &PutError| matches!(error, PutError::RouteUnavailable { route: Route::Direct });
    assert!(matches!(&out, Err(ConnectError::SelfTest { source, .. }) if unavailable(source)), "{out:?}");
    // The other side hears that the source has left.
    let deadline = Instant::now() + PATIENCE;
    let lost = (1..).find_map(|attempt| {
        assert!(Instant::now() < deadline, "the source is still there");
        let key = RequestKey { request: 1, attempt };
        destination.engine.receive(*into.as_ref().ok()?, key, &map([1]), 0..TOKENS).err()
    });
    assert!(matches!(lost, Some(PostError::Lost(_))), "{lost:?}");
}
