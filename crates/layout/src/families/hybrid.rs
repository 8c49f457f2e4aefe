//! Models that keep state on some of their layers.

use super::latent::latent_of;
use super::{LAYER_TYPES, heads, last_of, mtp_layers};
use crate::architectures::Facts;
use crate::check::LAYERS_MAX;
use crate::config::{Config, ConfigError, DIMENSION_MAX};
use crate::facts::{Cache, Lifetime, Section, Shape};
use crate::layer_kinds::{LayerKind, Source, agreed, layers_of};
use crate::mask::LayerMask;
use crate::table::{Dtype, Layer};

const FULL_OR_LINEAR: &[(&str, LayerKind)] =
    &[("full_attention", LayerKind::Full), ("linear_attention", LayerKind::Recurrent)];

/// A latent on some layers, state of Kimi delta attention on the others. The lists of layers count from 1. vLLM keeps this
/// state in 32 bits whatever the options (`kda_state_dtype` of `vllm/model_executor/layers/mamba/mamba_utils.py`,
/// vllm-project/vllm at commit 02d710837549).
pub(crate) fn kimi_linear(config: &Config) -> Result<Facts, ConfigError> {
    let hidden_layers = config.hidden_layers()?;
    let mtp_layers = mtp_layers(config, hidden_layers)?;
    let linear = config.object("linear_attn_config")?;
    let (first_key, second_key) = ("full_attn_layers", "kda_layers");
    let full = linear.integers(first_key, 1, hidden_layers)?;
    let kda = linear.integers(second_key, 1, hidden_layers)?;
    let mut listed: Vec<u32> = full.iter().chain(&kda).copied().collect();
    listed.sort_unstable();
    for number in 1..=hidden_layers {
        let times = listed.partition_point(|other| *other <= number) - listed.partition_point(|other| *other < number);
        if times != 1 {
            return Err(ConfigError::LayerNumber { first_key, second_key, number, times });
        }
    }
    let ids = |numbers: &[u32]| numbers.iter().map(|number| Layer(number - 1)).collect::<Vec<_>>();
    let mtp = (hidden_layers..hidden_layers + mtp_layers).map(Layer);
    let latents = LayerMask::new(hidden_layers, ids(&full).into_iter().chain(mtp));
    let heads = linear.dimension("num_heads")?;
    let head_dim = linear.dimension("head_dim")?;
    let section = Section { heads, head_channels: head_dim };
    let state = Shape::Recurrent {
        sections: vec![section.clone(), section.clone(), section],
        columns: columns(&linear, "short_conv_kernel_size")?,
        heads,
        head_elements: head_dim * head_dim,
        dtype: Some(Dtype::F32),
    };
    let state_owners = LayerMask::new(hidden_layers, ids(&kda));
    let caches = vec![
        Cache { lifetime: Lifetime::Full, owners: latents, shape: latent_of(config)? },
        Cache { lifetime: Lifetime::State, owners: state_owners, shape: state },
    ];
    Ok(Facts { hidden_layers, mtp_layers, caches })
}

/// Plain heads on some layers, state of gated delta nets on the others. MTP layers are full; how many there are,
/// Qwen3-Next's config does not say, and vLLM takes one (`vllm/model_executor/models/qwen3_next_mtp.py`).
pub(crate) fn gated_delta_net(config: &Config) -> Result<Facts, ConfigError> {
    const PERIOD: &str = "full_attention_interval";
    let hidden_layers = config.hidden_layers()?;
    let limit = LAYERS_MAX - hidden_layers;
    let mtp_layers = match config.optional("mtp_num_hidden_layers", 0, limit)? {
        Some(layers) => layers,
        None => config.optional("num_nextn_predict_layers", 0, limit)?.unwrap_or(1),
    };
    let mut sources = Vec::new();
    sources.extend(Source::list(config, LAYER_TYPES, FULL_OR_LINEAR)?);
    let period = config.optional(PERIOD, 1, u32::MAX)?;
    if period.is_some() || sources.is_empty() {
        sources.push(Source::rule(PERIOD, hidden_layers, last_of(period.unwrap_or(4), LayerKind::Recurrent)));
    }
    let kinds = agreed(hidden_layers, sources)?.unwrap_or_default();

    let keys = Section {
        heads: config.dimension("linear_num_key_heads")?,
        head_channels: config.dimension("linear_key_head_dim")?,
    };
    let values = Section {
        heads: config.dimension("linear_num_value_heads")?,
        head_channels: config.dimension("linear_value_head_dim")?,
    };
    let state = Shape::Recurrent {
        columns: columns(config, "linear_conv_kernel_dim")?,
        heads: values.heads,
        head_elements: values.head_channels * keys.head_channels,
        sections: vec![keys.clone(), keys, values],
        dtype: config.optional_dtype("mamba_ssm_dtype")?,
    };
    let attention = heads(config, config.dimension("head_dim")?)?;
    hybrid(hidden_layers, &kinds, &vec![LayerKind::Full; mtp_layers as usize], attention, state)
}

