//! Readers against published models, descriptions against themselves, and broken input.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn model(config: &Value) -> Model {
    Model::from_config(&config.to_string()).unwrap()
}

fn message(config: &Value) -> String {
    Model::from_config(&config.to_string()).unwrap_err().to_string()
}

/// Fields of released configs that differ from their class's defaults, and the parameters that those models have.
fn published() -> Vec<(&'static str, Value, u64)> {
    vec![
        (
            "Llama-3.1-8B",
            json!({"model_type": "llama", "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128_256}),
            8_030_261_248,
        ),
        (
            "Llama-3.2-1B",
            json!({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                   "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": true}),
            1_235_814_400,
        ),
        (
            "SmolLM2-135M",
            json!({"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                   "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
                   "tie_word_embeddings": true}),
            134_515_008,
        ),
        ("Mistral-7B-v0.1", json!({"model_type": "mistral"}), 7_241_732_096),
        ("Mixtral-8x7B-v0.1", json!({"model_type": "mixtral"}), 46_702_792_704),
        (
            "Qwen2.5-7B",
            json!({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064}),
            7_615_616_512,
        ),
        (
            "Qwen3-8B",
            json!({"model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36,
                   "num_key_value_heads": 8}),
            8_190_735_360,
        ),
        ("Qwen3-30B-A3B", json!({"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128}), 30_532_122_624),
        ("Gemma-2-2B", json!({"model_type": "gemma2"}), 2_614_341_888),
        (
            "Gemma-3-270M",
            json!({"model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048,
                   "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
                   "vocab_size": 262_144}),
            268_098_176,
        ),
        ("Phi-3-mini-4k", json!({"model_type": "phi3"}), 3_821_079_552),
        (
            "gpt-oss-20b",
            json!({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}),
            20_914_757_184,
        ),
        ("DeepSeek-V3", json!({"model_type": "deepseek_v3"}), 671_026_404_352),
        ("SmolLM3-3B", json!({"model_type": "smollm3"}), 3_075_098_624),
    ]
}

#[test]
fn published_models_have_the_parameters_they_are_known_for() {
    for (name, config, parameters) in published() {
        assert_eq!(model(&config).parameters(), parameters, "{name}");
    }
}

#[test]
fn active_weights_are_a_mixtures_few() {
    // Qwen3-30B-A3B activates 3.3 billion parameters; 0.3 of them are the embeddings and 0.3 the output layer.
    let (_, config, _) = published().swap_remove(7);
    let model = model(&config);
    let active = model.weights() + 2.0 * model.output_weights();
    assert!((3.3e9..3.4e9).contains(&active), "{active}");
    assert_eq!(model.output_weights(), 2048.0 * 151_936.0);
}

#[test]
fn a_description_reads_back_as_the_same_model() {
    for (name, config, parameters) in published() {
        let model = model(&config);
        let text = model.to_json().unwrap();
        let again = Model::from_description(&text).unwrap();
        assert_eq!(again, model, "{name}");
        assert_eq!(again.figures(7).parameters, parameters, "{name}");
    }
}

#[test]
fn layers_are_what_each_config_derives() {
    let kinds = |config: Value| -> String {
        let letter = |layer: &Layer| match &layer.mixer {
            Mixer::Attention(Attention { shared_from: Some(_), .. }) => 'r',
            Mixer::Attention(Attention { window: Some(_), .. }) => 's',
            Mixer::Attention(_) => 'f',
            Mixer::Mla(_) => 'm',
            Mixer::GatedDelta(_) => 'd',
            Mixer::Mamba2(_) => 'M',
            Mixer::ShortConv(_) => 'c',
            Mixer::Parallel(_) => 'p',
        };
        let dense = |layer: &Layer| if matches!(layer.mlp, Mlp::Moe(_)) { "+" } else { "" };
        model(&config).layers.iter().map(|layer| format!("{}{}", letter(layer), dense(layer))).collect()
    };
    let with = |name: &str, fields: Value| {
        let mut config = json!({"model_type": name, "num_hidden_layers": 8});
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        kinds(config)
    };
    assert_eq!(with("llama", json!({})), "ffffffff");
    assert_eq!(with("mistral", json!({})), "ssssssss");
    assert_eq!(with("mistral", json!({"sliding_window": null})), "ffffffff");
    assert_eq!(with("qwen2", json!({"use_sliding_window": true, "max_window_layers": 6})), "ffffffss");
    assert_eq!(with("qwen3", json!({"max_window_layers": 0})), "ffffffff");
    assert_eq!(with("gemma2", json!({})), "sfsfsfsf");
    assert_eq!(with("gemma3", json!({})), "sssssfss");
    assert_eq!(with("gemma3", json!({"sliding_window_pattern": 3})), "ssfssfss");
    assert_eq!(with("gemma4", json!({})), "sssssfsf");
    assert_eq!(with("gemma4", json!({"num_kv_shared_layers": 2})), "sssssfrr");
    assert_eq!(with("gpt_oss", json!({})), "s+f+s+f+s+f+s+f+");
    assert_eq!(with("olmo3", json!({})), "sssfsssf");
    assert_eq!(with("smollm3", json!({"use_sliding_window": true, "sliding_window": 9})), "fffsfffs");
    assert_eq!(with("deepseek_v3", json!({})), "mmmm+m+m+m+m+");
    assert_eq!(with("glm4_moe", json!({"first_k_dense_replace": 2})), "fff+f+f+f+f+f+");
    assert_eq!(with("qwen3_moe", json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]})), "ff+ffff+ff+");
    assert_eq!(with("qwen3_next", json!({})), "d+d+d+f+d+d+d+f+");
    assert_eq!(with("qwen3_5", json!({"full_attention_interval": 2})), "dfdfdfdf");
    assert_eq!(with("falcon_h1", json!({})), "pppppppp");
    assert_eq!(with("lfm2", json!({"full_attn_idxs": [2, 5]})), "ccfccfcc");
    assert_eq!(with("lfm2", json!({})), "ffffffff");
}

#[test]
fn shared_layers_read_the_last_layer_of_their_type() {
    let config = json!({"model_type": "gemma4", "num_hidden_layers": 8, "num_kv_shared_layers": 2});
    let model = model(&config);
    assert_eq!(model.layers[6].mixer.shared_from(), Some(4));
    assert_eq!(model.layers[7].mixer.shared_from(), Some(5));
    assert!(model.layers[6].cache(2304, 100).is_empty());
    assert_eq!(model.layers[6].mixer.cache_weights(2304), 0.0);
}

#[test]
fn a_windows_cache_keeps_one_row_less() {
    let layer = &model(&json!({"model_type": "mistral", "sliding_window": 24})).layers[0];
    assert_eq!(layer.cache(4096, 10)[0].shape, [8, 10, 128]);
    assert_eq!(layer.cache(4096, 100)[0].shape, [8, 23, 128]);
    assert_eq!(layer.cache_bytes(4096, 100, 2), 2.0 * 2.0 * 8.0 * 23.0 * 128.0);
}

#[test]
fn a_fill_needs_only_what_the_cache_keeps() {
    let (_, llama, _) = published().swap_remove(0);
    let attention = &model(&llama).layers[0].mixer;
    assert_eq!(attention.weights(4096), 2.0 * 4096.0 * 4096.0 + 2.0 * 4096.0 * 1024.0);
    assert_eq!(attention.cache_weights(4096), 2.0 * 4096.0 * 1024.0);
    assert_eq!(attention.pair_flops(), 4.0 * 4096.0);
    let mla = &model(&json!({"model_type": "deepseek_v3"})).layers[0].mixer;
    assert_eq!(mla.cache_weights(7168), 7168.0 * 576.0);
    assert_eq!(mla.pair_flops(), 2.0 * 128.0 * (192.0 + 128.0));
    for config in
        [json!({"model_type": "qwen3_next"}), json!({"model_type": "falcon_h1"}), json!({"model_type": "lfm2"})]
    {
        let model = model(&config);
        let d = model.hidden_size;
        for layer in &model.layers {
            let (needed, all) = (layer.mixer.cache_weights(d), layer.mixer.weights(d));
            assert!(0.0 < needed && needed < all, "{needed} of {all}");
            assert!(layer.mixer.cache_width(d) * d as f64 <= needed);
        }
    }
}

#[test]
fn absurd_descriptions_are_refused_by_field() {
    let good = json!({"model_type": "mine", "hidden_size": 8, "vocab_size": 9, "layers": [{
        "count": 3,
        "mixer": {"kind": "attention", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2},
        "mlp": {"kind": "dense", "intermediate_size": 16},
    }]});
    let model = Model::from_description(&good.to_string()).unwrap();
    assert_eq!(model.layers.len(), 3);
    assert_eq!(model.parameters(), 2 * 8 * 9 + 3 * (8 * 8 * 2 + 2 * 8 * 4 + 3 * 8 * 16));
    let refused = |pointer: &str, value: Value| {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        Model::from_description(&bad.to_string()).unwrap_err().to_string()
    };
    assert_eq!(refused("/hidden_size", json!(0)), "hidden_size is 0; expected 1 to 16777216");
    assert_eq!(
        refused("/layers/0/mixer/num_key_value_heads", json!(3)),
        "layers[0].mixer.num_attention_heads is 4; expected a multiple of num_key_value_heads, which is 3"
    );
    assert_eq!(refused("/layers", json!([])), "the number of layers is 0; expected 1 to 4096");
    assert!(refused("/layers/0/count", json!(4097)).contains("count is 4097; expected 1 or more, and at most 4096"));
    assert!(refused("/layers/0/count", json!(u64::MAX)).contains("at most 4096 layers"));
    assert!(refused("/layers/0/mlp/kind", json!("magic")).contains("unknown variant `magic`"));
    let huge = json!({"kind": "moe", "num_experts": 1 << 24, "num_experts_per_tok": 1,
        "moe_intermediate_size": 1 << 24});
    assert!(refused("/layers/0/mlp", huge).starts_with("the number of parameters is 2.027e16; expected at most 2^53"));
    let shared = json!({"kind": "attention", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
        "shared_from": 0});
    assert!(refused("/layers/0/mixer", shared).starts_with("layers[0].mixer.shared_from is 0; expected a layer below"));
}

#[test]
fn unknown_types_name_what_is_known_and_the_way_out() {
    let found = message(&json!({"model_type": "mamba"}));
    assert!(found.starts_with("model_type \"mamba\" is unknown; known are deepseek_v3, falcon_h1, "), "{found}");
    assert!(found.ends_with("pass it with --layers (docs/layers.md)"), "{found}");
    assert!(Model::known_types().is_sorted());
    for name in Model::known_types() {
        assert!(found.contains(name), "{name}");
    }
}

#[test]
fn pythons_infinity_is_read() {
    let text = r#"{"model_type": "falcon_h1", "time_step_limit": [0.0, Infinity]}"#;
    assert_eq!(Model::from_config(text).unwrap(), model(&json!({"model_type": "falcon_h1"})));
}

/// Every field that any reader looks at.
const FIELDS: &[&str] = &[
    "attention_bias",
    "attention_k_eq_v",
    "block_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
    "conv_L_cache",
    "decoder_sparse_step",
    "enable_moe_block",
    "first_k_dense_replace",
    "full_attention_interval",
    "full_attn_idxs",
    "global_head_dim",
    "hc_count",
    "hc_lowrank",
    "head_dim",
    "heads_per_ngram",
    "hidden_size",
    "hidden_size_per_layer_input",
    "indexer_budget",
    "indexer_compress_ratio",
    "indexer_head_dim",
    "indexer_kv_heads",
    "indexer_n_heads",
    "intermediate_size",
    "kv_lora_rank",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "make_ngram_vocab_size_divisible_by",
    "mamba_d_head",
    "mamba_d_ssm",
    "mamba_d_state",
    "mamba_expand",
    "mamba_n_groups",
    "mamba_n_heads",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "mlp_only_layers",
    "model_type",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "ngram_size",
    "ngram_vocab_size_base",
    "no_rope_layer_interval",
    "no_rope_layers",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_global_key_value_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_kv_shared_layers",
    "num_local_experts",
    "per_layer_config",
    "ple_conv_kernel_size",
    "ple_embed_dim",
    "ple_layer_ids",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "shared_expert_intermediate_size",
    "sliding_window",
    "sliding_window_pattern",
    "text_config",
    "tie_word_embeddings",
    "top_k_experts",
    "use_bidirectional_attention",
    "use_double_wide_mlp",
    "use_sliding_window",
    "v_head_dim",
    "vocab_size",
    "vocab_size_per_layer_input",
];

fn any_value() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        0u64..20,
        Just(1 << 24),
        Just((1 << 24) + 1),
        Just(1 << 28),
        Just(u64::from(u32::MAX)),
        Just(u64::MAX),
        any::<u64>()
    ];
    let leaf = prop_oneof![
        6 => number.prop_map(Value::from),
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => prop_oneof![Just("auto"), Just("all"), Just("full_attention"), Just("conv"), Just("é\u{0}")]
            .prop_map(Value::from),
    ];
    prop_oneof![
        8 => leaf.clone(),
        1 => prop::collection::vec(leaf.clone(), 0..9).prop_map(Value::from),
        1 => prop::collection::btree_map("[0-9]", leaf, 0..3).prop_map(|map| json!(map)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4096) })]

    #[test]
    fn no_config_makes_it_panic(
        family in prop::sample::select(Model::known_types()),
        fields in prop::collection::vec((prop::sample::select(FIELDS), any_value()), 0..12),
        layers in 1u64..9, cut in any::<prop::sample::Index>(), indexed in any::<bool>(), rows in any::<u64>(),
    ) {
        let mut config = json!({"model_type": family, "num_hidden_layers": layers});
        let object = config.as_object_mut().unwrap();
        if indexed {
            let indexer = json!({"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                "indexer_budget": 8, "indexer_compress_ratio": 2, "enable_moe_block": true, "num_experts": 8,
                "top_k_experts": 2, "moe_intermediate_size": 8});
            object.extend(indexer.as_object().unwrap().clone());
        }
        object.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
        let text = config.to_string();
        if let Ok(model) = Model::from_config(&text) {
            // What is accepted has finite counts, and its description is accepted too, as the same model.
            prop_assert!(model.parameters() > 0 && model.parameters() as f64 <= MAX_PARAMETERS);
            let figures = model.figures(rows);
            prop_assert!(figures.layers.iter().all(|layer| layer.cache_weights <= layer.weights));
            prop_assert!(figures.weights <= figures.parameters);
            prop_assert_eq!(&Model::from_description(&model.to_json().unwrap()).unwrap(), &model);
        }
        // A file cut anywhere is an error, and never a panic.
        let cut = cut.index(text.len());
        if text.is_char_boundary(cut) {
            prop_assert!(Model::from_config(&text[..cut]).is_err());
        }
    }

    #[test]
    fn no_text_makes_it_panic(text in ".{0,200}", word in prop_oneof![Just("NaN"), Just("Infinity"), Just("-Infinity\"")]) {
        let _ = Model::from_config(&text);
        let _ = Model::from_config(&format!("{{{text}{word}"));
        let _ = Model::from_description(&text);
    }
}
