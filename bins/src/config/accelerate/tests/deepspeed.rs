//! DeepSpeed inline and by file.

use super::*;
use Saying::{Differs, NoEffect, Same};

/// As `accelerate config` writes ZeRO-3 without a file of DeepSpeed's own.
const INLINE: &str = "\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 8
use_cpu: false
";

/// A file of DeepSpeed with these lines in its section.
fn zero(mixed: &str, lines: &str) -> String {
    let section: String = lines.lines().map(|line| format!("  {line}\n")).collect();
    format!("distributed_type: DEEPSPEED\nmixed_precision: {mixed}\ndeepspeed_config:\n{section}")
}

#[test]
fn the_questionnaires_settings_are_flags() {
    let layer = of(INLINE);
    assert_eq!(flags(&layer), "--lanes 8 --stage 3 --accum 4 --clip 0.5 --policy deepspeed --optimizer-form torch");
    assert_eq!(source(&layer, "accum"), "run.yaml:4:3 (deepspeed_config.gradient_accumulation_steps: 4)");
    assert_eq!(source(&layer, "policy"), "run.yaml:13:1 (mixed_precision: \"bf16\")");
    assert_eq!(remark(&layer, "deepspeed_config.zero3_save_16bit_model"), (Same, "model/ holds the weights in bf16"));
    assert_eq!(remark(&layer, "deepspeed_config.deepspeed_multinode_launcher").0, NoEffect);
    assert_eq!(remark(&layer, "deepspeed_config.offload_optimizer_device"), (Same, "nothing is offloaded"));
}

#[test]
fn several_machines_are_started_by_others() {
    let lines = "deepspeed_hostfile: /etc/hostfile\ndeepspeed_multinode_launcher: pdsh\ndeepspeed_exclusion_filter: ''\n\
                 zero_stage: 3\nzero3_init_flag: true\nzero3_save_16bit_model: false";
    let layer = of(&(zero("bf16", lines) + "num_machines: 2\nnum_processes: 16\nrdzv_backend: static\n"));
    assert_eq!(flags(&layer), "--lanes 16 --stage 3 --clip 1 --policy deepspeed --optimizer-form torch");
    for key in ["deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_exclusion_filter"] {
        let started = "mpirun or Slurm starts the ranks and tells them where the others are";
        assert_eq!(remark(&layer, &format!("deepspeed_config.{key}")), (NoEffect, started), "{key}");
    }
    let kept = "model/ is written all the same";
    assert_eq!(remark(&layer, "deepspeed_config.zero3_save_16bit_model"), (NoEffect, kept));
}

#[test]
fn missing_settings_are_accelerates() {
    let layer = of("distributed_type: DEEPSPEED\nmixed_precision: bf16\n");
    assert_eq!(flags(&layer), "--stage 2 --clip 1 --policy deepspeed --optimizer-form torch");
    assert_eq!(source(&layer, "stage"), "run.yaml (Accelerate's DeepSpeed plugin without zero_stage)");
    let filled = "run.yaml (Accelerate sets gradient_clipping to 1.0 where it is missing or \"auto\")";
    assert_eq!(source(&layer, "clip"), filled);
    let layer = of(&zero("bf16", "gradient_clipping: auto\ngradient_accumulation_steps: auto\nzero_stage: 1"));
    assert_eq!(flags(&layer), "--stage 1 --clip 1 --policy deepspeed --optimizer-form torch");
    assert_eq!(remark(&layer, "deepspeed_config.gradient_accumulation_steps").0, NoEffect);
    assert_eq!(
        flags(&of(&zero("bf16", "gradient_clipping: 0.0"))),
        "--stage 2 --clip 0 --policy deepspeed --optimizer-form torch"
    );
}

#[test]
fn without_mixed_precision_everything_is_fp32() {
    let expected = "--stage 2 --clip 1 --policy fp32 --clip-form deepspeed --optimizer-form torch";
    assert_eq!(flags(&of(&zero("'no'", "zero_stage: 2"))), expected);
    assert_eq!(flags(&of("distributed_type: DEEPSPEED\n")), expected);
    let cpu = flags(&of(&zero("no", "offload_optimizer_device: cpu")));
    assert_eq!(cpu, "--stage 2 --clip 1 --policy fp32 --clip-form deepspeed --optimizer-form cpu");
}

