//! Reads [`ModelFacts`] from a HuggingFace `config.json`.

use serde_json::{Map, Value};

use crate::check::LAYERS_MAX;
use crate::facts::{Attention, INDEXER_QUANT_BLOCK, Indexer, ModelFacts};
use crate::indexer_mask::indexer_owners;
use crate::table::Layer;

/// Largest head count, head size or vector length taken for real.
const DIMENSION_MAX: u32 = 1 << 20;

/// How a model type caches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    /// Keys and values of `num_key_value_heads`; `head_dim` may be left to `hidden_size / num_attention_heads`.
    Heads,
    /// The same, but the class has a default of its own for `head_dim`, so the config must say it.
    HeadsOfGivenSize,
    /// A latent; an indexer too if `index_topk` says so.
    Latent,
    /// A latent, and an indexer on some layers.
    SparseLatent,
}

const FAMILIES: [(&str, Family); 9] = [
    ("deepseek_v3", Family::Latent),
    ("deepseek_v32", Family::SparseLatent),
    ("glm_moe_dsa", Family::SparseLatent),
    ("kimi_k2", Family::Latent),
    ("llama", Family::Heads),
    ("mistral", Family::Heads),
    ("qwen2", Family::Heads),
    ("qwen3", Family::HeadsOfGivenSize),
    ("qwen3_moe", Family::HeadsOfGivenSize),
];

/// Why a config does not give a model's facts. Correct the file, or describe the cache by hand ([`crate::RankSpec`]).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not JSON, or JSON but not an object.
    #[error("config is not a JSON object")]
    Json(#[source] serde_json::Error),

    /// No builder knows how this type of model caches.
    #[error("unknown model_type {found:?}; known are {}", known.join(", "))]
    UnknownModelType {
        /// What the config says.
        found: String,
        /// The types known here.
        known: Vec<&'static str>,
    },

    /// A key is not there, or null.
    #[error("config has no {key}")]
    MissingKey {
        /// The key.
        key: &'static str,
    },

    /// The value of a key is of another kind than it should be.
    #[error("config: {key} is not {expected}")]
    WrongType {
        /// The key.
        key: &'static str,
        /// What it should be.
        expected: &'static str,
    },

    /// The value of a key is not one that a model can have.
    #[error("config: {key} is {value}, not in {min}..={max}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// What it is.
        value: u64,
        /// Least value taken.
        min: u32,
        /// Largest value taken.
        max: u32,
    },

    /// The head size is not given and does not come out as a whole number.
    #[error("config: hidden_size {hidden_size} is not a multiple of num_attention_heads {attention_heads}")]
    HeadDim {
        /// The one.
        hidden_size: u32,
        /// The other.
        attention_heads: u32,
    },

    /// The indexer's keys do not divide into the blocks that scales are stored for.
    #[error("config: index_head_dim {head_dim} is not a multiple of the {quant_block} elements of a scale")]
    IndexHeadDim {
        /// Elements of a key.
        head_dim: u32,
        /// Elements of a scale.
        quant_block: u32,
    },

    /// Some layers keep a window only. No builder here splits layers into groups by window.
    #[error("config: sliding_window {window_tokens} is in use, which no builder supports")]
    SlidingWindow {
        /// The window.
        window_tokens: u32,
    },

    /// A layer's attention is of a kind that this type of model is not known to have.
    #[error("config: layer_types says {found} for layer {layer}, only \"full_attention\" is supported")]
    LayerType {
        /// The layer.
        layer: Layer,
        /// What the config says of it.
        found: String,
    },

    /// A list with one entry a layer has too few or too many.
    #[error("config: {key} has {entries} entries for {hidden_layers} layers")]
    MaskLength {
        /// The key.
        key: &'static str,
        /// Entries of the list.
        entries: usize,
        /// Hidden layers of the model.
        hidden_layers: u32,
    },

    /// An entry says neither that a layer owns an indexer nor that it shares one.
    #[error("config: {key} says {found} for layer {layer}, not {expected}")]
    MaskEntry {
        /// The key.
        key: &'static str,
        /// The layer.
        layer: Layer,
        /// What the config says of it.
        found: String,
        /// What it may say.
        expected: &'static str,
    },

    /// Two keys say different things about a layer. An engine that reads the one caches other rows than an engine that
    /// reads the other: ask whoever made the checkpoint.
    #[error("config: layer {layer} owns an indexer by {owning_key}, but not by {sharing_key}")]
    MaskConflict {
        /// The first layer in dispute.
        layer: Layer,
        /// The key that says it owns one.
        owning_key: &'static str,
        /// The key that says it does not.
        sharing_key: &'static str,
    },
}

