//! Facts of each family from small configs, good and bad. The genuine ones are under `models`.

use kvferry_layout::{Dtype, GroupKind, ModelFacts, PageTable, Role, TableOptions, build};
use serde_json::{Value, json};

fn with(mut config: Value, keys: Value) -> Value {
    let Value::Object(keys) = keys else { panic!("keys are an object") };
    config.as_object_mut().unwrap().extend(keys);
    config
}

fn table_of(config: &Value) -> PageTable {
    let facts = ModelFacts::from_config(&config.to_string()).unwrap();
    let options = TableOptions { mtp: true, ..TableOptions::new(128, Dtype::Bf16, 4) };
    build(&facts, &"tp1".parse().unwrap(), 0, &options).unwrap()
}

/// The mask of `role` in each group, by the window of the group.
#[track_caller]
fn masks(config: &Value, role: &Role, expected: &[(Option<u32>, &str)]) {
    let table = table_of(config);
    let found = table.groups.iter().filter_map(|group| {
        let mask: String = (0..table.role_mask(role).layer_count())
            .map(|layer| if group.rows.iter().any(|row| row.role == *role && row.layer.0 == layer) { 'T' } else { 'F' })
            .collect();
        let window = match group.kind {
            GroupKind::Paged { window_tokens, .. } => window_tokens,
            GroupKind::State => Some(0),
        };
        mask.contains('T').then_some((window, mask))
    });
    let expected: Vec<_> = expected.iter().map(|(window, mask)| (*window, (*mask).to_owned())).collect();
    assert_eq!(found.collect::<Vec<_>>(), expected);
}

#[track_caller]
fn refused(config: &Value, message: &str) {
    assert_eq!(ModelFacts::from_config(&config.to_string()).unwrap_err().to_string(), message);
}

fn heads(model_type: &str, keys: Value) -> Value {
    let config = json!({
        "model_type": model_type, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8,
    });
    with(config, keys)
}

const BY_TURNS: [&str; 4] = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"];

#[test]
fn windows() {
    let check = |model_type: &str, keys: Value, expected: &[(Option<u32>, &str)]| {
        masks(&heads(model_type, keys), &Role::Key, expected);
    };
    let listed = || json!({ "layer_types": BY_TURNS, "sliding_window": 128 });
    let by_turns: &[(Option<u32>, &str)] = &[(None, "FTFT"), (Some(128), "TFTF")];
    for model_type in ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text"] {
        check(model_type, listed(), by_turns);
    }
    let windowed = || json!({ "sliding_window": 128 });
    check("mistral", windowed(), &[(Some(128), "TTTT")]);
    check("mistral", json!({ "sliding_window": null }), &[(None, "TTTT")]);
    check("gpt_oss", windowed(), by_turns);
    check("llama", json!({}), &[(None, "TTTT")]);

    // Qwen's window counts only if it is switched on, and then from some layer on.
    check("qwen2", windowed(), &[(None, "TTTT")]);
    check("qwen3", with(windowed(), json!({ "use_sliding_window": false })), &[(None, "TTTT")]);
    let from = |layer: u32| json!({ "sliding_window": 128, "use_sliding_window": true, "max_window_layers": layer });
    check("qwen2", from(3), &[(None, "TTTF"), (Some(128), "FFFT")]);
    check("qwen3", from(0), &[(Some(128), "TTTT")]);
    check("qwen3", from(9), &[(None, "TTTT")]);
    check("qwen3", json!({ "use_sliding_window": true, "sliding_window": null }), &[(None, "TTTT")]);

    let eight = |keys: Value| with(keys, json!({ "num_hidden_layers": 8, "sliding_window": 128 }));
    check("gemma3_text", eight(json!({})), &[(None, "FFFFFTFF"), (Some(128), "TTTTTFTT")]);
    let third = json!({ "sliding_window_pattern": 3 });
    check("gemma3_text", eight(third), &[(None, "FFTFFTFF"), (Some(128), "TTFTTFTT")]);
}