#[test]
fn offload_changes_the_optimizer_only() {
    let lines =
        "zero_stage: 3\noffload_optimizer_device: cpu\noffload_param_device: cpu\noffload_param_nvme_path: none";
    let layer = of(&zero("bf16", lines));
    assert_eq!(flags(&layer), "--stage 3 --clip 1 --policy deepspeed --optimizer-form cpu");
    let host = "on this device all state lies in host memory";
    assert_eq!(remark(&layer, "deepspeed_config.offload_param_device"), (NoEffect, host));
    let nvme = of(&zero("bf16", "offload_optimizer_device: nvme\noffload_optimizer_nvme_path: /local"));
    assert_eq!(flags(&nvme), "--stage 2 --clip 1 --policy deepspeed --optimizer-form cpu");
    let (saying, why) = remark(&nvme, "deepspeed_config.offload_optimizer_device");
    assert!(saying == Differs && why.contains("host memory, not in files"), "{why}");
}

#[test]
fn wrong_values_and_names_are_placed() {
    for (lines, place, what, expected) in [
        ("zero_stage: 4", "run.yaml:4:15", "deepspeed_config.zero_stage cannot be 4", "0, 1, 2 or 3"),
        ("zero_stage: auto", "run.yaml:4:15", "deepspeed_config.zero_stage cannot be \"auto\"", "0, 1, 2 or 3"),
        (
            "gradient_clipping: -1",
            "run.yaml:4:22",
            "deepspeed_config.gradient_clipping cannot be -1",
            "a number that is 0 (off) or more, or auto",
        ),
        (
            "gradient_accumulation_steps: 8.5",
            "run.yaml:4:32",
            "deepspeed_config.gradient_accumulation_steps cannot be 8.5",
            "a whole number that is 1 or more",
        ),
        (
            "offload_optimizer_devise: cpu",
            "run.yaml:4:3",
            "there is no key \"offload_optimizer_devise\" in deepspeed_config",
            "perhaps \"offload_optimizer_device\"",
        ),
        (
            "offload_param_device: gpu",
            "run.yaml:4:25",
            "deepspeed_config.offload_param_device cannot be \"gpu\"",
            "one of none, cpu, nvme",
        ),
    ] {
        let failure = refused(&zero("bf16", lines));
        assert_eq!((told(&failure).0, told(&failure).1), (place, what));
        assert_eq!(failure.expected.as_deref(), Some(expected), "{lines}");
    }
    assert_eq!(
        flags(&of(&zero("bf16", "gradient_accumulation_steps: '8'"))),
        "--stage 2 --accum 8 --clip 1 --policy deepspeed --optimizer-form torch"
    );
    assert_eq!(told(&refused(&zero("fp16", "zero_stage: 2"))).0, "run.yaml:2:1");
}

/// A folder with DeepSpeed's file in it.
fn folder(json: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ds_zero3.json"), json).unwrap();
    dir
}

const JSON: &str =
    "{\"train_micro_batch_size_per_gpu\": 1, \"zero_optimization\": {\"stage\": 3}, \"bf16\": {\"enabled\": true}}";

fn by_file(value: &str, more: &str) -> String {
    format!(
        "deepspeed_config:\n  deepspeed_config_file: {value}\n  zero3_init_flag: true\n{more}distributed_type: DEEPSPEED\n\
         num_processes: 2\n"
    )
}

