//! How an instance is cut into ranks: pipeline stages and tensor-parallel shards.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Most ranks of an instance.
pub const RANKS_MAX: u32 = 65_536;

/// Why a cut is none, or does not fit a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CutError {
    /// Not the text of a cut. Write it as shown.
    #[error("cut {text:?} is not of the form pp4, tp8, pp4tp2 or pp40+38tp2")]
    Syntax {
        /// What was given.
        text: String,
    },

    /// A degree or a stage of 0. Leave out what is not cut.
    #[error("a cut into 0 parts, or a stage of 0 layers")]
    Zero,

    /// Layer counts for one stage only. Leave the pipeline out.
    #[error("layer counts for {stages} pipeline stage, give them for 2 or more")]
    TooFewStages {
        /// Counts given.
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
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Stages {
    /// This many, of as equal length as can be: the first ones have one layer more.
    Even(u32),
    /// One layer count a stage.
    Counts(Vec<u32>),
}

/// Pipeline and tensor degrees of an instance, as in `pp4`, `tp8`, `pp4tp2` or, with the layer count of each stage given,
/// `pp40+38tp2`.
///
/// Rank `pp_rank * tp_size + tp_rank` has these coordinates. Stages are contiguous and cover the hidden layers in order;
/// MTP layers are on the last stage.
///
/// ```
/// use kvferry_layout::Cut;
///
/// let cut: Cut = "pp40+38tp2".parse()?;
/// assert_eq!(cut.rank_count(), 4);
/// assert_eq!(cut.coordinates(3)?, (1, 1));
/// assert_eq!(cut.stage_layers(1, 78)?, 40..78);
/// assert_eq!(cut.stage_layers(1, 79).unwrap_err().to_string(), "pp stages cover 78 of 79 layers");
/// # Ok::<(), kvferry_layout::CutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    stages: Stages,
    tp_size: u32,
}

impl Cut {
    /// `pp_size` stages of as equal length as can be, the first ones one layer longer, each over `tp_size` ranks.
    ///
    /// # Errors
    ///
    /// [`CutError::Zero`], [`CutError::TooManyRanks`].
    pub fn new(pp_size: u32, tp_size: u32) -> Result<Self, CutError> {
        Self { stages: Stages::Even(pp_size), tp_size }.checked()
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
        Self { stages: Stages::Counts(layer_counts), tp_size }.checked()
    }

    fn checked(self) -> Result<Self, CutError> {
        let too_many = CutError::TooManyRanks { ranks_max: RANKS_MAX };
        let pp_size = match &self.stages {
            Stages::Even(stages) => *stages,
            Stages::Counts(counts) if counts.contains(&0) => 0,
            Stages::Counts(counts) => u32::try_from(counts.len()).map_err(|_| too_many.clone())?,
        };
        match pp_size.checked_mul(self.tp_size) {
            Some(0) => Err(CutError::Zero),
            Some(ranks) if ranks <= RANKS_MAX => Ok(self),
            _ => Err(too_many),
        }
    }

    /// Number of pipeline stages.
    pub fn pp_size(&self) -> u32 {
        match &self.stages {
            Stages::Even(stages) => *stages,
            // `checked` has bounded it by `RANKS_MAX`.
            Stages::Counts(counts) => u32::try_from(counts.len()).unwrap_or(RANKS_MAX),
        }
    }

    /// Ranks of a stage.
    pub fn tp_size(&self) -> u32 {
        self.tp_size
    }

    /// Ranks of the instance, at most [`RANKS_MAX`].
    pub fn rank_count(&self) -> u32 {
        self.pp_size() * self.tp_size
    }

    /// `(pp_rank, tp_rank)` of `rank`.
    ///
    /// # Errors
    ///
    /// [`CutError::Rank`] if there is no such rank.
    pub fn coordinates(&self, rank: u32) -> Result<(u32, u32), CutError> {
        if rank >= self.rank_count() {
            return Err(CutError::Rank { rank, rank_count: self.rank_count(), cut: self.clone() });
        }
        Ok((rank / self.tp_size, rank % self.tp_size))
    }

