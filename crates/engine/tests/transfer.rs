//! Engines of one process over real UCX: what a request promises, and what it says when it cannot be kept.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvferry::{
    CardError, ConnectError, Engine, EngineOptions, InstanceCard, InstanceCardError, Link, NotQuiet, PeerName,
    PostError, PublishError, Receive, Refusal, RequestError, RequestKey, Send, StartError, TransferError, telemetry,
};
use kvferry_layout::{
    Cut, Dtype, GroupKind, GroupSpec, Layer, LayerMask, LayoutError, ModelFacts, PageTable, RankSpec, Role, RowSpec,
    Slot, TableOptions, block_major, build,
};
use kvferry_match::{BindError, BlockMap, Side};
use kvferry_wire::{PROTOCOL_VERSION, Region, Route};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

const PATIENCE: Duration = Duration::from_secs(20);
const SLOTS: u32 = 8;
const TOKENS: u32 = 32;
const KEY: RequestKey = RequestKey { request: 42, attempt: 1 };

/// One rank of an instance.
struct Rank {
    engine: Engine,
    table: PageTable,
    regions: Vec<Region>,
}

/// The seed model: keys of 64 fp16 on every layer, an indexer row of 132 B a token on the layers of `mask`.
fn table(mask: &str, layers: Range<u32>) -> PageTable {
    let owns: Vec<bool> = mask.chars().map(|owns| owns == 'T').collect();
    let hidden_layers = u32::try_from(owns.len()).unwrap();
    let key = RowSpec::single(Role::Key, Dtype::F16, LayerMask::all(hidden_layers), 1, 64).unwrap();
    let indexer = RowSpec::indexer(Dtype::Fp8E4m3, LayerMask::from_bools(owns), 128, 128).unwrap();
    let kind = GroupKind::paged(TOKENS);
    block_major(&RankSpec {
        hidden_layers,
        layers: layers.map(Layer).collect(),
        tp_rank: 0,
        tp_size: 1,
        groups: vec![GroupSpec { kind, slot_count: SLOTS, pools: vec![vec![key], vec![indexer]] }],
    })
    .unwrap()
}

fn rank(rank: u32, table: PageTable, patience: Duration) -> Rank {
    start(EngineOptions::new(rank).patience(patience), table)
}

fn start(options: EngineOptions, mut table: PageTable) -> Rank {
    let engine = Engine::start(options).unwrap();
    let regions = engine.allocate(&mut table).unwrap();
    engine.publish(table.clone(), regions.clone()).unwrap();
    Rank { engine, table, regions }
}

fn card(rank: &Rank) -> Vec<u8> {
    rank.engine.card().unwrap()
}

/// The card of an instance of one rank, numbered 0.
fn alone(rank: &Rank) -> InstanceCard {
    InstanceCard::new([0], [card(rank)]).unwrap()
}

fn instance(ranks: &[Rank]) -> InstanceCard {
    InstanceCard::new(ranks.iter().map(|rank| rank.engine.options().rank), ranks.iter().map(card)).unwrap()
}

/// Connects every rank with every other, as each would in its own process. The links in order: sources, destinations.
fn connect(sources: &[Rank], destinations: &[Rank]) -> Vec<Link> {
    try_connect(sources, destinations).unwrap()
}

fn try_connect(sources: &[Rank], destinations: &[Rank]) -> Result<Vec<Link>, ConnectError> {
    let (from, to) = (instance(sources), instance(destinations));
    thread::scope(|scope| {
        let ranks = sources.iter().chain(destinations);
        let asked: Vec<_> = ranks.map(|rank| scope.spawn(|| rank.engine.connect(&from, &to))).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    })
}

fn pair(patience: Duration) -> (Rank, Rank, Link, Link) {
    let start = Instant::now();
    loop {
        let (sources, destinations) =
            ([rank(0, table("TFTF", 0..4), patience)], [rank(0, table("TFTF", 0..4), patience)]);
        match try_connect(&sources, &destinations) {
            Ok(links) => {
                let ([source], [destination]) = (sources, destinations);
                return (source, destination, links[0], links[1]);
            }
            // A busy machine may take longer than a short patience to have two ranks meet.
            Err(error) => assert!(patience < PATIENCE && start.elapsed() < PATIENCE, "{error}"),
        }
    }
}

