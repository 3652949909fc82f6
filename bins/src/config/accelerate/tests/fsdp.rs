//! FSDP 1 and 2.

use super::*;
use LoadDType::{Bf16, Fp32};
use Saying::{Differs, NoEffect, Same};

/// As the questionnaire of `accelerate config` writes FSDP 1.
const FSDP_1: &str = "\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: MistralDecoderLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
";

/// And FSDP 2.
const FSDP_2: &str = "\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
mixed_precision: bf16
num_processes: 8
";

/// A file of FSDP with one more line in its section.
fn fsdp(lines: &str) -> String {
    let section: String = lines.lines().map(|line| format!("  {line}\n")).collect();
    format!("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n{section}")
}

#[test]
fn the_questionnaires_fsdp_1_is_stage_3() {
    let layer = of(FSDP_1);
    assert_eq!(flags(&layer), "--lanes 4 --policy fsdp-mixed --stage 3 --recompute block");
    assert_eq!(source(&layer, "stage"), "run.yaml:13:3 (fsdp_config.fsdp_sharding_strategy: \"FULL_SHARD\")");
    assert_eq!(source(&layer, "lanes"), "run.yaml:22:1 (num_processes: 4)");
    let host = "on this device all state lies in host memory";
    assert_eq!(remark(&layer, "fsdp_config.fsdp_offload_params"), (NoEffect, host));
    assert_eq!(remark(&layer, "fsdp_config.fsdp_transformer_layer_cls_to_wrap").0, Same);
    assert_eq!(remark(&layer, "fsdp_config.fsdp_auto_wrap_policy").0, Same);
    assert_eq!(remark(&layer, "tpu_use_sudo"), (NoEffect, "it is for TPUs only"));
    // Everything written is a flag or has a remark, but for the section itself, its distributed_type and precision, which
    // decide what the rest means, and for an empty list.
    // What FSDP does differently under accumulation is said of the precision as well.
    assert_eq!(remark(&layer, "mixed_precision").0, Differs);
    let said = layer.remarks.len() - 1 + layer.settings.iter().filter(|s| s.source.place.is_some()).count();
    assert_eq!(said, FSDP_1.lines().count() - 4);
}

#[test]
fn the_questionnaires_fsdp_2_is_stage_3() {
    let layer = of(FSDP_2);
    assert_eq!(flags(&layer), "--lanes 8 --policy fsdp-mixed --stage 3");
    assert_eq!(source(&layer, "stage"), "run.yaml:8:3 (fsdp_config.fsdp_reshard_after_forward: true)");
    assert_eq!(flags(&of("distributed_type: FSDP\n")), "--policy fsdp-low --stage 3");
}

#[test]
fn each_release_and_load_dtype_has_its_policy() {
    let rows = [
        // FSDP 1: version, load, mixed precision, policy, a part of the reason.
        (1, Version(0, 28, 0), Bf16, "bf16", "fsdp-low", "the flat parameters stay as loaded"),
        (1, Version(0, 29, 3), Bf16, "bf16", "fsdp-low", "0.30.0 began to upcast them"),
        (1, Version(0, 28, 0), Bf16, "no", "fsdp-low", "memory-constrained mode"),
        (1, Version(0, 30, 0), Bf16, "bf16", "fsdp-mixed", "flat parameters are upcast to fp32 after wrapping"),
        (1, Version(1, 15, 0), Bf16, "no", "fsdp-low", "memory-constrained mode"),
        (1, Version(0, 28, 0), Fp32, "bf16", "fsdp-mixed", "weights and AdamW stay fp32"),
        (1, Version(1, 15, 0), Fp32, "no", "fp32", "everything stays fp32"),
        (2, Version(1, 6, 0), Bf16, "bf16", "fsdp-mixed", "the whole model is upcast to fp32 after sharding"),
        (2, Version(1, 12, 0), Bf16, "bf16", "fsdp-mixed", "the whole model is upcast to fp32 after sharding"),
        (2, Version(1, 13, 0), Bf16, "bf16", "fsdp-low", "says that it upcasts and does not"),
        (2, Version(1, 13, 2), Bf16, "bf16", "fsdp-low", "issue 3979"),
        (2, Version(1, 13, 0), Fp32, "bf16", "fsdp-mixed", "weights and AdamW stay fp32"),
        (2, Version(1, 14, 0), Bf16, "bf16", "fsdp-mixed", "upcast to fp32 before sharding"),
        (2, Version(1, 15, 0), Bf16, "no", "fsdp-low", "memory-constrained mode"),
        (2, Version(1, 15, 0), Fp32, "no", "fp32", "everything stays fp32"),
    ];
    for (version, release, load, mixed, policy, why) in rows {
        let text =
            format!("distributed_type: FSDP\nmixed_precision: {mixed}\nfsdp_config:\n  fsdp_version: {version}\n");
        let layer = read(&text, &with(release, load)).unwrap();
        let row = format!("FSDP {version} {release} {load:?} {mixed}");
        assert!(flags(&layer).contains(&format!("--policy {policy} ")), "{row}: {}", flags(&layer));
        let reason = source(&layer, "policy");
        let loaded = if load == Bf16 { "bf16" } else { "fp32" };
        let facts = format!(
            "run.yaml (Accelerate {release}, FSDP {version}, mixed_precision {mixed}, weights loaded in {loaded}: "
        );
        assert!(reason.starts_with(&facts) && reason.contains(why), "{row}: {reason}");
    }
}

