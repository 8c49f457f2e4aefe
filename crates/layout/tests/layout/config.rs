//! Facts from configs, good and bad.

use std::error::Error;

use kvferry_layout::{ConfigError, Layer, ModelFacts};
use serde_json::{Value, json};

use crate::tables::config_of;

fn facts(config: &Value) -> Result<ModelFacts, ConfigError> {
    ModelFacts::from_config(&config.to_string())
}

#[track_caller]
fn refused(config: &Value, message: &str) {
    assert_eq!(facts(config).unwrap_err().to_string(), message);
}

fn glm() -> Value {
    serde_json::from_str(&config_of("glm-5.2")).unwrap()
}

/// A sparse model of four layers and one MTP layer, with the given keys.
fn small(keys: Value) -> Value {
    let mut config = json!({
        "model_type": "glm_moe_dsa", "num_hidden_layers": 4, "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048,
    });
    let Value::Object(keys) = keys else { panic!("keys are an object") };
    config.as_object_mut().unwrap().extend(keys);
    config
}

fn llama(keys: Value) -> Value {
    let mut config = json!({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    });
    let Value::Object(keys) = keys else { panic!("keys are an object") };
    config.as_object_mut().unwrap().extend(keys);
    config
}

#[test]
fn glm_5_2_owns_21_of_78_and_the_mtp_layer() {
    let facts = facts(&glm()).unwrap();
    let owners: Vec<u32> = facts.indexer_owners().unwrap().owners().map(|Layer(layer)| layer).collect();
    assert_eq!(owners, [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74, 78]);
    assert_eq!((facts.hidden_layers(), facts.mtp_layers(), facts.model_type()), (78, 1, "glm_moe_dsa"));
}

#[test]
fn each_source_of_the_mask_alone_says_the_same_of_glm_5_2() {
    let expected = facts(&glm()).unwrap();
    let without = |keys: &[&str]| {
        let mut config = glm();
        for key in keys {
            config.as_object_mut().unwrap().remove(*key);
        }
        config
    };
    assert_eq!(facts(&without(&["index_topk_freq", "index_skip_topk_offset"])).unwrap(), expected);
    let by_freq = without(&["indexer_types"]);
    assert_eq!(facts(&by_freq).unwrap(), expected);
    let mut by_pattern = without(&["indexer_types", "index_topk_freq", "index_skip_topk_offset"]);
    by_pattern["index_topk_pattern"] = format!("FFF{}SSS", "SSSF".repeat(18)).into();
    assert_eq!(facts(&by_pattern).unwrap(), expected);
}

#[test]
fn masks() {
    let check = |keys: Value, expected: &str| {
        let facts = facts(&small(keys)).unwrap();
        assert_eq!(facts.indexer_owners().unwrap().to_string(), expected);
    };
    check(json!({}), "TTTTT");
    check(json!({ "indexer_types": null, "index_topk_pattern": null, "index_topk_freq": null }), "TTTTT");
    check(json!({ "indexer_types": ["full", "shared", "full", "shared"] }), "TFTFT");
    check(json!({ "index_topk_pattern": "FSSF" }), "TFFTT");
    check(json!({ "index_topk_pattern": ["F", "S", "full", "shared"] }), "TFTFT");
    check(json!({ "index_topk_freq": 1 }), "TTTTT");
    // The offset is 2 where it is not given: max(i - 1, 0) % 2.
    check(json!({ "index_topk_freq": 2 }), "TTFTT");
    check(json!({ "index_topk_freq": 2, "index_skip_topk_offset": 0 }), "FTFTT");
    check(json!({ "index_topk_freq": 4, "index_skip_topk_offset": 3 }), "TTTFT");
    check(json!({ "index_topk_freq": 4_000_000_000u32, "index_skip_topk_offset": 1 }), "TFFFT");
    // An offset without a frequency says nothing.
    check(json!({ "index_skip_topk_offset": 3 }), "TTTTT");
    check(json!({ "indexer_types": ["full", "full", "shared", "full"], "index_topk_freq": 2 }), "TTFTT");
    check(json!({ "num_nextn_predict_layers": 0, "index_topk_pattern": "FSSF" }), "TFFT");
}