fn map(slots: &[u32]) -> Vec<BlockMap> {
    vec![BlockMap::new(0, slots.iter().map(|slot| Some(Slot(*slot))).collect())]
}

fn sent(send: &Send) -> Result<u64, Arc<RequestError>> {
    send.wait(2 * PATIENCE).expect("a send ends").map(|sent| sent.iter().map(|sent| sent.bytes).sum())
}

fn received(receive: &Receive) -> Result<u64, Arc<RequestError>> {
    receive.wait(2 * PATIENCE).expect("a receive ends").map(|received| received.iter().map(|r| r.bytes).sum())
}

/// The only error of a request that failed.
fn only<T: std::fmt::Debug>(outcome: &Result<T, Arc<RequestError>>) -> &TransferError {
    match &outcome.as_ref().unwrap_err().errors[..] {
        [part] => &part.error,
        errors => panic!("{errors:?}"),
    }
}

/// The bytes of one row in one slot.
fn row(rank: &Rank, layer: u32, role: &Role, slot: u32) -> Vec<u8> {
    let (_, row) = rank.table.row(Layer(layer), role).unwrap();
    let pool = rank.table.pool(row.pool).unwrap();
    let mut bytes = vec![0; usize::try_from(row.bytes).unwrap()];
    let offset = pool.slot_offset(Slot(slot)).unwrap() + row.offset;
    rank.regions[usize::from(row.pool.0)].read(offset, &mut bytes).unwrap();
    bytes
}

/// Fills every pool with bytes that differ by rank, pool and place.
fn fill(rank: &Rank, seed: u64) {
    for (pool, region) in (0u64..).zip(&rank.regions) {
        let byte =
            |i: u64| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (seed << 40) ^ (pool << 56)) >> 33).to_le_bytes()[0];
        region.write(0, &(0..region.bytes()).map(byte).collect::<Vec<_>>()).unwrap();
    }
}

#[test]
fn the_masked_indexer_moves_from_pp1_to_pp2_by_layer() {
    let sources = [rank(0, table("TFTF", 0..4), PATIENCE)];
    let destinations = [rank(0, table("TFTF", 0..2), PATIENCE), rank(1, table("TFTF", 2..4), PATIENCE)];
    let links = connect(&sources, &destinations);
    fill(&sources[0], 1);
    let tokens = 0..u64::from(3 * TOKENS);
    let (from, to) = ([6, 1, 3], [5, 0, 2]);
    let receives: Vec<_> =
        (0..2).map(|i| destinations[i].engine.receive(links[1 + i], KEY, &map(&to), tokens.clone()).unwrap()).collect();
    let send = sources[0].engine.send(links[0], KEY, map(&from), tokens).unwrap();
    let part = 3 * (2 * 4096 + 4224);
    assert_eq!(receives.iter().map(|receive| received(receive).unwrap()).collect::<Vec<_>>(), [part, part]);
    assert_eq!(sent(&send).unwrap(), 2 * part);
    for (rank, layers, owner) in [(&destinations[0], 0..2, 0), (&destinations[1], 2..4, 2)] {
        for (from, to) in from.into_iter().zip(to) {
            for layer in layers.clone() {
                assert!(row(rank, layer, &Role::Key, to) == row(&sources[0], layer, &Role::Key, from));
            }
            assert!(row(rank, owner, &Role::IndexerKey, to) == row(&sources[0], owner, &Role::IndexerKey, from));
        }
        for slot in [1, 3, 4, 6, 7] {
            assert!(row(rank, owner, &Role::IndexerKey, slot).iter().all(|byte| *byte == 0), "slot {slot} changed");
        }
    }
}

#[test]
fn a_rank_that_owns_no_indexer_layer_has_no_pool_and_still_succeeds() {
    let sources = [rank(0, table("TFFF", 0..4), PATIENCE)];
    let destinations = [rank(0, table("TFFF", 0..2), PATIENCE), rank(1, table("TFFF", 2..4), PATIENCE)];
    assert_eq!((destinations[0].table.pools.len(), destinations[1].table.pools.len()), (2, 1));
    let links = connect(&sources, &destinations);
    fill(&sources[0], 2);
    let tokens = 0..u64::from(TOKENS);
    let send = sources[0].engine.send(links[0], KEY, map(&[4]), tokens.clone()).unwrap();
    let receives: Vec<_> = (0..2)
        .map(|i| destinations[i].engine.receive(links[1 + i], KEY, &map(&[7]), tokens.clone()).unwrap())
        .collect();
    assert_eq!((received(&receives[0]).unwrap(), received(&receives[1]).unwrap()), (2 * 4096 + 4224, 2 * 4096));
    assert_eq!(sent(&send).unwrap(), 4 * 4096 + 4224);
    assert!(row(&destinations[1], 3, &Role::Key, 7) == row(&sources[0], 3, &Role::Key, 4));
}

