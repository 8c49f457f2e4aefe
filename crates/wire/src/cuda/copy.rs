//! The direct route on a GPU: one kernel launch reads this side's slots and writes the peer's, or the other way round. Either
//! may be host memory.
//!
//! A kernel's writes are visible to every device before its number is, so what is said when it has ended is said behind them.
//!
//! # Safety
//!
//! The copy holds the regions it reads and the mappings it writes until its kernel has ended. Every run was checked against
//! both when the transfer was posted.
#![allow(unsafe_code, reason = "launches the kernel on memory that it holds")]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::cuda::driver::CudaError;
use crate::cuda::expand::Mode;
use crate::cuda::queue::{Prepared, Queue, Ticket};
use crate::cuda::slab::Slab;
use crate::cuda::target::Targets;
use crate::error::PutError;
use crate::route::Route;
use crate::transfer::{Direction, Work};

/// A transfer into mapped memory of a peer's GPU.
pub(crate) struct DeviceCopy {
    work: Arc<Work>,
    targets: Targets,
    queue: Rc<RefCell<Queue>>,
    prepared: Option<Prepared>,
    ticket: Option<Ticket>,
    /// How the kernel ended.
    ended: Option<Result<(), CudaError>>,
    cancelled: bool,
}

impl DeviceCopy {
    /// Launches the kernel. `targets` are those of the parts.
    pub(crate) fn start(queue: &Rc<RefCell<Queue>>, work: Arc<Work>, targets: Targets) -> Result<Self, PutError> {
        let failed = |source| PutError::Cuda { source };
        let mut owner = queue.borrow_mut();
        // Waited for before anything is launched: what the caller's stream still has to write is not read before.
        if let Some(ready) = &work.ready {
            // SAFETY: the event is live, as whoever posted it promised.
            unsafe { owner.wait_for(ready.raw()) }.map_err(failed)?;
        }
        let mode = if work.direction == Direction::Get { Mode::Pull } else { Mode::Direct };
        let unavailable = PutError::RouteUnavailable { route: Route::Direct };
        let template = owner.template_of(mode, work.parts(), Some(targets.addresses()));
        let template = template.map_err(failed)?.ok_or(unavailable)?;
        let prepared = owner.prepare(&template, &work.sets).map_err(failed)?.ok_or(unavailable)?;
        // SAFETY: every place is inside a region or a mapping, which the new value holds until the kernel has ended.
        let launched = unsafe { owner.launch(&prepared, (0, prepared.units()), Slab::NONE, 0) };
        let ticket = match launched {
            Ok(ticket) => ticket,
            Err(error) => {
                owner.release(prepared); // its slots may still be on their way to the device
                return Err(failed(error));
            }
        };
        drop(owner);
        let (queue, prepared, ticket) = (queue.clone(), Some(prepared), Some(ticket));
        Ok(Self { work, targets, queue, prepared, ticket, ended: None, cancelled: false })
    }

    /// Has the kernel leave out what it has not come to.
    pub(crate) fn stop(&mut self) {
        self.look();
        if let Some(ticket) = &self.ticket
            && !std::mem::replace(&mut self.cancelled, true)
        {
            // If it cannot be stopped, it runs to its end.
            let _ = self.queue.borrow_mut().stop(ticket);
        }
    }

    fn look(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let mut queue = self.queue.borrow_mut();
            match queue.poll(&ticket) {
                None => self.ticket = Some(ticket),
                Some(result) => {
                    self.prepared.take().into_iter().for_each(|prepared| queue.release(prepared));
                    self.ended = Some(result);
                }
            }
        }
    }

    /// Kernels that have not ended.
    pub(crate) fn outstanding(&mut self) -> u64 {
        self.look();
        u64::from(self.ticket.is_some())
    }

    /// Bytes of the transfer if all of it is copied: a kernel does not say how far it is.
    pub(crate) fn moved_bytes(&self) -> u64 {
        if let Some(Ok(())) = self.ended
            && !self.cancelled
        {
            self.work.size.bytes
        } else {
            0
        }
    }

    /// `Some` at the end.
    pub(crate) fn step(&mut self) -> Option<Result<(), PutError>> {
        self.look();
        let result = self.ended?;
        Some(match (result, self.targets.withdrawn()) {
            (Err(source), _) => Err(PutError::Cuda { source }),
            (Ok(()), _) if self.cancelled => Err(PutError::Cancelled),
            (Ok(()), Some(part)) => {
                let remote = &self.work.remotes[part];
                Err(PutError::Withdrawn { base: remote.base(), bytes: remote.bytes() })
            }
            (Ok(()), None) => Ok(()),
        })
    }
}

impl Drop for DeviceCopy {
    fn drop(&mut self) {
        if self.outstanding() > 0 {
            // Only a worker that is torn down in the middle comes here; it must not let go of the memory.
            let _ = self.queue.borrow_mut().drain();
        }
    }
}