#[test]
fn sources_that_disagree() {
    let types = json!(["full", "full", "shared", "full"]);
    refused(
        &small(json!({ "indexer_types": types, "index_topk_pattern": "FFSS" })),
        "config: layer 3 owns an indexer by indexer_types, but not by index_topk_pattern",
    );
    refused(
        &small(json!({ "indexer_types": types, "index_topk_freq": 1 })),
        "config: layer 2 owns an indexer by index_topk_freq, but not by indexer_types",
    );
    refused(
        &small(json!({ "index_topk_pattern": "FSFS", "index_topk_freq": 2 })),
        "config: layer 1 owns an indexer by index_topk_freq, but not by index_topk_pattern",
    );
    let mut config = glm();
    config["index_skip_topk_offset"] = 2.into();
    refused(&config, "config: layer 2 owns an indexer by indexer_types, but not by index_topk_freq");
}

#[test]
fn sources_that_are_not_understood() {
    refused(
        &small(json!({ "indexer_types": ["full", "shared", "none", "full"] })),
        "config: indexer_types says \"none\" for layer 2, not \"full\" or \"shared\"",
    );
    refused(
        &small(json!({ "indexer_types": ["full", 1, "full", "full"] })),
        "config: indexer_types says 1 for layer 1, not \"full\" or \"shared\"",
    );
    refused(&small(json!({ "indexer_types": ["full"] })), "config: indexer_types has 1 entries for 4 layers");
    refused(&small(json!({ "indexer_types": "FSSF" })), "config: indexer_types is not a list");
    refused(&small(json!({ "index_topk_pattern": "FSSFF" })), "config: index_topk_pattern has 5 entries for 4 layers");
    refused(
        &small(json!({ "index_topk_pattern": "FSfS" })),
        "config: index_topk_pattern says f for layer 2, not F (full) or S (shared)",
    );
    refused(&small(json!({ "index_topk_pattern": 4 })), "config: index_topk_pattern is not a string or a list");
    refused(&small(json!({ "index_topk_freq": 0 })), "config: index_topk_freq is 0, not in 1..=4294967295");
    refused(&small(json!({ "index_topk_freq": -1 })), "config: index_topk_freq is not a non-negative integer");
}

#[test]
fn families() {
    let layers = |config: &Value| facts(config).unwrap().indexer_owners().map(|owners| owners.count());
    assert_eq!(layers(&serde_json::from_str(&config_of("deepseek-v3.2")).unwrap()), Some(62));
    assert_eq!(layers(&serde_json::from_str(&config_of("llama-3.1-8b")).unwrap()), None);
    let without_index = |model_type: &str| {
        let mut config = small(json!({ "model_type": model_type }));
        config.as_object_mut().unwrap().remove("index_topk");
        config
    };
    assert_eq!(layers(&without_index("deepseek_v3")), None);
    assert_eq!(layers(&without_index("kimi_k2")), None);
    // A sparse model under the older model type shows itself by `index_topk`.
    assert_eq!(layers(&small(json!({ "model_type": "deepseek_v3" }))), Some(5));
    for model_type in ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"] {
        assert_eq!(layers(&llama(json!({ "model_type": model_type, "head_dim": 16 }))), None);
    }
    assert_eq!(facts(&llama(json!({ "head_dim": 8 }))).unwrap(), facts(&llama(json!({ "head_dim": null }))).unwrap());
}