#[test]
fn many_requests_at_once_each_end_well_in_any_order() {
    let (source, destination, out, into) = pair(PATIENCE);
    fill(&source, 3);
    let key = |request| RequestKey { request, attempt: 0 };
    let tokens = 0..u64::from(TOKENS);
    let slot = |request: u64| u32::try_from(request).unwrap() % SLOTS;
    let receives: Vec<_> =
        (0..64).map(|i| destination.engine.receive(into, key(i), &map(&[slot(i)]), tokens.clone()).unwrap()).collect();
    let sends: Vec<_> =
        (0..64).rev().map(|i| source.engine.send(out, key(i), map(&[slot(i)]), tokens.clone()).unwrap()).collect();
    let bytes = 4 * 4096 + 2 * 4224;
    assert!(receives.iter().all(|receive| received(receive).unwrap() == bytes));
    assert!(sends.iter().all(|send| sent(send).unwrap() == bytes));
    for (here, there) in source.regions.iter().zip(&destination.regions) {
        let read = |region: &Region| {
            let mut bytes = vec![0; usize::try_from(region.bytes()).unwrap()];
            region.read(0, &mut bytes).unwrap();
            bytes
        };
        assert!(read(here) == read(there), "every slot was moved to its like");
    }
}

#[test]
fn a_hole_that_is_needed_is_named_and_nothing_moves() {
    let (source, destination, out, into) = pair(PATIENCE);
    fill(&source, 4);
    let tokens = 0..u64::from(2 * TOKENS);
    let holed = vec![BlockMap::new(0, vec![Some(Slot(1)), None])];
    match destination.engine.receive(into, KEY, &holed, tokens.clone()) {
        Err(PostError::BlockMaps { peer, source: BindError::Hole { side: Side::Destination, ordinal: 1, .. } }) => {
            assert_eq!(peer, PeerName { side: Side::Source, rank: 0 });
        }
        result => panic!("{:?}", result.map(|_| ())),
    }
    let receive = destination.engine.receive(into, KEY, &map(&[1, 2]), tokens.clone()).unwrap();
    let send = source.engine.send(out, KEY, holed, tokens).unwrap();
    match only(&sent(&send)) {
        TransferError::BlockMaps { source: BindError::Hole { side: Side::Source, ordinal: 1, .. }, .. } => {}
        error => panic!("{error:?}"),
    }
    match only(&received(&receive)) {
        TransferError::Refused { peer: PeerName { rank: 0, .. }, source: Refusal::BlockMaps } => {}
        error => panic!("{error:?}"),
    }
    assert!(row(&destination, 0, &Role::Key, 1).iter().all(|byte| *byte == 0), "nothing moved");
}

#[test]
fn sides_that_name_other_tokens_find_out_before_a_byte_moves() {
    let (source, destination, out, into) = pair(PATIENCE);
    fill(&source, 5);
    let receive = destination.engine.receive(into, KEY, &map(&[1]), 0..u64::from(TOKENS)).unwrap();
    let send = source.engine.send(out, KEY, map(&[1]), 0..u64::from(TOKENS) - 1).unwrap();
    assert!(matches!(only(&sent(&send)), TransferError::TokensDiffer { theirs: Range { start: 0, end: 32 }, .. }));
    let refused = received(&receive);
    assert!(matches!(only(&refused), TransferError::Refused { source: Refusal::TokensDiffer, .. }));
    assert!(row(&destination, 0, &Role::Key, 1).iter().all(|byte| *byte == 0), "nothing moved");
}