#[test]
fn a_file_of_deepspeeds_is_read_in_all_its_forms() {
    let dir = folder(JSON);
    let path = dir.path().join("ds_zero3.json").display().to_string();
    let base64 = "eyJ0cmFpbl9taWNyb19iYXRjaF9zaXplX3Blcl9ncHUiOiAxLCAiemVyb19vcHRpbWl6YXRpb24iOiB7InN0YWdlIjogM30sICJiZjE2IjogeyJlbmFibGVkIjogdHJ1ZX19";
    let text = format!("'{JSON}'");
    let within = "its settings are read from run.yaml[deepspeed_config.deepspeed_config_file]";
    let table = "its settings are read from run.yaml";
    let named = format!("its settings are read from {path}");
    for (value, expected) in [(path.as_str(), named.as_str()), (&text, within), (base64, within), (JSON, table)] {
        let layer = of(&by_file(value, ""));
        assert_eq!(remark(&layer, "deepspeed_config.deepspeed_config_file"), (Same, expected), "{value}");
        assert_eq!(remark(&layer, "deepspeed_config.zero3_init_flag").0, NoEffect);
        assert!(flags(&layer).starts_with("--lanes 2"), "{}", flags(&layer));
        assert!(!flags(&layer).contains("--policy fp32"), "the file decides the precision");
    }
    // Accelerate's word for no file.
    let layer = of(&by_file("none", ""));
    assert!(flags(&layer).contains("--stage 2"), "{}", flags(&layer));
}

#[test]
fn a_file_that_is_not_there() {
    let dir = folder(JSON);
    let yaml = dir.path().join("accelerate.yaml");
    let text = by_file("ds_zero3.json", "");
    let file = Arc::new(yaml.clone());
    let failure = layer(&file, &yaml::parse(&text).unwrap(), &FACTS).unwrap_err();
    let json = dir.path().join("ds_zero3.json");
    assert_eq!(failure.what, "the DeepSpeed file ds_zero3.json cannot be read");
    assert_eq!(failure.place, Some(format!("{}:2:3", yaml.display())));
    let hint = "it is beside the YAML, but the path counts from the working folder: write";
    assert_eq!(failure.hint, Some(format!("{hint} {}, or start there", json.display())));
    let failure = refused(&by_file("configs/zero9.json", ""));
    assert_eq!(told(&failure).2, "correct the path, or write the settings into deepspeed_config");
}

#[test]
fn settings_that_accelerate_cannot_use() {
    let within = "run.yaml[deepspeed_config.deepspeed_config_file]";
    let failure = refused(&by_file("'{\"bf16\": {\"enabled\": true}}'", ""));
    assert_eq!(
        (told(&failure).0, told(&failure).1),
        (within, "Accelerate needs zero_optimization in DeepSpeed's settings")
    );
    let failure = refused(&by_file("'{\"zero_optimization\": {]}'", ""));
    assert_eq!(told(&failure).0, format!("{within}:1:24"));
    assert_eq!(failure.what, "the DeepSpeed settings are not well-formed JSON");
}

#[test]
fn settings_beside_a_file_are_refused_with_both_places() {
    for (key, value, instead) in [
        ("zero_stage", "3", "zero_optimization.stage"),
        ("gradient_clipping", "1.0", "gradient_clipping"),
        ("gradient_accumulation_steps", "1", "gradient_accumulation_steps"),
        ("offload_param_device", "\"none\"", "zero_optimization.offload_param.device"),
        ("zero3_save_16bit_model", "true", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    ] {
        let failure = refused(&by_file("ds.json", &format!("  {key}: {value}\n")));
        let what = format!("deepspeed_config.{key} cannot be written beside deepspeed_config.deepspeed_config_file");
        let hint = format!("remove it and write {instead} in that file");
        assert_eq!(told(&failure), ("run.yaml:4:3", what.as_str(), hint.as_str()));
        let expected = "DeepSpeed's settings in one place, the file named at run.yaml:2:3";
        assert_eq!(failure.expected.as_deref(), Some(expected));
        assert_eq!(failure.found, Some(format!("deepspeed_config.{key}: {value}")));
    }
    let failure = refused(&by_file("ds.json", "mixed_precision: bf16\n"));
    let what = "mixed_precision cannot be written beside deepspeed_config.deepspeed_config_file";
    assert_eq!(told(&failure), ("run.yaml:4:1", what, "remove it and write bf16.enabled: true in that file"));
}
