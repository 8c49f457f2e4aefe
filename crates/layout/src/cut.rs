//! How an instance is cut into ranks: pipeline stages, data, context and tensor parallel.

use std::fmt;
use std::str::FromStr;

use crate::stages::{Stages, number};
use crate::table::{Layer, Ordinals};

/// Most ranks of an instance.
pub const RANKS_MAX: u32 = 65_536;

/// Why a cut is none, or does not fit a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CutError {
    /// Not the text of a cut. Write it as shown.
    #[error("cut {text:?} is not of the form pp4, tp8, pp4dp2cp2tp2, pp40+38tp2 or pp0..40,76..78+40..76")]
    Syntax {
        /// What was given.
        text: String,
    },

    /// A degree or a stage of 0. Leave out what is not cut.
    #[error("a cut into 0 parts, or a stage of 0 layers")]
    Zero,

    /// Layers given for one stage only. Leave the pipeline out.
    #[error("layers for {stages} pipeline stage, give them for 2 or more")]
    TooFewStages {
        /// Stages given.
        stages: usize,
    },

    /// More ranks than any instance has. Lower a degree.
    #[error("more than {ranks_max} ranks")]
    TooManyRanks {
        /// Most ranks of an instance.
        ranks_max: u32,
    },

    /// No such rank. Ranks count from 0.
    #[error("rank {rank} is not one of the {rank_count} of {cut}")]
    Rank {
        /// Rank asked for.
        rank: u32,
        /// Ranks of the cut.
        rank_count: u32,
        /// The cut.
        cut: Cut,
    },

    /// The stages' layer counts do not add up to the model's. Fix the counts.
    #[error("pp stages cover {covered} of {hidden_layers} layers")]
    Coverage {
        /// Sum of the counts.
        covered: u64,
        /// Layers of the model.
        hidden_layers: u32,
    },

    /// Some stage would have no layer. Lower the pipeline degree.
    #[error("{stages} pp stages for {hidden_layers} layers")]
    MoreStagesThanLayers {
        /// Stages of the cut.
        stages: u32,
        /// Layers of the model.
        hidden_layers: u32,
    },

    /// A layer id that no model has. Correct the list.
    #[error("layer {layer} in a pp stage, layer ids are below {layers_max}")]
    LayerTooHigh {
        /// The layer.
        layer: Layer,
        /// Most layers of a model.
        layers_max: u32,
    },

    /// A layer is listed twice. Give it to one stage.
    #[error("layer {layer} is listed twice in the pp stages")]
    LayerTwice {
        /// The first such layer.
        layer: Layer,
    },

    /// A layer is in none of the lists. Give it to a stage.
    #[error("no pp stage lists layer {layer} of {hidden_layers}")]
    LayerMissing {
        /// The first such layer.
        layer: Layer,
        /// Layers of the model.
        hidden_layers: u32,
    },

    /// A listed layer is not one of the model's hidden layers. Take it out; MTP layers need no listing.
    #[error("a pp stage lists layer {layer}, the model has {hidden_layers}")]
    LayerPastModel {
        /// The first such layer.
        layer: Layer,
        /// Layers of the model.
        hidden_layers: u32,
    },
}

/// Where one rank stands on each axis of a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Which share of the requests it serves.
    pub dp_rank: u32,
    /// Which share of a sequence's blocks it holds.
    pub cp_rank: u32,
    /// Which share of the heads it holds.
    pub tp_rank: u32,
}