#[test]
fn each_side_posts_its_own_kind_once_at_a_time() {
    // More than it takes to post the second while the first is under way.
    let (source, destination, out, into) = pair(Duration::from_secs(2));
    let tokens = 0..u64::from(TOKENS);
    assert!(matches!(source.engine.receive(out, KEY, &map(&[1]), tokens.clone()), Err(PostError::OtherSide)));
    assert!(matches!(destination.engine.send(into, KEY, map(&[1]), tokens.clone()), Err(PostError::OtherSide)));
    let first = destination.engine.receive(into, KEY, &map(&[1]), tokens.clone()).unwrap();
    assert!(matches!(destination.engine.receive(into, KEY, &map(&[1]), tokens), Err(PostError::UnderWay(KEY))));
    assert!(matches!(destination.engine.disconnect(into), Err(PostError::UnderWay(KEY))));
    assert!(received(&first).is_err());
    destination.engine.disconnect(into).unwrap();
    assert!(matches!(destination.engine.disconnect(into), Err(PostError::NoLink)));
}

#[test]
fn a_receive_that_nobody_serves_ends_at_the_deadline_and_so_does_the_send() {
    let patience = Duration::from_millis(400);
    let (source, destination, out, into) = pair(patience);
    let tokens = 0..u64::from(TOKENS);
    let started = Instant::now();
    let receive = destination.engine.receive(into, KEY, &map(&[1]), tokens.clone()).unwrap();
    match only(&received(&receive)) {
        TransferError::Stalled {
            peer: PeerName { side: Side::Source, rank: 0 }, moved: 0, expected: 24832, ..
        } => {}
        error => panic!("{error:?}"),
    }
    let took = started.elapsed();
    assert!(took >= patience && took < patience + Duration::from_secs(2), "{took:?}");
    // The destination takes its want back. A send that is posted before it has heard of that writes in vain and is told so
    // (until then the slots are exposed); one posted later waits for a new want and gives up in its turn.
    let send = source.engine.send(out, KEY, map(&[1]), tokens).unwrap();
    let outcome = sent(&send);
    let error = only(&outcome);
    let in_vain = matches!(error, TransferError::Refused { source: Refusal::Cancelled | Refusal::Unknown, .. });
    assert!(in_vain || matches!(error, TransferError::Stalled { expected: 0, .. }), "{error:?}");
}

#[test]
fn an_engine_that_goes_away_ends_its_own_requests_and_its_peers() {
    let (source, destination, _, into) = pair(PATIENCE);
    let receive = destination.engine.receive(into, KEY, &map(&[1]), 0..u64::from(TOKENS)).unwrap();
    let started = Instant::now();
    drop(source);
    let outcome = received(&receive);
    let error = only(&outcome);
    assert!(matches!(error, TransferError::Lost { peer: PeerName { rank: 0, .. }, .. }), "{error:?}");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    // It said goodbye: nothing of it is written any more.
    assert_eq!(receive.wait_quiet(PATIENCE).map(|quiet| quiet.key()), Ok(KEY));
    assert_eq!(receive.poll_quiet(), Err(NotQuiet::Given));
    let again = RequestKey { attempt: 2, ..KEY };
    let next = destination.engine.receive(into, again, &map(&[1]), 0..u64::from(TOKENS));
    assert!(matches!(next, Err(PostError::Lost(PeerName { side: Side::Source, rank: 0 }))));

    let (_source, destination, _, into) = pair(PATIENCE);
    let receive = destination.engine.receive(into, KEY, &map(&[1]), 0..u64::from(TOKENS)).unwrap();
    drop(destination);
    assert!(matches!(only(&received(&receive)), TransferError::Stopped));
    assert_eq!(receive.poll_quiet(), Err(NotQuiet::Never));
}

/// With checksums to be made, and in the middle of writes: the destination hears when the last of them has ended.
#[test]
fn an_engine_that_goes_away_while_it_sends_leaves_nothing_in_quarantine() {
    const LAYERS: u32 = 64;
    for verify in [false, true] {
        let options = |instance: &str| {
            let (transports, route) = (Some("tcp".to_owned()), Some(Route::Runs));
            EngineOptions { verify, transports, route, ..EngineOptions::new(0).instance(instance).patience(PATIENCE) }
        };
        let wide = || table(&"F".repeat(LAYERS as usize), 0..LAYERS);
        let (source, destination) = (start(options("from"), wide()), start(options("to"), wide()));
        let links = connect(std::slice::from_ref(&source), std::slice::from_ref(&destination));
        let requests = (0..SLOTS).map(|slot| (RequestKey { request: u64::from(slot), attempt: 0 }, map(&[slot])));
        let tokens = 0..u64::from(TOKENS);
        let posted: Vec<(RequestKey, Send, Receive)> = requests
            .map(|(key, map)| {
                let receive = destination.engine.receive(links[1], key, &map, tokens.clone()).unwrap();
                (key, source.engine.send(links[0], key, map, tokens.clone()).unwrap(), receive)
            })
            .collect();
        // Some are being moved, and others wait for their sums.
        let started = Instant::now();
        while posted.iter().all(|(_, send, _)| send.poll().is_none()) && started.elapsed() < PATIENCE / 100 {
            thread::yield_now();
        }
        drop(source);
        for (key, send, receive) in posted {
            let (sent, received) = (sent(&send), received(&receive));
            assert!(sent.is_err() || received.is_ok(), "{sent:?}, {received:?}");
            assert_eq!(receive.wait_quiet(PATIENCE / 4).map(|quiet| quiet.key()), Ok(key), "verify {verify}");
        }
    }
}

