//! How each family of models caches: from the keys of its config to caches.

mod compressed;
mod heads;
mod hybrid;
mod latent;

use crate::check::LAYERS_MAX;
use crate::config::{Config, ConfigError};
use crate::facts::{Lifetime, Shape};
use crate::layer_kinds::LayerKind;

pub(crate) use compressed::compressed;
pub(crate) use heads::{gemma, gemma_of_two_sizes, gpt_oss, llama, minimax, minimax_sparse, mistral, qwen2, qwen3};
pub(crate) use hybrid::{gated_delta_net, kimi_linear, nemotron_h};
pub(crate) use latent::{latent, sparse_latent};

const WINDOW: &str = "sliding_window";
const LAYER_TYPES: &str = "layer_types";

/// Full attention on the last layer of every `period`, `other` before it.
fn last_of(period: u32, other: LayerKind) -> impl Fn(u32) -> LayerKind {
    move |layer| if layer % period == period - 1 { LayerKind::Full } else { other }
}

fn mtp_layers(config: &Config, hidden_layers: u32) -> Result<u32, ConfigError> {
    Ok(config.optional("num_nextn_predict_layers", 0, LAYERS_MAX - hidden_layers)?.unwrap_or(0))
}

fn window(config: &Config) -> Result<Lifetime, ConfigError> {
    Ok(Lifetime::Window(config.count(WINDOW, u32::MAX)?))
}

fn heads(config: &Config, head_dim: u32) -> Result<Shape, ConfigError> {
    Ok(Shape::Heads { kv_heads: config.dimension("num_key_value_heads")?, head_dim })
}
