//! One transfer, whatever its route, from its start to its one end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ucx_sys::Status;

use crate::connection::Connection;
use crate::context::Context;
use crate::cuda::route::{Carried, Carriers, DeviceCarrier};
use crate::direct::{Copiers, Direct};
use crate::endpoint::EndpointId;
use crate::error::PutError;
use crate::event::{TransferId, TransferStats};
use crate::frames::outgoing::Sender;
use crate::inbox::message::{Refusal, StreamId};
use crate::inbox::outbox::Outbox;
use crate::inbox::source::{Desk, Filling};
use crate::route::{self, Route, RouteReason};
use crate::runs::Runs;
use crate::transfer::Work;

/// Between two tellings of a transfer's progress.
const TELL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) struct InFlight {
    pub(crate) endpoint: EndpointId,
    pub(crate) transfer: TransferId,
    /// Its place among those that were posted.
    pub(crate) order: StreamId,
    work: Arc<Work>,
    carrier: Carrier,
    route: (Route, RouteReason),
    started: Instant,
    told: (Instant, u64),
    /// The last time something moved, and how much had by then.
    moved: (Instant, Mark),
    cancelled: bool,
}

/// What of a transfer has happened: it changes when something moves.
type Mark = (u64, u64);

/// A route, at work.
enum Carrier {
    Runs(Runs),
    Direct(Direct),
    Inbox(Filling),
    Gpu(DeviceCarrier),
    /// Over before it began.
    Ended(Result<(), PutError>),
}

/// What a transfer may be carried by.
pub(crate) struct Means<'a> {
    pub(crate) context: &'a Context,
    pub(crate) copiers: &'a Copiers,
    /// The GPU's, if the context has one.
    pub(crate) gpu: Option<&'a Carriers>,
}

impl InFlight {
    /// Chooses the route. `connection` is `None` if it is gone.
    pub(crate) fn new(
        endpoint: EndpointId,
        transfer: TransferId,
        work: Work,
        means: &Means<'_>,
        connection: Option<&mut Connection>,
        stream: StreamId,
    ) -> Self {
        let work = Arc::new(work);
        let (carrier, route) = match connection {
            Some(connection) => choose(&work, means, connection, stream),
            // `step` says why it is gone.
            None => (Carrier::Ended(Ok(())), (Route::Runs, RouteReason::Empty)),
        };
        let now = Instant::now();
        let (told, moved) = ((now, 0), (now, (0, 0)));
        Self { endpoint, transfer, order: stream, work, carrier, route, started: now, told, moved, cancelled: false }
    }

    /// Gives the transfer up: it ends when nothing of it can be written any more.
    pub(crate) fn cancel(&mut self) {
        if std::mem::replace(&mut self.cancelled, true) {
            return;
        }
        self.moved.0 = Instant::now(); // a peer that must agree has the whole deadline for it
        match &mut self.carrier {
            Carrier::Runs(runs) => runs.stop(),
            Carrier::Inbox(filling) => filling.stop(PutError::Cancelled),
            Carrier::Gpu(carrier) => carrier.stop(PutError::Cancelled),
            Carrier::Direct(_) | Carrier::Ended(_) => {}
        }
    }

    pub(crate) fn moved_bytes(&self) -> u64 {
        match &self.carrier {
            Carrier::Runs(runs) => runs.moved_bytes(),
            Carrier::Direct(direct) => direct.moved_bytes(),
            Carrier::Inbox(filling) => filling.moved_bytes(),
            Carrier::Gpu(carrier) => carrier.moved_bytes(),
            Carrier::Ended(_) => 0,
        }
    }

    fn outstanding(&self) -> u64 {
        match &self.carrier {
            Carrier::Runs(runs) => runs.outstanding(),
            Carrier::Inbox(filling) => filling.outstanding(),
            Carrier::Direct(_) | Carrier::Gpu(_) | Carrier::Ended(_) => 0,
        }
    }