/// What a receive that was open had in quarantine is nobody's concern once its engine has gone.
#[test]
fn slots_of_an_engine_that_goes_away_are_not_counted_as_in_quarantine() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let slots = || {
        let recorded = snapshotter.snapshot().into_vec();
        recorded.into_iter().find_map(|(key, _, _, value)| match value {
            DebugValue::Gauge(slots) if key.key().name() == telemetry::QUARANTINED_SLOTS => Some(slots.0),
            _ => None,
        })
    };
    let (source, destination, _, link) = metrics::with_local_recorder(&recorder, || pair(PATIENCE));
    let receive = destination.engine.receive(link, KEY, &map(&[1, 2]), 0..u64::from(2 * TOKENS)).unwrap();
    assert_eq!(slots(), Some(0.0));
    drop((destination, source));
    assert!(matches!(only(&received(&receive)), TransferError::Stopped));
    assert_eq!(receive.wait_quiet(PATIENCE).unwrap_err(), NotQuiet::Never);
    assert_eq!(slots(), Some(0.0));
}

#[test]
fn a_peer_that_never_connects_is_named_at_the_deadline() {
    let patience = Duration::from_millis(500);
    let source = rank(0, table("TFTF", 0..4), patience);
    let destination = rank(0, table("TFTF", 0..4), patience);
    let (from, to) = (alone(&source), alone(&destination));
    match destination.engine.connect(&from, &to) {
        Err(ConnectError::NoAnswer { peer: PeerName { side: Side::Source, rank: 0 }, waited }) => {
            assert_eq!(waited, patience)
        }
        result => panic!("{result:?}"),
    }
}

#[test]
fn cards_that_are_no_instance_are_refused_by_name() {
    let ranks = [rank(0, table("TFTF", 0..4), PATIENCE), rank(1, table("TFTF", 0..4), PATIENCE)];
    let [first, second] = [&ranks[0], &ranks[1]].map(card);
    let refused = |ranks: Range<u32>, cards: &[&[u8]]| InstanceCard::new(ranks, cards).unwrap_err();
    let unreadable = |card: &[u8]| match refused(0..2, &[&first, card]) {
        InstanceCardError::Card { place: 1, source } => source,
        error => panic!("{error:?}"),
    };
    assert!(matches!(unreadable(&[]), CardError::NotACard { bytes: 0 }));
    assert!(matches!(unreadable(b"GET / HTTP/1.1"), CardError::NotACard { .. }));
    assert!(matches!(unreadable(&second[..20]), CardError::NotACard { bytes: 20 }));
    let altered = |card: &[u8], byte: usize| {
        let mut card = card.to_vec();
        card[byte] ^= 0x40;
        card
    };
    // Of another release than the others.
    match unreadable(&altered(&second, 8)) {
        CardError::Version { theirs, ours } => assert_eq!((theirs, ours), (PROTOCOL_VERSION ^ 0x40, PROTOCOL_VERSION)),
        error => panic!("{error}"),
    }
    for byte in (10..second.len()).step_by(7) {
        assert!(matches!(unreadable(&altered(&second, byte)), CardError::Damaged), "byte {byte}");
    }
    assert!(matches!(refused(0..3, &[&second, &first]), InstanceCardError::Missing { rank: 2 }));
    assert!(matches!(refused(0..1, &[]), InstanceCardError::Missing { rank: 0 }));
    assert!(matches!(refused(0..1, &[&first, &second]), InstanceCardError::Unexpected { rank: 1 }));
    let life = card(&rank(1, table("TFTF", 0..4), PATIENCE));
    assert!(matches!(refused(0..2, &[&first, &second, &life]), InstanceCardError::Twice { rank: 1 }));
    let elsewhere = Engine::start(EngineOptions::new(1).instance("decode")).unwrap();
    let mut table = table("TFTF", 0..4);
    let regions = elsewhere.allocate(&mut table).unwrap();
    elsewhere.publish(table, regions).unwrap();
    let error = refused(0..2, &[&first, &elsewhere.card().unwrap()]);
    assert!(
        matches!(&error, InstanceCardError::OtherInstance { rank: 1, theirs, .. } if theirs == "decode"),
        "{error}"
    );

    let instance = InstanceCard::new(0..2, [&second, &first]).unwrap();
    assert!(instance.ranks().eq(0..2));
    let bytes = instance.to_bytes();
    assert_eq!(InstanceCard::from_bytes(&bytes).unwrap(), instance);
    for byte in (0..bytes.len()).step_by(13) {
        let error = InstanceCard::from_bytes(&altered(&bytes, byte)).unwrap_err();
        assert!(matches!(error, InstanceCardError::Unreadable(_)), "byte {byte}: {error:?}");
    }
    // One is not taken for the other.
    let one_rank = InstanceCard::from_bytes(&first).unwrap_err();
    assert!(matches!(one_rank, InstanceCardError::Unreadable(CardError::NotACard { .. })), "{one_rank:?}");
    assert!(matches!(unreadable(&bytes), CardError::NotACard { .. }));
}

