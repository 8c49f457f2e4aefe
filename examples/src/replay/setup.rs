//! What the two instances are, scaled to this machine: everything that follows from the options alone.

use kvferry_layout::{Cut, GroupKind, LayoutError, PageTable, TableOptions, build};
use kvferry_match::BlockMap;

use crate::fit::{self, FitError};
use crate::job::table_bytes;
use crate::meet::{Member, Side};
use crate::models::{self, ModelError};
use crate::replay::content::slot;
use crate::replay::options::ReplayOptions;
use crate::replay::pool::Frame;
use crate::replay::trace::BLOCK_TOKENS;

/// Ranks of both instances at most: all are engines of this one process.
const RANKS_MAX: u32 = 32;

/// Both instances.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The prefill instance.
    pub prefill: Instance,
    /// The decode instance.
    pub decode: Instance,
    /// Tokens of the trace to one token here.
    pub scale: u64,
}

/// One of the two instances.
#[derive(Clone, Debug)]
pub struct Instance {
    /// How it is cut.
    pub cut: Cut,
    /// The page tables of its ranks.
    pub tables: Vec<PageTable>,
    /// Slots, in each pool, to a block of the trace.
    pub slots_per_frame: u32,
    /// Tokens of a block of the cache.
    pub tokens_per_block: u32,
}