    /// The hidden layers of stage `pp_rank` in a model of `hidden_layers`, half-open; none past the last stage.
    ///
    /// # Errors
    ///
    /// [`CutError::Coverage`] or [`CutError::MoreStagesThanLayers`] if the cut does not fit the model.
    pub fn stage_layers(&self, pp_rank: u32, hidden_layers: u32) -> Result<Range<u32>, CutError> {
        match &self.stages {
            Stages::Even(stages) => {
                if *stages > hidden_layers {
                    return Err(CutError::MoreStagesThanLayers { stages: *stages, hidden_layers });
                }
                let (each, longer) = (hidden_layers / stages, hidden_layers % stages);
                // At most `hidden_layers`, as `each * stages + longer` is exactly that.
                let start = |stage: u32| each * stage + longer.min(stage);
                let pp_rank = pp_rank.min(*stages);
                Ok(start(pp_rank)..start((pp_rank + 1).min(*stages)))
            }
            Stages::Counts(counts) => {
                let covered = counts.iter().copied().map(u64::from).sum();
                if covered != u64::from(hidden_layers) {
                    return Err(CutError::Coverage { covered, hidden_layers });
                }
                // No sum of some of the counts is above `hidden_layers`, a `u32`.
                let start = counts.iter().take(pp_rank as usize).sum::<u32>();
                Ok(start..start + counts.get(pp_rank as usize).copied().unwrap_or(0))
            }
        }
    }
}

/// The text that parses to this cut: a degree of 1 is left out, unless both are 1 (`tp1`).
impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.stages {
            Stages::Even(1) => return write!(f, "tp{}", self.tp_size),
            Stages::Even(stages) => write!(f, "pp{stages}")?,
            Stages::Counts(counts) => {
                let counts: Vec<String> = counts.iter().map(u32::to_string).collect();
                write!(f, "pp{}", counts.join("+"))?;
            }
        }
        if self.tp_size > 1 {
            write!(f, "tp{}", self.tp_size)?;
        }
        Ok(())
    }
}

impl FromStr for Cut {
    type Err = CutError;