    /// Whether nobody but this process writes the target's memory, if anybody does: it is over when this process has stopped.
    fn copies_itself(&self) -> bool {
        match &self.carrier {
            Carrier::Direct(_) | Carrier::Ended(_) => true,
            Carrier::Gpu(carrier) => carrier.stream().is_none(),
            Carrier::Runs(_) | Carrier::Inbox(_) => false,
        }
    }

    /// What has to end by itself before a transfer that is cut off is over.
    fn lingering(&mut self) -> u64 {
        match &mut self.carrier {
            Carrier::Direct(direct) => direct.abandon(),
            Carrier::Gpu(carrier) => carrier.outstanding(),
            _ => self.outstanding(),
        }
    }

    /// Bytes on their way, if it is time to tell and there are more than the last time.
    pub(crate) fn progress_to_tell(&mut self) -> Option<u64> {
        let bytes = self.moved_bytes();
        let due = bytes > self.told.1 && self.told.0.elapsed() >= TELL_INTERVAL;
        due.then(|| {
            self.told = (Instant::now(), bytes);
            bytes
        })
    }

    /// When something of it last moved, or of what was posted `before` it on the same connection: it has to wait for that.
    pub(crate) fn last_moved(&mut self, now: Instant, before: Option<Instant>) -> Instant {
        let mark = (self.moved_bytes(), self.outstanding());
        if mark != self.moved.1 {
            self.moved = (now, mark);
        }
        self.moved.0 = before.map_or(self.moved.0, |before| before.max(self.moved.0));
        self.moved.0
    }

    /// The name of the transfer at the peer's inbox, if it takes that way.
    pub(crate) fn stream(&self) -> Option<StreamId> {
        match &self.carrier {
            Carrier::Inbox(filling) => Some(filling.stream()),
            Carrier::Gpu(carrier) => carrier.stream(),
            _ => None,
        }
    }

    pub(crate) fn granted(&mut self, before: u64, chunks: &[u32]) {
        if let Carrier::Inbox(filling) = &mut self.carrier {
            filling.granted(before, chunks);
        }
        if let Carrier::Gpu(carrier) = &mut self.carrier {
            carrier.granted(before, chunks);
        }
    }

    pub(crate) fn landed(&mut self) {
        if let Carrier::Inbox(filling) = &mut self.carrier {
            filling.landed();
        }
        if let Carrier::Gpu(carrier) = &mut self.carrier {
            carrier.landed();
        }
    }

    pub(crate) fn dropped(&mut self) {
        if let Carrier::Inbox(filling) = &mut self.carrier {
            filling.dropped();
        }
        if let Carrier::Gpu(carrier) = &mut self.carrier {
            carrier.dropped();
        }
    }

    /// The target scatters nothing of this any more. It ends when the target has its chunks back.
    pub(crate) fn revoked(&mut self) {
        let why = PutError::Refused { refusal: Refusal::Revoked };
        match &mut self.carrier {
            Carrier::Inbox(filling) => filling.stop(why),
            Carrier::Gpu(carrier) => carrier.stop(why),
            Carrier::Runs(_) | Carrier::Direct(_) | Carrier::Ended(_) => {}
        }
    }

    pub(crate) fn refused(&mut self, refusal: Refusal) {
        if let Carrier::Inbox(filling) = &mut self.carrier {
            filling.refused(refusal, &self.work);
        }
        if let Carrier::Gpu(carrier) = &mut self.carrier {
            carrier.refused(refusal);
        }
    }

    /// Moves the transfer along. Returns how it ended, once it has and nothing of it is posted any more.
    ///
    /// `connection` is why it is gone, if it is.
    pub(crate) fn step(
        &mut self,
        connection: Result<&mut Connection, Status>,
        context: &Context,
        sender: &Sender<'_>,
        outbox: &mut Outbox,
    ) -> Option<Result<TransferStats, PutError>> {
        let ended = match connection {
            Ok(connection) => self.advance(connection, context, sender, outbox),
            // A flush is not waited for: its request names no memory.
            Err(source) => {
                let settled = self.copies_itself();
                (self.lingering() == 0).then_some(Err(PutError::Endpoint { source, settled }))
            }
        };
        if ended.is_some()
            && let Carrier::Inbox(filling) = &mut self.carrier
        {
            filling.release(outbox);
        }
        if ended.is_some()
            && let Carrier::Gpu(carrier) = &mut self.carrier
        {
            carrier.release(outbox);
        }
        let (route, reason) = self.route;
        let (bytes, runs, elapsed) = (self.work.size.bytes, self.work.size.runs, self.started.elapsed());
        ended.map(|result| result.map(|()| TransferStats { bytes, runs, elapsed, route, reason }))
    }

