//! The models that are compiled in, and any other whose `config.json` is given.

use std::io::{self, Read};
use std::path::PathBuf;

use kvferry_layout::{ConfigError, ModelFacts};

use crate::files::open_regular;

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
    #[error("{} is longer than {CONFIG_BYTES_MAX} bytes, a config.json is not", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
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
    let mut config = Vec::new();
    // Read up to the bound, whatever size the file system claims: files of /proc claim none.
    match open_regular(&path).and_then(|file| file.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut config)) {
        Ok(_) if config.len() as u64 > CONFIG_BYTES_MAX => Err(ModelError::TooLong { path }),
        Ok(_) => String::from_utf8(config)
            .map_err(|error| ModelError::Read { path, source: io::Error::new(io::ErrorKind::InvalidData, error) }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ModelError::Unknown { name: name.to_owned() }),
        Err(source) => Err(ModelError::Read { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;
    use crate::failure;

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

    /// No size that a file system claims, and no file that never ends, is read without bound.
    #[test]
    fn files_that_are_no_config() {
        let directory = tempfile::tempdir().unwrap();
        let (long, binary) = (directory.path().join("long"), directory.path().join("binary"));
        // A hole: the size is real, the disk's blocks are not.
        File::create(&long).unwrap().set_len(1 << 40).unwrap();
        fs::write(&binary, [0xff]).unwrap();
        for (path, expected) in [
            ("/dev/zero".into(), "cannot read /dev/zero: not a regular file".to_owned()),
            (
                long.display().to_string(),
                format!("{} is longer than 4194304 bytes, a config.json is not", long.display()),
            ),
            (
                binary.display().to_string(),
                format!("cannot read {}: invalid utf-8 sequence of 1 bytes from index 0", binary.display()),
            ),
        ] {
            assert_eq!(failure::line(&load(&path).unwrap_err()), expected);
        }
    }
}
