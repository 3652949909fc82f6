//! Data parallel, one process, several machines.

use super::*;
use LoadDType::{Bf16, Fp32};
use Saying::{Differs, NoEffect, Same};

/// As `accelerate config` writes data parallelism on two machines.
const MULTI_GPU: &str = "\
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: 0,1,2,3
machine_rank: 1
main_process_ip: 10.0.0.21
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: c10d
same_network: true
use_cpu: false
";

#[test]
fn data_parallel_is_stage_0_with_fp32_gradients() {
    let layer = read(MULTI_GPU, &with(Version(1, 15, 0), Fp32)).unwrap();
    assert_eq!(flags(&layer), "--lanes 8 --stage 0 --policy fsdp-mixed --wire fp32 --reduced fp32");
    let why = "run.yaml (Accelerate 1.15.0, no sharding, mixed_precision bf16, weights loaded in fp32: autocast computes in \
               bf16, weights, reduction and AdamW are fp32)";
    assert_eq!(source(&layer, "policy"), why);
    for key in ["machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "num_machines"]
    {
        let started = "mpirun or Slurm starts the ranks and tells them where the others are";
        assert_eq!(remark(&layer, key), (NoEffect, started), "{key}");
    }
    assert_eq!(remark(&layer, "gpu_ids").0, NoEffect);
}

#[test]
fn the_load_dtype_decides_without_sharding() {
    for (mixed, load, policy) in [
        ("bf16", Bf16, "fsdp-low"),
        ("bf16", Fp32, "fsdp-mixed --wire fp32 --reduced fp32"),
        ("no", Bf16, "fsdp-low"),
        ("no", Fp32, "fp32"),
    ] {
        let text = format!("distributed_type: MULTI_CPU\nmixed_precision: {mixed}\nuse_cpu: true\n");
        let layer = read(&text, &with(Version(1, 15, 0), load)).unwrap();
        assert_eq!(flags(&layer), format!("--stage 0 --policy {policy}"), "{mixed} {load:?}");
        assert_eq!(remark(&layer, "use_cpu").0, Same);
    }
    let layer = of(MULTI_GPU);
    let (saying, why) = remark(&layer, "mixed_precision");
    assert!(saying == Differs && why.contains("autocast does not upcast weights"), "{why}");
    for kind in ["MULTI_NPU", "MULTI_MLU", "MULTI_XPU", "MULTI_HPU", "multi_gpu"] {
        assert_eq!(flags(&of(&format!("distributed_type: {kind}\n"))), "--stage 0 --policy fsdp-low", "{kind}");
    }
}

#[test]
fn no_distribution_is_one_lane() {
    for (text, place) in [
        ("distributed_type: 'NO'\n", "run.yaml:1:1 (distributed_type: \"NO\")"),
        ("distributed_type: NO\nnum_processes: 1\n", "run.yaml:2:1 (num_processes: 1)"),
        ("distributed_type: false\nnum_processes: -1\n", "run.yaml:1:1 (distributed_type: false)"),
    ] {
        let layer = of(text);
        assert_eq!(flags(&layer), "--lanes 1 --stage 0 --policy fsdp-low", "{text}");
        assert_eq!(source(&layer, "lanes"), place, "{text}");
    }
    let failure = refused("distributed_type: 'NO'\nnum_processes: 4\n");
    let what = "num_processes 4 contradicts distributed_type NO";
    assert_eq!(told(&failure), ("run.yaml:2:1", what, "distributed_type: FSDP or MULTI_GPU for several processes"));
    let expected = "1, or no such key: distributed_type is \"NO\" at run.yaml:1:1";
    assert_eq!(failure.expected.as_deref(), Some(expected));
}

#[test]
fn written_lanes_beat_processes() {
    let facts = Facts { lanes_written: true, batch_written: false, ..FACTS };
    let layer = read(MULTI_GPU, &facts).unwrap();
    assert_eq!(flags(&layer), "--stage 0 --policy fsdp-low");
    assert_eq!(remark(&layer, "num_processes"), (NoEffect, "--lanes is written, and a flag beats a file"));
    assert!(!flags(&read("distributed_type: 'NO'\n", &facts).unwrap()).contains("lanes"));
    let layer = of("distributed_type: MULTI_GPU\nnum_processes: -1\n");
    assert!(!flags(&layer).contains("lanes") && remark(&layer, "num_processes").0 == NoEffect);
}

#[test]
fn precision_words() {
    let policy = |lines: &str| flags(&of(&format!("distributed_type: FSDP\n{lines}")));
    for no in [
        "mixed_precision: no\n",
        "mixed_precision: false\n",
        "mixed_precision: 'NO'\n",
        "fp16: false\n",
        "mixed_precision:\n",
        "",
    ] {
        assert_eq!(policy(no), "--policy fsdp-low --stage 3", "{no}");
    }
    assert_eq!(policy("fp16: false\nmixed_precision: bf16\n"), "--policy fsdp-mixed --stage 3");
    let instead = "mixed_precision: bf16, which has fp32's range and needs no loss scaling";
    let failure = refused("distributed_type: FSDP\nmixed_precision: fp16  # as an old example has it\n");
    let what = "mixed_precision \"fp16\" is not supported: fp16 gradients need loss scaling";
    assert_eq!(told(&failure), ("run.yaml:2:1", what, instead));
    let failure = refused("fp16: true\ndistributed_type: MULTI_GPU\n");
    assert_eq!(
        told(&failure),
        ("run.yaml:1:1", "fp16 true is not supported: fp16 gradients need loss scaling", instead)
    );
    let failure = refused("distributed_type: FSDP\nmixed_precision: bf16\nfp16: true\n");
    assert_eq!(told(&failure), ("run.yaml:3:1", "fp16 contradicts mixed_precision", "remove one of the two"));
    let failure = refused("distributed_type: FSDP\nmixed_precision: fp8\nfp8_config: {backend: TE}\n");
    assert_eq!(told(&failure).1, "mixed_precision \"fp8\" is not supported: there are no fp8 products");
    let failure = refused("distributed_type: FSDP\nmixed_precision: bf61\n");
    assert_eq!(told(&failure), ("run.yaml:2:18", "mixed_precision cannot be \"bf61\"", ""));
    assert_eq!(failure.expected.as_deref(), Some("one of no, bf16, fp16, fp8"));
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    for (text, place, what) in [
        (
            "distributed_type: XLA\n",
            "run.yaml:1:1",
            "distributed_type \"XLA\" is not supported: there is no backend for TPUs",
        ),
        (
            "distributed_type: TPU\n",
            "run.yaml:1:1",
            "distributed_type \"TPU\" is not supported: there is no backend for TPUs",
        ),
        (
            "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n",
            "run.yaml:1:1",
            "distributed_type \"MEGATRON_LM\" is not supported: tensor and pipeline parallelism are not built",
        ),
        (
            "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nec2_instance_type: ml.p3.2xlarge\n",
            "run.yaml:1:1",
            "compute_environment \"AMAZON_SAGEMAKER\" is not supported: SageMaker's jobs are started by its own service",
        ),
        (
            "distributed_type: MULTI_GPU\ntp_config:\n  tp_size: 2\n",
            "run.yaml:3:3",
            "tp_config.tp_size 2 is not supported: tensor parallelism is not built",
        ),
        (
            "distributed_type: FSDP\ngradient_accumulation_steps: 8\n",
            "run.yaml:2:1",
            "gradient_accumulation_steps 8 is not supported: Accelerate has no such key at this level",
        ),
    ] {
        let failure = refused(text);
        assert_eq!((told(&failure).0, told(&failure).1), (place, what));
        assert!(failure.hint.is_some(), "{text}");
    }
    let failure = refused("distributed_type: FSDP\ngradient_accumulation_steps: 8\n");
    assert_eq!(told(&failure).2, "write it in deepspeed_config, or give --accum");
    let failure = refused("distributed_type: FSDP\nfsdp_sharding_strategy: SHARD_GRAD_OP\n");
    assert_eq!(told(&failure).2, "write it in fsdp_config, or give --stage");
}

#[test]
fn sections_of_another_type_are_remarked() {
    let text = "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\ndeepspeed_config: {}\n\
                megatron_lm_config:\n  megatron_lm_pp_degree: 1\nfp8_config: {backend: TE}\ndynamo_config:\n  \
                dynamo_backend: INDUCTOR\nmpirun_config: {mpirun_ccl: '1'}\n";
    let layer = of(text);
    assert_eq!(flags(&layer), "--stage 0 --policy fsdp-low");
    let why = "Accelerate reads it under distributed_type FSDP, and this is \"MULTI_GPU\"";
    assert_eq!(remark(&layer, "fsdp_config"), (NoEffect, why));
    for key in ["megatron_lm_config", "fp8_config", "dynamo_config", "mpirun_config"] {
        assert_eq!(remark(&layer, key).0, NoEffect, "{key}");
    }
    assert!(!layer.remarks.iter().any(|r| r.source.says.starts_with("deepspeed_config")), "empty: it asks for nothing");
    assert_eq!(told(&refused("distributed_type: MULTI_GPU\nfsdp_config: FULL_SHARD\n")).0, "run.yaml:2:14");
}

#[test]
fn unknown_names_have_a_nearest_one() {
    for (text, place, what, hint) in [
        (
            "distributed_type: FSDP\nmixed_precison: bf16\n",
            "run.yaml:2:1",
            "there is no key \"mixed_precison\"",
            "did you mean \"mixed_precision\"?",
        ),
        (
            "distributed_typ: FSDP\nnum_processes: 2\nuse_cpu: true\n",
            "run.yaml:1:1",
            "there is no key \"distributed_typ\"",
            "did you mean \"distributed_type\"?",
        ),
        ("distributed_type: FSPD\n", "run.yaml:1:19", "distributed_type cannot be \"FSPD\"", ""),
        (
            "distributed_type: MULTI_GPUS\n",
            "run.yaml:1:19",
            "distributed_type cannot be \"MULTI_GPUS\"",
            "did you mean \"MULTI_GPU\"?",
        ),
        (
            "distributed_type: MULTI_GPU\ndynamo_config:\n  dynamo_backnd: EAGER\n",
            "run.yaml:3:3",
            "there is no key \"dynamo_backnd\" in dynamo_config",
            "did you mean \"dynamo_backend\"?",
        ),
        (
            "num_processes: 2\nfsdp_config: {}\n",
            "run.yaml",
            "distributed_type is missing",
            "distributed_type: FSDP for sharded weights, MULTI_GPU for plain data parallelism, NO for one process",
        ),
        ("distributed_type: FSDP\nnum_processes: 8.5\n", "run.yaml:2:16", "num_processes cannot be 8.5", ""),
        ("distributed_type: FSDP\nnum_processes: 0\n", "run.yaml:2:16", "num_processes cannot be 0", ""),
        (
            "distributed_type: FSDP\nuse_cpu: true\ndistributed_type: MULTI_GPU\n",
            "run.yaml:3:1",
            "distributed_type is written twice",
            "remove one of the two",
        ),
    ] {
        assert_eq!(told(&refused(text)), (place, what, hint), "{text}");
    }
    assert_eq!(
        flags(&of("distributed_type: MULTI_GPU\nnum_processes: '8'\n")),
        "--lanes 8 --stage 0 --policy fsdp-low"
    );
}

/// Fields that came and went between releases are known, whatever release is assumed.
#[test]
fn keys_of_other_releases_are_known() {
    let text = "distributed_type: MULTI_GPU\nenable_cpu_affinity: true\nipex_config: {ipex: true}\ndynamo_backend: 'NO'\n\
                downcast_bf16: false\ntpu_name: null\ntpu_zone:\ntpu_vm: [a]\ncommand_file: null\ncommands: null\n\
                main_process_port: null\n";
    let layer = of(text);
    for key in ["enable_cpu_affinity", "ipex_config", "dynamo_backend", "downcast_bf16", "tpu_vm"] {
        assert_eq!(remark(&layer, key).0, NoEffect, "{key}");
    }
    assert!(!layer.remarks.iter().any(|r| r.source.says.contains("null")));
}
