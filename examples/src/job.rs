//! What a run is about, with its options checked: everything a rank derives from the command line alone.

use std::time::Duration;

use kvferry_layout::{
    Cut, Dtype, GroupKind, Layer, LayerGroup, LayoutError, ModelFacts, PageTable, Slot, TableOptions, build,
};

use crate::image::{Image, ImageError};
use crate::meet::{Attendance, Member, Side, Terms};
use crate::models::{self, ModelError};
use crate::options::{JobOptions, Mtp};
use crate::pattern::Key;
use crate::slots;

/// The one request of a run.
pub const REQUEST: u64 = 1;

/// Ranks of both instances at most.
const RANKS_MAX: u32 = 1024;

/// How fast pools are filled at least, by all ranks of one machine together.
const FILL_BYTES_A_SECOND: u64 = 256 << 20;

/// One run.
#[derive(Clone, Debug)]
pub struct Job {
    facts: ModelFacts,
    senders: Instance,
    receivers: Instance,
    tokens: u64,
    dtype: Dtype,
    mtp: Mtp,
    seed: u64,
}

/// The page tables of all ranks of a run, by rank.
#[derive(Clone, Debug)]
pub struct Tables {
    /// Those of the sending instance.
    pub senders: Vec<PageTable>,
    /// Those of the receiving instance.
    pub receivers: Vec<PageTable>,
}

/// One of the two instances.
#[derive(Clone, Debug)]
struct Instance {
    cut: Cut,
    tokens_per_block: u32,
    block_count: u32,
    slot_count: u32,
    mtp: bool,
}

/// Why options make no run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The model is not known or not usable.
    #[error("--model")]
    Model(#[from] ModelError),
    /// More ranks than a run of the examples makes sense with. Take smaller cuts.
    #[error("--from and --to are {ranks} ranks together, at most {RANKS_MAX} can meet")]
    TooManyRanks {
        /// Ranks of both instances.
        ranks: u32,
    },
    /// More blocks than a pool has slots. Ask for fewer tokens or longer blocks.
    #[error("{tokens} tokens in blocks of {tokens_per_block} need more slots than a pool can have")]
    TooManyBlocks {
        /// Tokens of the request.
        tokens: u64,
        /// Tokens of a block.
        tokens_per_block: u32,
    },
    /// The cut does not fit the model, or has no such rank.
    #[error("{member} of {cut}")]
    Table {
        /// The rank.
        member: Member,
        /// The cut of its instance.
        cut: Cut,
        /// What is wrong.
        source: Box<LayoutError>,
    },
}

impl Job {
    /// Checks options and loads the model.
    ///
    /// # Errors
    ///
    /// [`JobError`] names the option.
    pub fn new(options: &JobOptions) -> Result<Self, JobError> {
        let facts = models::load(&options.model)?;
        let ranks = options.from.rank_count().saturating_add(options.to.rank_count());
        if ranks > RANKS_MAX {
            return Err(JobError::TooManyRanks { ranks });
        }
        let tokens = options.tokens;
        let instance = |cut: &Cut, tokens_per_block: u32, mtp: bool| {
            let block_count = tokens.div_ceil(u64::from(tokens_per_block));
            let error = JobError::TooManyBlocks { tokens, tokens_per_block };
            let Some(slot_count) = slots::slot_count(block_count) else {
                return Err(error);
            };
            let Ok(block_count) = u32::try_from(block_count) else {
                return Err(error);
            };
            Ok(Instance { cut: cut.clone(), tokens_per_block, block_count, slot_count, mtp })
        };
        let mtp = options.mtp;
        Ok(Self {
            facts,
            senders: instance(&options.from, options.block_tokens_from, matches!(mtp, Mtp::From | Mtp::Both))?,
            receivers: instance(&options.to, options.block_tokens_to, matches!(mtp, Mtp::To | Mtp::Both))?,
            tokens,
            dtype: options.dtype,
            mtp,
            seed: options.seed,
        })
    }

    /// Tokens of the request.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// How many ranks there are.
    pub fn attendance(&self) -> Attendance {
        Attendance { senders: self.senders.cut.rank_count(), receivers: self.receivers.cut.rank_count() }
    }

    /// What all ranks must have been told alike. The model is left out: its path may differ from host to host, and
    /// another model is another table, which the engine refuses.
    pub fn terms(&self) -> Terms {
        let options = [
            ("--from", self.senders.cut.to_string()),
            ("--to", self.receivers.cut.to_string()),
            ("--tokens", self.tokens.to_string()),
            ("--block-tokens-from", self.senders.tokens_per_block.to_string()),
            ("--block-tokens-to", self.receivers.tokens_per_block.to_string()),
            ("--dtype", self.dtype.to_string()),
            ("--mtp", self.mtp.name().to_owned()),
            ("--seed", self.seed.to_string()),
        ];
        options.map(|(option, value)| (option.to_owned(), value)).into()
    }

