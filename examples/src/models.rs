//! The models that are compiled in, and any other whose `config.json` is given.

use std::fs;
use std::io;
use std::path::PathBuf;

use kvferry_layout::{ConfigError, ModelFacts};

/// Name and facts of each model that is compiled in.
const BUILT_IN: [(&str, &str); 24] = [
    ("glm-5.2", include_str!("../models/glm-5.2.json")),
    ("deepseek-v3", include_str!("../models/deepseek-v3.json")),
    ("deepseek-v3.2", include_str!("../models/deepseek-v3.2.json")),
    ("deepseek-v4-pro", include_str!("../models/deepseek-v4-pro.json")),
    ("gemma-3-27b", include_str!("../models/gemma-3-27b.json")),
    ("gemma-4-26b-a4b", include_str!("../models/gemma-4-26b-a4b.json")),
    ("glm-5", include_str!("../models/glm-5.json")),
    ("gpt-oss-120b", include_str!("../models/gpt-oss-120b.json")),
    ("kimi-k2", include_str!("../models/kimi-k2.json")),
    ("kimi-k2.5", include_str!("../models/kimi-k2.5.json")),
    ("kimi-k3", include_str!("../models/kimi-k3.json")),
    ("llama-3.1-405b", include_str!("../models/llama-3.1-405b.json")),
    ("llama-3.1-70b", include_str!("../models/llama-3.1-70b.json")),
    ("llama-3.1-8b", include_str!("../models/llama-3.1-8b.json")),
    ("minimax-m2.5", include_str!("../models/minimax-m2.5.json")),
    ("minimax-m3", include_str!("../models/minimax-m3.json")),
    ("nemotron-3-nano-30b-a3b", include_str!("../models/nemotron-3-nano-30b-a3b.json")),
    ("nemotron-3-super-120b-a12b", include_str!("../models/nemotron-3-super-120b-a12b.json")),
    ("nemotron-3-ultra-550b-a55b", include_str!("../models/nemotron-3-ultra-550b-a55b.json")),
    ("nemotron-h-56b", include_str!("../models/nemotron-h-56b.json")),
    ("qwen3-235b-a22b", include_str!("../models/qwen3-235b-a22b.json")),
    ("qwen3-8b", include_str!("../models/qwen3-8b.json")),
    ("qwen3-next-80b-a3b", include_str!("../models/qwen3-next-80b-a3b.json")),
    ("qwen3.5-397b-a17b", include_str!("../models/qwen3.5-397b-a17b.json")),
];

/// Bytes of a config at most.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No such model, and no such file. Take one of the list, or give the path of a `config.json`.
    #[error("unknown model {name:?}: known are {}, or give the path of a config.json", names().join(", "))]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no model's config: none is that large.
    #[error("{} has {bytes} bytes, a config.json has at most {CONFIG_BYTES_MAX}", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The config does not describe a model that can be laid out.
    #[error("model {name}")]
    Config {
        /// Name or path.
        name: String,
        /// What is wrong.
        source: ConfigError,
    },
}

/// Names of the models that are compiled in.
pub fn names() -> Vec<&'static str> {
    BUILT_IN.iter().map(|(name, _)| *name).collect()
}

/// Facts of the model `name`, or of the config at that path.
///
/// # Errors
///
/// [`ModelError`] names the model or file.
pub fn load(name: &str) -> Result<ModelFacts, ModelError> {
    let config = match BUILT_IN.iter().find(|(known, _)| *known == name) {
        Some((_, text)) => (*text).to_owned(),
        None => read(name)?,
    };
    ModelFacts::from_config(&config).map_err(|source| ModelError::Config { name: name.to_owned(), source })
}

fn read(name: &str) -> Result<String, ModelError> {
    let path = PathBuf::from(name);
    let bytes = match fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ModelError::Unknown { name: name.to_owned() });
        }
        Err(source) => return Err(ModelError::Read { path, source }),
    };
    if bytes > CONFIG_BYTES_MAX {
        return Err(ModelError::TooLong { path, bytes });
    }
    fs::read_to_string(&path).map_err(|source| ModelError::Read { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_are_compiled_in_load() {
        for name in names() {
            load(name).unwrap();
        }
    }

    #[test]
    fn an_unknown_model_lists_the_known() {
        let error = load("glm-9").unwrap_err().to_string();
        assert!(error.starts_with("unknown model \"glm-9\": known are glm-5.2, deepseek-v3, "), "{error}");
        assert!(error.ends_with(", qwen3.5-397b-a17b, or give the path of a config.json"), "{error}");
    }
}