    fn advance(
        &mut self,
        connection: &mut Connection,
        context: &Context,
        sender: &Sender<'_>,
        outbox: &mut Outbox,
    ) -> Option<Result<(), PutError>> {
        match &mut self.carrier {
            Carrier::Runs(runs) => runs.step(&self.work, &connection.raw),
            Carrier::Direct(direct) => {
                let ended = if self.cancelled { direct.stop() } else { direct.step() };
                ended.map(|result| match connection.failure(true) {
                    Status::OK => result,
                    source => Err(PutError::Endpoint { source, settled: true }),
                })
            }
            Carrier::Gpu(carrier) => carrier.step(connection, context, sender, outbox),
            Carrier::Ended(result) => Some(*result),
            Carrier::Inbox(filling) => {
                let Some(inbox) = connection.inbox().cloned() else {
                    return Some(Err(PutError::RouteUnavailable { route: self.route.0 }));
                };
                let mut said = Vec::new();
                let mut say = |body| said.push(body);
                let (id, endpoint) = (connection.id, &connection.raw);
                let mut desk = Desk { context, id, endpoint, inbox: &inbox, outbox, say: &mut say };
                let ended = filling.step(&self.work, &mut desk);
                for body in said {
                    connection.say(sender, body);
                }
                ended
            }
        }
    }
}

fn choose(
    work: &Arc<Work>,
    means: &Means<'_>,
    connection: &mut Connection,
    stream: StreamId,
) -> (Carrier, (Route, RouteReason)) {
    let Means { context, copiers, .. } = *means;
    if work.uses_gpu {
        let (carried, route) = Carried::choose(work, context, means.gpu, connection, stream);
        let carrier = match carried {
            Carried::Gpu(carrier) => Carrier::Gpu(carrier),
            Carried::Host(filling) => Carrier::Inbox(*filling),
            Carried::Ended(result) => Carrier::Ended(result),
        };
        return (carrier, route);
    }
    let facts = connection.facts(context, work);
    let unavailable = |route| (Carrier::Ended(Err(PutError::RouteUnavailable { route })), (route, RouteReason::Forced));
    let (route, reason) = match route::choose(&facts) {
        Ok(chosen) => chosen,
        Err(route) => return unavailable(route),
    };
    if reason == RouteReason::Empty {
        return (Carrier::Ended(Ok(())), (route, reason));
    }
    // A region that its owner has given up would be written all the same over cma: there is no key to check.
    if let Some(error) = connection.withdrawn(work) {
        return (Carrier::Ended(Err(error)), (route, reason));
    }
    let carrier = match route {
        Route::Direct => {
            connection.targets(work).map(|targets| Carrier::Direct(Direct::new(work.clone(), targets, copiers)))
        }
        Route::Landing => connection.inbox_mapped().map(|inbox| Carrier::Inbox(Filling::landing(stream, inbox))),
        Route::Staged if facts.puts_emulated => Some(Carrier::Inbox(Filling::spoken(stream))),
        Route::Staged => match connection.import_inbox() {
            Ok(inbox) => Some(Carrier::Inbox(Filling::staged(stream, inbox))),
            Err(source) => Some(Carrier::Ended(Err(PutError::Put { source }))),
        },
        Route::Runs => Some(Carrier::Runs(Runs::new(context, work))),
    };
    carrier.map_or_else(|| unavailable(route), |carrier| (carrier, (route, reason)))
}
