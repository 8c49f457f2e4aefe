//! What an engine counts and measures, through the [`metrics`] facade, and the [`tracing`] span of each request.
//!
//! | name | kind | unit | labels |
//! | --- | --- | --- | --- |
//! | [`REQUESTS`] | counter | requests ended | `side`, `outcome` |
//! | [`REQUESTS_IN_FLIGHT`] | gauge | requests posted and not ended | `side` |
//! | [`REQUEST_SECONDS`] | histogram | seconds from the post to the end, of those that ended well | `side` |
//! | [`POST_SECONDS`] | histogram | seconds that the call that posts took | `side` |
//! | [`SENT_BYTES`] | counter | bytes, by the destination's own count | `route`, `reason` |
//! | [`WRITES`] | counter | parts of sends, each to one destination rank by one route, that ended well | `route`, `reason` |
//! | [`WRITE_SECONDS`] | histogram | seconds of such a part on the wire | `route` |
//! | [`RECEIVED_BYTES`] | counter | bytes, by this rank's own count | |
//! | [`QUARANTINED_SLOTS`] | gauge | slots of receives that have ended and that somebody may still write to | |
//! | [`RESENT_FRAMES`] | counter | frames said again because no answer came in time | |
//! | [`DROPPED_FRAMES`] | counter | frames from peers that were no frames or no messages | |
//!
//! `side` is `source` or `destination`, `outcome` is `succeeded`, `failed` or `cancelled`, `route` is the name of a
//! [`Route`] and `reason` the words of a [`RouteReason`]. Engines of one process add up.
//!
//! A recorder that is to see anything must be installed before [`Engine::start`](crate::Engine::start): an engine asks for
//! its counters there, and without one keeps counters that do nothing. Spans are called `send` and `receive`, carry request,
//! attempt and tokens, and are given bytes and outcome at the end, with one event for each peer. A send has one span, `write`, for
//! each write to a destination rank, from when it is handed to the wire until all of it has arrived, or it has ended otherwise.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use kvferry_match::Side;
use kvferry_wire::{Route, RouteReason, TransferStats};
use metrics::{
    Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use parking_lot::Mutex;
use tracing::field::Empty;
use tracing::{Span, debug, info_span};

use crate::core::{Action, Handle, PutId, Ticket};
use crate::error::{RequestError, TransferError};
use crate::message::{Message, RequestKey};
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
/// What was written to one destination rank of a send.
pub const WRITES: &str = "kvferry_writes_total";
/// How long that took on the wire.
pub const WRITE_SECONDS: &str = "kvferry_write_seconds";
/// Bytes that sources have written here.
pub const RECEIVED_BYTES: &str = "kvferry_received_bytes_total";
/// Slots that nobody may use yet: how many [`Engine::quarantine`](crate::Engine::quarantine) names, each once.
pub const QUARANTINED_SLOTS: &str = "kvferry_quarantined_slots";
/// Greetings, announcements, wants and reports that were not answered in time. What ends a request early is not counted.
pub const RESENT_FRAMES: &str = "kvferry_resent_frames_total";
/// What came from peers and made no sense.
pub const DROPPED_FRAMES: &str = "kvferry_dropped_frames_total";

/// The counters of one engine, and its requests under way.
#[derive(Debug)]
pub(crate) struct Telemetry {
    sending: OneSide,
    receiving: OneSide,
    received_bytes: Counter,
    quarantined_slots: Gauge,
    resent_frames: Counter,
    dropped_frames: Counter,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    writes: HashMap<(Route, RouteReason), Writes>,
    under_way: HashMap<Handle, UnderWay>,
    /// Spans of writes, if anybody looks at spans.
    writing: HashMap<PutId, Span>,
    /// Slots of receives that have ended and are not quiet.
    quarantined: HashMap<RequestKey, usize>,
}

/// What is counted alike for sends and for receives.
#[derive(Debug)]
struct OneSide {
    succeeded: Counter,
    failed: Counter,
    cancelled: Counter,
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
    /// Slots that peers are told of.
    slots: usize,
}

impl Telemetry {
    /// Asks the recorder that is installed now for counters.
    pub(crate) fn new() -> Self {
        describe();
        Self {
            sending: OneSide::new(Side::Source),
            receiving: OneSide::new(Side::Destination),
            received_bytes: counter!(RECEIVED_BYTES),
            quarantined_slots: gauge!(QUARANTINED_SLOTS),
            resent_frames: counter!(RESENT_FRAMES),
            dropped_frames: counter!(DROPPED_FRAMES),
            state: Mutex::default(),
        }
    }

    /// A send has been taken up, by a call that began at `posted`.
    pub(crate) fn send_begun(&self, ticket: Ticket, tokens: &Range<u64>, posted: Instant) {
        let RequestKey { request, attempt } = ticket.key;
        let span = info_span!("send", request, attempt, ?tokens, bytes = Empty, outcome = Empty);
        self.begun(Handle::Send(ticket), UnderWay { posted, span, slots: 0 });
    }

    /// A write of a send leaves.
    pub(crate) fn write_begun(&self, ticket: Ticket, put: PutId, destination: u32, bytes: u64) {
        let mut state = self.state.lock();
        let Some(UnderWay { span: send, .. }) = state.under_way.get(&Handle::Send(ticket)) else { return };
        let span =
            info_span!(parent: send, "write", destination, bytes, route = Empty, reason = Empty, outcome = Empty);
        if !span.is_disabled() {
            state.writing.insert(put, span);
        }
    }

    /// A write has ended, or was refused.
    pub(crate) fn write_ended(&self, put: PutId, stats: Option<&TransferStats>, outcome: &str) {
        let Some(span) = self.state.lock().writing.remove(&put) else { return };
        if let Some(stats) = stats {
            span.record("route", tracing::field::display(stats.route));
            span.record("reason", tracing::field::display(stats.reason));
        }
        span.record("outcome", outcome);
    }

    /// A receive into so many slots has been taken up, by a call that began at `posted`.
    pub(crate) fn receive_begun(&self, key: RequestKey, tokens: &Range<u64>, slots: usize, posted: Instant) {
        let RequestKey { request, attempt } = key;
        let span = info_span!("receive", request, attempt, ?tokens, bytes = Empty, outcome = Empty);
        self.begun(Handle::Receive(key), UnderWay { posted, span, slots });
    }

    /// The call that posted a request returns, after this long.
    pub(crate) fn posted(&self, side: Side, elapsed: Duration) {
        let counters = match side {
            Side::Source => &self.sending,
            Side::Destination => &self.receiving,
        };
        counters.post_seconds.record(elapsed);
    }

    /// A send has ended.
    pub(crate) fn sent(&self, now: Instant, ticket: Ticket, outcome: &Result<Vec<Sent>, RequestError>) {
        let Some((span, _)) = self.ended(now, Handle::Send(ticket), outcome.as_ref().err()) else { return };
        let _entered = span.enter();
        let Ok(parts) = outcome else { return };
        let mut state = self.state.lock();
        for Sent { rank, carried, .. } in parts {
            for TransferStats { bytes, route, reason, elapsed, .. } in carried {
                debug!(destination = rank, bytes, %route, %reason, ?elapsed, "sent");
                let writes = state.writes.entry((*route, *reason)).or_insert_with(|| Writes::new(*route, *reason));
                writes.add(*bytes, *elapsed);
            }
        }
        span.record("bytes", parts.iter().map(|part| part.bytes).sum::<u64>());
    }

    /// A receive has ended.
    pub(crate) fn received(&self, now: Instant, key: RequestKey, outcome: &Result<Vec<Received>, RequestError>) {
        let Some((span, slots)) = self.ended(now, Handle::Receive(key), outcome.as_ref().err()) else { return };
        self.state.lock().quarantined.insert(key, slots);
        self.quarantined_slots.increment(count(slots));
        let _entered = span.enter();
        let Ok(parts) = outcome else { return };
        for Received { rank, carried, .. } in parts {
            for TransferStats { bytes, route, reason, elapsed, .. } in carried {
                debug!(source = rank, bytes, %route, %reason, ?elapsed, "received");
            }
        }
        let bytes = parts.iter().map(|part| part.bytes).sum::<u64>();
        self.received_bytes.increment(bytes);
        span.record("bytes", bytes);
    }

    /// The slots of a receive are quiet, or the engine that would say so has stopped.
    pub(crate) fn forget(&self, key: RequestKey) {
        if let Some(slots) = self.state.lock().quarantined.remove(&key) {
            self.quarantined_slots.decrement(count(slots));
        }
    }

    /// What the state machine asks for because time has passed.
    pub(crate) fn ticked(&self, actions: &[Action]) {
        let said_again = |action: &&Action| match action {
            Action::Say { message, .. } => {
                matches!(message, Message::Hello(_) | Message::Announce(_) | Message::Want(_) | Message::Done(_))
            }
            _ => false,
        };
        let frames = actions.iter().filter(said_again).count();
        if frames > 0 {
            self.resent_frames.increment(frames as u64);
        }
    }

    /// Something came from a peer that is no message.
    pub(crate) fn dropped_frame(&self) {
        self.dropped_frames.increment(1);
    }

    fn side(&self, handle: Handle) -> &OneSide {
        match handle {
            Handle::Send(_) => &self.sending,
            Handle::Receive(_) => &self.receiving,
        }
    }

    fn begun(&self, handle: Handle, under_way: UnderWay) {
        self.side(handle).in_flight.increment(1);
        self.state.lock().under_way.insert(handle, under_way);
    }

    /// Counts an end. Returns the request's span, and the slots that it had.
    fn ended(&self, now: Instant, handle: Handle, error: Option<&RequestError>) -> Option<(Span, usize)> {
        let UnderWay { posted, span, slots } = self.state.lock().under_way.remove(&handle)?;
        let counters = self.side(handle);
        counters.in_flight.decrement(1);
        let Some(error) = error else {
            counters.succeeded.increment(1);
            counters.request_seconds.record(now.saturating_duration_since(posted));
            span.record("outcome", "succeeded");
            return Some((span, slots));
        };
        let cancelled = error.errors.iter().any(|part| matches!(part.error, TransferError::Cancelled));
        if cancelled {
            counters.cancelled.increment(1);
        } else {
            counters.failed.increment(1);
        }
        span.record("outcome", if cancelled { "cancelled" } else { "failed" });
        span.in_scope(|| {
            for part in &error.errors {
                debug!(peer = part.error.peer().map(tracing::field::display), error = %part, "ended early");
            }
        });
        Some((span, slots))
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
            cancelled: counter!(REQUESTS, "side" => side, "outcome" => "cancelled"),
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

/// Slots of a request, as gauges have it: exact up to 2^53.
fn count(slots: usize) -> f64 {
    slots as f64
}

/// Gives the recorder units and help texts.
fn describe() {
    describe_counter!(REQUESTS, Unit::Count, "requests that have ended");
    describe_gauge!(REQUESTS_IN_FLIGHT, Unit::Count, "requests that are posted and have not ended");
    describe_histogram!(REQUEST_SECONDS, Unit::Seconds, "from the post of a request to its end, if that was good");
    describe_histogram!(POST_SECONDS, Unit::Seconds, "how long the call that posts a request took");
    describe_counter!(SENT_BYTES, Unit::Bytes, "bytes written to destinations, by their own count");
    describe_counter!(
        WRITES,
        Unit::Count,
        "parts of sends, each to one destination rank by one route, that ended well"
    );
    describe_histogram!(WRITE_SECONDS, Unit::Seconds, "how long such a part took on the wire");
    describe_counter!(RECEIVED_BYTES, Unit::Bytes, "bytes that sources have written here, by this rank's own count");
    describe_gauge!(QUARANTINED_SLOTS, Unit::Count, "slots of ended receives that somebody may still write to");
    describe_counter!(RESENT_FRAMES, Unit::Count, "frames said again because no answer came in time");
    describe_counter!(DROPPED_FRAMES, Unit::Count, "frames from peers that were no frames or no messages");
}

#[cfg(test)]
mod tests;