/// Degrees of an instance, as in `pp4`, `tp8`, `pp4tp2`, `dp4tp2` or, with the layers of each stage given, `pp40+38tp2` and
/// `pp0..20,40..60+20..40,60..78`.
///
/// - `pp`: stages that hold the hidden layers between them: as many and as equal as can be, or by layer counts, or by lists
///   of half-open ranges of layers. MTP layers are on the last stage.
/// - `dp`: attention data parallel. Each part holds whole requests, other ones than the other parts: only the ranks of one
///   `dp_rank` ([`Self::ranks_of`]) have to do with a request.
/// - `cp`: context parallel. The blocks of a sequence are dealt out, block `o` to rank `o % cp_size`.
/// - `tp`: tensor parallel. Heads are split; with more ranks than heads, consecutive ranks are replicas.
///
/// The last axis counts fastest, in the order of the text: rank
/// `((pp_rank * dp_size + dp_rank) * cp_size + cp_rank) * tp_size + tp_rank`. This is SGLang's order for attention-DP, where
/// the parts are slices of a stage's tensor-parallel ranks. Data parallelism around whole pipelines (vLLM's) is one instance
/// a part, each with a cut of its own.
///
/// ```
/// use kvferry_layout::{Coordinates, Cut, Layer};
///
/// let cut: Cut = "pp40+38dp2tp2".parse()?;
/// assert_eq!(cut.rank_count(), 8);
/// assert_eq!(cut.coordinates(7)?, Coordinates { pp_rank: 1, dp_rank: 1, cp_rank: 0, tp_rank: 1 });
/// assert_eq!(cut.ranks_of(1).collect::<Vec<_>>(), [2, 3, 6, 7]);
/// assert_eq!(cut.stage_layers(1, 78)?.first(), Some(&Layer(40)));
/// assert_eq!(cut.stage_layers(1, 79).unwrap_err().to_string(), "pp stages cover 78 of 79 layers");
/// # Ok::<(), kvferry_layout::CutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    stages: Stages,
    dp_size: u32,
    cp_size: u32,
    tp_size: u32,
}

impl Cut {
    /// `pp_size` stages of as equal length as can be, the first ones one layer longer, each over `tp_size` ranks.
    ///
    /// # Errors
    ///
    /// [`CutError::Zero`], [`CutError::TooManyRanks`].
    pub fn new(pp_size: u32, tp_size: u32) -> Result<Self, CutError> {
        Self { stages: Stages::Even(pp_size), dp_size: 1, cp_size: 1, tp_size }.checked()
    }

    /// One stage for each of `layer_counts`, each over `tp_size` ranks.
    ///
    /// # Errors
    ///
    /// [`CutError::TooFewStages`], [`CutError::Zero`], [`CutError::TooManyRanks`].
    pub fn with_layer_counts(layer_counts: Vec<u32>, tp_size: u32) -> Result<Self, CutError> {
        if layer_counts.len() < 2 {
            return Err(CutError::TooFewStages { stages: layer_counts.len() });
        }
        Self { stages: Stages::Counts(layer_counts), dp_size: 1, cp_size: 1, tp_size }.checked()
    }

    /// One stage for each of `layer_lists`, each over `tp_size` ranks. The order inside a list does not matter.
    ///
    /// # Errors
    ///
    /// [`CutError::TooFewStages`], [`CutError::Zero`], [`CutError::TooManyRanks`], [`CutError::LayerTwice`],
    /// [`CutError::LayerTooHigh`]. That the lists are those of a model is checked by [`Self::stage_layers`].
    pub fn with_layer_lists(layer_lists: &[Vec<Layer>], tp_size: u32) -> Result<Self, CutError> {
        if layer_lists.len() < 2 {
            return Err(CutError::TooFewStages { stages: layer_lists.len() });
        }
        // Saturating leaves a layer that no model has an empty range, or one past the limit: both are refused.
        let list = |list: &Vec<Layer>| list.iter().map(|layer| layer.0..layer.0.saturating_add(1)).collect();
        let stages = Stages::lists(layer_lists.iter().map(list).collect())?;
        Self { stages, dp_size: 1, cp_size: 1, tp_size }.checked()
    }

    /// The same, divided into `dp_size` parts that each hold whole requests.
    ///
    /// # Errors
    ///
    /// [`CutError::Zero`], [`CutError::TooManyRanks`].
    pub fn with_dp(self, dp_size: u32) -> Result<Self, CutError> {
        Self { dp_size, ..self }.checked()
    }

    /// The same, with the blocks of a sequence dealt out to `cp_size` ranks.
    ///
    /// # Errors
    ///
    /// [`CutError::Zero`], [`CutError::TooManyRanks`].
    pub fn with_cp(self, cp_size: u32) -> Result<Self, CutError> {
        Self { cp_size, ..self }.checked()
    }

    fn checked(self) -> Result<Self, CutError> {
        let Self { dp_size, cp_size, tp_size, .. } = self;
        let pp_size = self.stages.count();
        if pp_size == Some(0) || [dp_size, cp_size, tp_size].contains(&0) {
            return Err(CutError::Zero);
        }
        let ranks = pp_size.and_then(|ranks| ranks.checked_mul(dp_size)?.checked_mul(cp_size)?.checked_mul(tp_size));
        match ranks {
            Some(ranks) if ranks <= RANKS_MAX => Ok(self),
            _ => Err(CutError::TooManyRanks { ranks_max: RANKS_MAX }),
        }
    }