#[test]
fn mixed_precision_that_leaves_bf16_weights_is_remarked() {
    let layer = read(FSDP_1, &with(Version(0, 28, 0), Bf16)).unwrap();
    let (saying, why) = remark(&layer, "mixed_precision");
    assert_eq!(saying, Differs);
    assert!(why.contains("updates below half a bf16 step are lost") && why.contains("--policy fsdp-mixed"), "{why}");
    let layer = read(FSDP_2, &with(Version(1, 12, 0), Bf16)).unwrap();
    assert!(remark(&layer, "mixed_precision").1.contains("fail in the first optimizer step"));
    assert!(!of(FSDP_1).remarks.iter().any(|r| r.why.contains("fail in the first optimizer step")));
}

#[test]
fn fsdp_2_needs_a_release_that_has_it() {
    let failure = refused_with(FSDP_2, &with(Version(1, 5, 2), Bf16));
    assert_eq!(told(&failure).0, "run.yaml:4:3");
    assert_eq!(failure.what, "Accelerate 1.5.2 has no FSDP 2");
    assert_eq!(failure.expected.as_deref(), Some("fsdp_version: 1, or Accelerate 1.6.0 or newer"));
}

/// The file of the report that began it: the YAML says no, the script's arguments say bf16; numbers for names; the old
/// spelling of the prefetch key.
#[test]
fn the_yaml_of_the_flat_loss() {
    let text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
        fsdp_backward_prefetch_policy: BACKWARD_PRE\n  fsdp_forward_prefetch: false\n  fsdp_offload_params: false\n  \
        fsdp_sharding_strategy: 1\n  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_cpu_ram_efficient_loading: true\n  \
        fsdp_sync_module_states: true\nmixed_precision: 'no'\nnum_processes: 4\n";
    let layer = read(text, &with(Version(0, 28, 0), Bf16)).unwrap();
    assert_eq!(flags(&layer), "--lanes 4 --policy fsdp-low --stage 3");
    let (saying, why) = remark(&layer, "mixed_precision");
    assert!(saying == Same && why.contains("TrainingArguments(bf16=True) of transformers overrides it"), "{why}");
    assert!(remark(&layer, "fsdp_config.fsdp_backward_prefetch_policy").1.contains("an old spelling"));
}

#[test]
fn strategies_are_stages() {
    for (line, expected) in [
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", "--stage 2"),
        ("sharding_strategy: shard_grad_op", "--stage 2"),
        ("fsdp_sharding_strategy: 2", "--stage 2"),
        ("fsdp_sharding_strategy: '3'", "--stage 0"),
        ("fsdp_sharding_strategy: NO_SHARD", "--stage 0"),
        ("fsdp_reshard_after_forward: SHARD_GRAD_OP", "--stage 2"),
        ("fsdp_reshard_after_forward: true", "--stage 3"),
        ("fsdp_reshard_after_forward: 'false'", "--stage 2"),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP\nfsdp_reshard_after_forward: false", "--stage 2"),
        ("fsdp_sharding_strategy: FULL_SHARD\nfsdp_reshard_after_forward: FULL_SHARD", "--stage 3"),
        ("fsdp_version: 2\nfsdp_reshard_after_forward: false", "--stage 3 --reshard-after-forward off"),
        ("fsdp_version: '2'\nreshard_after_forward: yes", "--stage 3"),
        ("fsdp_version: 2\nfsdp_sharding_strategy: NO_SHARD", "--stage 3"),
        ("fsdp_activation_checkpointing: false", "--stage 3 --recompute none"),
    ] {
        assert_eq!(flags(&of(&fsdp(line))), format!("--policy fsdp-mixed {expected}"), "{line}");
    }
}

