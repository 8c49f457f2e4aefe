//! Models whose layers all cache a latent vector, and perhaps keys of a sparse-attention indexer.

use super::mtp_layers;
use crate::architectures::Facts;
use crate::config::{Config, ConfigError};
use crate::facts::{Cache, INDEXER_QUANT_BLOCK, Lifetime, Shape};
use crate::indexer_mask::indexer_owners;
use crate::mask::LayerMask;

/// A latent on every layer; an indexer too where `index_topk` says so, whatever the model's type: that is how SGLang and
/// vLLM tell.
///
/// `num_key_value_heads` and `head_dim` of these models speak of the expanded heads, which are not cached.
pub(crate) fn latent(config: &Config) -> Result<Facts, ConfigError> {
    if config.value("index_topk").is_some() {
        return sparse_latent(config);
    }
    let hidden_layers = config.hidden_layers()?;
    let mtp_layers = mtp_layers(config, hidden_layers)?;
    let owners = LayerMask::all(hidden_layers + mtp_layers);
    Ok(Facts {
        hidden_layers,
        mtp_layers,
        caches: vec![Cache { lifetime: Lifetime::Full, owners, shape: latent_of(config)? }],
    })
}

/// A latent on every layer, and an indexer on some.
pub(crate) fn sparse_latent(config: &Config) -> Result<Facts, ConfigError> {
    let hidden_layers = config.hidden_layers()?;
    let mtp_layers = mtp_layers(config, hidden_layers)?;
    let every_layer = LayerMask::all(hidden_layers + mtp_layers);
    let latents = Cache { lifetime: Lifetime::Full, owners: every_layer, shape: latent_of(config)? };
    let shape = Shape::Indexer { head_dim: index_head_dim(config)?, tokens_per_cell: 1 };
    let owners = indexer_owners(config, hidden_layers, mtp_layers)?;
    let caches = vec![latents, Cache { lifetime: Lifetime::Full, owners, shape }];
    Ok(Facts { hidden_layers, mtp_layers, caches })
}

pub(super) fn latent_of(config: &Config) -> Result<Shape, ConfigError> {
    let compressed = config.dimension("kv_lora_rank")?;
    let rotary = config.dimension("qk_rope_head_dim")?;
    Ok(Shape::Latent { elements: compressed + rotary })
}

pub(super) fn index_head_dim(config: &Config) -> Result<u32, ConfigError> {
    let head_dim = config.dimension("index_head_dim")?;
    if !head_dim.is_multiple_of(INDEXER_QUANT_BLOCK) {
        return Err(ConfigError::IndexHeadDim { head_dim, quant_block: INDEXER_QUANT_BLOCK });
    }
    Ok(head_dim)
}
