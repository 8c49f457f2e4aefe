//! Which way a transfer takes that has a GPU at one end, and what carries it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ucx_sys::Status;

use crate::connection::Connection;
use crate::context::Context;
use crate::cuda::copy::DeviceCopy;
use crate::cuda::desk::Desk;
use crate::cuda::driver::CudaError;
use crate::cuda::gpu::Gpu;
use crate::cuda::imported::NotImported;
use crate::cuda::incoming::Incoming;
use crate::cuda::landing::{DeviceFilling, Way};
use crate::cuda::queue::Queue;
use crate::cuda::target::Targets;
use crate::error::PutError;
use crate::frames::outgoing::Sender;
use crate::inbox::message::{Refusal, StreamId};
use crate::inbox::outbox::Outbox;
use crate::inbox::source::Filling;
use crate::inbox::units::UnitSource;
use crate::region::MemoryKind;
use crate::route::{PUTS_NOT_EMULATED, Route, RouteReason};
use crate::transfer::{Direction, Work};

/// What a progress thread copies with.
pub(crate) struct Carriers {
    /// Of transfers that this side sends.
    outgoing: Rc<RefCell<Queue>>,
    /// Of those that land here.
    incoming: Rc<Incoming>,
}

impl Carriers {
    pub(crate) fn start(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        // Two kernels beside each other take twice the multiprocessors for a while, which not everybody wants.
        let lanes = if gpu.options.sm_blocks.is_none() { 2 } else { 1 };
        let (outgoing, incoming) = (Queue::new(gpu, lanes)?, Queue::new(gpu, 1)?);
        Ok(Self { outgoing: Rc::new(RefCell::new(outgoing)), incoming: Rc::new(Incoming::new(incoming)) })
    }

    pub(crate) fn incoming(&self) -> &Rc<Incoming> {
        &self.incoming
    }
}

/// What carries a transfer that has a GPU at one end.
pub(crate) enum Carried {
    /// Kernels of this side.
    Gpu(DeviceCarrier),
    /// This side has no GPU: the peer's takes the bytes out of its inbox.
    Host(Box<Filling>),
    /// It was over before it began.
    Ended(Result<(), PutError>),
}

/// A route of a GPU's, at work.
pub(crate) enum DeviceCarrier {
    Direct(Box<DeviceCopy>),
    Filling(Box<DeviceFilling>),
}

/// What the choice depends on.
#[derive(Clone, Copy, Debug)]
struct Facts {
    forced: Option<Route>,
    /// This side has a GPU.
    gpu: bool,
    /// The slab, the inbox, or nothing.
    inbox_only: bool,
    /// Both sides are GPU memory.
    between_gpus: bool,
    /// All of the target is mapped here, or why not.
    target: Result<(), NotImported>,
    slab_mapped: bool,
    /// All of the target is host memory.
    to_host: bool,
    pulled: bool,
    /// The target is memory of this very GPU.
    same_gpu: bool,
    /// The peer has an inbox in host memory, and it is mapped here.
    inbox: bool,
    inbox_mapped: bool,
}

/// Chooses, or says which route cannot be taken, and why.
fn choose(facts: &Facts) -> Result<(Route, RouteReason), (Route, RouteReason)> {
    let why_not = match facts.target {
        _ if !facts.gpu => RouteReason::NoGpu,
        Err(NotImported::NoGpu) => RouteReason::NoGpu,
        Err(NotImported::Refused(_)) => RouteReason::GpuRefused,
        Err(NotImported::NotOffered) if facts.to_host => RouteReason::HostNotMapped,
        Err(NotImported::NotOffered) | Ok(()) => RouteReason::GpuNotMapped,
    };
    let direct = facts.gpu && facts.target.is_ok() && !facts.inbox_only;
    let slab = facts.gpu && facts.slab_mapped;
    let landing = (slab || facts.inbox && facts.inbox_mapped) && !facts.pulled;
    let staged = facts.inbox && !facts.pulled;
    match facts.forced {
        Some(Route::Direct) if direct => Ok((Route::Direct, RouteReason::Forced)),
        Some(Route::Landing) if landing => Ok((Route::Landing, RouteReason::Forced)),
        Some(Route::Staged) if staged => Ok((Route::Staged, RouteReason::Forced)),
        Some(route) => Err((route, why_not)),
        None if direct && facts.same_gpu => Ok((Route::Direct, RouteReason::SameGpu)),
        None if slab && landing && facts.between_gpus => Ok((Route::Landing, RouteReason::GpusOfOneHost)),
        None if direct => Ok((Route::Direct, RouteReason::TargetMapped)),
        None if landing => Ok((Route::Landing, why_not)),
        None if staged => Ok((Route::Staged, why_not)),
        None => Err((Route::Landing, why_not)),
    }
}