impl ModelFacts {
    /// Reads a genuine `config.json`: keys that do not concern the cache may be there or not.
    ///
    /// Known `model_type`s: `deepseek_v3`, `deepseek_v32`, `glm_moe_dsa`, `kimi_k2` (latent attention, with or without
    /// indexer), and `llama`, `mistral`, `qwen2`, `qwen3`, `qwen3_moe` (plain key-value heads).
    ///
    /// # Errors
    ///
    /// See [`ConfigError`]; each names the key or the layer.
    pub fn from_config(json: &str) -> Result<Self, ConfigError> {
        let config = Config { keys: serde_json::from_str(json).map_err(ConfigError::Json)? };
        let model_type = config.text("model_type")?;
        let Some((_, family)) = FAMILIES.iter().find(|(name, _)| *name == model_type) else {
            let known = FAMILIES.iter().map(|(name, _)| *name).collect();
            return Err(ConfigError::UnknownModelType { found: model_type.to_owned(), known });
        };
        let hidden_layers = config.count("num_hidden_layers", LAYERS_MAX)?;
        let mtp_key = "num_nextn_predict_layers";
        let mtp_layers = config.optional(mtp_key, 0, LAYERS_MAX - hidden_layers)?.unwrap_or(0);
        let attention = match family {
            Family::Heads | Family::HeadsOfGivenSize => heads(&config, *family)?,
            Family::Latent | Family::SparseLatent => latent(&config)?,
        };
        let sparse = match family {
            Family::Heads | Family::HeadsOfGivenSize => false,
            // SGLang and vLLM tell by this key, whatever the model type.
            Family::Latent => config.value("index_topk").is_some(),
            Family::SparseLatent => true,
        };
        let indexer = if sparse { Some(indexer(&config, hidden_layers, mtp_layers)?) } else { None };
        Ok(Self { model_type: model_type.to_owned(), hidden_layers, mtp_layers, attention, indexer })
    }
}

fn heads(config: &Config, family: Family) -> Result<Attention, ConfigError> {
    let windowed = config.optional_bool("use_sliding_window")?.unwrap_or(true);
    if let Some(window_tokens) = config.optional("sliding_window", 0, u32::MAX)?
        && windowed
    {
        return Err(ConfigError::SlidingWindow { window_tokens });
    }
    for (layer, kind) in (0..).map(Layer).zip(config.optional_list("layer_types")?.unwrap_or_default()) {
        if kind != "full_attention" {
            return Err(ConfigError::LayerType { layer, found: kind.to_string() });
        }
    }
    let kv_heads = config.count("num_key_value_heads", DIMENSION_MAX)?;
    let head_dim = match (config.optional("head_dim", 1, DIMENSION_MAX)?, family) {
        (Some(head_dim), _) => head_dim,
        (None, Family::Heads) => {
            let hidden_size = config.count("hidden_size", DIMENSION_MAX)?;
            let attention_heads = config.count("num_attention_heads", DIMENSION_MAX)?;
            if !hidden_size.is_multiple_of(attention_heads) {
                return Err(ConfigError::HeadDim { hidden_size, attention_heads });
            }
            hidden_size / attention_heads
        }
        (None, _) => return Err(ConfigError::MissingKey { key: "head_dim" }),
    };
    Ok(Attention::Heads { kv_heads, head_dim })
}

/// `num_key_value_heads` and `head_dim` of these models speak of the expanded heads, which are not cached.
fn latent(config: &Config) -> Result<Attention, ConfigError> {
    let compressed = config.count("kv_lora_rank", DIMENSION_MAX)?;
    let rotary = config.count("qk_rope_head_dim", DIMENSION_MAX)?;
    Ok(Attention::Latent { elements: compressed + rotary })
}

fn indexer(config: &Config, hidden_layers: u32, mtp_layers: u32) -> Result<Indexer, ConfigError> {
    let head_dim = config.count("index_head_dim", DIMENSION_MAX)?;
    if !head_dim.is_multiple_of(INDEXER_QUANT_BLOCK) {
        return Err(ConfigError::IndexHeadDim { head_dim, quant_block: INDEXER_QUANT_BLOCK });
    }
    Ok(Indexer { head_dim, owners: indexer_owners(config, hidden_layers, mtp_layers)? })
}

/// The keys of a config. A key that is null counts as one that is not there, as it does to Python's `getattr` users.
pub(crate) struct Config {
    keys: Map<String, Value>,
}

impl Config {
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    /// An integer of `min..=max`, if the key is there.
    pub(crate) fn optional(&self, key: &'static str, min: u32, max: u32) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let value = value.as_u64().ok_or(ConfigError::WrongType { key, expected: "a non-negative integer" })?;
        match u32::try_from(value) {
            Ok(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(ConfigError::OutOfRange { key, value, min, max }),
        }
    }

    /// A list, if the key is there.
    pub(crate) fn optional_list(&self, key: &'static str) -> Result<Option<&[Value]>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let list = value.as_array().ok_or(ConfigError::WrongType { key, expected: "a list" })?;
        Ok(Some(list.as_slice()))
    }

    fn optional_bool(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        let expected = "true or false";
        self.value(key).map(|value| value.as_bool().ok_or(ConfigError::WrongType { key, expected })).transpose()
    }

    /// A positive integer up to `max`.
    fn count(&self, key: &'static str, max: u32) -> Result<u32, ConfigError> {
        self.optional(key, 1, max)?.ok_or(ConfigError::MissingKey { key })
    }

    fn text(&self, key: &'static str) -> Result<&str, ConfigError> {
        let value = self.value(key).ok_or(ConfigError::MissingKey { key })?;
        value.as_str().ok_or(ConfigError::WrongType { key, expected: "a string" })
    }
}
