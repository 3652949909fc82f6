//! The rest of the file: what only logs or tunes, and what would train something else.

use super::Auto;
use super::keys::{
    Any, Bool, Count, Kind, List, Number, Quiet, Text, has_content, quiet, quiet_section, refused, written,
};
use crate::Result;
use crate::config::Layer;
use crate::config::node::{Node, Value};
use crate::config::section::Section;

const PRINTS: &str = "metrics.jsonl has times, memory and rates of every step";
const EXPERTS: &str = "there are no experts";

const TOP: &[Quiet] = &[
    ("wall_clock_breakdown", Bool, PRINTS),
    ("memory_breakdown", Bool, PRINTS),
    ("dump_state", Bool, "run.json has every setting"),
    ("log_level", Any, "it concerns DeepSpeed's own messages"),
    ("disable_allgather", Bool, "DeepSpeed has no use for it any more"),
    ("allgather_size", Count, "Umbra gathers unit by unit"),
    ("graph_harvesting", Bool, "there are no CUDA graphs"),
    ("vocabulary_size", Count, "config.json has it; DeepSpeed only warns of a size that is not a multiple of 8"),
    ("use_data_before_expert_parallelism", Bool, EXPERTS),
];

/// A section without effect: its name, its keys, and why.
type Without = (&'static str, &'static [(&'static str, Kind)], &'static str);

const MONITOR: &str = "metrics.jsonl has every step; --tensorboard writes events";
const SECTIONS: &[Without] = &[
    (
        "activation_checkpointing",
        &[
            ("partition_activations", Bool),
            ("cpu_checkpointing", Bool),
            ("contiguous_memory_optimization", Bool),
            ("number_checkpoints", Count),
            ("synchronize_checkpoint_boundary", Bool),
            ("profile", Bool),
        ],
        "it tunes what the model's code has to turn on; here that is --recompute block, which changes no bit",
    ),
    (
        "aio",
        &[
            ("block_size", Count),
            ("queue_depth", Count),
            ("intra_op_parallelism", Count),
            ("thread_count", Count),
            ("single_submit", Bool),
            ("overlap_events", Bool),
            ("use_gds", Bool),
        ],
        "nothing is offloaded to files",
    ),
    (
        "checkpoint",
        &[
            ("tag_validation", Text),
            ("load_universal", Bool),
            ("use_node_local_storage", Bool),
            ("parallel_write", Any),
            ("writer", Any),
        ],
        "Umbra's checkpoints are whole or not there and fit any number of ranks; --save-every, --keep and \
         --checkpoint-files say how they are written",
    ),
    (
        "nebula",
        &[
            ("enabled", Bool),
            ("persistent_storage_path", Text),
            ("persistent_time_interval", Count),
            ("num_of_version_in_retention", Count),
            ("enable_nebula_load", Bool),
            ("load_path", Text),
        ],
        "checkpoints are written in the background in any case",
    ),
    ("datastates_ckpt", &[("enabled", Bool), ("config", Any)], "checkpoints are written in the background in any case"),
    (
        "flops_profiler",
        &[
            ("enabled", Bool),
            ("recompute_fwd_factor", Number),
            ("profile_step", Count),
            ("module_depth", Number),
            ("top_modules", Count),
            ("detailed", Bool),
            ("output_file", Text),
        ],
        "metrics.jsonl has tflops and mfu of every step, umbra bench step the parts",
    ),
    (
        "comms_logger",
        &[("enabled", Bool), ("verbose", Bool), ("prof_all", Bool), ("debug", Bool), ("prof_ops", List)],
        "metrics.jsonl has comm_ms of every step",
    ),
    ("tensorboard", &[("enabled", Bool), ("output_path", Text), ("job_name", Text)], MONITOR),
    ("csv_monitor", &[("enabled", Bool), ("output_path", Text), ("job_name", Text)], MONITOR),
    (
        "wandb",
        &[("enabled", Bool), ("group", Text), ("team", Text), ("project", Text)],
        "nothing is sent over the network; metrics.jsonl has every step",
    ),
    (
        "comet",
        &[
            ("enabled", Bool),
            ("samples_log_interval", Count),
            ("project", Text),
            ("workspace", Text),
            ("api_key", Text),
            ("experiment_name", Text),
            ("experiment_key", Text),
            ("online", Bool),
            ("mode", Text),
        ],
        "nothing is sent over the network; metrics.jsonl has every step",
    ),
    ("timers", &[("throughput", Any)], PRINTS),
];

/// A section for something else: its name, its keys, why it is refused when it is on, and what to do instead.
type Other = (&'static str, &'static [&'static str], &'static str, &'static str);

/// Off until `"enabled": true` stands anywhere in them.
const ENABLED: &[Other] = &[
    ("progressive_layer_drop", &["enabled", "theta", "gamma"], "it drops layers at random", "leave it out"),
    (
        "curriculum_learning",
        &["enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config"],
        "it changes how long the rows are as the run goes on",
        "leave it out; rows prepared in the wanted order are read in it with --no-shuffle",
    ),
    (
        "data_efficiency",
        &["enabled", "seed", "data_sampling", "data_routing"],
        "it chooses rows and drops tokens",
        "leave it out",
    ),
    (
        "compression_training",
        &[
            "weight_quantization",
            "activation_quantization",
            "sparse_pruning",
            "row_pruning",
            "head_pruning",
            "channel_pruning",
            "layer_reduction",
        ],
        "it prunes and quantises weights",
        "leave it out",
    ),
    (
        "elasticity",
        &[
            "enabled",
            "max_train_batch_size",
            "micro_batch_sizes",
            "min_gpus",
            "max_gpus",
            "min_time",
            "version",
            "ignore_non_elastic_batch_info",
            "prefer_larger_batch",
            "model_parallel_size",
            "num_gpus_per_node",
        ],
        "it makes the batch depend on the number of ranks",
        "write the batch; with --lanes it is the same on any number of ranks",
    ),
    (
        "hybrid_engine",
        &[
            "enabled",
            "max_out_tokens",
            "inference_tp_size",
            "release_inference_cache",
            "pin_parameters",
            "tp_gather_partition_size",
            "enable_cuda_graph",
        ],
        "it generates between steps",
        "leave it out",
    ),
    (
        "eigenvalue",
        &["enabled", "verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name", "layer_num"],
        "it belongs to quantised training",
        "leave it out",
    ),
    (
        "autotuning",
        &[
            "enabled",
            "fast",
            "results_dir",
            "exps_dir",
            "overwrite",
            "start_profile_step",
            "end_profile_step",
            "metric",
            "metric_path",
            "tuner_type",
            "tuner_early_stopping",
            "tuner_num_trials",
            "arg_mappings",
            "max_train_batch_size",
            "min_train_batch_size",
            "max_train_micro_batch_size_per_gpu",
            "min_train_micro_batch_size_per_gpu",
            "num_tuning_micro_batch_sizes",
            "mp_size",
            "model_info",
            "model_info_path",
        ],
        "it replaces batch sizes and stage by others",
        "leave it out; umbra plan says what fits",
    ),
];

/// On when there is anything in them.
const PRESENT: &[(&str, &str, &str)] = &[
    ("sparse_attention", "attention is dense, within the model's window", "leave it out"),
    ("weight_quantization", "it quantises weights", "leave it out"),
    ("quantize_training", "it quantises weights", "leave it out"),
    ("expert_parallel", EXPERTS, "leave it out"),
    ("pipeline", "there is no pipeline parallelism", "leave it out; --stage 3 and --recompute block save memory"),
];

/// Everything else at the top of the file.
///
/// # Errors
/// Exit 2: what would train something else, wrong types and unknown keys in the sections.
pub(super) fn read(layer: &mut Layer, top: &mut Section<'_>, auto: Auto) -> Result<()> {
    printing(layer, top, auto)?;
    loop_of_its_own(layer, top)?;
    parallel(layer, top)?;
    for &(key, keys, why, instead) in ENABLED {
        let Some(field) = written(top, key) else { continue };
        let mut section = field.section()?;
        for key in keys {
            section.take(key);
        }
        section.finish()?;
        if enabled(field.node) {
            return Err(refused(&field, why, instead));
        }
        layer.no_effect(&field, "off");
    }
    for &(key, why, instead) in PRESENT {
        let Some(field) = written(top, key) else { continue };
        if has_content(&field) {
            return Err(refused(&field, why, instead));
        }
        layer.no_effect(&field, "nothing is set in it");
    }
    for &(key, keys, why) in SECTIONS {
        quiet_section(layer, top, key, keys, why)?;
    }
    if let Some(field) = written(top, "compile") {
        layer.no_effect(&field, "Umbra is compiled already: there is no graph of the model to compile");
    }
    quiet(layer, top, TOP)
}

/// Whether `"enabled": true` stands anywhere in it.
fn enabled(node: &Node) -> bool {
    let on = |node: &Node| match &node.value {
        Value::Bool(on) => *on,
        Value::Text(word) => word.eq_ignore_ascii_case("true"),
        _ => false,
    };
    let mut entries = node.entries().unwrap_or_default().iter();
    entries.any(|entry| (entry.key == "enabled" && on(&entry.node)) || enabled(&entry.node))
}

/// `steps_per_print` as `--log-every`.
fn printing(layer: &mut Layer, top: &mut Section<'_>, auto: Auto) -> Result<()> {
    let Some(field) = written(top, "steps_per_print") else { return Ok(()) };
    if auto.is_accelerate() {
        Number.check(&field)?;
        layer.no_effect(&field, "Accelerate turns DeepSpeed's printing off");
        return Ok(());
    }
    match field.count()? {
        0 => layer.no_effect(&field, "0 prints nothing; progress is shown as --log-every says"),
        steps => layer.set("log-every", steps, &field),
    }
    Ok(())
}

/// What depends on who owns the training loop.
fn loop_of_its_own(layer: &mut Layer, top: &mut Section<'_>) -> Result<()> {
    if let Some(field) = written(top, "managed_gradient_accumulation") {
        if field.bool()? {
            layer.same(&field, "a step follows its last micro-batch");
        } else {
            layer.differs(&field, "the script would say when to step; Umbra steps after --accum micro-batches");
        }
    }
    if let Some(field) = written(top, "dataloader_drop_last") {
        if field.bool()? {
            layer.differs(
                &field,
                "the rows left over at the end of an epoch make a short step here and are not dropped",
            );
        } else {
            layer.same(&field, "rows left over at the end of an epoch make a short step");
        }
    }
    Ok(())
}

/// Splits of the model or of a row over ranks.
fn parallel(layer: &mut Layer, top: &mut Section<'_>) -> Result<()> {
    if let Some(field) = written(top, "sequence_parallel_size") {
        match field.positive()? {
            1 => layer.same(&field, "a row stays on one rank"),
            _ => return Err(field.refused("a row stays on one rank", "1, with --recompute block to save memory")),
        }
    }
    let Some(field) = written(top, "tensor_parallel") else { return Ok(()) };
    let mut section = field.section()?;
    for key in ["autotp_size", "tp_size"] {
        if let Some(size) = written(&mut section, key).filter(|size| !size.is_auto())
            && size.count()? > 1
        {
            return Err(
                size.refused("a matrix is never split over ranks", "leave tensor_parallel out: --stage 3 shards")
            );
        }
    }
    for key in
        ["dtype", "tp_overlap_comm", "tensor_parallel", "injection_policy_tuple", "preset_model", "partition_config"]
    {
        section.take(key);
    }
    section.finish()?;
    layer.no_effect(&field, "off");
    Ok(())
}
