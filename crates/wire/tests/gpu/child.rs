//! The other process: this test binary again, which runs nothing but [`target`].

use std::sync::Arc;

use kvferry_test_process::{Answers, Process, footprint, serve, setup};
use kvferry_wire::{Context, ContextOptions, CudaOptions, Region, RegionCard, Worker};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::framework::Framework;

/// Where the target's pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// GPU memory of the library's.
    Allocated,
    /// GPU memory of `cudaMalloc`.
    Callers,
    Host,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// The GPU, as the target sees them.
    pub(crate) device: u32,
    /// `CUDA_VISIBLE_DEVICES` of the target.
    pub(crate) visible: Option<String>,
    pub(crate) transports: Option<String>,
    pub(crate) kind: Kind,
    pub(crate) epoch: u64,
    pub(crate) bytes: u64,
    pub(crate) slab_bytes: u64,
    pub(crate) slab_chunk_bytes: u32,
}

impl Setup {
    pub(crate) fn new(bytes: u64) -> Self {
        let (slab_bytes, slab_chunk_bytes) = (16 << 20, 1 << 20);
        let (visible, transports, kind) = (None, None, Kind::Allocated);
        Self { device: other_device(), visible, transports, kind, epoch: 0xb, bytes, slab_bytes, slab_chunk_bytes }
    }
}

/// The second GPU, or the only one.
pub(crate) fn other_device() -> u32 {
    std::env::var("KVFERRY_TEST_DEVICE").map_or(1, |device| device.parse().unwrap())
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Card,
    Write(Vec<u8>),
    Fill(u8),
    Digest,
    Memory,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Card { address: Vec<u8>, card: Box<RegionCard> },
    Digest(u64),
    Memory { free: u64, descriptors: usize },
    Done,
}

/// A process with a worker and one region, which peers write.
pub(crate) struct Target {
    pub(crate) address: Vec<u8>,
    pub(crate) epoch: u64,
    pub(crate) card: RegionCard,
    pub(crate) process: Process,
    answers: Answers<Answer>,
}

impl Target {
    pub(crate) fn start(setup: &Setup) -> Self {
        let (mut process, mut answers) = Process::start("child::target", setup, |command| {
            if let Some(visible) = &setup.visible {
                command.env("CUDA_VISIBLE_DEVICES", visible);
            }
        });
        process.tell(&Ask::Card);
        let Some(Answer::Card { address, card }) = answers.next() else { panic!("no card") };
        Self { address, epoch: setup.epoch, card: *card, process, answers }
    }

    fn ask(&mut self, question: &Ask) -> Answer {
        self.process.tell(question);
        self.answers.next().expect("the target is there")
    }

    /// Whether the region holds these bytes.
    pub(crate) fn holds(&mut self, expected: &[u8]) -> bool {
        let Answer::Digest(digest) = self.ask(&Ask::Digest) else { panic!("no digest") };
        digest == xxh3_64(expected)
    }

    /// Fills the whole region with one byte.
    pub(crate) fn fill(&mut self, byte: u8) {
        assert!(matches!(self.ask(&Ask::Fill(byte)), Answer::Done));
    }

    /// Free bytes of the GPU, and open descriptors of the process.
    pub(crate) fn footprint(&mut self) -> (u64, usize) {
        let Answer::Memory { free, descriptors } = self.ask(&Ask::Memory) else { panic!("no footprint") };
        (free, descriptors)
    }
}

#[test]
#[ignore = "the other process of the tests here; does nothing by itself"]
fn target() {
    let Some(setup) = setup::<Setup>() else { return };
    let cuda = CudaOptions {
        slab_bytes: setup.slab_bytes,
        slab_chunk_bytes: setup.slab_chunk_bytes,
        ..CudaOptions::new(setup.device)
    };
    let transports = setup.transports.clone();
    let options = ContextOptions { transports, cuda: Some(cuda), ..Default::default() };
    let context = Context::open(&options).unwrap();
    let (worker, events) = Worker::start(&context, setup.epoch).unwrap();
    let region = match setup.kind {
        Kind::Allocated => context.allocate_device(setup.bytes).unwrap(),
        Kind::Callers => callers(&context, &setup),
        Kind::Host => context.allocate(setup.bytes).unwrap(),
    };
    serve(|ask| {
        let answer = match ask {
            Ask::Card => Answer::Card { address: worker.address().to_owned(), card: Box::new(region.card()) },
            Ask::Write(bytes) => {
                region.write(0, &bytes).unwrap();
                Answer::Done
            }
            Ask::Fill(byte) => {
                region.write(0, &vec![byte; setup.bytes as usize]).unwrap();
                Answer::Done
            }
            Ask::Digest => {
                let mut bytes = vec![0; setup.bytes as usize];
                region.read(0, &mut bytes).unwrap();
                Answer::Digest(xxh3_64(&bytes))
            }
            Ask::Memory => {
                let (_, free, _) = context.gpu_memory().unwrap().unwrap();
                Answer::Memory { free, descriptors: footprint().0 }
            }
        };
        while events.try_recv().is_ok() {}
        answer
    });
}

/// Memory of `cuMemAlloc`, as a framework has it.
fn callers(context: &Context, setup: &Setup) -> Region {
    let base = Framework::on(setup.device).allocate(setup.bytes);
    // SAFETY: the memory is never freed.
    unsafe { context.register_device(base, setup.bytes, Arc::new(())) }.unwrap()
}
