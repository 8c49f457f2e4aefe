//! What an engine counts and measures, through the [`metrics`] facade, and the [`tracing`] span of each request.
//!
//! | name | kind | unit | labels |
//! | --- | --- | --- | --- |
//! | [`REQUESTS`] | counter | requests ended | `side`, `outcome` |
//! | [`REQUESTS_IN_FLIGHT`] | gauge | requests posted and not ended | `side` |
//! | [`REQUEST_SECONDS`] | histogram | seconds from the post to the end, of those that ended well | `side` |
//! | [`POST_SECONDS`] | histogram | seconds that the call that posts took | `side` |
//! | [`SENT_BYTES`] | counter | bytes, by the destination's own count | `route`, `reason` |
//! | [`WRITES`] | counter | writes to one destination rank, ended well | `route`, `reason` |
//! | [`WRITE_SECONDS`] | histogram | seconds from the start of such a write until its bytes were there | `route` |
//! | [`RECEIVED_BYTES`] | counter | bytes, by this rank's own count | |
//! | [`DROPPED_FRAMES`] | counter | frames from peers that were no frames or no messages | |
//!
//! `side` is `source` or `destination`, `outcome` is `succeeded` or `failed`, `route` is the name of a
//! [`Route`] and `reason` the words of a [`RouteReason`]. Engines of one process add up.
//!
//! A recorder that is to see anything must be installed before [`Engine::start`](crate::Engine::start): an engine asks for
//! its counters there, and without one keeps counters that do nothing. Spans are called `send` and `receive`, carry request,
//! attempt and tokens, and are given bytes and outcome at the end, with one event for each peer.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use kvferry_match::Side;
use kvferry_wire::{Route, RouteReason};
use metrics::{
    Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use tracing::field::Empty;
use tracing::{Span, debug, info_span};

use crate::core::Ticket;
use crate::error::RequestError;
use crate::report::{Received, Sent};

/// Requests that have ended.
pub const REQUESTS: &str = "kvferry_requests_total";
/// Requests that are posted and have not ended.
pub const REQUESTS_IN_FLIGHT: &str = "kvferry_requests_in_flight";
/// How long requests took.
pub const REQUEST_SECONDS: &str = "kvferry_request_seconds";
/// How long posting took.
pub const POST_SECONDS: &str = "kvferry_post_seconds";
/// Bytes written to destinations.
pub const SENT_BYTES: &str = "kvferry_sent_bytes_total";
/// Writes to one destination rank.
pub const WRITES: &str = "kvferry_writes_total";
/// How long writes to one destination rank took.
pub const WRITE_SECONDS: &str = "kvferry_write_seconds";
/// Bytes that sources have written here.
pub const RECEIVED_BYTES: &str = "kvferry_received_bytes_total";
/// What came from peers and made no sense.
pub const DROPPED_FRAMES: &str = "kvferry_dropped_frames_total";

/// The counters of one engine, and its requests under way.
#[derive(Debug)]
pub(crate) struct Telemetry {
    sending: OneSide,
    receiving: OneSide,
    writes: HashMap<(Route, RouteReason), Writes>,
    received_bytes: Counter,
    dropped_frames: Counter,
    /// An engine is one side of a link, so a ticket is one request.
    under_way: HashMap<Ticket, UnderWay>,
}

/// What is counted alike for sends and for receives.
#[derive(Debug)]
struct OneSide {
    succeeded: Counter,
    failed: Counter,
    in_flight: Gauge,
    post_seconds: Histogram,
    request_seconds: Histogram,
}

/// What is counted of writes that took one route for one reason.
#[derive(Debug)]
struct Writes {
    count: Counter,
    bytes: Counter,
    seconds: Histogram,
}

#[derive(Debug)]
struct UnderWay {
    posted: Instant,
    span: Span,
}

impl Telemetry {
    /// Asks the recorder that is installed now for counters.
    pub(crate) fn new() -> Self {
        describe();
        Self {
            sending: OneSide::new(Side::Source),
            receiving: OneSide::new(Side::Destination),
            writes: HashMap::new(),
            received_bytes: counter!(RECEIVED_BYTES),
            dropped_frames: counter!(DROPPED_FRAMES),
            under_way: HashMap::new(),
        }
    }

    /// A request has been taken up, by a call that began at `posted`.
    pub(crate) fn begun(&mut self, side: Side, ticket: Ticket, tokens: &Range<u64>, posted: Instant) {
        let (request, attempt) = (ticket.key.request, ticket.key.attempt);
        // The name of a span is a constant.
        let span = match side {
            Side::Source => info_span!("send", request, attempt, ?tokens, bytes = Empty, outcome = Empty),
            Side::Destination => info_span!("receive", request, attempt, ?tokens, bytes = Empty, outcome = Empty),
        };
        self.side(side).in_flight.increment(1);
        self.under_way.insert(ticket, UnderWay { posted, span });
    }

    /// The call that posted a request returns, after this long.
    pub(crate) fn posted(&self, side: Side, elapsed: Duration) {
        self.side(side).post_seconds.record(elapsed);
    }

    /// A send has ended.
    pub(crate) fn sent(&mut self, now: Instant, ticket: Ticket, outcome: &Result<Vec<Sent>, RequestError>) {
        let span = self.ended(now, Side::Source, ticket, outcome.is_ok());
        let _entered = span.enter();
        match outcome {
            Ok(parts) => {
                for Sent { rank, bytes, route, reason, elapsed, .. } in parts {
                    debug!(destination = rank, bytes, %route, %reason, ?elapsed, "sent");
                    self.writes
                        .entry((*route, *reason))
                        .or_insert_with(|| Writes::new(*route, *reason))
                        .add(*bytes, *elapsed);
                }
                span.record("bytes", parts.iter().map(|part| part.bytes).sum::<u64>());
            }
            Err(error) => tell_failures(error),
        }
    }

    /// A receive has ended.
    pub(crate) fn received(&mut self, now: Instant, ticket: Ticket, outcome: &Result<Vec<Received>, RequestError>) {
        let span = self.ended(now, Side::Destination, ticket, outcome.is_ok());
        let _entered = span.enter();
        match outcome {
            Ok(parts) => {
                for Received { rank, bytes, elapsed, .. } in parts {
                    debug!(source = rank, bytes, ?elapsed, "received");
                }
                let bytes = parts.iter().map(|part| part.bytes).sum::<u64>();
                self.received_bytes.increment(bytes);
                span.record("bytes", bytes);
            }
            Err(error) => tell_failures(error),
        }
    }

    /// Something came from a peer that is no message.
    pub(crate) fn dropped_frame(&self) {
        self.dropped_frames.increment(1);
    }

    fn side(&self, side: Side) -> &OneSide {
        match side {
            Side::Source => &self.sending,
            Side::Destination => &self.receiving,
        }
    }

    fn ended(&mut self, now: Instant, side: Side, ticket: Ticket, succeeded: bool) -> Span {
        let Some(UnderWay { posted, span }) = self.under_way.remove(&ticket) else { return Span::none() };
        let counters = self.side(side);
        counters.in_flight.decrement(1);
        if succeeded {
            counters.succeeded.increment(1);
            counters.request_seconds.record(now.saturating_duration_since(posted));
        } else {
            counters.failed.increment(1);
        }
        span.record("outcome", if succeeded { "succeeded" } else { "failed" });
        span
    }
}

impl OneSide {
    fn new(side: Side) -> Self {
        let side = match side {
            Side::Source => "source",
            Side::Destination => "destination",
        };
        Self {
            succeeded: counter!(REQUESTS, "side" => side, "outcome" => "succeeded"),
            failed: counter!(REQUESTS, "side" => side, "outcome" => "failed"),
            in_flight: gauge!(REQUESTS_IN_FLIGHT, "side" => side),
            post_seconds: histogram!(POST_SECONDS, "side" => side),
            request_seconds: histogram!(REQUEST_SECONDS, "side" => side),
        }
    }
}

impl Writes {
    fn new(route: Route, reason: RouteReason) -> Self {
        let (route, reason) = (route.to_string(), reason.to_string());
        Self {
            count: counter!(WRITES, "route" => route.clone(), "reason" => reason.clone()),
            bytes: counter!(SENT_BYTES, "route" => route.clone(), "reason" => reason),
            seconds: histogram!(WRITE_SECONDS, "route" => route),
        }
    }

    fn add(&self, bytes: u64, elapsed: Duration) {
        self.count.increment(1);
        self.bytes.increment(bytes);
        self.seconds.record(elapsed);
    }
}

fn tell_failures(error: &RequestError) {
    for error in &error.errors {
        debug!(peer = error.peer().map(tracing::field::display), %error, "failed");
    }
}

/// Gives the recorder units and help texts.
fn describe() {
    describe_counter!(REQUESTS, Unit::Count, "requests that have ended");
    describe_gauge!(REQUESTS_IN_FLIGHT, Unit::Count, "requests that are posted and have not ended");
    describe_histogram!(REQUEST_SECONDS, Unit::Seconds, "from the post of a request to its end, if that was good");
    describe_histogram!(POST_SECONDS, Unit::Seconds, "how long the call that posts a request took");
    describe_counter!(SENT_BYTES, Unit::Bytes, "bytes written to destinations, by their own count");
    describe_counter!(WRITES, Unit::Count, "writes to one destination rank that ended well");
    describe_histogram!(WRITE_SECONDS, Unit::Seconds, "from the start of such a write until its bytes were there");
    describe_counter!(RECEIVED_BYTES, Unit::Bytes, "bytes that sources have written here, by this rank's own count");
    describe_counter!(DROPPED_FRAMES, Unit::Count, "frames from peers that were no frames or no messages");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvferry_wire::Status;
    use metrics_util::MetricKind;
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    use super::*;
    use crate::core::LinkId;
    use crate::error::{PeerName, TransferError};
    use crate::message::RequestKey;

    const POSTED: Duration = Duration::from_micros(10);
    const TOTAL: Duration = Duration::from_millis(5);

    fn ticket(request: u64) -> Ticket {
        Ticket { link: LinkId(0), key: RequestKey { request, attempt: 0 } }
    }

    fn part(rank: u32, bytes: u64, route: Route) -> Sent {
        let (reason, elapsed) = (RouteReason::Forced, Duration::from_millis(2));
        Sent { rank, rows: 1, pieces: 1, runs: 1, bytes, route, reason, elapsed }
    }

    /// Everything that was recorded, by name and labels.
    fn record(work: impl FnOnce(&mut Telemetry)) -> BTreeMap<String, DebugValue> {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        metrics::with_local_recorder(&recorder, || work(&mut Telemetry::new()));
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

    fn seconds(durations: &[Duration]) -> DebugValue {
        DebugValue::Histogram(durations.iter().map(|duration| duration.as_secs_f64().into()).collect())
    }

    #[test]
    fn requests_are_counted_by_side_outcome_route_and_reason() {
        let now = Instant::now();
        let peer = PeerName { side: Side::Source, rank: 3 };
        let lost = TransferError::Lost { peer, moved: 0, expected: 9, source: Status::ERR_CONNECTION_RESET };
        let recorded = record(|telemetry| {
            for request in 0..3 {
                telemetry.begun(Side::Source, ticket(request), &(0..32), now);
                telemetry.posted(Side::Source, POSTED);
            }
            let parts = vec![part(0, 100, Route::Direct), part(1, 20, Route::Staged)];
            telemetry.sent(now + TOTAL, ticket(0), &Ok(parts));
            telemetry.sent(now + TOTAL, ticket(1), &Ok(vec![part(0, 3, Route::Direct)]));
            telemetry.sent(now + TOTAL, ticket(1), &Ok(vec![]));

            telemetry.begun(Side::Destination, ticket(7), &(0..32), now);
            telemetry.received(now + TOTAL, ticket(7), &Err(lost.into()));
            telemetry.begun(Side::Destination, ticket(8), &(0..32), now);
            let received = Received { rank: 0, rows: 1, bytes: 50, elapsed: TOTAL };
            telemetry.received(now + TOTAL, ticket(8), &Ok(vec![received, received]));
            telemetry.dropped_frame();
        });
        let of = |name: &str| recorded.get(name).unwrap_or_else(|| panic!("{name}: {:?}", recorded.keys()));
        for (name, expected) in [
            ("kvferry_requests_total side=source outcome=succeeded", 2),
            ("kvferry_requests_total side=source outcome=failed", 0),
            ("kvferry_requests_total side=destination outcome=succeeded", 1),
            ("kvferry_requests_total side=destination outcome=failed", 1),
            ("kvferry_sent_bytes_total route=direct reason=the options ask for it", 103),
            ("kvferry_sent_bytes_total route=staged reason=the options ask for it", 20),
            ("kvferry_writes_total route=direct reason=the options ask for it", 2),
            ("kvferry_received_bytes_total", 100),
            ("kvferry_dropped_frames_total", 1),
        ] {
            assert_eq!(of(name), &DebugValue::Counter(expected), "{name}");
        }
        assert_eq!(of("kvferry_requests_in_flight side=source"), &DebugValue::Gauge(1.0.into()));
        assert_eq!(of("kvferry_requests_in_flight side=destination"), &DebugValue::Gauge(0.0.into()));
        assert_eq!(of("kvferry_post_seconds side=source"), &seconds(&[POSTED; 3]));
        assert_eq!(of("kvferry_request_seconds side=source"), &seconds(&[TOTAL; 2]));
        assert_eq!(of("kvferry_request_seconds side=destination"), &seconds(&[TOTAL]));
        assert_eq!(of("kvferry_write_seconds route=direct"), &seconds(&[Duration::from_millis(2); 2]));
    }
}