#[test]
fn hybrid_groups_are_the_ranks_of_a_machine() {
    let text = fsdp("fsdp_sharding_strategy: HYBRID_SHARD");
    let layer = of(&format!("{text}num_machines: 2\nnum_processes: 16\nmachine_rank: 1\n"));
    assert_eq!(flags(&layer), "--lanes 16 --policy fsdp-mixed --stage 3 --shard-group 8");
    let how = "run.yaml (HYBRID_SHARD at run.yaml:4:3: num_processes 16 / num_machines 2)";
    assert_eq!(source(&layer, "shard-group"), how);
    let layer = of(&format!("{text}num_processes: 8\n"));
    assert_eq!(flags(&layer), "--lanes 8 --policy fsdp-mixed --stage 3");
    let whole = "on one machine all ranks share one copy of the state";
    assert_eq!(remark(&layer, "fsdp_config.fsdp_sharding_strategy"), (Same, whole));
    let layer = of(&format!("{text}num_machines: 4\nnum_processes: -1\n"));
    assert_eq!(flags(&layer), "--policy fsdp-mixed --stage 3");
    assert_eq!(remark(&layer, "fsdp_config.fsdp_sharding_strategy").0, Differs);
    let zero_2 = fsdp("fsdp_sharding_strategy: 5") + "num_machines: 2\nnum_processes: 4\n";
    assert_eq!(flags(&of(&zero_2)), "--lanes 4 --policy fsdp-mixed --stage 2 --shard-group 2");
    let failure = refused(&format!("{text}num_machines: 3\nnum_processes: 8\n"));
    assert_eq!(told(&failure).0, "run.yaml:6:1");
    assert_eq!(failure.what, "8 processes cannot be spread evenly over 3 machines");
    assert_eq!(failure.expected.as_deref(), Some("a multiple of num_machines 3 (run.yaml:5:1)"));
}

#[test]
fn contradictions_show_both_places() {
    for (lines, place, what, expected) in [
        (
            "fsdp_sharding_strategy: SHARD_GRAD_OP\nfsdp_reshard_after_forward: true",
            "run.yaml:5:3",
            "fsdp_config.fsdp_reshard_after_forward contradicts fsdp_config.fsdp_sharding_strategy",
            "\"SHARD_GRAD_OP\" as at run.yaml:4:3",
        ),
        (
            "fsdp_reshard_after_forward: NO_SHARD\nfsdp_sharding_strategy: FULL_SHARD",
            "run.yaml:4:3",
            "fsdp_config.fsdp_reshard_after_forward contradicts fsdp_config.fsdp_sharding_strategy",
            "\"FULL_SHARD\" as at run.yaml:5:3",
        ),
        (
            "fsdp_version: 2\nfsdp_sharding_strategy: SHARD_GRAD_OP\nfsdp_reshard_after_forward: true",
            "run.yaml:5:3",
            "fsdp_config.fsdp_sharding_strategy contradicts fsdp_config.fsdp_reshard_after_forward",
            "true as at run.yaml:6:3",
        ),
        (
            "offload_params: true\nfsdp_offload_params: false",
            "run.yaml:4:3",
            "fsdp_config.offload_params contradicts fsdp_config.fsdp_offload_params",
            "false as at run.yaml:5:3",
        ),
    ] {
        let failure = refused(&fsdp(lines));
        assert_eq!(told(&failure), (place, what, "remove one of the two"), "{lines}");
        assert_eq!(failure.expected.as_deref(), Some(expected), "{lines}");
    }
}

#[test]
fn every_key_may_lack_its_prefix() {
    let section = &FSDP_1[FSDP_1.find("fsdp_config").unwrap()..];
    let short = FSDP_1.replace("  fsdp_", "  ");
    assert!(section.contains("  fsdp_use_orig_params") && short.contains("\n  use_orig_params: true\n"));
    assert_eq!(flags(&of(&short)), flags(&of(FSDP_1)));
    let twice =
        FSDP_1.replace("  fsdp_offload_params: true\n", "  fsdp_offload_params: true\n  offload_params: true\n");
    assert_eq!(flags(&of(&twice)), flags(&of(FSDP_1)));
}

