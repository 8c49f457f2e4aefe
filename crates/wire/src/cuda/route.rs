//! Which way a transfer takes that has a GPU at one end, and what carries it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ucx_sys::Status;

use crate::connection::{Connection, Sender};
use crate::context::Context;
use crate::cuda::copy::DeviceCopy;
use crate::cuda::driver::CudaError;
use crate::cuda::gpu::Gpu;
use crate::cuda::imported::NotImported;
use crate::cuda::queue::Queue;
use crate::error::PutError;
use crate::inbox::message::StreamId;
use crate::route::{Route, RouteReason};
use crate::transfer::Work;

/// Blocks that reach nine tenths of the peak, measured.
const BLOCKS: u32 = 32;

/// What a progress thread copies with.
pub(crate) struct Carriers {
    /// Of transfers that this side sends.
    outgoing: Rc<RefCell<Queue>>,
}

impl Carriers {
    pub(crate) fn start(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let blocks = gpu.options.sm_blocks.unwrap_or(BLOCKS).clamp(1, gpu.processors.max(1));
        Ok(Self { outgoing: Rc::new(RefCell::new(Queue::new(gpu, blocks)?)) })
    }
}

/// A route of a GPU's, at work.
pub(crate) enum DeviceCarrier {
    Direct(DeviceCopy),
}

impl DeviceCarrier {
    /// Chooses the route and starts. The carrier is an end if the transfer is over before it began.
    pub(crate) fn choose(
        work: &Arc<Work>,
        context: &Context,
        carriers: Option<&Carriers>,
        connection: &mut Connection,
        _stream: StreamId,
    ) -> (Result<Self, Result<(), PutError>>, (Route, RouteReason)) {
        if work.size.runs == 0 {
            return (Err(Ok(())), (Route::Runs, RouteReason::Empty));
        }
        let forced = context.options().route;
        let unavailable = |route, reason| (Err(Err(PutError::RouteUnavailable { route })), (route, reason));
        let Some(carriers) = carriers else { return unavailable(forced.unwrap_or(Route::Direct), RouteReason::NoGpu) };
        if let Some(error) = connection.withdrawn(work) {
            return (Err(Err(error)), (Route::Direct, RouteReason::TargetMapped));
        }
        let reason = if forced.is_some() { RouteReason::Forced } else { RouteReason::TargetMapped };
        match connection.device_targets(work) {
            Ok(targets) => {
                let copy = DeviceCopy::start(&carriers.outgoing, work.clone(), targets);
                (copy.map(Self::Direct).map_err(Err), (Route::Direct, reason))
            }
            Err(NotImported::Refused(_)) => unavailable(Route::Direct, RouteReason::GpuRefused),
            Err(NotImported::NoGpu) => unavailable(Route::Direct, RouteReason::NoGpu),
            Err(NotImported::NotOffered) => unavailable(Route::Direct, RouteReason::GpuNotMapped),
        }
    }

    pub(crate) fn moved_bytes(&self) -> u64 {
        match self {
            Self::Direct(copy) => copy.moved_bytes(),
        }
    }

    /// Kernels that have not ended.
    pub(crate) fn outstanding(&mut self) -> u64 {
        match self {
            Self::Direct(copy) => copy.outstanding(),
        }
    }

    /// `Some` at the end.
    pub(crate) fn step(
        &mut self,
        _work: &Work,
        connection: &mut Connection,
        _sender: &Sender<'_>,
    ) -> Option<Result<(), PutError>> {
        match self {
            Self::Direct(copy) => copy.step().map(|result| match connection.failure(true) {
                Status::OK => result,
                source => Err(PutError::Endpoint { source }),
            }),
        }
    }
}
