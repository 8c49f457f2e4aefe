//! Models whose layers all cache keys and values, on some of them perhaps in a window.

use super::{LAYER_TYPES, WINDOW, heads, last_of, window};
use crate::architectures::Facts;
use crate::check::LAYERS_MAX;
use crate::config::{Config, ConfigError, DIMENSION_MAX};
use crate::facts::{Cache, Lifetime, Shape};
use crate::layer_kinds::{LayerKind, Source, agreed, layers_of};
use crate::mask::LayerMask;
use crate::table::Layer;

const FULL_OR_WINDOW: &[(&str, LayerKind)] =
    &[("full_attention", LayerKind::Full), ("sliding_attention", LayerKind::Window)];

/// Plain heads. A window means nothing to transformers' Llama, and something to some engines, unless `layer_types` says
/// which layers have it.
pub(crate) fn llama(config: &Config) -> Result<Facts, ConfigError> {
    let hidden_layers = config.hidden_layers()?;
    let types = Source::list(config, LAYER_TYPES, FULL_OR_WINDOW)?;
    if let Some(window_tokens) = config.optional(WINDOW, 0, u32::MAX)?
        && types.is_none()
    {
        return Err(ConfigError::SlidingWindow { window_tokens, model_type: "llama" });
    }
    windowed_heads(config, hidden_layers, types, heads(config, divided_head_dim(config)?)?)
}

/// Plain heads; with a window, all layers have it.
pub(crate) fn mistral(config: &Config) -> Result<Facts, ConfigError> {
    let hidden_layers = config.hidden_layers()?;
    let windowed = config.optional(WINDOW, 1, u32::MAX)?.is_some();
    let kind = if windowed { LayerKind::Window } else { LayerKind::Full };
    let types = Source::list(config, LAYER_TYPES, FULL_OR_WINDOW)?;
    let types = types.unwrap_or_else(|| Source::rule(WINDOW, hidden_layers, |_| kind));
    windowed_heads(config, hidden_layers, Some(types), heads(config, divided_head_dim(config)?)?)
}

/// Plain heads; with `use_sliding_window`, layers from `max_window_layers` on have a window (transformers'
/// `src/transformers/models/qwen2/configuration_qwen2.py`).
pub(crate) fn qwen2(config: &Config) -> Result<Facts, ConfigError> {
    qwen(config, divided_head_dim(config)?)
}

/// The same, but the class has a head size of its own, so the config must say it.
pub(crate) fn qwen3(config: &Config) -> Result<Facts, ConfigError> {
    qwen(config, config.dimension("head_dim")?)
}

fn qwen(config: &Config, head_dim: u32) -> Result<Facts, ConfigError> {
    const FROM: &str = "max_window_layers";
    let hidden_layers = config.hidden_layers()?;
    let windowed =
        config.optional_bool("use_sliding_window")?.unwrap_or(false) && config.optional(WINDOW, 0, u32::MAX)?.is_some();
    let mut sources = Vec::new();
    sources.extend(Source::list(config, LAYER_TYPES, FULL_OR_WINDOW)?);
    if windowed {
        let from = config.optional(FROM, 0, u32::MAX)?.ok_or(ConfigError::MissingKey { key: FROM })?;
        let kind = |layer| if layer < from { LayerKind::Full } else { LayerKind::Window };
        sources.push(Source::rule(FROM, hidden_layers, kind));
    }
    windowed_heads(config, hidden_layers, sources, heads(config, head_dim)?)
}

/// Window and full layers by turns, a window first, unless the config says otherwise (transformers'
/// `src/transformers/models/gpt_oss/configuration_gpt_oss.py`).
pub(crate) fn gpt_oss(config: &Config) -> Result<Facts, ConfigError> {
    let hidden_layers = config.hidden_layers()?;
    let by_turns = |layer: u32| if layer.is_multiple_of(2) { LayerKind::Window } else { LayerKind::Full };
    let types = Source::list(config, LAYER_TYPES, FULL_OR_WINDOW)?;
    let types = types.unwrap_or_else(|| Source::rule(LAYER_TYPES, hidden_layers, by_turns));
    windowed_heads(config, hidden_layers, Some(types), heads(config, config.dimension("head_dim")?)?)
}

/// Every sixth layer is full, the others have a window.
pub(crate) fn gemma(config: &Config) -> Result<Facts, ConfigError> {
    let hidden_layers = config.hidden_layers()?;
    let sources = gemma_sources(config, hidden_layers)?;
    windowed_heads(config, hidden_layers, sources, heads(config, config.dimension("head_dim")?)?)
}

