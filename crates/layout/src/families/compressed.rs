//! Models that put several tokens into one latent.

use super::latent::index_head_dim;
use super::{mtp_layers, window};
use crate::architectures::Facts;
use crate::config::{Config, ConfigError};
use crate::facts::{Cache, Lifetime, Shape};
use crate::mask::LayerMask;
use crate::table::{Layer, Role};

/// DeepSeek-V4: on every layer a window of latents; where `compress_ratios` is not 0, besides it one latent for so many
/// tokens, kept whole, and the state of the compressor that makes them; where it is 4, an indexer with a compressor of its
/// own. A compressor keeps 32-bit keys and scores of the tokens that its next outputs will need: of one stretch of
/// `ratio` tokens, or for ratio 4, where stretches overlap, of two and of both halves
/// (`vllm/models/deepseek_v4/compressor.py`, `CompressorStateCache` and its callers, vllm-project/vllm).
pub(crate) fn compressed(config: &Config) -> Result<Facts, ConfigError> {
    const RATIOS: &str = "compress_ratios";
    let hidden_layers = config.hidden_layers()?;
    let mtp_layers = mtp_layers(config, hidden_layers)?;
    let ratios = config.integers(RATIOS, 0, 128)?;
    let layers = hidden_layers + mtp_layers;
    if ratios.len() != layers as usize {
        return Err(ConfigError::MaskLength { key: RATIOS, entries: ratios.len(), hidden_layers: layers });
    }
    if let Some((layer, found)) = (0..).map(Layer).zip(&ratios).find(|(_, ratio)| ![0, 4, 128].contains(*ratio)) {
        let (found, known) = (found.to_string(), vec!["0", "4", "128"]);
        return Err(ConfigError::LayerType { key: RATIOS, layer, found, known });
    }
    let of_ratio = |ratio| LayerMask::from_bools(ratios.iter().map(|found| *found == ratio));
    let (fours, many) = (of_ratio(4), of_ratio(128));
    let head_dim = config.dimension("head_dim")?;
    let rotary = config.count("qk_rope_head_dim", head_dim)?;
    let index_head_dim = index_head_dim(config)?;
    let plain = head_dim - rotary;
    let named = |name: &str| Role::Named(name.to_owned());
    let latents = |role, tokens_per_cell| Shape::MixedLatent { role, plain, rotary, tokens_per_cell };
    let state = |name: &str, elements| Shape::CompressorState { role: named(name), elements };
    let cache = |lifetime, owners: &LayerMask, shape| Cache { lifetime, owners: owners.clone(), shape };
    let (of_four, of_many) = (Lifetime::Window(8), Lifetime::Window(128));
    let indexer = Shape::Indexer { head_dim: index_head_dim, tokens_per_cell: 4 };
    let mut caches = vec![
        cache(Lifetime::Full, &fours, latents(named("compressed latent"), 4)),
        cache(Lifetime::Full, &many, latents(named("compressed latent"), 128)),
        cache(Lifetime::Full, &fours, indexer),
        cache(window(config)?, &LayerMask::all(layers), latents(Role::Latent, 1)),
        cache(of_many, &many, state("compressor state", 2 * head_dim)),
        cache(of_four, &fours, state("compressor state", 4 * head_dim)),
        cache(of_four, &fours, state("indexer compressor state", 4 * index_head_dim)),
    ];
    caches.retain(|cache| cache.owners.count() > 0);
    Ok(Facts { hidden_layers, mtp_layers, caches })
}
