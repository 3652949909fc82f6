//! `zero_optimization`.

use super::*;

fn zero(text: &str) -> Layer {
    read(&with_batch(&format!("\"bf16\": {{\"enabled\": true}}, \"zero_optimization\": {text}"))).expect(text)
}

#[test]
fn stages() {
    for stage in 0..=3 {
        assert_eq!(value(&zero(&format!("{{\"stage\": {stage}}}")), "stage"), Some(stage.to_string()));
    }
    assert_eq!(value(&zero("{}"), "stage").as_deref(), Some("implied 0"));
    let oldest = zero("true");
    assert_eq!(value(&oldest, "stage").as_deref(), Some("1"));
    assert!(remark(&oldest, "zero_optimization").1.contains("oldest form"));
    assert_eq!(value(&zero("false"), "stage").as_deref(), Some("0"));
    for wrong in ["4", "1.5", "true", "\"three\""] {
        let text = with_batch(&format!("\"zero_optimization\": {{\"stage\": {wrong}}}"));
        fails(&text, "2:32", "zero_optimization.stage cannot be", "");
    }
}

#[test]
fn groups_of_ranks() {
    let mics = zero(r#"{"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": true}"#);
    assert_eq!(value(&mics, "shard-group").as_deref(), Some("2"));
    let hpz = zero(r#"{"stage": 3, "zero_hpz_partition_size": 8}"#);
    assert_eq!(value(&hpz, "shard-group").as_deref(), Some("8"));
    let (saying, why) = remark(&hpz, "zero_optimization.zero_hpz_partition_size");
    assert!(saying == Saying::Differs && why.contains("second copy"), "{why}");
    let off = zero(r#"{"stage": 3, "mics_shard_size": -1, "zero_hpz_partition_size": 1}"#);
    assert_eq!(value(&off, "shard-group"), None);
    let below = zero(r#"{"stage": 2, "mics_shard_size": 2}"#);
    assert_eq!(value(&below, "shard-group"), None);
    assert!(remark(&below, "zero_optimization.mics_shard_size").1.contains("stage 3"));
    let text =
        with_batch("\"zero_optimization\": {\"stage\": 3, \"mics_shard_size\": 2,\n\"zero_hpz_partition_size\": 4}");
    fails(&text, "3:1", "zero_hpz_partition_size contradicts zero_optimization.mics_shard_size", "remove one");
}

#[test]
fn offload_means_the_arithmetic_of_the_host() {
    let optimizer = r#", "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}"#;
    let form = |zero: &str| {
        let text = with_batch(&format!("\"bf16\": {{\"enabled\": true}}, \"zero_optimization\": {zero}{optimizer}"));
        value(&read(&text).unwrap(), "optimizer-form")
    };
    assert_eq!(form(r#"{"stage": 2, "offload_optimizer": {"device": "cpu"}}"#).as_deref(), Some("cpu"));
    assert_eq!(form(r#"{"stage": 2, "cpu_offload": true}"#).as_deref(), Some("cpu"));
    assert_eq!(form(r#"{"stage": 3, "offload_param": {"device": "cpu"}}"#).as_deref(), Some("implied fused"));
    assert_eq!(form(r#"{"stage": 3, "offload_optimizer": {"device": "none"}}"#).as_deref(), Some("implied fused"));
    assert_eq!(form(r#"{"stage": 3, "offload_optimizer": null}"#).as_deref(), Some("implied fused"));
    let part = zero(r#"{"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4, "nvme_path": "/local"}}"#);
    let (saying, why) = remark(&part, "zero_optimization.offload_optimizer.ratio");
    assert!(saying == Saying::Differs && why.contains("CPUAdam"), "{why}");
    // To files as to host memory: CPUAdam steps either.
    let nvme = r#"{"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}, "offload_param": {"device": "nvme"}}"#;
    assert_eq!(form(nvme).as_deref(), Some("cpu"));
    for key in ["offload_optimizer", "offload_param"] {
        let nvme = zero(nvme);
        let (saying, why) = remark(&nvme, &format!("zero_optimization.{key}.device"));
        assert!(saying == Saying::Differs && why.contains("host memory, not in files"), "{why}");
    }
    let old = zero(r#"{"stage": 3, "cpu_offload_params": true, "cpu_offload": false}"#);
    assert!(remark(&old, "zero_optimization.cpu_offload_params").1.contains("offload_param.device"));
}

#[test]
fn offload_that_cannot_be() {
    let text = |inner: &str| with_batch(&format!("\"zero_optimization\": {{\"stage\": 3,\n{inner}}}"));
    fails(&text(r#""offload_param": {"device": "gpu"}"#), "3:29", "cannot be \"gpu\"", "did you mean \"cpu\"");
    fails(&text(r#""offload_param": {"device": "cpu", "bufer_size": 1}"#), "3:36", "\"bufer_size\"", "\"buffer_size\"");
    let both = text("\"offload_optimizer\": {\"device\": \"none\"},\n\"cpu_offload\": true");
    fails(&both, "4:1", "cpu_offload contradicts zero_optimization.offload_optimizer.device", "remove one");
    let failure = read(&both).unwrap_err();
    assert_eq!(failure.expected.as_deref(), Some("\"none\" as at ds.json:3:23"));
    fails(&text(r#""offload_optimizer": {"device": "cpu", "ratio": 2}"#), "3:49", "cannot be 2", "");
    fails(
        &text(r#""offload_optimizer": {"device": "cpu", "super_offload": true}"#),
        "3:40",
        "SuperOffload",
        "leave it out",
    );
}

#[test]
fn quantised_and_late_steps_are_refused() {
    let text = |inner: &str| with_batch(&format!("\"zero_optimization\": {{\"stage\": 3,\n{inner}}}"));
    for key in ["zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"] {
        fails(&text(&format!("\"{key}\": true")), "3:1", key, "--policy");
        let off = zero(&format!("{{\"stage\": 3, \"{key}\": false}}"));
        assert_eq!(remark(&off, &format!("zero_optimization.{key}")), (Saying::Same, "off"));
    }
    fails(&text(r#""zenflow": {"topk_ratio": 0.05}"#), "3:1", "zero_optimization.zenflow", "leave it out");
    assert_eq!(
        remark(&zero(r#"{"zeropp_loco_param": {"err_beta": 0.8}}"#), "zero_optimization.zeropp_loco_param").0,
        Saying::NoEffect
    );
}

#[test]
fn tuning_keys_are_typed_and_have_no_effect() {
    let counts = [
        "reduce_bucket_size",
        "allgather_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold",
        "max_live_parameters",
    ];
    for key in counts {
        for value in ["5e8", "500000000", "\"auto\"", "2.0e5", "null"] {
            let layer = zero(&format!("{{\"{key}\": {value}}}"));
            assert_eq!(remark(&layer, &format!("zero_optimization.{key}")).0, Saying::NoEffect, "{key} {value}");
        }
        let text = with_batch(&format!("\"zero_optimization\": {{\"{key}\": 8.5}}"));
        fails(&text, &format!("2:{}", 27 + key.len()), &format!("{key} cannot be 8.5"), "");
    }
    let bools = [
        "contiguous_gradients",
        "allgather_partitions",
        "overlap_comm",
        "use_multi_rank_bucket_allreduce",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "ignore_unused_parameters",
        "round_robin_gradients",
        "memory_efficient_linear",
        "pipeline_loading_checkpoint",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "legacy_stage1",
        "override_module_apply",
        "save_muon_momentum_buffer_in_memory",
        "cpu_offload_use_pin_memory",
    ];
    for key in bools {
        let layer = zero(&format!("{{\"{key}\": true}}"));
        assert_eq!(remark(&layer, &format!("zero_optimization.{key}")).0, Saying::NoEffect, "{key}");
        let text = with_batch(&format!("\"zero_optimization\": {{\"{key}\": 3}}"));
        fails(&text, &format!("2:{}", 27 + key.len()), &format!("{key} cannot be 3"), "");
    }
    assert!(remark(&zero(r#"{"leaf_module": {"classes": []}}"#), "zero_optimization.leaf_module").1.contains("units"));
    for key in ["stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"] {
        let layer = zero(&format!("{{\"{key}\": \"auto\"}}"));
        assert_eq!(remark(&layer, &format!("zero_optimization.{key}")).0, Saying::Same);
    }
}

#[test]
fn micro_batches_below_stage_2() {
    let differs = |batch: &str| {
        let text =
            format!("{{\"train_micro_batch_size_per_gpu\": 1, {batch} \"zero_optimization\": {{\"stage\": 1}}}}");
        let layer = read(&text).unwrap();
        layer.remarks.iter().any(|r| r.saying == Saying::Differs && r.source.says == "zero_optimization.stage: 1")
    };
    assert!(differs("\"gradient_accumulation_steps\": 4,"));
    assert!(!differs("\"gradient_accumulation_steps\": 1,"));
    assert!(!differs(""), "one is implied");
}

#[test]
fn slips_of_the_pen_are_found() {
    let text = |inner: &str| with_batch(&format!("\"zero_optimization\": {{\n  {inner}}}"));
    fails(&text("\"stge\": 3"), "3:3", "there is no key \"stge\" in zero_optimization", "did you mean \"stage\"");
    fails(&text("\"overlap_com\": true"), "3:3", "\"overlap_com\"", "did you mean \"overlap_comm\"");
    fails(&text("\"stage3_prefetch_bucket\": 1"), "3:3", "\"stage3_prefetch_bucket\"", "stage3_prefetch_bucket_size");
    fails(&text("\"stage\": 3, \"stage\": 2"), "3:15", "zero_optimization.stage is written twice", "remove one");
}
