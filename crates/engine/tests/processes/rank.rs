//! One engine with one pool of large slots, in this process or another.

use std::time::Duration;

use kvferry::{Engine, EngineOptions, InstanceCard, Link, Receive, RequestKey, Send};
use kvferry_layout::{Dtype, GroupKind, GroupSpec, Layer, LayerMask, RankSpec, Role, RowSpec, Slot, block_major};
use kvferry_match::BlockMap;
use kvferry_wire::{Region, Route, Version};
use serde::{Deserialize, Serialize};

/// Tokens of a block, each of 64 KiB.
const BLOCK_TOKENS: u32 = 16;

pub(crate) const SLOT_BYTES: u64 = 1 << 20;
pub(crate) const SLOTS: u32 = 96;

/// What slots hold that nothing may write to.
pub(crate) const CANARY: u8 = 0xa5;

/// Transports and the only route over them, if there is to be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    /// Into mapped memory.
    Direct,
    Landing,
    /// Tcp, and whatever is chosen over it.
    Tcp,
    /// Tcp, through the inbox.
    Staged,
}

pub(crate) const WAYS: [Way; 3] = [Way::Direct, Way::Landing, Way::Tcp];

pub(crate) struct Rank {
    pub(crate) engine: Engine,
    pub(crate) region: Region,
}

impl Rank {
    pub(crate) fn start(way: Way, rank: u32, patience: Duration) -> Self {
        let options = EngineOptions::new(rank).patience(patience);
        let engine = Engine::start(match way {
            Way::Direct => options,
            Way::Landing => options.route(Route::Landing),
            Way::Tcp => options.transports("tcp"),
            Way::Staged => options.transports("tcp").route(Route::Staged),
        });
        let engine = engine.unwrap();
        let cell = u32::try_from(SLOT_BYTES).unwrap() / BLOCK_TOKENS;
        let row = RowSpec::single(Role::Key, Dtype::U8, LayerMask::all(1), 1, cell).unwrap();
        let kind = GroupKind::paged(BLOCK_TOKENS);
        let groups = vec![GroupSpec { kind, slot_count: SLOTS, pools: vec![vec![row]] }];
        let spec = RankSpec { hidden_layers: 1, layers: vec![Layer(0)], tp_rank: 0, tp_size: 1, groups };
        let mut table = block_major(&spec).unwrap();
        let region = engine.allocate(&mut table).unwrap().remove(0);
        engine.publish(table, vec![region.clone()]).unwrap();
        Self { engine, region }
    }

    /// Whether all that comes this way comes through this rank's inbox. Slots are so large that they are put where they belong
    /// over tcp, unless it is a UCX that makes messages of puts.
    pub(crate) fn takes_inbox(&self, way: Way) -> bool {
        match way {
            Way::Direct => false,
            Way::Landing | Way::Staged => true,
            Way::Tcp => self.engine.ucx_version() < Version::new(1, 16, 0),
        }
    }

    /// The card of the instance, which has this rank only.
    pub(crate) fn card(&self) -> InstanceCard {
        InstanceCard::new([self.engine.options().rank], self.engine.card()).unwrap()
    }

    pub(crate) fn receive(&self, link: Link, key: RequestKey, slots: &[u32]) -> Result<Receive, kvferry::PostError> {
        self.engine.receive(link, key, &map(slots), 0..tokens(slots))
    }

    pub(crate) fn send(&self, link: Link, key: RequestKey, slots: &[u32]) -> Result<Send, kvferry::PostError> {
        self.engine.send(link, key, map(slots), 0..tokens(slots))
    }

    pub(crate) fn fill(&self, slots: &[u32], byte: u8) {
        let bytes = vec![byte; usize::try_from(SLOT_BYTES).unwrap()];
        for slot in slots {
            self.region.write(u64::from(*slot) * SLOT_BYTES, &bytes).unwrap();
        }
    }

    pub(crate) fn guard(&self, slots: &[u32]) {
        self.fill(slots, CANARY);
    }

    /// The slots hold what [`Rank::guard`] has put there.
    pub(crate) fn is_untouched(&self, slots: &[u32]) -> bool {
        self.holds(slots, CANARY)
    }

    pub(crate) fn holds(&self, slots: &[u32], byte: u8) -> bool {
        let expected = vec![byte; usize::try_from(SLOT_BYTES).unwrap()];
        let mut bytes = expected.clone();
        slots.iter().all(|slot| {
            self.region.read(u64::from(*slot) * SLOT_BYTES, &mut bytes).unwrap();
            bytes == expected
        })
    }

    /// Watches slots for a while.
    pub(crate) fn watch(&self, slots: &[u32], time: Duration) {
        let until = std::time::Instant::now() + time;
        while std::time::Instant::now() < until {
            assert!(self.is_untouched(slots), "slots were written after they were quiet");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn map(slots: &[u32]) -> Vec<BlockMap> {
    vec![BlockMap::dense(0, slots.iter().copied().map(Slot))]
}

fn tokens(slots: &[u32]) -> u64 {
    slots.len() as u64 * u64::from(BLOCK_TOKENS)
}

pub(crate) fn all_slots() -> Vec<u32> {
    (0..SLOTS).collect()
}

pub(crate) fn key(request: u64, attempt: u32) -> RequestKey {
    RequestKey { request, attempt }
}