/// Plain heads on some layers, Mamba2 state on some, nothing on the others. Each layer of the MTP pattern counts as one
/// (`vllm/model_executor/models/nemotron_h_mtp.py`).
pub(crate) fn nemotron_h(config: &Config) -> Result<Facts, ConfigError> {
    const LETTERS: &[(&str, LayerKind)] =
        &[("M", LayerKind::Recurrent), ("*", LayerKind::Full), ("-", LayerKind::Nothing), ("E", LayerKind::Nothing)];
    const WORDS: &[(&str, LayerKind)] = &[
        ("mamba", LayerKind::Recurrent),
        ("attention", LayerKind::Full),
        ("mlp", LayerKind::Nothing),
        ("moe", LayerKind::Nothing),
    ];
    let pattern_of = |letters, words| {
        let mut sources = Vec::new();
        sources.extend(Source::letters(config, letters, LETTERS)?);
        sources.extend(Source::list(config, words, WORDS)?);
        Ok(sources)
    };
    let sources = pattern_of("hybrid_override_pattern", "layers_block_type")?;
    // Some checkpoints leave the count to the list.
    let listed = sources.first().and_then(|source| u32::try_from(source.len()).ok());
    let hidden_layers = match (config.optional("num_hidden_layers", 1, LAYERS_MAX)?, listed) {
        (Some(layers), _) | (None, Some(layers)) if (1..=LAYERS_MAX).contains(&layers) => layers,
        _ => return Err(ConfigError::MissingKey { key: "num_hidden_layers" }),
    };
    let key = "hybrid_override_pattern";
    let kinds = agreed(hidden_layers, sources)?.ok_or(ConfigError::MissingKey { key })?;

    let mut mtp_kinds = Vec::new();
    let mtp_sources = pattern_of("mtp_hybrid_override_pattern", "mtp_layers_block_type")?;
    if let Some(pattern_layers) = mtp_sources.first().and_then(|source| u32::try_from(source.len()).ok())
        && pattern_layers > 0
    {
        let pattern = agreed(pattern_layers, mtp_sources)?.unwrap_or_default();
        let limit = (LAYERS_MAX - hidden_layers) / pattern_layers;
        let times = config.optional("num_nextn_predict_layers", 0, limit)?.unwrap_or(0);
        mtp_kinds = pattern.repeat(times as usize);
    }

    let head_dim = match config.optional("head_dim", 1, DIMENSION_MAX)? {
        Some(head_dim) => head_dim,
        None => config.dimension("attention_head_dim")?,
    };
    let channels =
        Section { heads: config.dimension("mamba_num_heads")?, head_channels: config.dimension("mamba_head_dim")? };
    let groups = Section { heads: config.dimension("n_groups")?, head_channels: config.dimension("ssm_state_size")? };
    let state = Shape::Recurrent {
        columns: columns(config, "conv_kernel")?,
        heads: channels.heads,
        head_elements: channels.head_channels * groups.head_channels,
        sections: vec![channels, groups.clone(), groups],
        dtype: config.optional_dtype("mamba_ssm_cache_dtype")?,
    };
    hybrid(hidden_layers, &kinds, &mtp_kinds, heads(config, head_dim)?, state)
}

/// Attention and recurrent layers side by side, MTP layers behind them.
fn hybrid(
    hidden_layers: u32,
    kinds: &[LayerKind],
    mtp_kinds: &[LayerKind],
    attention: Shape,
    state: Shape,
) -> Result<Facts, ConfigError> {
    let kinds = [kinds, mtp_kinds].concat();
    let cache = |lifetime, kind, shape| Cache { lifetime, owners: layers_of(&kinds, kind), shape };
    let caches =
        vec![cache(Lifetime::Full, LayerKind::Full, attention), cache(Lifetime::State, LayerKind::Recurrent, state)];
    // The config's readers bound the sum of both by `LAYERS_MAX`.
    let mtp_layers = u32::try_from(mtp_kinds.len()).unwrap_or(0);
    Ok(Facts { hidden_layers, mtp_layers, caches })
}

/// Columns that a convolution keeps: those of its kernel that are not the current token.
fn columns(config: &Config, key: &'static str) -> Result<u32, ConfigError> {
    config.optional(key, 2, DIMENSION_MAX)?.map(|kernel| kernel - 1).ok_or(ConfigError::MissingKey { key })
}
