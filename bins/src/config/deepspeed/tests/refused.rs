//! The rest of the file.

use super::*;

#[test]
fn sections_that_only_log_or_tune_have_no_effect() {
    for (section, why) in [
        (
            r#""activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true,
            "number_checkpoints": null, "profile": false}"#,
            "--recompute block",
        ),
        (r#""aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "overlap_events": true}"#, "files"),
        (r#""checkpoint": {"tag_validation": "Warn", "load_universal": false}"#, "--save-every"),
        (r#""flops_profiler": {"enabled": true, "module_depth": -1, "output_file": null}"#, "tflops"),
        (r#""comms_logger": {"enabled": true, "prof_ops": ["all_reduce"]}"#, "comm_ms"),
        (r#""tensorboard": {"enabled": true, "output_path": "logs/", "job_name": "try"}"#, "--tensorboard"),
        (r#""csv_monitor": {"enabled": false}"#, "metrics.jsonl"),
        (r#""wandb": {"enabled": true, "project": "p"}"#, "network"),
        (r#""comet": {"enabled": false, "api_key": "k"}"#, "network"),
        (r#""compile": {"deepcompile": true}"#, "compiled"),
        (r#""timers": {"throughput": {"enabled": true}}"#, "metrics.jsonl"),
        (r#""nebula": {"enabled": false}"#, "background"),
        (r#""progressive_layer_drop": {"enabled": false, "theta": 0.5}"#, "off"),
        (r#""compression_training": {"layer_reduction": {"enabled": false}}"#, "off"),
        (r#""pipeline": {}"#, "nothing is set"),
        (r#""tensor_parallel": {"autotp_size": 1}"#, "off"),
        (r#""memory_breakdown": true"#, "metrics.jsonl"),
        (r#""dump_state": true"#, "run.json"),
        (r#""vocabulary_size": 32000"#, "config.json"),
    ] {
        let layer = read(&with_batch(section)).expect(section);
        let path = section.split('"').nth(1).unwrap();
        let (saying, because) = remark(&layer, path);
        assert!(saying == Saying::NoEffect && because.contains(why), "{path}: {because}");
    }
}

#[test]
fn what_would_train_something_else_is_refused() {
    for (section, place, hint) in [
        (r#""progressive_layer_drop": {"enabled": true}"#, "2:1", "leave it out"),
        (r#""curriculum_learning": {"enabled": true, "curriculum_type": "seqlen"}"#, "2:1", "--no-shuffle"),
        (r#""data_efficiency": {"enabled": true, "data_routing": {"enabled": true}}"#, "2:1", "leave it out"),
        (
            r#""compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}"#,
            "2:1",
            "leave it out",
        ),
        (r#""elasticity": {"enabled": true, "micro_batch_sizes": [2, 4]}"#, "2:1", "--lanes"),
        (r#""hybrid_engine": {"enabled": true}"#, "2:1", "leave it out"),
        (r#""autotuning": {"enabled": true, "fast": false}"#, "2:1", "umbra plan"),
        (r#""sparse_attention": {"mode": "fixed", "block": 16}"#, "2:1", "leave it out"),
        (r#""pipeline": {"stages": 4}"#, "2:1", "--recompute block"),
        (r#""expert_parallel": {"enabled": true}"#, "2:1", "leave it out"),
        (r#""tensor_parallel": {"autotp_size": 4}"#, "2:21", "--stage 3"),
        (r#""sequence_parallel_size": 2"#, "2:1", "--recompute block"),
    ] {
        fails(&with_batch(section), place, "is not supported", hint);
    }
}

#[test]
fn unknown_keys_are_errors_with_the_nearest_one() {
    fails(&with_batch("  \"gradient_cliping\": 1.0"), "2:3", "no key \"gradient_cliping\"", "\"gradient_clipping\"");
    fails(&with_batch("\"zero_optimisation\": {}"), "2:1", "\"zero_optimisation\"", "\"zero_optimization\"");
    fails(&with_batch("\"colour\": 1"), "2:1", "no key \"colour\"", "nothing is ignored in silence");
    fails(&with_batch("\"bf16\": {\"enable\": true}"), "2:10", "\"enable\" in bf16", "\"enabled\"");
    fails(&with_batch("\"fp16\": {\"los_scale\": 0}"), "2:10", "\"los_scale\" in fp16", "\"loss_scale\"");
    fails(&with_batch("\"tensorboard\": {\"enabld\": true}"), "2:17", "\"enabld\"", "\"enabled\"");
    fails(&with_batch("\"progressive_layer_drop\": {\"enabld\": true}"), "2:28", "\"enabld\"", "\"enabled\"");
    fails(&with_batch("\"steps_per_print\": 1,\n\"steps_per_print\": 2"), "3:1", "written twice", "remove one");
}

#[test]
fn values_of_another_type_are_errors() {
    fails(&with_batch("\"wall_clock_breakdown\": \"sometimes\""), "2:25", "cannot be \"sometimes\"", "");
    fails(&with_batch("\"steps_per_print\": 2.5"), "2:20", "steps_per_print cannot be 2.5", "");
    fails(&with_batch("\"bf16\": true"), "2:9", "bf16 is not a table", "");
    fails(&with_batch("\"bf16\": {\"enabled\": \"maybe\"}"), "2:21", "bf16.enabled cannot be \"maybe\"", "");
    fails(&with_batch("\"aio\": {\"block_size\": -1}"), "2:23", "aio.block_size cannot be -1", "");
    fails("[1, 2]", "1:1", "the file is not a table", "");
}