#[test]
fn unknown_models_and_missing_keys() {
    refused(
        &json!({ "model_type": "gpt2" }),
        "unknown model_type \"gpt2\"; known are deepseek_v32, deepseek_v3, kimi_k2, deepseek_v4, gemma3_text, gemma3, \
         gemma4_text, gemma4, glm_moe_dsa, gpt_oss, kimi_k25, kimi_k3, kimi_linear, llama, minimax_m2, minimax_m3, \
         minimax_m3_vl, mistral, nemotron_h, qwen2, qwen3, qwen3_moe, qwen3_next, qwen3_5_moe_text, qwen3_5_moe",
    );
    let unknown = llama(json!({ "architectures": ["LlamaForCausalLMEagle3"] }));
    refused(
        &unknown,
        "unknown architecture \"LlamaForCausalLMEagle3\"; known are DeepseekV32ForCausalLM, DeepseekV3ForCausalLM, \
         DeepseekV4ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma4ForCausalLM, \
         Gemma4ForConditionalGeneration, GlmMoeDsaForCausalLM, GptOssForCausalLM, KimiK25ForConditionalGeneration, \
         KimiK3ForConditionalGeneration, KimiLinearForCausalLM, LlamaForCausalLM, MiniMaxM2ForCausalLM, \
         MiniMaxM3SparseForCausalLM, MiniMaxM3SparseForConditionalGeneration, MistralForCausalLM, NemotronHForCausalLM, \
         Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen3NextForCausalLM, Qwen3_5MoeForCausalLM, \
         Qwen3_5MoeForConditionalGeneration",
    );
    let Err(ConfigError::UnknownArchitecture { known, .. }) = facts(&unknown) else { panic!("refused above") };
    assert!(known.into_iter().eq(ModelFacts::architectures()));
    refused(&json!({}), "config has no model_type");
    refused(&json!({ "model_type": 5 }), "config: model_type is not a string");
    let needed = ["num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim"];
    for key in needed {
        let mut config = small(json!({}));
        config.as_object_mut().unwrap().remove(key);
        refused(&config, &format!("config has no {key}"));
    }
    for key in ["num_hidden_layers", "num_key_value_heads", "hidden_size", "num_attention_heads"] {
        let mut config = llama(json!({}));
        config.as_object_mut().unwrap().remove(key);
        refused(&config, &format!("config has no {key}"));
    }
    refused(&llama(json!({ "model_type": "qwen3" })), "config has no head_dim");
    for text in ["", "[]", "{", "\"llama\""] {
        let error = ModelFacts::from_config(text).unwrap_err();
        assert_eq!(error.to_string(), "config is not a JSON object");
        assert!(error.source().is_some());
    }
}

#[test]
fn values_no_model_has() {
    refused(&llama(json!({ "num_hidden_layers": 0 })), "config: num_hidden_layers is 0, not in 1..=65536");
    refused(
        &llama(json!({ "num_hidden_layers": 1_000_000_000 })),
        "config: num_hidden_layers is 1000000000, not in 1..=65536",
    );
    refused(&llama(json!({ "num_key_value_heads": 0 })), "config: num_key_value_heads is 0, not in 1..=65535");
    refused(
        &llama(json!({ "num_key_value_heads": u64::MAX })),
        "config: num_key_value_heads is 18446744073709551615, not in 1..=65535",
    );
    refused(&llama(json!({ "num_hidden_layers": 2.0 })), "config: num_hidden_layers is not a non-negative integer");
    refused(&llama(json!({ "num_hidden_layers": "2" })), "config: num_hidden_layers is not a non-negative integer");
    refused(&llama(json!({ "num_attention_heads": 0 })), "config: num_attention_heads is 0, not in 1..=65535");
    refused(
        &llama(json!({ "num_attention_heads": 7 })),
        "config: hidden_size 64 is not a multiple of num_attention_heads 7",
    );
    refused(&small(json!({ "num_hidden_layers": 65_536 })), "config: num_nextn_predict_layers is 1, not in 0..=0");
    refused(
        &small(json!({ "index_head_dim": 100 })),
        "config: index_head_dim 100 is not a multiple of the 128 elements of a scale",
    );
    refused(&llama(json!({ "text_config": 5 })), "config: text_config is not an object");
    for architectures in [json!("LlamaForCausalLM"), json!([5])] {
        let config = llama(json!({ "architectures": architectures }));
        refused(&config, "config: architectures is not a list of strings");
    }
    refused(&llama(json!({ "dtype": "int8" })), "config: dtype is \"int8\"; known are float32, float16, bfloat16");
    refused(&llama(json!({ "torch_dtype": 16 })), "config: torch_dtype is not a string");
}