/// Why options make no replay. Change them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The model is not known or not usable.
    #[error("--model")]
    Model(#[from] ModelError),
    /// A block of the trace must be whole tokens here.
    #[error("--scale {scale} does not divide the {BLOCK_TOKENS} tokens of a block of the trace")]
    Scale {
        /// The option.
        scale: u64,
    },
    /// A block of the trace must be whole blocks here.
    #[error("{option} {tokens_per_block} does not divide the {frame_tokens} tokens that a block of the trace has here")]
    BlockTokens {
        /// The option.
        option: &'static str,
        /// Its value.
        tokens_per_block: u64,
        /// What it should divide.
        frame_tokens: u64,
    },
    /// Slot ids do not reach so far.
    #[error("--pool-blocks {frame_count} of {slots_per_frame} slots each are more than a pool can have")]
    Frames {
        /// The option.
        frame_count: u32,
        /// Slots of each.
        slots_per_frame: u32,
    },
    /// More engines than a process should have. Take smaller cuts.
    #[error("--from and --to are {ranks} ranks together, at most {RANKS_MAX} are engines of one process")]
    TooManyRanks {
        /// Ranks of both instances.
        ranks: u32,
    },
    /// A request lives in one data-parallel part. Replay one of them.
    #[error("{option} {cut} has {parts} data-parallel parts: leave one, each serves requests of its own")]
    Parts {
        /// The option.
        option: &'static str,
        /// The cut.
        cut: Cut,
        /// How many it has.
        parts: u32,
    },
    /// The cut does not fit the model.
    #[error("{member} of {cut}")]
    Table {
        /// The rank.
        member: Member,
        /// The cut.
        cut: Cut,
        /// What is wrong.
        source: Box<LayoutError>,
    },
    /// What a request leaves behind is no prefix of another one's: a window has moved on, and state has no tokens. Take a
    /// model that keeps every token.
    #[error("--model {model} has windows or recurrent state, of which no prefix can be used again")]
    NoPrefix {
        /// The option.
        model: String,
    },
    /// The instances cannot serve each other.
    #[error(transparent)]
    Fit(#[from] FitError),
}

impl Setup {
    /// Checks the options, and makes the page tables of all ranks.
    ///
    /// # Errors
    ///
    /// [`SetupError`] names the option.
    pub fn new(options: &ReplayOptions) -> Result<Self, SetupError> {
        let ranks = options.from.rank_count().saturating_add(options.to.rank_count());
        if ranks > RANKS_MAX {
            return Err(SetupError::TooManyRanks { ranks });
        }
        let scale = options.scale;
        if BLOCK_TOKENS.checked_rem(scale) != Some(0) {
            return Err(SetupError::Scale { scale });
        }
        let prefill = Instance::new(options, Side::Sender)?;
        let decode = Instance::new(options, Side::Receiver)?;
        fn ranks_of(tables: &[PageTable]) -> impl Iterator<Item = (u32, &PageTable)> {
            (0..).zip(tables)
        }
        fit::check_tables(ranks_of(&prefill.tables), ranks_of(&decode.tables), |_| true)?;
        Ok(Self { prefill, decode, scale })
    }

    /// Tokens here of so many tokens of the trace.
    pub fn tokens(&self, trace_tokens: u64) -> u64 {
        trace_tokens.div_ceil(self.scale)
    }

    /// Bytes of the pools of all ranks.
    pub fn pool_bytes(&self) -> u64 {
        self.prefill.pool_bytes().saturating_add(self.decode.pool_bytes())
    }
}

impl Instance {
    fn new(options: &ReplayOptions, side: Side) -> Result<Self, SetupError> {
        let (cut_option, block_option, cut, block_tokens) = match side {
            Side::Sender => ("--from", "--block-tokens-from", &options.from, options.block_tokens_from),
            Side::Receiver => ("--to", "--block-tokens-to", &options.to, options.block_tokens_to),
        };
        let facts = models::load(&options.model)?;
        if cut.dp_size() > 1 {
            return Err(SetupError::Parts { option: cut_option, cut: cut.clone(), parts: cut.dp_size() });
        }
        let frame_tokens = BLOCK_TOKENS / options.scale;
        let tokens_per_block = block_tokens.map_or(frame_tokens, u64::from);
        let uneven = || SetupError::BlockTokens { option: block_option, tokens_per_block, frame_tokens };
        if frame_tokens.checked_rem(tokens_per_block) != Some(0) {
            return Err(uneven());
        }
        let narrow = |tokens: u64| u32::try_from(tokens).map_err(|_| uneven());
        let slots_per_frame = narrow(frame_tokens / tokens_per_block)?;
        let tokens_per_block = narrow(tokens_per_block)?;
        let frame_count = options.pool_blocks;
        let slot_count =
            frame_count.checked_mul(slots_per_frame).ok_or(SetupError::Frames { frame_count, slots_per_frame })?;
        let table_options = TableOptions::new(tokens_per_block, options.dtype, slot_count);
        let table = |rank| {
            build(&facts, cut, rank, &table_options).map_err(|source| SetupError::Table {
                member: Member { side, rank },
                cut: cut.clone(),
                source: Box::new(source),
            })
        };
        let tables = (0..cut.rank_count()).map(table).collect::<Result<Vec<_>, _>>()?;
        let keeps_all = |kind: GroupKind| matches!(kind, GroupKind::Paged { window_tokens: None, .. });
        if !tables.iter().flat_map(|table| &table.groups).all(|group| keeps_all(group.kind)) {
            return Err(SetupError::NoPrefix { model: options.model.clone() });
        }
        Ok(Self { cut: cut.clone(), tables, slots_per_frame, tokens_per_block })
    }

    /// Where blocks of a request are, for the engine of one rank: those from the ordinal `first` on (in blocks of the trace),
    /// as far as `tokens` reach (in tokens here).
    pub fn block_maps(&self, table: &PageTable, first: usize, frames: &[Frame], tokens: u64) -> Vec<BlockMap> {
        let per_frame = self.slots_per_frame;
        let first = first as u64 * u64::from(per_frame);
        let end = tokens.div_ceil(u64::from(self.tokens_per_block));
        let slots = frames.iter().flat_map(|frame| (0..per_frame).map(|sub| slot(*frame, per_frame, sub)));
        let count = usize::try_from(end.saturating_sub(first)).unwrap_or(usize::MAX);
        let map = BlockMap::dense(first, slots.take(count));
        vec![map; table.groups.len()]
    }

    /// Bytes of a token, over all ranks: what is on several counts as often.
    pub fn token_bytes(&self) -> u64 {
        let of_table = |table: &PageTable| -> u64 {
            let rows = table.groups.iter().flat_map(|group| &group.rows);
            let planes = rows.flat_map(|row| &row.planes);
            planes.map(|plane| plane.cell_bytes * plane.units.len() as u64 * u64::from(plane.tokens)).sum()
        };
        self.tables.iter().map(of_table).sum::<u64>() / u64::from(self.tokens_per_block)
    }

    /// Bytes of the pools of its ranks.
    pub fn pool_bytes(&self) -> u64 {
        self.tables.iter().map(table_bytes).fold(0, u64::saturating_add)
    }
}
