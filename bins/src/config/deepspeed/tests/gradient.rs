//! Precision, and a gradient's way to the optimizer.

use super::*;

/// The roles that a file sets, under a release.
fn roles(text: &str, deepspeed: &str) -> String {
    let text = with_batch(&format!("\"zero_optimization\": {{\"stage\": 3}}, {text}"));
    let layer = read_as(&text, &facts(4, deepspeed), Auto::DeepSpeed).expect(&text);
    let roles = ["policy", "wire", "reduced", "accumulate"].into_iter();
    let found = roles.filter_map(|flag| value(&layer, flag).map(|value| format!("{flag} {value}")));
    found.collect::<Vec<_>>().join(", ")
}

const BF16: &str = r#""bf16": {"enabled": true}"#;

#[test]
fn dtypes_on_the_way() {
    let wire = |word: &str| format!("{BF16}, \"communication_data_type\": \"{word}\"");
    let accumulate = |word: &str| format!("{BF16}, \"data_types\": {{\"grad_accum_dtype\": \"{word}\"}}");
    let both = format!("{}, \"data_types\": {{\"grad_accum_dtype\": \"fp32\"}}", wire("fp32"));
    for (text, deepspeed, expected) in [
        (BF16.to_owned(), "0.19.6", "policy deepspeed"),
        // One alone leaves a bf16 rounding in the middle.
        (wire("fp32"), "0.19.6", "policy deepspeed, wire fp32"),
        (accumulate("fp32"), "0.19.6", "policy deepspeed, accumulate fp32"),
        (both.clone(), "0.19.6", "policy deepspeed, wire fp32, reduced implied fp32, accumulate fp32"),
        (both.clone(), "0.19.2", "policy deepspeed, wire fp32, reduced implied fp32, accumulate fp32"),
        (both.clone(), "0.19.1", "policy deepspeed, wire fp32, reduced implied bf16, accumulate fp32"),
        (both.clone(), "0.14", "policy deepspeed, wire fp32, reduced implied bf16, accumulate fp32"),
        (wire("BF16"), "0.19.6", "policy deepspeed, wire bf16"),
        (accumulate("torch.float32"), "0.19.6", "policy deepspeed, accumulate fp32"),
        // Without bf16 everything is fp32 until it is asked to be less.
        (
            r#""communication_data_type": "bf16""#.to_owned(),
            "0.19.6",
            "policy implied fp32, wire bf16, reduced implied bf16",
        ),
        (r#""communication_data_type": "fp32""#.to_owned(), "0.14", "policy implied fp32, wire fp32"),
        (
            r#""data_types": {"grad_accum_dtype": "bf16"}"#.to_owned(),
            "0.19.6",
            "policy implied fp32, reduced implied bf16, accumulate bf16",
        ),
    ] {
        assert_eq!(roles(&text, deepspeed), expected, "{deepspeed}: {text}");
    }
    let layer = read_as(
        &with_batch(&both).replace("\"data", "\"zero_optimization\": {\"stage\": 1}, \"data"),
        &facts(4, "0.14"),
        Auto::DeepSpeed,
    )
    .unwrap();
    let reduced = layer.settings.iter().find(|s| s.flag == "reduced").unwrap();
    assert!(reduced.source.says.starts_with("DeepSpeed 0.14.0 casts the sum back to bf16"), "{}", reduced.source);
}

#[test]
fn dtypes_that_cannot_be() {
    let text = |inner: &str| with_batch(&format!("{BF16},\n{inner}"));
    let not = "\"bf16\" or \"fp32\"";
    fails(
        &text(r#""communication_data_type": "fp16""#),
        "3:1",
        "communication_data_type \"fp16\" is not supported",
        not,
    );
    fails(&text(r#""data_types": {"grad_accum_dtype": "half"}"#), "3:16", "\"half\" is not supported", not);
    fails(&text(r#""communication_data_type": "bf61""#), "3:28", "cannot be \"bf61\"", "");
    let stage_0 = text(r#""data_types": {"grad_accum_dtype": "fp32"}"#);
    fails(&stage_0, "3:16", "without ZeRO DeepSpeed accumulates in the model's bf16", "\"stage\": 1");
    let text = text(r#""data_types": {"param_dtype": "fp32"}"#);
    fails(&text, "3:16", "data_types.param_dtype disagrees with the mode", "leave param_dtype out");
    assert_eq!(read(&text).unwrap_err().expected.as_deref(), Some("bf16 at ds.json:2:10 (bf16.enabled)"));
    let agrees = read(&text.replace("fp32", "bf16")).unwrap();
    assert_eq!(remark(&agrees, "data_types.param_dtype").0, Saying::Same);
    let buffers = read(&text.replace("param_dtype\": \"fp32", "buffer_dtype\": \"bf16")).unwrap();
    assert_eq!(remark(&buffers, "data_types.buffer_dtype").0, Saying::Differs);
    let sequence = read(&with_batch(r#""seq_parallel_communication_data_type": "fp32""#)).unwrap();
    assert_eq!(remark(&sequence, "seq_parallel_communication_data_type").0, Saying::NoEffect);
}

#[test]
fn modes() {
    let policy = |text: &str| value(&read(&with_batch(text)).unwrap(), "policy").unwrap();
    assert_eq!(policy(r#""bfloat16": {"enabled": true}"#), "deepspeed");
    assert_eq!(policy(r#""bf16": {"enabled": "auto"}"#), "deepspeed");
    assert_eq!(policy(r#""fp16": {"enabled": "auto"}"#), "implied fp32");
    assert_eq!(policy(r#""bf16": {}, "fp16": {}"#), "implied fp32");
    assert_eq!(policy(r#""bf16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}"#), "deepspeed");
    let twice = with_batch("\"bf16\": {\"enabled\": true},\n\"bfloat16\": {\"enabled\": false}");
    fails(&twice, "3:1", "bfloat16 contradicts bf16", "remove one");
    let layer =
        read(&with_batch(r#""bf16": {"enabled": true, "check_grad_overflow": true, "immediate_grad_update": true}"#));
    let (saying, why) = (remark(layer.as_ref().unwrap(), "bf16.check_grad_overflow"), "exit code 6");
    assert!(saying.0 == Saying::Differs && saying.1.contains(why));
    assert_eq!(remark(layer.as_ref().unwrap(), "bf16.immediate_grad_update").0, Saying::NoEffect);
}

#[test]
fn fp16_is_refused_with_what_takes_its_place() {
    let fp16 = with_batch("\"fp16\": {\n  \"enabled\": true, \"loss_scale\": 0}");
    fails(&fp16, "3:3", "fp16.enabled true is not supported", "\"bf16\": {\"enabled\": true}");
    let both = with_batch("\"bf16\": {\"enabled\": true},\n\"fp16\": {\"enabled\": true}");
    fails(&both, "3:10", "bf16 and fp16 are both enabled", "\"fp16\": {\"enabled\": false}");
    assert_eq!(read(&both).unwrap_err().expected.as_deref(), Some("one of them; bf16.enabled is at ds.json:2:10"));
}

#[test]
fn other_low_precision_is_refused() {
    let bf16 = |key: &str| with_batch(&format!("\"bf16\": {{\"enabled\": true,\n\"{key}\": true}}"));
    fails(&bf16("bf16_master_weights_and_grads"), "3:1", "small updates round away", "--policy low-sr");
    fails(&bf16("bf16_optimizer_states"), "3:1", "state in bf16", "--policy fsdp-low");
    let autocast = with_batch(r#""torch_autocast": {"enabled": true, "dtype": "bfloat16"}"#);
    fails(&autocast, "2:20", "torch_autocast.enabled true", "\"bf16\": {\"enabled\": true}");
    fails(&with_batch(r#""amp": {"enabled": true, "opt_level": "O1"}"#), "2:9", "amp.enabled true", "bf16");
    let off =
        read(&with_batch(r#""amp": {"enabled": false, "opt_level": "O1"}, "torch_autocast": {"enabled": false}"#));
    assert_eq!(remark(off.as_ref().unwrap(), "amp.opt_level").0, Saying::NoEffect);
}

#[test]
fn clipping() {
    let clip = |text: &str, deepspeed: &str| {
        let layer = read_as(&with_batch(text), &facts(4, deepspeed), Auto::DeepSpeed).unwrap();
        value(&layer, "clip").unwrap()
    };
    for (text, deepspeed, expected) in [
        ("", "0.19.6", "implied 1"),
        ("", "0.19.3", "implied 1"),
        ("", "0.19.2", "implied 0"),
        ("", "0.14", "implied 0"),
        ("\"gradient_clipping\": null", "0.19.6", "0"),
        ("\"gradient_clipping\": 0", "0.19.6", "0"),
        ("\"gradient_clipping\": 0.0", "0.19.6", "0.0"),
        ("\"gradient_clipping\": 2.5", "0.14", "2.5"),
        ("\"gradient_clipping\": \"auto\"", "0.14", "1"),
    ] {
        assert_eq!(clip(text, deepspeed), expected, "{text} {deepspeed}");
    }
    fails(&with_batch("\"gradient_clipping\": -1"), "2:22", "gradient_clipping cannot be -1", "");
}

#[test]
fn the_mean_over_ranks() {
    let text = |stage: u64, scatter: bool, keys: &str| {
        let zero = format!("\"zero_optimization\": {{\"stage\": {stage}, \"reduce_scatter\": {scatter}}}");
        with_batch(&format!("{keys},\n{zero}"))
    };
    let said = |stage, scatter, keys: &str, path: &str| remark(&read(&text(stage, scatter, keys)).unwrap(), path).0;
    let refusal = "DeepSpeed refuses it under ZeRO with reduce_scatter";
    for stage in 1..=3 {
        fails(&text(stage, true, "\"prescale_gradients\": true"), "2:1", refusal, "leave it out");
        fails(&text(stage, true, "\"gradient_predivide_factor\": 2.0"), "2:1", refusal, "1.0");
    }
    let (prescale, predivide) = ("prescale_gradients", "gradient_predivide_factor");
    assert_eq!(said(0, true, "\"prescale_gradients\": true", prescale), Saying::Differs);
    assert_eq!(said(3, false, "\"prescale_gradients\": true", prescale), Saying::Differs);
    assert_eq!(said(3, true, "\"gradient_predivide_factor\": 1.0", predivide), Saying::Same);
    assert_eq!(said(3, false, "\"gradient_predivide_factor\": 2.0", predivide), Saying::Differs);
    assert_eq!(said(2, false, "\"gradient_predivide_factor\": 4", predivide), Saying::Differs);
    // The four lanes of these tests: stage 3 would divide by 16.
    fails(&text(3, false, "\"gradient_predivide_factor\": 4.0"), "2:1", "divides by that number twice", "1.0");
    assert_eq!(said(3, false, "\"sparse_gradients\": true", "zero_optimization.reduce_scatter"), Saying::Differs);
    assert_eq!(said(3, true, "\"gradient_allreduce_op\": \"mean\"", "gradient_allreduce_op"), Saying::Same);
    fails(&text(1, true, "\"gradient_allreduce_op\": \"sum\""), "2:1", "gradients are averaged", "\"mean\"");
    fails(&text(1, true, "\"gradient_allreduce_op\": \"maen\""), "2:26", "cannot be \"maen\"", "");
}
