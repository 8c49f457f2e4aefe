//! This process's agent, and memory that it was lent.

use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

use kvferry_agent::wire::{ContextOptions, MemoryKind, Region, Run};
use kvferry_agent::{Agent, AgentOptions, Indices, List, Operation, Transfer};

use crate::child::Other;

pub(crate) const BYTES: u64 = 8 << 20;
pub(crate) const PIECE: u64 = 4096;
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Over UCX's own choice, and over sockets alone.
pub(crate) const WAYS: [Option<&str>; 2] = [None, Some("tcp")];

/// How long the agents here wait for a silent peer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

pub(crate) fn options(transports: Option<&str>) -> AgentOptions {
    let context = ContextOptions { transports: transports.map(str::to_owned), ..ContextOptions::default() };
    let context = ContextOptions { stall_deadline: PATIENCE, ..context };
    AgentOptions { context, patience: PATIENCE, ..AgentOptions::default() }
}

/// Memory of this process's own, which no peer can map.
#[derive(Debug)]
pub(crate) struct Memory {
    region: Region,
}

impl Memory {
    pub(crate) fn lend(agent: &Agent) -> Self {
        let (region, _) = lend(agent);
        Self { region }
    }

    pub(crate) fn runs(&self, bytes: u64) -> Vec<Run> {
        runs_of(&self.region, bytes)
    }

    pub(crate) fn fill(&self, with: u8) {
        self.region.write(0, &vec![with; usize::try_from(BYTES).unwrap()]).unwrap();
    }

    pub(crate) fn holds(&self, all: u8) -> bool {
        let mut bytes = vec![0; usize::try_from(BYTES).unwrap()];
        self.region.read(0, &mut bytes).unwrap();
        bytes == vec![all; bytes.len()] // quicker than to look at each where nothing is optimized
    }
}

/// Memory that is registered with the agent, and what tells whether it was given back.
#[allow(unsafe_code, reason = "memory of the caller's is registered by address")]
pub(crate) fn lend(agent: &Agent) -> (Region, Weak<Box<[u128]>>) {
    let pages = vec![0u128; usize::try_from(BYTES / 16).unwrap()].into_boxed_slice();
    let owner: Arc<Box<[u128]>> = Arc::new(pages);
    let base = NonNull::new(owner.as_ptr().cast_mut().cast()).unwrap();
    let lent = Arc::downgrade(&owner);
    // SAFETY: the slice is the owner's, which the registration holds, and nobody looks at it but through the region.
    let region = unsafe { agent.context().register(base, BYTES, owner) }.unwrap();
    agent.register(region.clone()).unwrap();
    (region, lent)
}

/// The region, in runs of `bytes`.
pub(crate) fn runs_of(region: &Region, bytes: u64) -> Vec<Run> {
    (0..BYTES / bytes).map(|run| Run { address: region.base() + run * bytes, bytes }).collect()
}

/// Held for writing by a test that measures this process, and for reading by the others.
static MEASURED: RwLock<()> = RwLock::new(());

/// An agent here and one elsewhere, whose memory is listed in pieces.
pub(crate) struct End {
    pub(crate) agent: Agent,
    pub(crate) memory: Memory,
    pub(crate) local: List,
    _company: Option<RwLockReadGuard<'static, ()>>,
}

/// Nobody else does anything in this process while this lives.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    MEASURED.write().unwrap_or_else(PoisonError::into_inner)
}

impl End {
    pub(crate) fn start(transports: Option<&str>) -> Self {
        Self::start_with(options(transports))
    }

    pub(crate) fn start_with(options: AgentOptions) -> Self {
        let company = MEASURED.read().unwrap_or_else(PoisonError::into_inner);
        Self { _company: Some(company), ..Self::start_alone(options) }
    }

    /// In a test that is [`alone`].
    pub(crate) fn start_alone(options: AgentOptions) -> Self {
        let agent = Agent::new("here", options).unwrap();
        let memory = Memory::lend(&agent);
        let local = agent.prepare_local(MemoryKind::Host, &memory.runs(PIECE)).unwrap();
        Self { agent, memory, local, _company: None }
    }

    pub(crate) fn list(&self, other: &Other) -> List {
        let name = self.agent.add_remote(&other.metadata).unwrap();
        self.agent.prepare_remote(&name, MemoryKind::Host, &other.runs(PIECE)).unwrap()
    }

    /// All of the pieces, in an order that leaves none beside its neighbour.
    pub(crate) fn all(&self, operation: Operation, remote: &List, notification: &[u8]) -> Transfer {
        let count = u32::try_from(BYTES / PIECE).unwrap();
        let order: Vec<u32> = (0..count).map(|piece| piece * 677 % count).collect();
        let notification = Some(notification).filter(|message| !message.is_empty());
        let order = Indices::U32(&order);
        self.agent.make(operation, &self.local, order, remote, order, notification).unwrap()
    }
}
