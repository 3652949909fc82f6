//! `scheduler`.

use super::*;

fn schedule(kind: &str, params: &str, deepspeed: &str) -> String {
    let text = with_batch(&format!("\"scheduler\": {{\"type\": \"{kind}\", \"params\": {params}}}"));
    let layer = read_as(&text, &facts(4, deepspeed), Auto::DeepSpeed).expect(&text);
    let params = value(&layer, "schedule-params").map_or(String::new(), |params| format!(": {params}"));
    format!("{}{params}", value(&layer, "schedule").unwrap())
}

#[test]
fn schedules_pass_on_what_is_written() {
    for (kind, params, expected) in [
        ("WarmupLR", "{}", "warmup-lr"),
        (
            "WarmupLR",
            r#"{"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500, "warmup_type": "linear"}"#,
            "warmup-lr: warmup_min_lr=0 warmup_max_lr=3e-5 warmup_num_steps=500 warmup_type=linear",
        ),
        (
            "WarmupDecayLR",
            r#"{"last_batch_iteration": -1, "total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
                "warmup_num_steps": "auto"}"#,
            "warmup-decay-lr: total_num_steps=auto warmup_min_lr=auto warmup_max_lr=auto warmup_num_steps=auto",
        ),
        (
            "WarmupCosineLR",
            r#"{"total_num_steps": 1e4, "warmup_min_ratio": 0.1, "warmup_num_steps": 100.0, "cos_min_ratio": 0.01,
                "warmup_type": "LOG"}"#,
            "warmup-cosine-lr: total_num_steps=10000 warmup_min_ratio=0.1 warmup_num_steps=100 cos_min_ratio=0.01 \
             warmup_type=log",
        ),
        (
            "OneCycle",
            r#"{"cycle_min_lr": [1e-5], "cycle_max_lr": 1e-2, "cycle_first_step_size": 1000, "decay_lr_rate": 0.001,
                "cycle_momentum": false, "decay_step_size": 0}"#,
            "one-cycle: cycle_min_lr=1e-5 cycle_max_lr=1e-2 decay_lr_rate=0.001 cycle_first_step_size=1000 \
             decay_step_size=0 cycle_momentum=false",
        ),
        (
            "LRRangeTest",
            r#"{"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 200, "lr_range_test_step_rate": 5,
                "lr_range_test_staircase": true}"#,
            "lr-range-test: lr_range_test_min_lr=1e-4 lr_range_test_step_size=200 lr_range_test_step_rate=5 \
             lr_range_test_staircase=true",
        ),
    ] {
        assert_eq!(schedule(kind, params, "0.19.6"), expected);
    }
}

#[test]
fn a_warm_up_of_no_steps() {
    let text = with_batch("\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\n\"warmup_num_steps\": 0}}");
    fails(&text, "3:21", "warmup_num_steps cannot be 0", "--assume deepspeed=0.14");
    let old = |steps: &str| schedule("WarmupLR", &format!("{{\"warmup_num_steps\": {steps}}}"), "0.19.5");
    assert_eq!(old("0"), "warmup-lr: warmup_num_steps=2");
    assert_eq!(old("-5"), "warmup-lr: warmup_num_steps=2");
    assert_eq!(old("1"), "warmup-lr: warmup_num_steps=1");
}

#[test]
fn schedules_that_cannot_be() {
    let text = |inner: &str| with_batch(&format!("\"scheduler\": {{\n{inner}}}"));
    fails(
        &text(r#""type": "CosineAnnealingLR""#),
        "3:1",
        "\"CosineAnnealingLR\" is not supported",
        "--schedule linear",
    );
    fails(&text(r#""type": "WarmupLr2""#), "3:1", "of torch's none", "did you mean \"WarmupLR\"");
    fails(&text(r#""params": {}"#), "2:1", "scheduler has no type", "by flags");
    fails(&text(r#""type": "WarmupDecayLR""#), "2:1", "WarmupDecayLR has no total_num_steps", "\"auto\"");
    let of = |kind: &str, inner: &str| text(&format!("\"type\": \"{kind}\", \"params\": {{\n{inner}}}"));
    fails(&of("WarmupCosineLR", "\"warmup_num_steps\": 9"), "3:27", "has no total_num_steps", "length of the run");
    fails(&of("OneCycle", "\"cycle_min_lr\": 1e-5"), "3:21", "OneCycle has no cycle_max_lr", "");
    fails(&of("OneCycle", "\"cycle_min_lr\": \"auto\""), "4:1", "neither Accelerate nor transformers", "a value");
    fails(&of("WarmupLR", "\"warmup_type\": \"auto\""), "4:1", "neither Accelerate nor transformers", "");
    fails(&of("WarmupLR", "\"warmup_type\": \"liner\""), "4:16", "cannot be \"liner\"", "\"linear\"");
    fails(&of("WarmupLR", "\"warmup_step_num\": 5"), "4:1", "\"warmup_step_num\"", "");
    fails(&of("WarmupLR", "\"warmup_num_step\": 5"), "4:1", "\"warmup_num_step\"", "\"warmup_num_steps\"");
    fails(&of("WarmupLR", "\"total_num_steps\": 5"), "4:1", "no key \"total_num_steps\" in scheduler.params", "");
    fails(&of("WarmupLR", "\"warmup_min_lr\": [0, 0]"), "4:18", "cannot be [0, 0]", "");
    fails(&of("WarmupLR", "\"last_batch_iteration\": 100"), "4:1", "from its checkpoint", "-1");
    fails(&of("WarmupLR", "\"warmup_num_steps\": 2.5"), "4:21", "cannot be 2.5", "");
}