/// The same, with heads of another size and number on full layers. Those that take keys for values
/// (`attention_k_eq_v`) still cache both: they are normalised apart. The last `num_kv_shared_layers` layers read the
/// caches of earlier ones (transformers' `src/transformers/models/gemma4/modeling_gemma4.py`).
pub(crate) fn gemma_of_two_sizes(config: &Config) -> Result<Facts, ConfigError> {
    let hidden_layers = config.hidden_layers()?;
    let sources = gemma_sources(config, hidden_layers)?;
    let window_heads = heads(config, config.dimension("head_dim")?)?;
    let full_head_dim = match config.optional("global_head_dim", 1, DIMENSION_MAX)? {
        Some(head_dim) => head_dim,
        None => config.dimension("head_dim")?,
    };
    let keys_as_values = config.optional_bool("attention_k_eq_v")?.unwrap_or(false);
    let full_heads = match config.optional("num_global_key_value_heads", 1, DIMENSION_MAX)? {
        Some(kv_heads) if keys_as_values => Shape::Heads { kv_heads, head_dim: full_head_dim },
        _ => heads(config, full_head_dim)?,
    };
    let kinds = agreed(hidden_layers, sources)?.unwrap_or_default();
    let sharing = config.optional("num_kv_shared_layers", 0, hidden_layers)?.unwrap_or(0);
    let own = (0..hidden_layers - sharing).map(Layer);
    let full = layers_of(&kinds, LayerKind::Full).restricted_to(own.clone());
    let windowed = layers_of(&kinds, LayerKind::Window).restricted_to(own);
    let mut caches = vec![Cache { lifetime: Lifetime::Full, owners: full, shape: full_heads }];
    caches.push(Cache { lifetime: window(config)?, owners: windowed, shape: window_heads });
    Ok(Facts { hidden_layers, mtp_layers: 0, caches })
}

fn gemma_sources(config: &Config, hidden_layers: u32) -> Result<Vec<Source>, ConfigError> {
    const PERIOD: &str = "sliding_window_pattern";
    let mut sources = Vec::new();
    sources.extend(Source::list(config, LAYER_TYPES, FULL_OR_WINDOW)?);
    let period = config.optional(PERIOD, 1, u32::MAX)?;
    if period.is_some() || sources.is_empty() {
        sources.push(Source::rule(PERIOD, hidden_layers, last_of(period.unwrap_or(6), LayerKind::Window)));
    }
    Ok(sources)
}

/// Plain heads on every layer and on the MTP modules' layers.
pub(crate) fn minimax(config: &Config) -> Result<Facts, ConfigError> {
    let hidden_layers = config.hidden_layers()?;
    let mtp_layers = minimax_mtp_layers(config, hidden_layers)?;
    let shape = heads(config, config.dimension("head_dim")?)?;
    let caches = vec![Cache { lifetime: Lifetime::Full, owners: LayerMask::all(hidden_layers + mtp_layers), shape }];
    Ok(Facts { hidden_layers, mtp_layers, caches })
}

/// Plain heads, and on block-sparse layers one indexer key a token that all heads, and so all ranks, share.
pub(crate) fn minimax_sparse(config: &Config) -> Result<Facts, ConfigError> {
    let mut facts = minimax(config)?;
    let sparse = config.object("sparse_attention_config")?;
    if sparse.optional_bool("use_sparse_attention")?.unwrap_or(false) {
        const FREQ: &str = "sparse_attention_freq";
        let entries = sparse.integers(FREQ, 0, 1)?;
        if entries.len() != facts.hidden_layers as usize {
            let (entries, hidden_layers) = (entries.len(), facts.hidden_layers);
            return Err(ConfigError::MaskLength { key: FREQ, entries, hidden_layers });
        }
        let owners = LayerMask::from_bools(entries.iter().map(|sparse| *sparse == 1));
        let shape = Shape::PlainIndexer { head_dim: sparse.dimension("sparse_index_dim")? };
        facts.caches.push(Cache { lifetime: Lifetime::Full, owners, shape });
    }
    Ok(facts)
}

fn minimax_mtp_layers(config: &Config, hidden_layers: u32) -> Result<u32, ConfigError> {
    const MODULES: &str = "num_mtp_modules";
    if !config.optional_bool("use_mtp")?.unwrap_or(true) {
        return Ok(0);
    }
    let each = config.optional("mtp_transformer_layers", 1, LAYERS_MAX)?.unwrap_or(1);
    let modules = config.optional(MODULES, 0, (LAYERS_MAX - hidden_layers) / each)?.unwrap_or(0);
    Ok(modules * each)
}

/// Heads of one size, on full layers and on windowed ones.
fn windowed_heads(
    config: &Config,
    hidden_layers: u32,
    sources: impl IntoIterator<Item = Source>,
    shape: Shape,
) -> Result<Facts, ConfigError> {
    let kinds = agreed(hidden_layers, sources)?.unwrap_or_else(|| vec![LayerKind::Full; hidden_layers as usize]);
    let mut caches = Vec::new();
    let full = layers_of(&kinds, LayerKind::Full);
    let windowed = layers_of(&kinds, LayerKind::Window);
    if full.count() > 0 {
        caches.push(Cache { lifetime: Lifetime::Full, owners: full, shape: shape.clone() });
    }
    if windowed.count() > 0 {
        caches.push(Cache { lifetime: window(config)?, owners: windowed, shape });
    }
    Ok(Facts { hidden_layers, mtp_layers: 0, caches })
}

/// `head_dim`, or else `hidden_size / num_attention_heads`.
fn divided_head_dim(config: &Config) -> Result<u32, ConfigError> {
    if let Some(head_dim) = config.optional("head_dim", 1, DIMENSION_MAX)? {
        return Ok(head_dim);
    }
    let hidden_size = config.dimension("hidden_size")?;
    let attention_heads = config.dimension("num_attention_heads")?;
    if !hidden_size.is_multiple_of(attention_heads) {
        return Err(ConfigError::HeadDim { hidden_size, attention_heads });
    }
    Ok(hidden_size / attention_heads)
}