#[test]
fn an_engine_is_of_one_of_the_two_instances() {
    let (source, destination) = (rank(0, table("TFTF", 0..4), PATIENCE), rank(0, table("TFTF", 0..4), PATIENCE));
    for of_both_sides in [&source, &destination].map(alone) {
        let refused = destination.engine.connect(&of_both_sides, &of_both_sides);
        assert!(matches!(refused, Err(ConnectError::NotAmong)), "{refused:?}");
    }
}

#[test]
fn instances_that_do_not_fit_are_refused_before_anything_is_connected() {
    let source = rank(0, table("TFFF", 0..4), PATIENCE);
    let destination = rank(0, table("TFTF", 0..4), PATIENCE);
    let (from, to) = (alone(&source), alone(&destination));
    for engine in [&source.engine, &destination.engine] {
        match engine.connect(&from, &to) {
            Err(ConnectError::Match(source)) => {
                assert!(source.to_string().contains("layer 2"), "{source}");
            }
            result => panic!("{result:?}"),
        }
    }
    let half = rank(0, table("TFTF", 0..2), PATIENCE);
    let uncovered = half.engine.connect(&alone(&half), &to);
    assert!(matches!(uncovered, Err(ConnectError::Match(_))), "{uncovered:?}");
}

#[test]
fn a_table_outside_its_regions_is_not_published() {
    let engine = Engine::start(EngineOptions::new(0).patience(PATIENCE)).unwrap();
    assert!(engine.card().is_none());
    let mut table = table("TFTF", 0..4);
    let regions = engine.allocate(&mut table).unwrap();
    let short = engine.publish(table.clone(), regions[..1].to_vec());
    assert!(matches!(short, Err(PublishError::Regions { pools: 2, regions: 1 })));
    let mut moved = table.clone();
    moved.pools[1].base += 1;
    match engine.publish(moved, regions.clone()) {
        Err(PublishError::Table(LayoutError::OutsideRegion { .. })) => {}
        result => panic!("{result:?}"),
    }
    engine.publish(table.clone(), regions.clone()).unwrap();
    assert!(matches!(engine.publish(table, regions), Err(PublishError::Twice)));
}

/// Sends one block and checks that it arrives.
fn block_moves(source: &Rank, destination: &Rank, links: (Link, Link), request: u64) {
    let key = RequestKey { request, attempt: 0 };
    let receive = destination.engine.receive(links.1, key, &map(&[2]), 0..u64::from(TOKENS)).unwrap();
    let send = source.engine.send(links.0, key, map(&[5]), 0..u64::from(TOKENS)).unwrap();
    assert!(received(&receive).unwrap() > 0 && sent(&send).unwrap() > 0);
    assert!(row(destination, 3, &Role::Key, 2) == row(source, 3, &Role::Key, 5));
}

