//! One end of a connection.

use std::time::Duration;

use crossbeam::channel::Receiver;
use kvferry_wire::{
    Context, ContextOptions, Dim, EndpointId, Event, Frame, Part, Piece, Region, RemoteRegion, Route, SlotPair,
    TransferId, TransferStats, Worker,
};

use crate::Arguments;
use crate::ask::Error;

const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct End {
    pub(crate) context: Context,
    pub(crate) worker: Worker,
    pub(crate) events: Receiver<Event>,
}

impl End {
    pub(crate) fn open(
        arguments: &Arguments,
        transports: Option<&str>,
        (route, copy_threads): (Option<Route>, usize),
    ) -> Result<Self, Error> {
        let mut options = ContextOptions {
            transports: transports.map(str::to_owned),
            route,
            copy_threads,
            populate: !arguments.unpopulated,
            ..ContextOptions::default()
        };
        if let Some(chunk) = arguments.chunk {
            options.chunk_bytes = u32::try_from(chunk)?;
        }
        let context = Context::open(&options)?;
        let epoch = u64::from(std::process::id()) << 32 | u64::from(std::time::UNIX_EPOCH.elapsed()?.subsec_nanos());
        let (worker, events) = Worker::start(&context, epoch)?;
        Ok(Self { context, worker, events })
    }

    /// Waits asleep.
    pub(crate) fn event_asleep(&self) -> Result<Event, Error> {
        loop {
            match self.events.recv_timeout(DEADLINE)? {
                Event::Progress { .. } => {}
                event => return Ok(event),
            }
        }
    }

    /// The next frame; transfers may end well meanwhile. Waits without sleeping: what is measured is the transfer, not the
    /// wake-up of this thread.
    pub(crate) fn frame(&self) -> Result<Frame, Error> {
        let start = std::time::Instant::now();
        loop {
            match self.events.try_recv() {
                Ok(Event::Frame(frame)) => return Ok(frame),
                Ok(Event::Progress { .. } | Event::TransferDone { result: Ok(_), .. }) => {}
                Ok(event) => return Err(format!("{event:?} in place of a frame").into()),
                Err(_) if start.elapsed() > DEADLINE => return Err("nothing happened for a minute".into()),
                Err(_) if self.worker.progress() => {}
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    pub(crate) fn put(&self, endpoint: EndpointId, part: Part) -> Result<TransferStats, Error> {
        self.worker.put(endpoint, TransferId(0), vec![part])?;
        done(self.event_asleep()?)
    }

    pub(crate) fn get(&self, endpoint: EndpointId, part: Part) -> Result<TransferStats, Error> {
        self.worker.get(endpoint, TransferId(0), vec![part])?;
        done(self.event_asleep()?)
    }
}

fn done(event: Event) -> Result<TransferStats, Error> {
    match event {
        Event::TransferDone { result, .. } => Ok(result?),
        event => Err(format!("{event:?} in place of the end of a transfer").into()),
    }
}

/// Whole blocks from one pool to another.
pub(crate) fn blocks(local: &Region, remote: RemoteRegion, size: u64, pairs: Vec<SlotPair>) -> Part {
    Part {
        local: local.clone(),
        local_base: 0,
        local_slot_stride: size,
        remote,
        remote_base: 0,
        remote_slot_stride: size,
        pieces: [Piece { local_offset: 0, remote_offset: 0, run_bytes: size, dims: [Dim::ONE; 2] }].into(),
        pairs: pairs.into(),
    }
}