impl Carried {
    /// Chooses the route and starts.
    pub(crate) fn choose(
        work: &Arc<Work>,
        context: &Context,
        carriers: Option<&Carriers>,
        connection: &mut Connection,
        stream: StreamId,
    ) -> (Self, (Route, RouteReason)) {
        if work.size.runs == 0 {
            return (Self::Ended(Ok(())), (Route::Runs, RouteReason::Empty));
        }
        let locals = work.locals.iter().all(|local| local.kind() == MemoryKind::Cuda);
        let remotes = work.remotes.iter().all(|remote| remote.kind() == MemoryKind::Cuda);
        let targets = connection.device_targets(work);
        let facts = Facts {
            forced: context.options().route,
            gpu: carriers.is_some(),
            inbox_only: work.inbox_only(),
            between_gpus: locals && remotes,
            target: targets.as_ref().map(|_| ()).map_err(|why| *why),
            slab_mapped: connection.slab().is_some(),
            to_host: work.remotes.iter().all(|remote| remote.kind() == MemoryKind::Host),
            pulled: work.direction == Direction::Get,
            same_gpu: context.gpu().zip(targets.as_ref().ok()).is_some_and(|(gpu, targets)| targets.are_on(gpu)),
            inbox: connection.inbox().is_some(),
            inbox_mapped: connection.inbox_mapped().is_some(),
        };
        let (route, reason) = match choose(&facts) {
            Ok(chosen) => chosen,
            Err((route, reason)) => return (Self::Ended(Err(PutError::RouteUnavailable { route })), (route, reason)),
        };
        if let Some(error) = connection.withdrawn(work) {
            return (Self::Ended(Err(error)), (route, reason));
        }
        let started = match carriers {
            Some(carriers) => {
                DeviceCarrier::start(route, work, context, carriers, connection, targets, stream).map(Self::Gpu)
            }
            None => host(route, work, context, connection, stream).map(|filling| Self::Host(Box::new(filling))),
        };
        (started.unwrap_or_else(|error| Self::Ended(Err(error))), (route, reason))
    }
}

/// Gathers on the host, which is all that this side has, in the order of the GPU that scatters.
fn host(
    route: Route,
    work: &Arc<Work>,
    context: &Context,
    connection: &mut Connection,
    stream: StreamId,
) -> Result<Filling, PutError> {
    let unavailable = PutError::RouteUnavailable { route };
    let filling = match (route, connection.inbox_mapped()) {
        (Route::Landing, Some(inbox)) => Filling::landing(stream, inbox),
        (Route::Staged, _) if context.ucx_version() < PUTS_NOT_EMULATED => Filling::spoken(stream),
        (Route::Staged, _) => {
            let inbox = connection.import_inbox().map_err(|source| PutError::Put { source })?;
            Filling::staged(stream, inbox)
        }
        _ => return Err(unavailable),
    };
    Ok(filling.in_units(UnitSource::new(work).ok_or(unavailable)?))
}

