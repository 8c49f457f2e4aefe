//! The other process: this test binary again, which runs nothing but [`target`].

use std::ptr::NonNull;
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
    /// GPU memory of several allocations, as a framework's pool that grows.
    Segments,
    /// Host memory that no other process maps.
    CallersHost,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// The GPU, as the target sees them. `None`: its context has none.
    pub(crate) device: Option<u32>,
    /// `CUDA_VISIBLE_DEVICES` of the target.
    pub(crate) visible: Option<String>,
    pub(crate) transports: Option<String>,
    /// Of each region, all of `bytes`.
    pub(crate) kinds: Vec<Kind>,
    pub(crate) epoch: u64,
    pub(crate) bytes: u64,
    pub(crate) slab_bytes: u64,
    pub(crate) slab_chunk_bytes: u32,
    /// Of the inbox.
    pub(crate) chunk_bytes: u32,
}

impl Setup {
    pub(crate) fn new(bytes: u64) -> Self {
        let (slab_bytes, slab_chunk_bytes) = (16 << 20, 1 << 20);
        let (visible, transports, kinds) = (None, None, vec![Kind::Allocated]);
        Self {
            device: Some(other_device()),
            visible,
            transports,
            kinds,
            epoch: 0xb,
            bytes,
            slab_bytes,
            slab_chunk_bytes,
            chunk_bytes: ContextOptions::default().chunk_bytes,
        }
    }
}

/// The second GPU, or the only one.
pub(crate) fn other_device() -> u32 {
    std::env::var("KVFERRY_TEST_DEVICE").map_or(1, |device| device.parse().unwrap())
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Card,
    Fill(u8),
    Digest,
    Memory,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Cards { address: Vec<u8>, cards: Vec<RegionCard> },
    Digest(u64),
    Memory { free: u64, descriptors: usize },
    Done,
}

/// A process with a worker and regions, which peers write.
pub(crate) struct Target {
    pub(crate) address: Vec<u8>,
    pub(crate) epoch: u64,
    /// Of the first region.
    pub(crate) card: RegionCard,
    pub(crate) cards: Vec<RegionCard>,
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
        let Some(Answer::Cards { address, cards }) = answers.next() else { panic!("no cards") };
        Self { address, epoch: setup.epoch, card: cards[0].clone(), cards, process, answers }
    }

    fn ask(&mut self, question: &Ask) -> Answer {
        self.process.tell(question);
        self.answers.next().expect("the target is there")
    }

    /// Whether the regions, one behind the other, hold these bytes.
    pub(crate) fn holds(&mut self, expected: &[u8]) -> bool {
        let Answer::Digest(digest) = self.ask(&Ask::Digest) else { panic!("no digest") };
        digest == xxh3_64(expected)
    }

    /// Fills all regions with one byte.
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
    let cuda = setup.device.map(|device| CudaOptions {
        slab_bytes: setup.slab_bytes,
        slab_chunk_bytes: setup.slab_chunk_bytes,
        ..CudaOptions::new(device)
    });
    let transports = setup.transports.clone();
    let options = ContextOptions { transports, cuda, chunk_bytes: setup.chunk_bytes, ..Default::default() };
    let context = Context::open(&options).unwrap();
    let (worker, events) = Worker::start(&context, setup.epoch).unwrap();
    let region = |kind: &Kind| kind.region(&context, setup.device.unwrap_or(0), setup.bytes);
    let regions: Vec<Region> = setup.kinds.iter().map(region).collect();
    serve(|ask| {
        let answer = match ask {
            Ask::Card => {
                let cards = regions.iter().map(Region::card).collect();
                Answer::Cards { address: worker.address().to_owned(), cards }
            }
            Ask::Fill(byte) => {
                let bytes = vec![byte; setup.bytes as usize];
                regions.iter().for_each(|region| region.write(0, &bytes).unwrap());
                Answer::Done
            }
            Ask::Digest => {
                let mut bytes = vec![0; setup.bytes as usize * regions.len()];
                let places = regions.iter().zip(bytes.chunks_mut(setup.bytes as usize));
                places.for_each(|(region, bytes)| region.read(0, bytes).unwrap());
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

impl Kind {
    /// A region of such memory, which is never freed if it is the caller's.
    pub(crate) fn region(self, context: &Context, device: u32, bytes: u64) -> Region {
        match self {
            Self::Allocated => context.allocate_device(bytes).unwrap(),
            Self::Callers => {
                let base = Framework::on(device).allocate(bytes);
                // SAFETY: the memory is never freed.
                unsafe { context.register_device(base, bytes, Arc::new(())) }.unwrap()
            }
            Self::Segments => {
                // Not from the start of the first.
                let base = Framework::on(device).allocate_segments(bytes + 4096) + 4096;
                // SAFETY: the memory is never freed.
                unsafe { context.register_device(base, bytes, Arc::new(())) }.unwrap()
            }
            Self::Host => context.allocate(bytes).unwrap(),
            Self::CallersHost => {
                let base = NonNull::from(vec![0u8; bytes as usize].leak()).cast();
                // SAFETY: the memory is never freed, and reached through the region alone.
                unsafe { context.register(base, bytes, Arc::new(())) }.unwrap()
            }
        }
    }
}
