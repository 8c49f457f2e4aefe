use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use kvferry_wire::Status;
use metrics_util::MetricKind;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tracing_subscriber::fmt::format::FmtSpan;

use super::*;
use crate::core::{LinkId, PutId};
use crate::error::{PartError, PeerName, Phase};
use crate::message::{CallId, Welcome};
use crate::report::Times;

const POSTED: Duration = Duration::from_micros(10);
const TOTAL: Duration = Duration::from_millis(5);

fn key(request: u64) -> RequestKey {
    RequestKey { request, attempt: 0 }
}

fn ticket(request: u64) -> Ticket {
    Ticket { link: LinkId(0), key: key(request) }
}

fn part(rank: u32, bytes: u64, route: Route) -> Sent {
    let (reason, elapsed, times) = (RouteReason::Forced, Duration::from_millis(2), Times::default());
    let carried = vec![TransferStats { bytes, runs: 1, elapsed, route, reason }];
    Sent { rank, rows: 1, pieces: 1, runs: 1, bytes, carried, elapsed, times }
}

fn error(request: u64, error: TransferError) -> RequestError {
    RequestError { key: key(request), errors: vec![PartError { epoch: 1, phase: Phase::Moving, error }] }
}

/// Everything that was recorded, by name and labels.
fn record(work: impl FnOnce(&Telemetry)) -> BTreeMap<String, DebugValue> {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || work(&Telemetry::new()));
    let recorded = snapshotter.snapshot().into_vec().into_iter();
    let named = recorded.map(|(key, unit, help, value)| {
        let (kind, key) = key.into_parts();
        assert!(unit.is_some() && help.is_some(), "{key} is not described");
        assert_eq!(kind == MetricKind::Counter, key.name().ends_with("_total"), "{key}");
        let labels: Vec<String> = key.labels().map(|label| format!(" {}={}", label.key(), label.value())).collect();
        (format!("{}{}", key.name(), labels.concat()), value)
    });
    named.collect()
}

fn check(recorded: &BTreeMap<String, DebugValue>, name: &str, expected: &DebugValue) {
    let found = recorded.get(name).unwrap_or_else(|| panic!("{name}: {:?}", recorded.keys()));
    assert_eq!(found, expected, "{name}");
}

fn seconds(durations: &[Duration]) -> DebugValue {
    DebugValue::Histogram(durations.iter().map(|duration| duration.as_secs_f64().into()).collect())
}

#[test]
fn requests_are_counted_by_side_outcome_route_and_reason() {
    let now = Instant::now();
    let end = now + TOTAL;
    let peer = PeerName { side: Side::Source, rank: 3 };
    let lost = TransferError::Lost { peer, moved: 0, expected: 9, source: Status::ERR_CONNECTION_RESET };
    let recorded = record(|telemetry| {
        for request in 0..4 {
            telemetry.send_begun(ticket(request), &(0..32), now);
            telemetry.posted(Side::Source, POSTED);
        }
        telemetry.sent(end, ticket(0), &Ok(vec![part(0, 100, Route::Direct), part(1, 20, Route::Staged)]));
        telemetry.sent(end, ticket(1), &Ok(vec![part(0, 3, Route::Direct)]));
        telemetry.sent(end, ticket(1), &Ok(vec![part(0, 9, Route::Direct)]));
        telemetry.sent(end, ticket(2), &Err(error(2, TransferError::Cancelled)));

        telemetry.receive_begun(key(7), &(0..32), 2, now);
        telemetry.received(end, key(7), &Err(error(7, lost)));
        telemetry.receive_begun(key(8), &(0..32), 2, now);
        let (carried, times) = (Vec::new(), Times::default());
        let received = Received { rank: 0, rows: 1, bytes: 50, carried, elapsed: TOTAL, times, note: Vec::new() };
        telemetry.received(end, key(8), &Ok(vec![received.clone(), received]));
        telemetry.dropped_frame();
    });
    for (name, expected) in [
        ("kvferry_requests_total side=source outcome=succeeded", 2),
        ("kvferry_requests_total side=source outcome=failed", 0),
        ("kvferry_requests_total side=source outcome=cancelled", 1),
        ("kvferry_requests_total side=destination outcome=succeeded", 1),
        ("kvferry_requests_total side=destination outcome=failed", 1),
        ("kvferry_sent_bytes_total route=direct reason=the options ask for it", 103),
        ("kvferry_sent_bytes_total route=staged reason=the options ask for it", 20),
        ("kvferry_writes_total route=direct reason=the options ask for it", 2),
        ("kvferry_received_bytes_total", 100),
        ("kvferry_dropped_frames_total", 1),
    ] {
        check(&recorded, name, &DebugValue::Counter(expected));
    }
    check(&recorded, "kvferry_requests_in_flight side=source", &DebugValue::Gauge(1.0.into()));
    check(&recorded, "kvferry_requests_in_flight side=destination", &DebugValue::Gauge(0.0.into()));
    check(&recorded, "kvferry_post_seconds side=source", &seconds(&[POSTED; 4]));
    check(&recorded, "kvferry_request_seconds side=source", &seconds(&[TOTAL; 2]));
    check(&recorded, "kvferry_request_seconds side=destination", &seconds(&[TOTAL]));
    check(&recorded, "kvferry_write_seconds route=direct", &seconds(&[Duration::from_millis(2); 2]));
}