impl DeviceCarrier {
    fn start(
        route: Route,
        work: &Arc<Work>,
        context: &Context,
        carriers: &Carriers,
        connection: &mut Connection,
        targets: Result<Targets, NotImported>,
        stream: StreamId,
    ) -> Result<Self, PutError> {
        let unavailable = PutError::RouteUnavailable { route };
        let fill = |way| {
            let chunk_bytes = context.options().chunk_bytes;
            let filling = DeviceFilling::start(&carriers.outgoing, work.clone(), way, chunk_bytes, stream);
            filling.map(Box::new)
        };
        match (route, connection.slab().cloned(), connection.inbox().cloned()) {
            (Route::Direct, _, _) => {
                let targets = targets.map_err(|_| unavailable)?;
                Ok(Self::Direct(Box::new(DeviceCopy::start(&carriers.outgoing, work.clone(), targets)?)))
            }
            (Route::Landing, Some(slab), _) => {
                let mut filling = fill(Way::Slab(slab))?;
                filling.begin(connection.take_ahead(filling.chunk_count()));
                Ok(Self::Filling(filling))
            }
            (Route::Landing, None, Some(inbox)) => {
                let pinned = connection.pin_inbox(carriers.outgoing.borrow().gpu()).ok_or(unavailable)?;
                let pinned = pinned.map_err(|source| PutError::Cuda { source })?;
                fill(Way::Inbox { inbox, pinned }).map(Self::Filling)
            }
            (Route::Staged, _, Some(inbox)) if context.ucx_version() < PUTS_NOT_EMULATED => {
                fill(Way::Spoken { inbox }).map(Self::Filling)
            }
            (Route::Staged, _, Some(inbox)) => {
                let key = connection.import_inbox().map_err(|source| PutError::Put { source })?;
                fill(Way::Staged { inbox, key }).map(Self::Filling)
            }
            _ => Err(unavailable),
        }
    }

    pub(crate) fn moved_bytes(&self) -> u64 {
        match self {
            Self::Direct(copy) => copy.moved_bytes(),
            Self::Filling(filling) => filling.moved_bytes(),
        }
    }

    /// Kernels that have not ended.
    pub(crate) fn outstanding(&mut self) -> u64 {
        match self {
            Self::Direct(copy) => copy.outstanding(),
            Self::Filling(filling) => filling.outstanding(),
        }
    }

    /// The name of the transfer at the peer's slab, if it takes that way.
    pub(crate) fn stream(&self) -> Option<StreamId> {
        match self {
            Self::Direct(_) => None,
            Self::Filling(filling) => Some(filling.stream()),
        }
    }

    pub(crate) fn granted(&mut self, before: u64, chunks: &[u32]) {
        if let Self::Filling(filling) = self {
            filling.granted(before, chunks);
        }
    }

    /// Gives the transfer up. A kernel that writes the target itself leaves out what it has not come to.
    pub(crate) fn stop(&mut self, why: PutError) {
        match self {
            Self::Direct(copy) => copy.stop(),
            Self::Filling(filling) => filling.stop(why),
        }
    }

    pub(crate) fn dropped(&mut self) {
        if let Self::Filling(filling) = self {
            filling.dropped();
        }
    }

    pub(crate) fn landed(&mut self) {
        if let Self::Filling(filling) = self {
            filling.landed();
        }
    }

    pub(crate) fn refused(&mut self, refusal: Refusal) {
        if let Self::Filling(filling) = self {
            filling.refused(refusal);
        }
    }

    /// Gives back what the transfer holds of the outbox. Call it when the transfer is over.
    pub(crate) fn release(&mut self, outbox: &mut Outbox) {
        if let Self::Filling(filling) = self {
            filling.slots().into_iter().for_each(|slot| outbox.put_back(slot));
        }
    }