#[test]
fn windows_that_are_not_understood() {
    let check = |model_type: &str, keys: Value, message: &str| refused(&heads(model_type, keys), message);
    check(
        "llama",
        json!({ "sliding_window": 1024 }),
        "config: sliding_window 1024 without layer_types, which a llama model has no rule for",
    );
    check(
        "qwen3",
        json!({ "layer_types": ["full_attention", "chunked_attention", "full_attention", "full_attention"] }),
        "config: layer_types says \"chunked_attention\" for layer 1; known are full_attention, sliding_attention",
    );
    check("qwen3", json!({ "layer_types": BY_TURNS[..3] }), "config: layer_types has 3 entries for 4 layers");
    check("gpt_oss", json!({ "layer_types": BY_TURNS }), "config has no sliding_window");
    check("mistral", json!({ "sliding_window": 0 }), "config: sliding_window is 0, not in 1..=4294967295");
    check("qwen2", json!({ "sliding_window": 8, "use_sliding_window": true }), "config has no max_window_layers");
    check("qwen2", json!({ "use_sliding_window": 1 }), "config: use_sliding_window is not true or false");
    check(
        "qwen3",
        json!({ "layer_types": BY_TURNS, "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 2 }),
        "config: layer_types and max_window_layers differ on what layer 0 is",
    );
    check(
        "gemma3_text",
        json!({ "layer_types": BY_TURNS, "sliding_window": 8, "sliding_window_pattern": 4 }),
        "config: layer_types and sliding_window_pattern differ on what layer 1 is",
    );
}

/// Heads of another size on full layers, and layers that read the caches of others.
#[test]
fn two_head_sizes_in_one_model() {
    let gemma = |keys: Value| {
        let types = json!({ "layer_types": BY_TURNS, "sliding_window": 128, "global_head_dim": 16 });
        heads("gemma4_text", with(types, keys))
    };
    let check = |keys: Value, full: (u32, u64), windowed: (u32, u64)| {
        let table = table_of(&gemma(keys));
        let shape = |layer: u32| {
            let plane = &table.row(kvferry_layout::Layer(layer), &Role::Value).unwrap().1.planes[0];
            (plane.units_total, plane.cell_bytes)
        };
        assert_eq!((shape(1), shape(0)), (full, windowed));
    };
    check(json!({ "attention_k_eq_v": true, "num_global_key_value_heads": 1 }), (1, 32), (2, 16));
    // The other head count is that of layers which take keys for values.
    check(json!({ "attention_k_eq_v": false, "num_global_key_value_heads": 1 }), (2, 32), (2, 16));
    check(json!({ "attention_k_eq_v": true, "num_global_key_value_heads": null }), (2, 32), (2, 16));
    check(json!({ "global_head_dim": null }), (2, 16), (2, 16));
    masks(&gemma(json!({ "num_kv_shared_layers": 1 })), &Role::Key, &[(None, "FTFF"), (Some(128), "TFTF")]);
    refused(&gemma(json!({ "num_kv_shared_layers": 5 })), "config: num_kv_shared_layers is 5, not in 0..=4");
}

/// What the language part says goes before what the outer object says.
#[test]
fn the_language_part_of_a_multimodal_model() {
    let text = json!({ "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 6, "sliding_window": 4 });
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "num_hidden_layers": 27,
        "text_config": with(text, json!({ "architectures": ["Unheard"], "model_type": "unheard", "dtype": "float16" })),
    });
    masks(&config, &Role::Key, &[(None, "FFFFFT"), (Some(4), "TTTTTF")]);
    let facts = ModelFacts::from_config(&config.to_string()).unwrap();
    assert_eq!((facts.model_type(), facts.dtype()), ("gemma3", Dtype::F16));
    // Null there is as good as nothing there.
    let outer = heads("llama", json!({ "text_config": { "head_dim": null } }));
    assert_eq!(table_of(&outer), table_of(&heads("llama", json!({}))));
    let dtype = |keys| ModelFacts::from_config(&heads("llama", keys).to_string()).unwrap().dtype();
    assert_eq!(dtype(json!({})), Dtype::Bf16);
    assert_eq!(dtype(json!({ "torch_dtype": "float32" })), Dtype::F32);
    assert_eq!(dtype(json!({ "torch_dtype": "torch.float16", "dtype": "float32" })), Dtype::F32);
}

#[test]
fn architecture_goes_before_type() {
    let config = |keys: Value| heads("of_our_own", keys);
    masks(&config(json!({ "architectures": ["Qwen3ForCausalLM"] })), &Role::Key, &[(None, "TTTT")]);
    for architectures in [json!(null), json!([])] {
        let error =
            ModelFacts::from_config(&config(json!({ "architectures": architectures })).to_string()).unwrap_err();
        assert!(error.to_string().starts_with("unknown model_type \"of_our_own\""));
    }
}

fn minimax(keys: Value) -> Value {
    let sparse =
        json!({ "use_sparse_attention": true, "sparse_index_dim": 128, "sparse_attention_freq": [0, 1, 1, 1] });
    heads("minimax_m3", with(json!({ "sparse_attention_config": sparse }), keys))
}

#[test]
fn block_sparse_heads() {
    masks(&minimax(json!({})), &Role::IndexerKey, &[(None, "FTTT")]);
    masks(&minimax(json!({ "num_mtp_modules": 2, "mtp_transformer_layers": 3 })), &Role::Key, &[(None, "TTTTTTTTTT")]);
    masks(&minimax(json!({ "num_mtp_modules": 2, "use_mtp": false })), &Role::Key, &[(None, "TTTT")]);
    masks(&minimax(json!({ "sparse_attention_config": { "use_sparse_attention": false } })), &Role::IndexerKey, &[]);
    let sparse = |config: Value| minimax(json!({ "sparse_attention_config": config }));
    refused(&minimax(json!({ "sparse_attention_config": null })), "config has no sparse_attention_config");
    refused(&sparse(json!([])), "config: sparse_attention_config is not an object");
    let keys = json!({ "use_sparse_attention": true, "sparse_index_dim": 128 });
    refused(&sparse(keys.clone()), "config has no sparse_attention_freq");
    let freq = |freq: Value| sparse(with(keys.clone(), json!({ "sparse_attention_freq": freq })));
    refused(&freq(json!([1, 1, 1])), "config: sparse_attention_freq has 3 entries for 4 layers");
    refused(&freq(json!([1, 1, 1, 2])), "config: sparse_attention_freq is 2, not in 0..=1");
    refused(&minimax(json!({ "num_mtp_modules": 70_000 })), "config: num_mtp_modules is 70000, not in 0..=65532");
    let each = json!({ "num_mtp_modules": 40_000, "mtp_transformer_layers": 2 });
    refused(&minimax(each), "config: num_mtp_modules is 40000, not in 0..=32766");
}

fn delta_net(keys: Value) -> Value {
    let linear = json!({
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    });
    heads("qwen3_next", with(linear, keys))
}

#[test]
fn gated_delta_nets() {
    let none = || json!({ "mtp_num_hidden_layers": 0 });
    masks(&delta_net(none()), &Role::Key, &[(None, "FFFT")]);
    masks(&delta_net(none()), &Role::ConvState, &[(Some(0), "TTTF")]);
    masks(&delta_net(json!({ "mtp_num_hidden_layers": 2 })), &Role::Key, &[(None, "FFFTTT")]);
    // No key: one, as in vLLM.
    masks(&delta_net(json!({})), &Role::Key, &[(None, "FFFTT")]);
    masks(&delta_net(json!({ "num_nextn_predict_layers": 0 })), &Role::Key, &[(None, "FFFT")]);
    masks(&delta_net(with(none(), json!({ "full_attention_interval": 2 }))), &Role::SsmState, &[(Some(0), "TFTF")]);
    let types = ["full_attention", "linear_attention", "linear_attention", "linear_attention"];
    masks(&delta_net(with(none(), json!({ "layer_types": types }))), &Role::Key, &[(None, "TFFF")]);
    refused(
        &delta_net(json!({ "layer_types": types, "full_attention_interval": 4 })),
        "config: layer_types and full_attention_interval differ on what layer 0 is",
    );
    refused(
        &delta_net(json!({ "linear_conv_kernel_dim": 1 })),
        "config: linear_conv_kernel_dim is 1, not in 2..=65535",
    );
    refused(
        &delta_net(json!({ "mamba_ssm_dtype": "float64" })),
        "config: mamba_ssm_dtype is \"float64\"; known are float32, float16, bfloat16",
    );
    // Sections q, k of 2 heads of 4 and v of 4 heads of 8; a matrix of 4 by 8 a head.
    let table = table_of(&delta_net(none()));
    let row = |role| table.row(kvferry_layout::Layer(0), &role).unwrap().1.clone();
    let conv: Vec<_> = row(Role::ConvState).planes.iter().map(|plane| (plane.units_total, plane.tokens)).collect();
    assert_eq!(conv, [(8, 3), (8, 3), (32, 3)]);
    let ssm = &row(Role::SsmState).planes[0];
    assert_eq!((ssm.units_total, ssm.cell_bytes), (4, 64));
}

fn nemotron(keys: Value) -> Value {
    let mamba = json!({
        "mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4,
        "hybrid_override_pattern": "M*-E",
    });
    heads("nemotron_h", with(mamba, keys))
}

#[test]
fn mamba_hybrids() {
    masks(&nemotron(json!({})), &Role::Key, &[(None, "FTFF")]);
    masks(&nemotron(json!({})), &Role::SsmState, &[(Some(0), "TFFF")]);
    let words = || json!({ "layers_block_type": ["mamba", "attention", "mlp", "moe"], "num_hidden_layers": null });
    assert_eq!(table_of(&nemotron(words())), table_of(&nemotron(json!({}))));
    let words_alone = with(words(), json!({ "hybrid_override_pattern": null }));
    assert_eq!(table_of(&nemotron(words_alone.clone())), table_of(&nemotron(json!({}))));
    let head_dim = json!({ "head_dim": null, "attention_head_dim": 8 });
    assert_eq!(table_of(&nemotron(head_dim)), table_of(&nemotron(json!({}))));

    // Each layer of the MTP pattern counts.
    let mtp = |layers: u32| json!({ "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": layers });
    masks(&nemotron(mtp(2)), &Role::Key, &[(None, "FTFFTFT")]);
    masks(&nemotron(mtp(0)), &Role::Key, &[(None, "FTFF")]);
    let facts = ModelFacts::from_config(&nemotron(mtp(2)).to_string()).unwrap();
    assert_eq!((facts.hidden_layers(), facts.mtp_layers()), (4, 4));
    let words = json!({ "mtp_layers_block_type": ["attention", "moe"], "num_nextn_predict_layers": 1 });
    masks(&nemotron(words), &Role::Key, &[(None, "FTFFT")]);

    refused(
        &nemotron(json!({ "hybrid_override_pattern": "M*X-" })),
        "config: hybrid_override_pattern says X for layer 2; known are M, *, -, E",
    );
    refused(&nemotron(json!({ "hybrid_override_pattern": ["M"] })), "config: hybrid_override_pattern is not a string");
    refused(&nemotron(json!({ "hybrid_override_pattern": null })), "config has no hybrid_override_pattern");
    let nothing = json!({ "hybrid_override_pattern": "", "num_hidden_layers": null });
    refused(&nemotron(nothing), "config has no num_hidden_layers");
    refused(
        &nemotron(json!({ "hybrid_override_pattern": "M*-" })),
        "config: hybrid_override_pattern has 3 entries for 4 layers",
    );
    refused(
        &nemotron(with(words_alone, json!({ "hybrid_override_pattern": "*M-E" }))),
        "config: hybrid_override_pattern and layers_block_type differ on what layer 0 is",
    );
}

/// Genuine Nemotron-H configs hold what JSON does not have.
#[test]
fn infinity_is_no_fact() {
    let config = nemotron(json!({ "time_step_limit": [0.0, "word"] })).to_string();
    let config = config.replace("\"word\"", "Infinity");
    assert!(config.contains("[0.0,Infinity]"));
    assert_eq!(ModelFacts::from_config(&config).unwrap().hidden_layers(), 4);
}

fn kimi(keys: Value) -> Value {
    let linear = json!({
        "full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4,
    });
    let latent = json!({ "kv_lora_rank": 8, "qk_rope_head_dim": 4 });
    heads("kimi_linear", with(latent, json!({ "linear_attn_config": with(linear, keys) })))
}

#[test]
fn delta_attention_beside_latents() {
    masks(&kimi(json!({})), &Role::Latent, &[(None, "FTFT")]);
    masks(&kimi(json!({})), &Role::ConvState, &[(Some(0), "TFTF")]);
    let lists = |times| format!("config: full_attn_layers and kda_layers list layer number 3 {times} times");
    refused(&kimi(json!({ "kda_layers": [1] })), &lists(0));
    refused(&kimi(json!({ "full_attn_layers": [2, 3, 4] })), &lists(2));
    refused(&kimi(json!({ "kda_layers": [0, 1, 3] })), "config: kda_layers is 0, not in 1..=4");
    refused(&kimi(json!({ "kda_layers": [1, 3, 5] })), "config: kda_layers is 5, not in 1..=4");
    refused(&kimi(json!({ "kda_layers": 3 })), "config: kda_layers is not a list");
}

fn compressed(keys: Value) -> Value {
    let config = json!({
        "compress_ratios": [128, 4, 0, 4], "sliding_window": 128, "head_dim": 512, "qk_rope_head_dim": 64,
        "index_head_dim": 128,
    });
    heads("deepseek_v4", with(config, keys))
}

#[test]
fn compressed_latents() {
    let named = |name: &str| Role::Named(name.to_owned());
    masks(&compressed(json!({})), &Role::Latent, &[(Some(128), "TTTT")]);
    masks(&compressed(json!({})), &named("compressed latent"), &[(None, "TTFT")]);
    masks(&compressed(json!({})), &Role::IndexerKey, &[(None, "FTFT")]);
    masks(&compressed(json!({})), &named("compressor state"), &[(Some(128), "TFFF"), (Some(8), "FTFT")]);
    masks(&compressed(json!({})), &named("indexer compressor state"), &[(Some(8), "FTFT")]);
    // A window alone: one group.
    let window_alone = compressed(json!({ "compress_ratios": [0, 0, 0, 0] }));
    assert_eq!(table_of(&window_alone).groups.len(), 1);
    refused(
        &compressed(json!({ "compress_ratios": [4, 4, 8, 4] })),
        "config: compress_ratios says 8 for layer 2; known are 0, 4, 128",
    );
    refused(
        &compressed(json!({ "num_nextn_predict_layers": 1 })),
        "config: compress_ratios has 4 entries for 5 layers",
    );
    refused(&compressed(json!({ "qk_rope_head_dim": 513 })), "config: qk_rope_head_dim is 513, not in 1..=512");
    refused(&compressed(json!({ "sliding_window": null })), "config has no sliding_window");
}