#[test]
fn a_restarted_peer_is_known_again_and_its_survivors_do_nothing() {
    restart_in_turn(|_| 1);
}

#[test]
fn ranks_of_any_number_of_workers_reach_each_other_and_may_restart_with_another() {
    restart_in_turn(|started| [2, 3, 2, 1, 4, 2, 64][started]);
}

/// Two sources and a destination, which restart in turn. `workers` is told how many ranks have been started before.
fn restart_in_turn(workers: impl Fn(usize) -> usize) {
    let tables = || [table("TFTF", 0..2), table("TFTF", 2..4)];
    let [first, second] = tables();
    let mut started = 0..;
    let mut rank = |rank, table| {
        // Inboxes so small that many fit.
        let workers = workers(started.next().unwrap());
        let options = EngineOptions { inbox_bytes: 1 << 20, workers, ..EngineOptions::new(rank).patience(PATIENCE) };
        start(options, table)
    };
    let mut sources = [rank(0, first), rank(1, second)];
    let mut destination = [rank(0, table("TFTF", 0..4))];
    let mut links = connect(&sources, &destination);
    for life in 0..4 {
        fill(&sources[0], life);
        fill(&sources[1], life);
        let back = Instant::now();
        // Nothing beyond trying again, until the peer is back everywhere.
        let (mut attempt, tokens) = (0, 0..u64::from(TOKENS));
        loop {
            assert!(back.elapsed() < 2 * PATIENCE, "life {life}");
            attempt += 1;
            let key = RequestKey { request: life, attempt };
            let Ok(receive) = destination[0].engine.receive(links[2], key, &map(&[2]), tokens.clone()) else {
                continue;
            };
            let sends = [0, 1].map(|i| sources[i].engine.send(links[i], key, map(&[5]), tokens.clone()));
            let [Ok(first), Ok(second)] = sends else { continue };
            if received(&receive).is_ok() {
                assert!(sent(&first).is_ok() && sent(&second).is_ok());
                break;
            }
        }
        println!("life {life}: moved after {:?} and {attempt} attempts", back.elapsed());
        for layer in 0..4 {
            let source = &sources[usize::from(layer >= 2)];
            assert!(row(&destination[0], layer, &Role::Key, 2) == row(source, layer, &Role::Key, 5));
        }
        // A source restarts, or the destination: only it connects.
        let [_, second] = tables();
        let restarted = if life % 2 == 0 {
            sources[1] = rank(1, second);
            1
        } else {
            destination[0] = rank(0, table("TFTF", 0..4));
            2
        };
        let (from, to) = (instance(&sources), instance(&destination));
        let engine = if restarted == 1 { &sources[1].engine } else { &destination[0].engine };
        links[restarted] = engine.connect(&from, &to).unwrap();
    }
}

#[test]
fn a_call_that_was_given_up_does_not_count_for_a_later_one() {
    // Calls overlap for three quarters of it, which a busy machine may find too short.
    let met = [1, 4, 16].into_iter().map(Duration::from_secs).find_map(meet_after_calls_in_vain);
    let (source, destination, links) = met.expect("the two meet");
    let (sources, destinations) = ([source], [destination]);
    fill(&sources[0], 6);
    block_moves(&sources[0], &destinations[0], links, 1);
    // One side starts anew on its own: the other is told, disconnects, and both meet again.
    sources[0].engine.disconnect(links.0).unwrap();
    let mut attempts = 1..;
    let lost = loop {
        let key = RequestKey { attempt: attempts.next().unwrap(), ..KEY };
        match destinations[0].engine.receive(links.1, key, &map(&[1]), 0..u64::from(TOKENS)) {
            Err(error) => break error,
            Ok(receive) => assert!(received(&receive).is_err()),
        }
    };
    assert!(matches!(lost, PostError::Lost(PeerName { side: Side::Source, rank: 0 })), "{lost:?}");
    destinations[0].engine.disconnect(links.1).unwrap();
    let links = connect(&sources, &destinations);
    block_moves(&sources[0], &destinations[0], (links[0], links[1]), 2);
}