    fn from_str(text: &str) -> Result<Self, CutError> {
        let syntax = || CutError::Syntax { text: text.to_owned() };
        let number = |digits: &str| {
            // `u32::from_str` alone would take a leading plus sign.
            let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse::<u32>().ok().filter(|_| plain).ok_or_else(syntax)
        };
        let (pipeline, tensor) = match text.split_once("tp") {
            Some((pipeline, tensor)) => (pipeline, Some(tensor)),
            None => (text, None),
        };
        let tp_size = tensor.map(number).transpose()?;
        match (pipeline.strip_prefix("pp"), tp_size) {
            (Some(stages), tp_size) if stages.contains('+') => {
                let counts = stages.split('+').map(number).collect::<Result<_, _>>()?;
                Self::with_layer_counts(counts, tp_size.unwrap_or(1))
            }
            (Some(stages), tp_size) => Self::new(number(stages)?, tp_size.unwrap_or(1)),
            (None, Some(tp_size)) if pipeline.is_empty() => Self::new(1, tp_size),
            (None, _) => Err(syntax()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cuts() -> impl Strategy<Value = Cut> {
        let even = (1..200u32, 1..200u32).prop_map(|(pp, tp)| Cut::new(pp, tp).unwrap());
        let counts = (prop::collection::vec(1..50u32, 2..20), 1..200u32);
        prop_oneof![even, counts.prop_map(|(counts, tp)| Cut::with_layer_counts(counts, tp).unwrap())]
    }

    #[test]
    fn texts() {
        let check = |text: &str, canonical: &str, pp_size, tp_size| {
            let cut: Cut = text.parse().unwrap();
            assert_eq!((cut.to_string().as_str(), cut.pp_size(), cut.tp_size()), (canonical, pp_size, tp_size));
        };
        check("pp4tp2", "pp4tp2", 4, 2);
        check("tp8", "tp8", 1, 8);
        check("pp2", "pp2", 2, 1);
        check("pp40+38tp2", "pp40+38tp2", 2, 2);
        check("pp40+38", "pp40+38", 2, 1);
        check("pp1tp1", "tp1", 1, 1);
        check("pp01tp08", "tp8", 1, 8);
    }

    #[test]
    fn bad_texts() {
        for text in [
            "",
            "pp",
            "tp",
            "4",
            "pp4 tp2",
            "PP4",
            "tp2pp4",
            "pp-1",
            "pp+4",
            "pp4+",
            "tp+8",
            "tp8tp8",
            "dp2",
            "pp4294967296",
        ] {
            let error = text.parse::<Cut>().unwrap_err();
            assert_eq!(error, CutError::Syntax { text: text.to_owned() });
        }
        assert_eq!("pp0tp2".parse::<Cut>(), Err(CutError::Zero));
        assert_eq!("tp0".parse::<Cut>(), Err(CutError::Zero));
        assert_eq!("pp40+0".parse::<Cut>(), Err(CutError::Zero));
        let too_many = Err(CutError::TooManyRanks { ranks_max: RANKS_MAX });
        assert_eq!("pp4294967295tp4294967295".parse::<Cut>(), too_many);
        assert_eq!("pp256tp257".parse::<Cut>(), too_many);
        assert_eq!("pp256tp256".parse::<Cut>().map(|cut| cut.rank_count()), Ok(RANKS_MAX));
        assert_eq!(Cut::with_layer_counts(vec![78], 2), Err(CutError::TooFewStages { stages: 1 }));
    }

    #[test]
    fn stages_that_do_not_fit_the_model() {
        let stage = |text: &str, hidden_layers| text.parse::<Cut>().unwrap().stage_layers(0, hidden_layers);
        assert_eq!(stage("pp40+37", 78).unwrap_err().to_string(), "pp stages cover 77 of 78 layers");
        assert_eq!(stage("pp40+39", 78), Err(CutError::Coverage { covered: 79, hidden_layers: 78 }));
        assert_eq!(
            stage("pp4294967295+4294967295", 78),
            Err(CutError::Coverage { covered: 8_589_934_590, hidden_layers: 78 })
        );
        assert_eq!(stage("pp5", 4), Err(CutError::MoreStagesThanLayers { stages: 5, hidden_layers: 4 }));
    }

    #[test]
    fn ranks_count_tensor_first() {
        let cut = Cut::new(2, 3).unwrap();
        let coordinates: Vec<_> = (0..6).map(|rank| cut.coordinates(rank).unwrap()).collect();
        assert_eq!(coordinates, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
        let error = cut.coordinates(6).unwrap_err();
        assert_eq!(error.to_string(), "rank 6 is not one of the 6 of pp2tp3");
    }

    proptest! {
        #[test]
        fn a_printed_cut_parses_to_itself(cut in cuts()) {
            prop_assert_eq!(cut.to_string().parse::<Cut>(), Ok(cut));
        }

        #[test]
        fn any_text_gives_a_cut_or_an_error(text in "[pt+0-9 ]{0,16}|\\PC{0,8}") {
            if let Ok(cut) = text.parse::<Cut>() {
                prop_assert!(cut.rank_count() >= 1);
            }
        }

        /// Layers dealt to the stages one by one, like cards, make the stages' sizes.
        #[test]
        fn even_stages_are_contiguous_and_as_equal_as_can_be(pp_size in 1..40u32, more in 0..100u32) {
            let hidden_layers = pp_size + more;
            let mut sizes = vec![0; pp_size as usize];
            (0..hidden_layers as usize).for_each(|card| sizes[card % pp_size as usize] += 1);
            let cut = Cut::new(pp_size, 1).unwrap();
            let mut next = 0;
            for (stage, size) in (0..).zip(sizes) {
                prop_assert_eq!(cut.stage_layers(stage, hidden_layers), Ok(next..next + size));
                next += size;
            }
            prop_assert_eq!(cut.stage_layers(pp_size, hidden_layers), Ok(hidden_layers..hidden_layers));
        }

        #[test]
        fn given_stages_are_contiguous(counts in prop::collection::vec(1..50u32, 2..20)) {
            let cut = Cut::with_layer_counts(counts.clone(), 1).unwrap();
            let hidden_layers = counts.iter().sum();
            let mut next = 0;
            for (stage, count) in (0..).zip(counts) {
                prop_assert_eq!(cut.stage_layers(stage, hidden_layers), Ok(next..next + count));
                next += count;
            }
        }
    }
}
