//! Which hidden layers each pipeline stage holds.

use std::fmt;
use std::ops::Range;

use crate::check::LAYERS_MAX;
use crate::cut::CutError;
use crate::table::Layer;

/// How the hidden layers are dealt out to the stages of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stages {
    /// This many, of as equal length as can be: the first ones have one layer more.
    Even(u32),
    /// One layer count a stage.
    Counts(Vec<u32>),
    /// The layers of each stage as ranges that ascend and do not touch.
    Lists(Vec<Vec<Range<u32>>>),
}

impl Stages {
    /// One list of half-open ranges a stage, in any order.
    pub(crate) fn lists(lists: Vec<Vec<Range<u32>>>) -> Result<Self, CutError> {
        let mut stages = Vec::with_capacity(lists.len());
        for mut list in lists {
            if list.is_empty() || list.iter().any(Range::is_empty) {
                return Err(CutError::Zero);
            }
            list.sort_unstable_by_key(|range| range.start);
            let mut merged: Vec<Range<u32>> = Vec::new();
            for range in list {
                if range.end > LAYERS_MAX {
                    return Err(CutError::LayerTooHigh { layer: Layer(range.end - 1), layers_max: LAYERS_MAX });
                }
                match merged.last_mut() {
                    Some(last) if last.end > range.start => {
                        return Err(CutError::LayerTwice { layer: Layer(range.start) });
                    }
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => merged.push(range),
                }
            }
            stages.push(merged);
        }
        let ranges = in_order(&stages);
        if let Some(pair) = ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
            return Err(CutError::LayerTwice { layer: Layer(pair[1].start) });
        }
        Ok(Self::Lists(stages))
    }

    pub(crate) fn parse(text: &str, syntax: impl Fn() -> CutError + Copy) -> Result<Self, CutError> {
        let stages = text.split('+');
        let at_least_two = |stages: usize| if stages < 2 { Err(CutError::TooFewStages { stages }) } else { Ok(()) };
        if text.contains("..") {
            let lists = stages.map(|stage| parse_list(stage, syntax)).collect::<Result<Vec<_>, _>>()?;
            at_least_two(lists.len())?;
            return Self::lists(lists);
        }
        if text.contains('+') {
            return Ok(Self::Counts(stages.map(|count| number(count).ok_or_else(syntax)).collect::<Result<_, _>>()?));
        }
        Ok(Self::Even(number(text).ok_or_else(syntax)?))
    }

    /// Number of stages, 0 if there are none or one of them has no layer; `None` past `u32`.
    pub(crate) fn count(&self) -> Option<u32> {
        match self {
            Self::Even(stages) => Some(*stages),
            Self::Counts(counts) if counts.contains(&0) => Some(0),
            Self::Counts(counts) => u32::try_from(counts.len()).ok(),
            Self::Lists(lists) => u32::try_from(lists.len()).ok(),
        }
    }

    /// The layers of stage `pp_rank` of a model of `hidden_layers`, ascending; none past the last stage.
    pub(crate) fn layers(&self, pp_rank: u32, hidden_layers: u32) -> Result<Vec<Layer>, CutError> {
        let ranges = match self {
            Self::Even(stages) => {
                if *stages > hidden_layers {
                    return Err(CutError::MoreStagesThanLayers { stages: *stages, hidden_layers });
                }
                let (each, longer) = (hidden_layers / stages, hidden_layers % stages);
                // At most `hidden_layers`, as `each * stages + longer` is exactly that.
                let start = |stage: u32| each * stage + longer.min(stage);
                let pp_rank = pp_rank.min(*stages);
                let stage = start(pp_rank)..start((pp_rank + 1).min(*stages));
                vec![stage]
            }
            Self::Counts(counts) => {
                let covered = counts.iter().copied().map(u64::from).sum();
                if covered != u64::from(hidden_layers) {
                    return Err(CutError::Coverage { covered, hidden_layers });
                }
                // No sum of some of the counts is above `hidden_layers`, a `u32`.
                let start = counts.iter().take(pp_rank as usize).sum::<u32>();
                let stage = start..start + counts.get(pp_rank as usize).copied().unwrap_or(0);
                vec![stage]
            }
            Self::Lists(lists) => {
                covers(lists, hidden_layers)?;
                lists.get(pp_rank as usize).cloned().unwrap_or_default()
            }
        };
        Ok(ranges.into_iter().flatten().map(Layer).collect())
    }
}

/// Whether lists without a layer in common hold all of `0..hidden_layers` and nothing else.
fn covers(lists: &[Vec<Range<u32>>], hidden_layers: u32) -> Result<(), CutError> {
    let mut next = 0;
    for range in in_order(lists) {
        if range.start > next && next < hidden_layers {
            return Err(CutError::LayerMissing { layer: Layer(next), hidden_layers });
        }
        if range.end > hidden_layers {
            let layer = Layer(range.start.max(hidden_layers));
            return Err(CutError::LayerPastModel { layer, hidden_layers });
        }
        next = range.end;
    }
    if next < hidden_layers {
        return Err(CutError::LayerMissing { layer: Layer(next), hidden_layers });
    }
    Ok(())
}

fn in_order(lists: &[Vec<Range<u32>>]) -> Vec<Range<u32>> {
    let mut ranges: Vec<_> = lists.iter().flatten().cloned().collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges
}

/// `0..4,8..12`, half-open.
fn parse_list(text: &str, syntax: impl Fn() -> CutError + Copy) -> Result<Vec<Range<u32>>, CutError> {
    let range = |text: &str| {
        let (start, end) = text.split_once("..")?;
        Some(number(start)?..number(end)?)
    };
    text.split(',').map(|text| range(text).ok_or_else(syntax)).collect()
}

/// Digits only: `u32::from_str` alone would take a leading plus sign. A number that does not fit is past every limit, and as
/// the largest that does it is refused by that limit's name.
pub(crate) fn number(digits: &str) -> Option<u32> {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().unwrap_or(u32::MAX))
}

/// What stands behind `pp`.
impl fmt::Display for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |ranges: &Vec<Range<u32>>| {
            let ranges: Vec<String> = ranges.iter().map(|range| format!("{}..{}", range.start, range.end)).collect();
            ranges.join(",")
        };
        match self {
            Self::Even(stages) => stages.fmt(f),
            Self::Counts(counts) => f.write_str(&counts.iter().map(u32::to_string).collect::<Vec<_>>().join("+")),
            Self::Lists(lists) => f.write_str(&lists.iter().map(list).collect::<Vec<_>>().join("+")),
        }
    }
}
