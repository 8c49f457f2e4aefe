//! The keys of a HuggingFace `config.json`, and what can be wrong with them.

use serde_json::{Map, Value};

use crate::check::LAYERS_MAX;
use crate::json;
use crate::table::{Dtype, Layer};

/// Largest head count, head size or vector length taken for real. The product of two fits in a `u32`.
pub(crate) const DIMENSION_MAX: u32 = (1 << 16) - 1;

/// Why a config does not give a model's facts. Correct the file, or describe the cache by hand ([`crate::RankSpec`]).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not JSON, or JSON but not an object.
    #[error("config is not a JSON object")]
    Json(#[source] serde_json::Error),

    /// No builder knows how this architecture caches.
    #[error("unknown architecture {found:?}; known are {}", known.join(", "))]
    UnknownArchitecture {
        /// What the config says.
        found: String,
        /// The architectures known here.
        known: Vec<&'static str>,
    },

    /// No builder knows how this type of model caches, and the config names no architecture.
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

    /// The model type has no windows of its own, yet the config gives one and does not say for which layers. Engines differ
    /// in whether they heed it: say it with `layer_types`, or remove it.
    #[error("config: sliding_window {window_tokens} without layer_types, which a {model_type} model has no rule for")]
    SlidingWindow {
        /// The window.
        window_tokens: u32,
        /// Type of the model.
        model_type: &'static str,
    },

    /// A layer is of a kind that this type of model is not known to have.
    #[error("config: {key} says {found} for layer {layer}; known are {}", known.join(", "))]
    LayerType {
        /// The key.
        key: &'static str,
        /// The layer.
        layer: Layer,
        /// What the config says of it.
        found: String,
        /// What it may say.
        known: Vec<&'static str>,
    },

    /// Two keys say different things about the kind of a layer. An engine that reads the one caches otherwise than an
    /// engine that reads the other: ask whoever made the checkpoint.
    #[error("config: {first_key} and {second_key} differ on what layer {layer} is")]
    LayerConflict {
        /// The first layer in dispute.
        layer: Layer,
        /// One key.
        first_key: &'static str,
        /// The other.
        second_key: &'static str,
    },

    /// Two lists of layer numbers, which count from 1, do not hold each layer once between them.
    #[error("config: {first_key} and {second_key} list layer number {number} {times} times")]
    LayerNumber {
        /// One list.
        first_key: &'static str,
        /// The other.
        second_key: &'static str,
        /// The first such number.
        number: u32,
        /// How often it is there.
        times: usize,
    },

    /// An element type that no cache is made of.
    #[error("config: {key} is {found:?}; known are float32, float16, bfloat16")]
    UnknownDtype {
        /// The key.
        key: &'static str,
        /// What the config says.
        found: String,
    },

    /// A list or string with one entry a layer has too few or too many.
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

/// The keys of a config, and those of the part of it that is about the language model. A key that is null counts as one
/// that is not there, as it does to Python's `getattr` users.
pub(crate) struct Config {
    outer: Map<String, Value>,
    /// `text_config` of a multimodal model.
    text: Map<String, Value>,
}

impl Config {
    pub(crate) fn parse(json: &str) -> Result<Self, ConfigError> {
        let outer = json::object(json).map_err(ConfigError::Json)?;
        let text = match outer.get("text_config") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(text)) => text.clone(),
            Some(_) => return Err(ConfigError::WrongType { key: "text_config", expected: "an object" }),
        };
        Ok(Self { outer, text })
    }

    /// The value of a key: that of the language part, or else the outer one.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        let of = |keys: &'_ Map<String, Value>| -> bool { keys.get(key).is_some_and(|value| !value.is_null()) };
        if of(&self.text) { self.text.get(key) } else { self.outer.get(key).filter(|value| !value.is_null()) }
    }

    /// The object under a key, as a config of its own.
    pub(crate) fn object(&self, key: &'static str) -> Result<Self, ConfigError> {
        let value = self.value(key).ok_or(ConfigError::MissingKey { key })?;
        let outer = value.as_object().ok_or(ConfigError::WrongType { key, expected: "an object" })?.clone();
        Ok(Self { outer, text: Map::new() })
    }

    /// An integer of `min..=max`, if the key is there.
    pub(crate) fn optional(&self, key: &'static str, min: u32, max: u32) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        integer(key, value, min, max).map(Some)
    }

    /// A list, if the key is there.
    pub(crate) fn optional_list(&self, key: &'static str) -> Result<Option<&[Value]>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let list = value.as_array().ok_or(ConfigError::WrongType { key, expected: "a list" })?;
        Ok(Some(list.as_slice()))
    }

    /// A list of integers of `min..=max`.
    pub(crate) fn integers(&self, key: &'static str, min: u32, max: u32) -> Result<Vec<u32>, ConfigError> {
        let list = self.optional_list(key)?.ok_or(ConfigError::MissingKey { key })?;
        list.iter().map(|value| integer(key, value, min, max)).collect()
    }

    pub(crate) fn optional_bool(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        let expected = "true or false";
        self.value(key).map(|value| value.as_bool().ok_or(ConfigError::WrongType { key, expected })).transpose()
    }

    /// A positive integer up to `max`.
    pub(crate) fn count(&self, key: &'static str, max: u32) -> Result<u32, ConfigError> {
        self.optional(key, 1, max)?.ok_or(ConfigError::MissingKey { key })
    }

    /// A head count, head size or vector length.
    pub(crate) fn dimension(&self, key: &'static str) -> Result<u32, ConfigError> {
        self.count(key, DIMENSION_MAX)
    }

    pub(crate) fn hidden_layers(&self) -> Result<u32, ConfigError> {
        self.count("num_hidden_layers", LAYERS_MAX)
    }

    /// An element type, if the key is there.
    pub(crate) fn optional_dtype(&self, key: &'static str) -> Result<Option<Dtype>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let word = value.as_str().ok_or(ConfigError::WrongType { key, expected: "a string" })?;
        match word.strip_prefix("torch.").unwrap_or(word) {
            "float32" => Ok(Some(Dtype::F32)),
            "float16" => Ok(Some(Dtype::F16)),
            "bfloat16" => Ok(Some(Dtype::Bf16)),
            _ => Err(ConfigError::UnknownDtype { key, found: word.to_owned() }),
        }
    }

    pub(crate) fn model_dtype(&self) -> Result<Dtype, ConfigError> {
        let (new, old) = (self.optional_dtype("dtype")?, self.optional_dtype("torch_dtype")?);
        Ok(new.or(old).unwrap_or(Dtype::Bf16))
    }

    /// A string of the outer object: the language part names its own architecture and type.
    pub(crate) fn outer_text(&self, key: &'static str) -> Result<&str, ConfigError> {
        let value = self.outer.get(key).filter(|value| !value.is_null()).ok_or(ConfigError::MissingKey { key })?;
        value.as_str().ok_or(ConfigError::WrongType { key, expected: "a string" })
    }

    /// The first of `architectures`, if there is any.
    pub(crate) fn architecture(&self) -> Result<Option<&str>, ConfigError> {
        let wrong = ConfigError::WrongType { key: "architectures", expected: "a list of strings" };
        match self.outer.get("architectures") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(names)) => match names.first() {
                None => Ok(None),
                Some(name) => name.as_str().map(Some).ok_or(wrong),
            },
            Some(_) => Err(wrong),
        }
    }
}

fn integer(key: &'static str, value: &Value, min: u32, max: u32) -> Result<u32, ConfigError> {
    let value = value.as_u64().ok_or(ConfigError::WrongType { key, expected: "a non-negative integer" })?;
    match u32::try_from(value) {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ => Err(ConfigError::OutOfRange { key, value, min, max }),
    }
}
