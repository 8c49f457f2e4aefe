//! Which models are known, and the way from a config to facts.

use crate::config::{Config, ConfigError};
use crate::facts::{Cache, ModelFacts};
use crate::families;

/// Reads the caches of a model of one family, and how many hidden and MTP layers it has.
type Reader = fn(&Config) -> Result<Facts, ConfigError>;

/// What a family's reader finds.
pub(crate) struct Facts {
    pub(crate) hidden_layers: u32,
    pub(crate) mtp_layers: u32,
    pub(crate) caches: Vec<Cache>,
}

/// A model by the name of its class and by its type, as `architectures` and `model_type` of a config have them.
struct Known {
    architecture: &'static str,
    model_type: &'static str,
    reader: Reader,
}

const fn known(architecture: &'static str, model_type: &'static str, reader: Reader) -> Known {
    Known { architecture, model_type, reader }
}

const KNOWN: [Known; 25] = [
    known("DeepseekV32ForCausalLM", "deepseek_v32", families::sparse_latent),
    known("DeepseekV3ForCausalLM", "deepseek_v3", families::latent),
    known("DeepseekV3ForCausalLM", "kimi_k2", families::latent),
    known("DeepseekV4ForCausalLM", "deepseek_v4", families::compressed),
    known("Gemma3ForCausalLM", "gemma3_text", families::gemma),
    known("Gemma3ForConditionalGeneration", "gemma3", families::gemma),
    known("Gemma4ForCausalLM", "gemma4_text", families::gemma_of_two_sizes),
    known("Gemma4ForConditionalGeneration", "gemma4", families::gemma_of_two_sizes),
    known("GlmMoeDsaForCausalLM", "glm_moe_dsa", families::sparse_latent),
    known("GptOssForCausalLM", "gpt_oss", families::gpt_oss),
    known("KimiK25ForConditionalGeneration", "kimi_k25", families::latent),
    known("KimiK3ForConditionalGeneration", "kimi_k3", families::kimi_linear),
    known("KimiLinearForCausalLM", "kimi_linear", families::kimi_linear),
    known("LlamaForCausalLM", "llama", families::llama),
    known("MiniMaxM2ForCausalLM", "minimax_m2", families::minimax),
    known("MiniMaxM3SparseForCausalLM", "minimax_m3", families::minimax_sparse),
    known("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", families::minimax_sparse),
    known("MistralForCausalLM", "mistral", families::mistral),
    known("NemotronHForCausalLM", "nemotron_h", families::nemotron_h),
    known("Qwen2ForCausalLM", "qwen2", families::qwen2),
    known("Qwen3ForCausalLM", "qwen3", families::qwen3),
    known("Qwen3MoeForCausalLM", "qwen3_moe", families::qwen3),
    known("Qwen3NextForCausalLM", "qwen3_next", families::gated_delta_net),
    known("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", families::gated_delta_net),
    known("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", families::gated_delta_net),
];

impl ModelFacts {
    /// Reads a genuine `config.json`: keys that do not concern the cache may be there or not, and what `text_config` says
    /// of the language part of a multimodal model goes before what the outer object says.
    ///
    /// The first of `architectures` decides how the model caches; without any, `model_type` does. [`Self::architectures`]
    /// lists the known ones. `NaN` and `Infinity`, which JSON does not have but Python writes, are taken for null.
    ///
    /// # Errors
    ///
    /// See [`ConfigError`]; each names the key or the layer.
    pub fn from_config(json: &str) -> Result<Self, ConfigError> {
        let config = Config::parse(json)?;
        let model_type = config.outer_text("model_type")?.to_owned();
        let reader = match config.architecture()? {
            Some(architecture) => {
                let by_name = KNOWN.iter().find(|known| known.architecture == architecture);
                by_name.ok_or_else(|| ConfigError::UnknownArchitecture {
                    found: architecture.to_owned(),
                    known: Self::architectures().collect(),
                })?
            }
            None => {
                let by_type = KNOWN.iter().find(|known| known.model_type == model_type);
                by_type.ok_or_else(|| ConfigError::UnknownModelType {
                    found: model_type.clone(),
                    known: KNOWN.iter().map(|known| known.model_type).collect(),
                })?
            }
        };
        let Facts { hidden_layers, mtp_layers, caches } = (reader.reader)(&config)?;
        let dtype = config.model_dtype()?;
        Ok(Self { model_type, hidden_layers, mtp_layers, dtype, caches })
    }

    /// The architectures that [`Self::from_config`] knows, in alphabetical order.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        let mut before = "";
        KNOWN.iter().map(|known| known.architecture).filter(move |name| std::mem::replace(&mut before, name) != *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_in_order_and_says_each_thing_once() {
        assert!(KNOWN.is_sorted_by_key(|known| (known.architecture, known.model_type)));
        let mut types: Vec<_> = KNOWN.iter().map(|known| known.model_type).collect();
        types.sort_unstable();
        assert!(types.is_sorted_by(|a, b| a < b));
        let names: Vec<_> = ModelFacts::architectures().collect();
        assert!(names.is_sorted_by(|a, b| a < b) && names.len() == KNOWN.len() - 1);
    }
}