    /// `Some` at the end.
    pub(crate) fn step(
        &mut self,
        connection: &mut Connection,
        context: &Context,
        sender: &Sender<'_>,
        outbox: &mut Outbox,
    ) -> Option<Result<(), PutError>> {
        match self {
            Self::Direct(copy) => copy.step().map(|result| match connection.failure(true) {
                Status::OK => result,
                source => Err(PutError::Endpoint { source, settled: true }),
            }),
            Self::Filling(filling) => {
                let mut said = Vec::new();
                let mut say = |body| said.push(body);
                let mut desk = Desk { context, id: connection.id, endpoint: &connection.raw, outbox, say: &mut say };
                let ended = filling.step(&mut desk);
                for body in said {
                    connection.say(sender, body);
                }
                if ended.is_some() {
                    connection.add_ahead(filling.take_ahead());
                }
                ended
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::{CudaCode, CudaError};

    const NEAR: Facts = Facts {
        forced: None,
        gpu: true,
        inbox_only: false,
        between_gpus: true,
        target: Ok(()),
        slab_mapped: true,
        to_host: false,
        pulled: false,
        same_gpu: false,
        inbox: true,
        inbox_mapped: false,
    };

    #[test]
    fn gpus_of_one_host_land_unless_asked_otherwise() {
        assert_eq!(choose(&NEAR), Ok((Route::Landing, RouteReason::GpusOfOneHost)));
        assert_eq!(choose(&Facts { same_gpu: true, ..NEAR }), Ok((Route::Direct, RouteReason::SameGpu)));
        let asked = Facts { forced: Some(Route::Direct), ..NEAR };
        assert_eq!(choose(&asked), Ok((Route::Direct, RouteReason::Forced)));
        assert_eq!(choose(&Facts { slab_mapped: false, ..NEAR }), Ok((Route::Direct, RouteReason::TargetMapped)));
        let promised = Facts { inbox_only: true, same_gpu: true, ..NEAR };
        assert_eq!(choose(&promised), Ok((Route::Landing, RouteReason::GpusOfOneHost)));
    }

    #[test]
    fn what_cannot_be_mapped_is_staged_and_the_reason_said() {
        let refused = NotImported::Refused(CudaError { call: "cuMemMap", code: CudaCode(1) });
        for (target, reason) in [
            (Err(NotImported::NotOffered), RouteReason::GpuNotMapped),
            (Err(refused), RouteReason::GpuRefused),
            (Err(NotImported::NoGpu), RouteReason::NoGpu),
        ] {
            let far = Facts { target, slab_mapped: false, ..NEAR };
            assert_eq!(choose(&far), Ok((Route::Staged, reason)));
            assert_eq!(choose(&Facts { inbox: false, ..far }), Err((Route::Landing, reason)));
            assert_eq!(choose(&Facts { inbox_mapped: true, ..far }), Ok((Route::Landing, reason)));
            let forced = Facts { forced: Some(Route::Direct), ..far };
            assert_eq!(choose(&forced), Err((Route::Direct, reason)));
        }
    }

    #[test]
    fn a_side_without_a_gpu_takes_the_inbox() {
        let (to, from) = (Facts { gpu: false, ..NEAR }, Facts { slab_mapped: false, to_host: true, ..NEAR });
        let (to, from) = (to, Facts { between_gpus: false, target: Err(NotImported::NotOffered), ..from });
        for (facts, reason) in [(to, RouteReason::NoGpu), (from, RouteReason::HostNotMapped)] {
            assert_eq!(choose(&facts), Ok((Route::Staged, reason)));
            let mapped = Facts { inbox_mapped: true, ..facts };
            assert_eq!(choose(&mapped), Ok((Route::Landing, reason)));
            let staged = Facts { forced: Some(Route::Staged), ..mapped };
            assert_eq!(choose(&staged), Ok((Route::Staged, RouteReason::Forced)));
            assert_eq!(choose(&Facts { inbox: false, ..mapped }), Err((Route::Landing, reason)));
            assert_eq!(choose(&Facts { pulled: true, ..mapped }), Err((Route::Landing, reason)));
            assert_eq!(choose(&Facts { forced: Some(Route::Direct), ..mapped }), Err((Route::Direct, reason)));
            assert_eq!(choose(&Facts { inbox_only: true, ..mapped }), Ok((Route::Landing, reason)));
        }
        assert_eq!(choose(&Facts { target: Ok(()), ..from }), Ok((Route::Direct, RouteReason::TargetMapped)));
    }

    #[test]
    fn host_memory_of_the_same_host_is_written_straight() {
        let offload = Facts { between_gpus: false, ..NEAR };
        assert_eq!(choose(&offload), Ok((Route::Direct, RouteReason::TargetMapped)));
        // The caller's own lands, or is staged: the GPU of its process writes it.
        let callers = Facts { target: Err(NotImported::NotOffered), ..offload };
        assert_eq!(choose(&callers), Ok((Route::Landing, RouteReason::GpuNotMapped)));
        let far = Facts { slab_mapped: false, ..callers };
        assert_eq!(choose(&far), Ok((Route::Staged, RouteReason::GpuNotMapped)));
    }

    #[test]
    fn what_is_pulled_is_read_where_it_is_mapped() {
        let pulled = Facts { pulled: true, ..NEAR };
        assert_eq!(choose(&pulled), Ok((Route::Direct, RouteReason::TargetMapped)));
        let not_mapped = Facts { target: Err(NotImported::NotOffered), ..pulled };
        assert_eq!(choose(&not_mapped), Err((Route::Landing, RouteReason::GpuNotMapped)));
    }
}
