//! `optimizer`.

use super::*;

fn optimizer(text: &str) -> Layer {
    read(&with_batch(&format!("\"bf16\": {{\"enabled\": true}}, \"optimizer\": {text}"))).expect(text)
}

/// The flags of the optimizer.
fn set(layer: &Layer) -> String {
    let names = ["optimizer", "optimizer-form", "lr", "weight-decay", "beta1", "beta2", "eps", "momentum"].into_iter();
    names.filter_map(|flag| value(layer, flag).map(|value| format!("{flag} {value}"))).collect::<Vec<_>>().join(", ")
}

#[test]
fn adam_in_its_forms() {
    let rest = "lr implied 0.001, weight-decay implied 0";
    for (text, expected) in [
        (r#"{"type": "AdamW"}"#, format!("optimizer adamw, optimizer-form implied fused, {rest}")),
        (r#"{"type": "adam", "params": {}}"#, format!("optimizer adamw, optimizer-form implied fused, {rest}")),
        (
            r#"{"type": "Adam", "params": {"adam_w_mode": false}}"#,
            format!("optimizer adam, optimizer-form implied fused, {rest}"),
        ),
        (
            r#"{"type": "AdamW", "params": {"adam_w_mode": false}}"#,
            format!("optimizer adamw, optimizer-form implied fused, {rest}"),
        ),
        (
            r#"{"type": "AdamW", "params": {"torch_adam": true, "lr": "2e-5"}}"#,
            "optimizer adamw, optimizer-form torch, lr 2e-5, weight-decay implied 0.01".to_owned(),
        ),
        (
            r#"{"type": "Adam", "params": {"torch_adam": true, "adam_w_mode": false}}"#,
            format!("optimizer adam, optimizer-form torch, {rest}"),
        ),
        (
            r#"{"type": "AdamW", "legacy_fusion": false, "params":
                {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "bias_correction": true,
                 "amsgrad": false, "fused": true, "fp32_optimizer_states": true}}"#,
            "optimizer adamw, optimizer-form implied fused, lr 3e-5, weight-decay 0.1, beta1 0.9, beta2 0.95, eps 1e-6"
                .to_owned(),
        ),
        (
            r#"{"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"}}"#,
            "optimizer adamw, optimizer-form implied fused".to_owned(),
        ),
    ] {
        assert_eq!(set(&optimizer(text)), expected, "{text}");
    }
    let ignored = optimizer(r#"{"type": "AdamW", "params": {"adam_w_mode": false}}"#);
    assert_eq!(remark(&ignored, "optimizer.params.adam_w_mode").0, Saying::NoEffect);
}

#[test]
fn torch_stays_torch_on_the_host() {
    let text = with_batch(
        r#""zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
           "optimizer": {"type": "AdamW", "params": {"torch_adam": true}}"#,
    );
    assert_eq!(value(&read(&text).unwrap(), "optimizer-form").as_deref(), Some("torch"));
}

#[test]
fn sgd() {
    let text = r#"{"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": false}}"#;
    let layer = optimizer(text);
    let expected = "optimizer sgd, optimizer-form implied torch, lr 0.1, weight-decay implied 0, momentum 0.9";
    assert_eq!(set(&layer), expected);
    let zero = |rest: &str| {
        let text = with_batch(&format!("\"zero_optimization\": {{\"stage\": 2}}, \"optimizer\": {text}{rest}"));
        let layer = read(&text).unwrap();
        layer.remarks.iter().any(|r| r.source.says.starts_with("optimizer.type") && r.saying == Saying::Differs)
    };
    assert!(zero("") && !zero(", \"zero_allow_untested_optimizer\": true"));
}

#[test]
fn what_umbra_does_not_step() {
    let text = |inner: &str| with_batch(&format!("\"optimizer\": {{\n{inner}}}"));
    for name in ["Lamb", "OneBitAdam", "Lion", "Muon", "Adagrad", "NAdam2024"] {
        let failure = read(&text(&format!("\"type\": \"{name}\""))).unwrap_err();
        assert_eq!(failure.place.as_deref(), Some("ds.json:3:1"), "{name}");
        assert!(failure.what.contains(&format!("optimizer.type \"{name}\" is not supported")), "{failure}");
        assert_eq!(failure.expected.as_deref(), Some("\"AdamW\", \"Adam\" or \"SGD\""));
    }
    fails(&text(r#""type": "AdmaW""#), "3:1", "\"AdmaW\"", "");
    fails(&text(r#""type": "AdamWW""#), "3:1", "\"AdamWW\"", "did you mean \"AdamW\"");
    fails(&text(r#""params": {"lr": 1}"#), "2:1", "optimizer has no type", "by flags");
    let params = |inner: &str| text(&format!("\"type\": \"AdamW\", \"params\": {{\n{inner}}}"));
    fails(&params("\"max_grad_norm\": 1.0"), "4:1", "no max_grad_norm", "gradient_clipping");
    fails(&params("\"bias_correction\": false"), "4:1", "corrects the bias", "true");
    fails(&params("\"amsgrad\": true"), "4:1", "AMSGrad", "leave it out");
    fails(&params("\"fp32_optimizer_states\": false"), "4:1", "moments in bf16", "low-sr");
    fails(&params("\"betas\": [0.9]"), "4:10", "betas cannot be [0.9]", "");
    fails(&params("\"betas\": [0.9, 1.5]"), "4:10", "betas cannot be", "");
    fails(&params("\"lr\": \"fast\""), "4:7", "lr cannot be \"fast\"", "");
    fails(&params("\"lr\": -1e-5"), "4:7", "lr cannot be -1e-5", "");
    fails(&params("\"weight_deacy\": 0.1"), "4:1", "\"weight_deacy\" in optimizer.params", "\"weight_decay\"");
    fails(&params("\"momentum\": 0.9"), "4:1", "no key \"momentum\"", "");
    let sgd = |inner: &str| text(&format!("\"type\": \"SGD\", \"params\": {{\n{inner}}}"));
    fails(&sgd("\"nesterov\": true"), "4:1", "plain momentum", "leave it out");
    fails(&sgd("\"dampening\": 0.1"), "4:1", "damp", "0");
    fails(&sgd("\"betas\": [0.9, 0.99]"), "4:1", "no key \"betas\"", "");
}