    /// Number of pipeline stages.
    pub fn pp_size(&self) -> u32 {
        // `checked` has seen that there is a count, and that it is not above `RANKS_MAX`.
        self.stages.count().unwrap_or(RANKS_MAX)
    }

    /// Parts that each hold whole requests.
    pub fn dp_size(&self) -> u32 {
        self.dp_size
    }

    /// Ranks that the blocks of a sequence are dealt out to.
    pub fn cp_size(&self) -> u32 {
        self.cp_size
    }

    /// Ranks that the heads are split over.
    pub fn tp_size(&self) -> u32 {
        self.tp_size
    }

    /// Ranks of the instance, at most [`RANKS_MAX`].
    pub fn rank_count(&self) -> u32 {
        self.pp_size() * self.dp_size * self.cp_size * self.tp_size
    }

    /// Where `rank` stands.
    ///
    /// # Errors
    ///
    /// [`CutError::Rank`] if there is no such rank.
    pub fn coordinates(&self, rank: u32) -> Result<Coordinates, CutError> {
        if rank >= self.rank_count() {
            return Err(CutError::Rank { rank, rank_count: self.rank_count(), cut: self.clone() });
        }
        let (rest, tp_rank) = (rank / self.tp_size, rank % self.tp_size);
        let (rest, cp_rank) = (rest / self.cp_size, rest % self.cp_size);
        Ok(Coordinates { pp_rank: rest / self.dp_size, dp_rank: rest % self.dp_size, cp_rank, tp_rank })
    }

    /// The ranks that hold the requests of `dp_rank` between them, ascending; none if there is no such part.
    pub fn ranks_of(&self, dp_rank: u32) -> impl Iterator<Item = u32> {
        let (dp_size, part_ranks) = (self.dp_size, self.cp_size * self.tp_size);
        (0..self.rank_count()).filter(move |rank| rank / part_ranks % dp_size == dp_rank)
    }

    /// The blocks of a sequence that context-parallel rank `cp_rank` holds.
    pub fn ordinals(&self, cp_rank: u32) -> Ordinals {
        Ordinals { step: self.cp_size, first: cp_rank }
    }

    /// The hidden layers of stage `pp_rank` in a model of `hidden_layers`, ascending; none past the last stage.
    ///
    /// # Errors
    ///
    /// Those of [`CutError`] that name the model's layers, if the cut does not fit the model.
    pub fn stage_layers(&self, pp_rank: u32, hidden_layers: u32) -> Result<Vec<Layer>, CutError> {
        self.stages.layers(pp_rank, hidden_layers)
    }
}

/// The text that parses to this cut: a degree of 1 is left out, unless all are 1 (`tp1`).
impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rank_count() == 1 {
            return f.write_str("tp1");
        }
        if self.stages != Stages::Even(1) {
            write!(f, "pp{}", self.stages)?;
        }
        for (axis, size) in [("dp", self.dp_size), ("cp", self.cp_size), ("tp", self.tp_size)] {
            if size > 1 {
                write!(f, "{axis}{size}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for Cut {
    type Err = CutError;

    fn from_str(text: &str) -> Result<Self, CutError> {
        let syntax = || CutError::Syntax { text: text.to_owned() };
        let mut rest = text;
        // What stands behind the name of an axis, up to the next name.
        let mut take = |axis: &str| {
            let value = rest.strip_prefix(axis)?;
            let end = value.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(value.len());
            let (value, behind) = value.split_at(end);
            rest = behind;
            Some(value)
        };
        let [pp, dp, cp, tp] = ["pp", "dp", "cp", "tp"].map(&mut take);
        if !rest.is_empty() || [pp, dp, cp, tp].iter().all(Option::is_none) {
            return Err(syntax());
        }
        let degree = |value: Option<&str>| value.map_or(Some(1), number).ok_or_else(syntax);
        let stages = pp.map_or(Ok(Stages::Even(1)), |value| Stages::parse(value, syntax))?;
        Self { stages, dp_size: degree(dp)?, cp_size: degree(cp)?, tp_size: degree(tp)? }.checked()
    }
}