/// A log in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_request_is_a_span_with_an_event_for_each_peer() {
    let log = Log::default();
    let for_writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_span_events(FmtSpan::CLOSE)
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .with_writer(move || for_writer.clone())
        .finish();
    let now = Instant::now();
    tracing::subscriber::with_default(subscriber, || {
        let telemetry = Telemetry::new();
        telemetry.send_begun(ticket(5), &(64..96), now);
        telemetry.write_begun(ticket(5), PutId(1), 0, 100);
        telemetry.write_begun(ticket(5), PutId(2), 1, 20);
        telemetry.write_ended(PutId(2), None, "failed");
        telemetry.write_ended(PutId(1), part(0, 100, Route::Direct).carried.first(), "succeeded");
        telemetry.write_begun(ticket(7), PutId(3), 1, 20); // of nothing that is under way
        telemetry.sent(now, ticket(5), &Ok(vec![part(0, 100, Route::Direct), part(1, 20, Route::Staged)]));
        telemetry.receive_begun(key(6), &(0..32), 1, now);
        telemetry.received(now, key(6), &Err(error(6, TransferError::Cancelled)));
    });
    let text = String::from_utf8(log.0.lock().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let expected = [
        "send{request=5 attempt=0 tokens=64..96}:write{destination=1 bytes=20 outcome=\"failed\"}: kvferry::telemetry: close",
        "send{request=5 attempt=0 tokens=64..96}:write{destination=0 bytes=100 route=direct reason=the options ask for it \
         outcome=\"succeeded\"}: kvferry::telemetry: close",
        "send{request=5 attempt=0 tokens=64..96 outcome=\"succeeded\"}: kvferry::telemetry: sent destination=0 bytes=100 \
         route=direct reason=the options ask for it",
        "send{request=5 attempt=0 tokens=64..96 outcome=\"succeeded\"}: kvferry::telemetry: sent destination=1 bytes=20 \
         route=staged reason=the options ask for it",
        "send{request=5 attempt=0 tokens=64..96 outcome=\"succeeded\" bytes=120}: kvferry::telemetry: close",
        "receive{request=6 attempt=0 tokens=0..32 outcome=\"cancelled\"}: kvferry::telemetry: ended early error=cancelled",
        "receive{request=6 attempt=0 tokens=0..32 outcome=\"cancelled\"}: kvferry::telemetry: close",
    ];
    assert_eq!(lines.len(), expected.len(), "{text}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.contains(expected), "{line}\n{expected}");
    }
}

#[test]
fn slots_are_quarantined_from_the_end_of_a_request_until_they_are_quiet() {
    let now = Instant::now();
    let after = |quiet: &[u64]| {
        let mut recorded = record(|telemetry| {
            for (request, slots) in [(1, 10), (2, 7), (3, 5)] {
                telemetry.receive_begun(key(request), &(0..32), slots, now);
            }
            telemetry.received(now, key(1), &Err(error(1, TransferError::Cancelled)));
            telemetry.received(now, key(2), &Err(error(2, TransferError::Cancelled)));
            quiet.iter().for_each(|request| telemetry.forget(key(*request)));
        });
        recorded.remove("kvferry_quarantined_slots")
    };
    assert_eq!(after(&[]), Some(DebugValue::Gauge(17.0.into())));
    assert_eq!(after(&[1, 1, 3]), Some(DebugValue::Gauge(7.0.into())));
    assert_eq!(after(&[2, 1]), Some(DebugValue::Gauge(0.0.into())));
}

#[test]
fn only_what_is_said_again_counts_as_resent() {
    let say = |message| Action::Say { epoch: 1, message };
    let recorded = record(|telemetry| {
        let welcome = Message::Welcome(Welcome { call: CallId(1), floor: 0 });
        telemetry.ticked(&[say(Message::Announce(key(1))), say(welcome), Action::Forget { epoch: 1 }]);
        telemetry.ticked(&[say(Message::Announce(key(1)))]);
    });
    check(&recorded, "kvferry_resent_frames_total", &DebugValue::Counter(2));
}