/// Two ranks that each called the other in vain, and then at the same time.
fn meet_after_calls_in_vain(patience: Duration) -> Option<(Rank, Rank, (Link, Link))> {
    let (source, destination) = (rank(0, table("TFTF", 0..4), patience), rank(0, table("TFTF", 0..4), patience));
    let (from, to) = (alone(&source), alone(&destination));
    // Each calls alone, one after the other: nobody is there, however fresh the other's greeting is.
    assert!(source.engine.connect(&from, &to).is_err());
    assert!(destination.engine.connect(&from, &to).is_err());
    thread::sleep(patience); // until the connections of the calls that were given up are down
    // Both at once, from different starts: the one that comes late finds the other waiting.
    let links = thread::scope(|scope| {
        let early = scope.spawn(|| source.engine.connect(&from, &to));
        thread::sleep(patience / 4);
        let late = destination.engine.connect(&from, &to);
        Some((early.join().unwrap().ok()?, late.ok()?))
    });
    links.map(|links| (source, destination, links))
}

#[test]
fn a_link_of_another_engine_is_no_link() {
    let (source, _destination, out, _) = pair(PATIENCE);
    let (other, _other_destination, foreign, _) = pair(PATIENCE);
    let send = other.engine.send(out, KEY, map(&[1]), 0..u64::from(TOKENS));
    assert!(matches!(send, Err(PostError::NoLink)));
    assert!(matches!(source.engine.disconnect(foreign), Err(PostError::NoLink)));
}

#[test]
fn a_receive_of_too_many_blocks_is_refused_at_once() {
    let (_source, destination, _, into) = pair(PATIENCE);
    let slots = vec![Some(Slot(0)); 200_000];
    match destination.engine.receive(into, KEY, &[BlockMap::new(0, slots)], 0..u64::from(TOKENS)) {
        Err(PostError::TooManyBlocks { blocks: 200_000, .. }) => {}
        result => panic!("{:?}", result.map(|_| ())),
    }
}

#[test]
fn a_patience_that_no_clock_can_count_is_refused() {
    for patience in [Duration::ZERO, Duration::MAX] {
        let engine = Engine::start(EngineOptions::new(0).patience(patience));
        assert!(matches!(engine, Err(StartError::Patience(refused)) if refused == patience));
    }
}

#[test]
fn an_engine_has_a_worker_and_not_too_many() {
    for workers in [0, 65] {
        let engine = Engine::start(EngineOptions::new(0).workers(workers));
        assert!(matches!(engine, Err(StartError::Workers { workers: refused }) if refused == workers));
    }
}

#[test]
fn memory_of_another_engine_is_not_published() {
    let start = || Engine::start(EngineOptions::new(0).patience(PATIENCE)).unwrap();
    let (engine, other) = (start(), start());
    let mut table = table("TFTF", 0..4);
    let regions = other.allocate(&mut table).unwrap();
    assert!(matches!(engine.publish(table, regions), Err(PublishError::OtherContext { pool: 0 })));
}

#[test]
fn each_data_parallel_part_has_a_link_of_its_own() {
    let facts = r#"{"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64}"#;
    let facts = ModelFacts::from_config(facts).unwrap();
    let options = TableOptions::new(TOKENS, Dtype::F16, SLOTS);
    let cut: Cut = "dp2".parse().unwrap();
    let part = |part| [rank(part, build(&facts, &cut, part, &options).unwrap(), PATIENCE)];
    let parts = [part(0), part(1)];
    let destinations = [rank(0, build(&facts, &"tp1".parse().unwrap(), 0, &options).unwrap(), PATIENCE)];
    let links = [connect(&parts[0], &destinations), connect(&parts[1], &destinations)];
    for (number, (sources, links)) in (0..).zip(parts.iter().zip(&links)) {
        fill(&sources[0], 40 + number);
        let key = RequestKey { request: number, attempt: 0 };
        let receive = destinations[0].engine.receive(links[1], key, &map(&[2]), 0..u64::from(TOKENS)).unwrap();
        let send = sources[0].engine.send(links[0], key, map(&[5]), 0..u64::from(TOKENS)).unwrap();
        assert!(received(&receive).unwrap() > 0 && sent(&send).unwrap() > 0);
        assert!(row(&destinations[0], 1, &Role::Value, 2) == row(&sources[0], 1, &Role::Value, 5));
    }
    // Together they are no instance that holds one request.
    let all = parts.iter().flatten();
    let both = InstanceCard::new(all.clone().map(|rank| rank.engine.options().rank), all.map(card)).unwrap();
    let mixed = destinations[0].engine.connect(&both, &instance(&destinations));
    assert!(matches!(mixed, Err(ConnectError::Match(_))), "{mixed:?}");
}