    /// The page table of one rank.
    ///
    /// # Errors
    ///
    /// [`JobError::Table`] if there is no such rank or its instance's cut does not fit the model.
    pub fn table(&self, member: Member) -> Result<PageTable, JobError> {
        let Instance { cut, tokens_per_block, slot_count, mtp, .. } = self.instance(member.side);
        let options = TableOptions { mtp: *mtp, ..TableOptions::new(*tokens_per_block, self.dtype, *slot_count) };
        build(&self.facts, cut, member.rank, &options).map_err(|source| JobError::Table {
            member,
            cut: cut.clone(),
            source: Box::new(source),
        })
    }

    /// Ranks of an instance that hold the request between them: all, or with attention data parallelism those of one part.
    pub fn part(&self, side: Side) -> Vec<u32> {
        let cut = &self.instance(side).cut;
        let dp_rank = REQUEST % u64::from(cut.dp_size());
        cut.ranks_of(u32::try_from(dp_rank).unwrap_or_default()).collect()
    }

    /// The slots of the request on one rank, by group and block ordinal: shuffled, otherwise on each rank. None on a rank
    /// that has no part in the request.
    pub fn slots(&self, member: Member, table: &PageTable) -> Vec<Vec<Slot>> {
        if !self.part(member.side).contains(&member.rank) {
            return vec![Vec::new(); table.groups.len()];
        }
        let Instance { block_count, slot_count, .. } = *self.instance(member.side);
        let blocks = |group: &LayerGroup| match group.kind {
            GroupKind::Paged { .. } => block_count,
            GroupKind::State => 1,
        };
        let groups = (0..).zip(&table.groups);
        groups.map(|(id, group)| slots::shuffled(self.own(member).part(id), blocks(group), slot_count)).collect()
    }

    /// What the pools of one rank should hold at the end: the request in `slots`, but for layers that only the
    /// receiver has, and everywhere else a background that differs from rank to rank.
    ///
    /// # Errors
    ///
    /// [`ImageError`] if the slots are not those of [`Job::slots`].
    pub fn image<'a>(
        &self,
        member: Member,
        table: &'a PageTable,
        slots: &[Vec<Slot>],
    ) -> Result<Image<'a>, ImageError> {
        let values = Key::new(self.seed).part(0).part(REQUEST);
        let image = Image::new(table, slots, self.tokens, values, self.own(member).part(u64::MAX))?;
        let only_here = member.side == Side::Receiver && self.mtp == Mtp::To;
        let mtp_layers = table.rows().map(|(_, row)| row.layer).filter(|layer| layer.0 >= table.hidden_layers);
        Ok(if only_here { image.without(mtp_layers.collect::<Vec<Layer>>()) } else { image })
    }

    /// The page tables of all ranks.
    ///
    /// # Errors
    ///
    /// [`JobError::Table`] of the first rank that has none.
    pub fn tables(&self) -> Result<Tables, JobError> {
        let of = |side| -> Result<Vec<PageTable>, JobError> {
            (0..self.attendance().ranks(side)).map(|rank| self.table(Member { side, rank })).collect()
        };
        Ok(Tables { senders: of(Side::Sender)?, receivers: of(Side::Receiver)? })
    }

    fn instance(&self, side: Side) -> &Instance {
        match side {
            Side::Sender => &self.senders,
            Side::Receiver => &self.receivers,
        }
    }

    /// The key of what is one rank's own: its shuffle and its background.
    fn own(&self, member: Member) -> Key {
        let side = match member.side {
            Side::Sender => 1,
            Side::Receiver => 2,
        };
        Key::new(self.seed).part(side).part(u64::from(member.rank))
    }
}

impl Tables {
    /// Bytes of the pools of all ranks together.
    pub fn pool_bytes(&self) -> u64 {
        self.senders.iter().chain(&self.receivers).map(table_bytes).fold(0, u64::saturating_add)
    }

    /// How long ranks wait for each other, where `deadline` is how long they would if they had nothing to fill.
    pub fn meeting_deadline(&self, deadline: Duration) -> Duration {
        deadline + Duration::from_secs(self.pool_bytes() / FILL_BYTES_A_SECOND)
    }
}

/// Bytes of the pools of a table.
pub fn table_bytes(table: &PageTable) -> u64 {
    let pools = table.pools.iter().map(|pool| u64::from(pool.slot_count).saturating_mul(pool.slot_stride));
    pools.fold(0, u64::saturating_add)
}
