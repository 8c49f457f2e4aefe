//! A worker with the GPU of its side.

use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, TryRecvError};
use kvferry_wire::{Context, ContextOptions, CudaOptions, Event, Region, Route, Worker};

use crate::Arguments;
use crate::ask::Error;

pub(crate) struct End {
    pub(crate) context: Context,
    pub(crate) worker: Worker,
    pub(crate) events: Receiver<Event>,
}

impl End {
    /// On a GPU or none.
    pub(crate) fn open(arguments: &Arguments, device: Option<u32>, way: &Way, epoch: u64) -> Result<Self, Error> {
        let cuda = device.map(CudaOptions::new).map(|default| CudaOptions {
            sm_blocks: way.blocks,
            slab_bytes: arguments.slab_mb.map_or(default.slab_bytes, |mb| mb << 20),
            slab_chunk_bytes: arguments.chunk_mb.map_or(default.slab_chunk_bytes, |mb| mb << 20),
            ..default
        });
        let options = ContextOptions {
            transports: way.transports.clone().or_else(|| arguments.transports.clone()),
            route: way.route,
            cuda,
            linger: Duration::from_millis(arguments.linger_ms),
            ..ContextOptions::default()
        };
        let context = Context::open(&options)?;
        let (worker, events) = Worker::start(&context, epoch)?;
        Ok(Self { context, worker, events })
    }

    /// A pool where this side has its memory.
    pub(crate) fn pool(&self, bytes: u64) -> Result<Region, Error> {
        let has_gpu = self.context.gpu_memory()?.is_some();
        Ok(if has_gpu { self.context.allocate_device(bytes)? } else { self.context.allocate(bytes)? })
    }

    /// The next event, looked for until `deadline`: a thread that sleeps would be woken late.
    pub(crate) fn next(&self, deadline: Instant) -> Result<Event, Error> {
        loop {
            match self.events.try_recv() {
                Ok(event) => return Ok(event),
                Err(TryRecvError::Disconnected) => return Err("the worker has stopped".into()),
                Err(TryRecvError::Empty) if Instant::now() >= deadline => return Err("nothing came in time".into()),
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
            }
        }
    }
}

/// How a job is moved.
#[derive(Clone, Debug, Default)]
pub(crate) struct Way {
    pub(crate) route: Option<Route>,
    pub(crate) blocks: Option<u32>,
    pub(crate) transports: Option<String>,
}

impl Way {
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let (name, blocks) = text.split_once(':').map_or((text, None), |(name, blocks)| (name, Some(blocks)));
        let route = match name {
            "direct" => Route::Direct,
            "landing" => Route::Landing,
            "staged" => Route::Staged,
            _ => return Err(format!("{name} is no route").into()),
        };
        let blocks = blocks.map(str::parse).transpose()?;
        let transports = (route == Route::Staged).then(|| "tcp".to_owned());
        Ok(Self { route: Some(route), blocks, transports })
    }
}
