//! Which layers of a sparse-attention model own an indexer, and so a cache of its keys.
//!
//! The others attend to the tokens that the nearest owner before them chose. Three keys of a config can say which layers
//! those are. Their meaning, and the defaults, are those of transformers'
//! `src/transformers/models/glm_moe_dsa/configuration_glm_moe_dsa.py` (huggingface/transformers at commit 008e57439125)
//! and of vLLM's `vllm/model_executor/models/deepseek_v2.py` (vllm-project/vllm at commit 002d6073aa03), which also says
//! that MTP layers always own one.

use serde_json::Value;

use crate::config::{Config, ConfigError};
use crate::mask::LayerMask;
use crate::table::Layer;

const TYPES: &str = "indexer_types";
const PATTERN: &str = "index_topk_pattern";
const FREQ: &str = "index_topk_freq";
const OFFSET: &str = "index_skip_topk_offset";
const OFFSET_DEFAULT: u32 = 2;

/// The owners among `hidden_layers` layers and the MTP layers behind them.
///
/// - `indexer_types`: a list; `"full"` owns one, `"shared"` does not.
/// - `index_topk_pattern`: the same as a string of `F` and `S`, or as a list of either spelling.
/// - `index_topk_freq`: layer `i` owns one iff `max(i - index_skip_topk_offset + 1, 0) % index_topk_freq == 0`.
///
/// With none of them every layer owns one. Engines differ in which of them they look at first, so all that are there must
/// say the same.
pub(crate) fn indexer_owners(config: &Config, hidden_layers: u32, mtp_layers: u32) -> Result<LayerMask, ConfigError> {
    let mut sources: Vec<(&'static str, Vec<bool>)> = Vec::new();
    if let Some(entries) = config.optional_list(TYPES)? {
        let owns = |entry: &Value| match entry.as_str() {
            Some("full") => Some(true),
            Some("shared") => Some(false),
            _ => None,
        };
        sources.push((TYPES, entries_of(TYPES, "\"full\" or \"shared\"", hidden_layers, entries, owns)?));
    }
    if let Some(pattern) = config.value(PATTERN) {
        sources.push((PATTERN, pattern_of(pattern, hidden_layers)?));
    }
    if let Some(freq) = config.optional(FREQ, 1, u32::MAX)? {
        let offset = config.optional(OFFSET, 0, u32::MAX)?.unwrap_or(OFFSET_DEFAULT);
        let owns = |layer: u32| (u64::from(layer) + 1).saturating_sub(u64::from(offset)).is_multiple_of(freq.into());
        sources.push((FREQ, (0..hidden_layers).map(owns).collect()));
    }

    for (key, owns) in sources.iter().skip(1) {
        let (first_key, first_owns) = &sources[0];
        let differs = (0..).map(Layer).zip(first_owns.iter().zip(owns)).find(|(_, (first, other))| first != other);
        if let Some((layer, (first, _))) = differs {
            let (owning_key, sharing_key) = if *first { (*first_key, *key) } else { (*key, *first_key) };
            return Err(ConfigError::MaskConflict { layer, owning_key, sharing_key });
        }
    }
    let hidden = sources.into_iter().next().map_or_else(|| vec![true; hidden_layers as usize], |(_, owns)| owns);
    Ok(LayerMask::from_bools(hidden.into_iter().chain((0..mtp_layers).map(|_| true))))
}

fn pattern_of(pattern: &Value, hidden_layers: u32) -> Result<Vec<bool>, ConfigError> {
    let expected = "F (full) or S (shared)";
    match pattern {
        Value::String(letters) => {
            let letters: Vec<char> = letters.chars().collect();
            entries_of(PATTERN, expected, hidden_layers, &letters, |letter| match letter {
                'F' => Some(true),
                'S' => Some(false),
                _ => None,
            })
        }
        Value::Array(entries) => entries_of(PATTERN, expected, hidden_layers, entries, |entry| match entry.as_str() {
            Some("F" | "full") => Some(true),
            Some("S" | "shared") => Some(false),
            _ => None,
        }),
        _ => Err(ConfigError::WrongType { key: PATTERN, expected: "a string or a list" }),
    }
}

/// One entry a hidden layer, read by `owns`.
fn entries_of<T: ToString>(
    key: &'static str,
    expected: &'static str,
    hidden_layers: u32,
    entries: &[T],
    owns: impl Fn(&T) -> Option<bool>,
) -> Result<Vec<bool>, ConfigError> {
    if entries.len() != hidden_layers as usize {
        return Err(ConfigError::MaskLength { key, entries: entries.len(), hidden_layers });
    }
    let read = |(layer, entry): (Layer, &T)| {
        owns(entry).ok_or_else(|| ConfigError::MaskEntry { key, layer, found: entry.to_string(), expected })
    };
    (0..).map(Layer).zip(entries).map(read).collect()
}
