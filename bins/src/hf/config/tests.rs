//! config.json in every spelling, and what is refused.

use super::*;
use crate::Exit;

/// A Mistral configuration as transformers 5 writes it.
fn mistral() -> Value {
    json!({
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16", "head_dim": 16,
        "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.01, "intermediate_size": 100,
        "max_position_embeddings": 128, "model_type": "mistral", "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_window": 8, "tie_word_embeddings": true, "vocab_size": 257
    })
}

/// A Llama configuration with only what has no default.
fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 320
    })
}

fn with(mut base: Value, changes: &[(&str, Value)]) -> Value {
    for (key, value) in changes {
        base[*key] = value.clone();
    }
    base
}

fn without(mut base: Value, key: &str) -> Value {
    base.as_object_mut().unwrap().remove(key);
    base
}

fn read(value: &Value) -> Result<Config> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), value.to_string()).unwrap();
    read_config(dir.path()).map(|(config, json)| {
        assert_eq!(json, *value);
        config
    })
}

/// The failure names the file, the key and what was found there.
#[track_caller]
fn refused(value: &Value, key: &str, found: &str) {
    let failure = read(value).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    let place = failure.place.clone().unwrap();
    assert!(place.contains("config.json") && place.ends_with(&format!("key {key}")), "{failure}");
    assert!(failure.found.clone().unwrap().contains(found), "{failure}");
}

#[test]
fn every_value_of_a_new_style_file_is_taken() {
    let expected = Config {
        family: Family::Mistral,
        vocab_size: 257,
        hidden_size: 48,
        intermediate_size: 100,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        rope_scaling: RopeScaling::Default,
        sliding_window: Some(8),
        tied: true,
        max_positions: 128,
        initializer_range: 0.01,
    };
    assert_eq!(read(&mistral()).unwrap(), expected);
}

#[test]
fn absent_keys_have_the_defaults_of_the_family_and_null_is_not_absent() {
    let config = read(&llama()).unwrap();
    assert_eq!((config.kv_heads, config.head_dim, config.max_positions), (4, 16, 2048));
    assert_eq!((config.rms_norm_eps, config.rope_theta, config.initializer_range), (1e-6, 1e4, 0.02));
    assert_eq!((config.sliding_window, config.tied), (None, false));

    let bare = with(llama(), &[("model_type", json!("mistral")), ("num_attention_heads", json!(16))]);
    let config = read(&bare).unwrap();
    assert_eq!((config.kv_heads, config.sliding_window, config.max_positions), (8, Some(4096), 131_072));
    let nulls = with(bare, &[("sliding_window", Value::Null), ("num_key_value_heads", Value::Null)]);
    let config = read(&with(nulls, &[("head_dim", Value::Null)])).unwrap();
    assert_eq!((config.kv_heads, config.sliding_window, config.head_dim), (16, None, 4));
}

#[test]
fn rotary_settings_are_the_same_in_both_spellings() {
    let llama3 = json!({"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64, "rope_type": "llama3"});
    let old = with(llama(), &[("rope_theta", json!(500000)), ("rope_scaling", llama3.clone())]);
    let mut table = llama3;
    table["rope_theta"] = json!(500000.0);
    let new = with(llama(), &[("rope_parameters", table)]);
    let config = read(&old).unwrap();
    assert_eq!(config, read(&new).unwrap());
    assert_eq!(config.rope_theta, 5e5);
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64.0,
    };
    assert_eq!(config.rope_scaling, expected);

    let linear = with(llama(), &[("rope_scaling", json!({"type": "linear", "factor": 2.0}))]);
    assert_eq!(read(&linear).unwrap().rope_scaling, RopeScaling::Linear { factor: 2.0 });
    let conflict = with(mistral(), &[("rope_theta", json!(1e4))]);
    refused(&conflict, "rope_parameters.rope_theta", "1000000");
}

#[test]
fn other_rope_types_and_unknown_rope_keys_are_refused_by_name() {
    for (table, key, found) in [
        (json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 32}), "rope_scaling.rope_type", "yarn"),
        (json!({"type": "dynamic", "factor": 4.0}), "rope_scaling.rope_type", "dynamic"),
        (json!({"rope_type": "longrope", "short_factor": [1.0]}), "rope_scaling.rope_type", "longrope"),
        (json!({"rope_type": "linear", "factor": 2.0, "mscale": 0.7}), "rope_scaling.mscale", "0.7"),
        (json!({"full_attention": {"rope_type": "default"}}), "rope_scaling.full_attention", "default"),
        (json!({"rope_type": "default", "partial_rotary_factor": 0.5}), "rope_scaling.partial_rotary_factor", "0.5"),
        (json!({"rope_type": "linear"}), "rope_scaling.factor", "no such key"),
        (json!({"rope_type": "linear", "factor": "2"}), "rope_scaling.factor", "the string"),
        (json!({"rope_type": "linear", "factor": 0.0}), "rope_scaling.factor", "0"),
        (json!([1]), "rope_scaling", "the list"),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64}),
            "rope_scaling.high_freq_factor",
            "1",
        ),
    ] {
        refused(&with(llama(), &[("rope_scaling", table)]), key, found);
    }
}