#[test]
fn what_fsdp_2_no_longer_has() {
    let old = "fsdp_version: 2\nfsdp_backward_prefetch: BACKWARD_PRE\nfsdp_sync_module_states: true\n\
               fsdp_use_orig_params: false\nfsdp_forward_prefetch: false\nfsdp_sharding_strategy: FULL_SHARD";
    let layer = of(&fsdp(old));
    for key in ["backward_prefetch", "sync_module_states", "use_orig_params", "forward_prefetch", "sharding_strategy"] {
        let (saying, why) = remark(&layer, &format!("fsdp_config.fsdp_{key}"));
        assert!(saying == NoEffect && why.starts_with("obsolete under FSDP 2"), "{key}: {why}");
    }
    let failure = refused(&fsdp("fsdp_version: 2\nfsdp_forward_prefetch: true"));
    let what = "fsdp_config.fsdp_forward_prefetch true is not supported: FSDP 2 has no forward prefetch yet";
    assert_eq!(told(&failure), ("run.yaml:5:3", what, "leave it out; Umbra prefetches anyway"));
    let failure = refused(&fsdp("fsdp_version: 2\nfsdp_state_dict_type: LOCAL_STATE_DICT"));
    assert_eq!(told(&failure).2, "fsdp_state_dict_type: SHARDED_STATE_DICT");
    assert_eq!(flags(&of(&fsdp("fsdp_state_dict_type: LOCAL_STATE_DICT"))), "--policy fsdp-mixed --stage 3");
    let failure = refused(&fsdp("fsdp_version: 2\nfsdp_reshard_after_forward: SHARD_GRAD_OP"));
    assert_eq!(failure.expected.as_deref(), Some("true or false"));
    assert_eq!(told(&failure).2, "SHARD_GRAD_OP of FSDP 1 is false under FSDP 2");
}

#[test]
fn wrong_values_and_names_are_placed() {
    for (lines, place, what, hint) in [
        (
            "fsdp_sharding_strategy: FULL_SHARDS",
            "run.yaml:4:27",
            "fsdp_config.fsdp_sharding_strategy cannot be \"FULL_SHARDS\"",
            "did you mean \"FULL_SHARD\"?",
        ),
        ("fsdp_sharding_strategy: 6", "run.yaml:4:27", "fsdp_config.fsdp_sharding_strategy cannot be 6", ""),
        ("fsdp_version: 3", "run.yaml:4:17", "fsdp_config.fsdp_version cannot be 3", ""),
        ("fsdp_offload_params: maybe", "run.yaml:4:24", "fsdp_config.fsdp_offload_params cannot be \"maybe\"", ""),
        ("fsdp_min_num_params: 8.5", "run.yaml:4:24", "fsdp_config.fsdp_min_num_params cannot be 8.5", ""),
        (
            "fsdp_ofload_params: true",
            "run.yaml:4:3",
            "there is no key \"fsdp_ofload_params\" in fsdp_config",
            "did you mean \"fsdp_offload_params\"?",
        ),
        (
            "fsdp_ignored_modules: '.*embed.*'",
            "run.yaml:4:3",
            "fsdp_config.fsdp_ignored_modules \".*embed.*\" is not supported: every weight is sharded",
            "leave it out: no number changes",
        ),
    ] {
        assert_eq!(told(&refused(&fsdp(lines))), (place, what, hint), "{lines}");
    }
    let fine = "fsdp_min_num_params: 1e8\nfsdp_ignored_modules:\nfsdp_backward_prefetch: 2\n\
                fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Qwen2DecoderLayer";
    let layer = of(&fsdp(fine));
    assert_eq!(remark(&layer, "fsdp_config.fsdp_transformer_layer_cls_to_wrap").0, NoEffect);
}

#[test]
fn the_mesh_of_fsdp_2() {
    let mesh = |sizes: &str| FSDP_2.to_owned() + "parallelism_config:\n" + sizes;
    let layer = of(&mesh(
        "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 1\n  parallelism_config_cp_comm_strategy: allgather\n",
    ));
    assert_eq!(flags(&layer), "--lanes 8 --policy fsdp-mixed --stage 3 --shard-group 4");
    assert_eq!(remark(&layer, "parallelism_config.parallelism_config_tp_size"), (Same, "off"));
    let layer = of(&mesh("  dp_shard_size: 8\n"));
    assert_eq!(flags(&layer), "--lanes 8 --policy fsdp-mixed --stage 3");
    let failure = refused(&mesh("  parallelism_config_cp_size: 2\n"));
    let what = "parallelism_config.parallelism_config_cp_size 2 is not supported: context parallelism is not built";
    assert_eq!(told(&failure).0, "run.yaml:13:3");
    assert_eq!(failure.what, what);
}