#[test]
fn what_umbra_does_not_compute_is_refused_by_name() {
    for (key, value, found) in [
        ("model_type", json!("mixtral"), "mixtral"),
        ("architectures", json!(["MistralForSequenceClassification"]), "SequenceClassification"),
        ("architectures", json!(["LlamaForCausalLM"]), "LlamaForCausalLM"),
        ("attention_bias", json!(true), "true"),
        ("mlp_bias", json!(true), "true"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("attention_dropout", json!(0.1), "0.1"),
        ("quantization_config", json!({"quant_method": "gptq", "bits": 4}), "gptq"),
        ("partial_rotary_factor", json!(0.25), "0.25"),
    ] {
        refused(&with(mistral(), &[(key, value)]), key, found);
    }
    refused(&with(llama(), &[("sliding_window", json!(128))]), "sliding_window", "128");
    let mixed = json!(["sliding_attention", "full_attention"]);
    refused(&with(mistral(), &[("layer_types", mixed)]), "layer_types[1]", "full_attention");
    let same = json!(["sliding_attention", "sliding_attention"]);
    assert!(read(&with(mistral(), &[("layer_types", same)])).is_ok());
    refused(&without(without(mistral(), "model_type"), "architectures"), "model_type", "no such key");
    assert!(read(&without(mistral(), "model_type")).is_ok());
    assert!(read(&without(mistral(), "architectures")).is_ok());
}

#[test]
fn missing_keys_wrong_types_and_pointless_values_name_file_and_key() {
    for key in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"] {
        refused(&without(mistral(), key), key, "no such key");
        refused(&with(mistral(), &[(key, json!("4"))]), key, "the string");
        refused(&with(mistral(), &[(key, json!(-1))]), key, "-1");
        refused(&with(mistral(), &[(key, json!(0))]), key, "0");
    }
    refused(&with(mistral(), &[("rms_norm_eps", json!([]))]), "rms_norm_eps", "the list");
    refused(&with(mistral(), &[("tie_word_embeddings", json!(1))]), "tie_word_embeddings", "the number");
    refused(&with(mistral(), &[("num_key_value_heads", json!(3))]), "num_key_value_heads", "3");
    refused(&with(mistral(), &[("head_dim", json!(15))]), "head_dim", "15");
    refused(&with(llama(), &[("hidden_size", json!(66))]), "head_dim", "no head_dim");
    refused(&with(llama(), &[("rope_theta", json!(-1.0))]), "rope_theta", "-1");
}

#[test]
fn folders_and_files_that_are_not_there_or_not_json_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = read_config(&dir.path().join("none")).unwrap_err();
    assert_eq!((nowhere.exit, nowhere.found.as_deref()), (Exit::Input, Some("nothing there")));
    assert!(read_config(dir.path()).unwrap_err().place.unwrap().ends_with("config.json"));
    std::fs::write(dir.path().join("config.json"), "{\"vocab_size\": 1").unwrap();
    assert!(read_config(dir.path()).unwrap_err().what.contains("not JSON"));
    assert_eq!(read_config(&dir.path().join("config.json")).unwrap_err().found.as_deref(), Some("a file"));
}

#[test]
fn what_is_written_reads_back_as_the_same_configuration() {
    let scaled = json!({"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64, "rope_type": "llama3"});
    for value in [mistral(), llama(), with(llama(), &[("rope_scaling", scaled)])] {
        let config = read(&value).unwrap();
        assert_eq!(read(&write_config(&config)).unwrap(), config);
    }
    let open = read(&with(mistral(), &[("sliding_window", Value::Null)])).unwrap();
    assert_eq!(read(&write_config(&open)).unwrap().sliding_window, None);
}

#[test]
fn end_ids_come_from_the_generation_settings_first() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(eos_token_ids(dir.path(), &json!({"eos_token_id": 2})), [2]);
    assert!(eos_token_ids(dir.path(), &json!({"eos_token_id": null})).is_empty());
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [7, 9]}"#).unwrap();
    assert_eq!(eos_token_ids(dir.path(), &json!({"eos_token_id": 2})), [7, 9]);
}
