//! Whole files in the styles that are about, then (below) key by key.

use super::*;
use crate::Failure;
use crate::config::assume::{Assume, LoadDType};
use crate::config::{Saying, hjson};

mod batch;
mod gradient;
mod optimizer;
mod refused;
mod scheduler;
mod zero;

fn facts(lanes: usize, deepspeed: &str) -> Facts {
    let assume = Assume::read(&[format!("deepspeed={deepspeed}")]).unwrap();
    Facts { lanes, lanes_written: false, batch_written: false, assume, load: LoadDType::Bf16 }
}

fn read_as(text: &str, facts: &Facts, auto: Auto) -> Result<Layer> {
    let file = Arc::new(PathBuf::from("ds.json"));
    let node = hjson::parse(text).map_err(|e| Failure::usage(format!("{:?}", e.spot)).found(e.found))?;
    let mut layer = Layer::new(file.clone(), Dialect::DeepSpeed);
    fill(&mut layer, &file, &node, facts, auto)?;
    Ok(layer)
}

/// Under the newest release, on four lanes.
fn read(text: &str) -> Result<Layer> {
    read_as(text, &facts(4, "0.19.6"), Auto::DeepSpeed)
}

/// A file with a batch, and `text` beside it.
fn with_batch(text: &str) -> String {
    format!("{{\"train_micro_batch_size_per_gpu\": \"auto\",\n{text}}}")
}

/// The flags in their order.
fn flags(layer: &Layer) -> String {
    let flags = layer.settings.iter().map(|s| format!("--{} {}", s.flag, s.values.join(" ")));
    flags.collect::<Vec<_>>().join("; ")
}

/// The values of one flag, an implied one marked.
fn value(layer: &Layer, flag: &str) -> Option<String> {
    let mut found = layer.settings.iter().filter(|s| s.flag == flag);
    let first = found.next()?;
    assert_eq!(found.next(), None, "--{flag} is set once");
    let implied = if first.source.place.is_none() { "implied " } else { "" };
    Some(format!("{implied}{}", first.values.join(" ")))
}

/// What is said of a key.
fn remark<'l>(layer: &'l Layer, path: &str) -> (Saying, &'l str) {
    let mut found = layer.remarks.iter().filter(|r| r.source.says.starts_with(&format!("{path}: ")));
    let first = found.next().unwrap_or_else(|| panic!("nothing is said of {path}: {:#?}", layer.remarks));
    (first.saying, &first.why)
}

#[track_caller]
fn fails(text: &str, place: &str, what: &str, hint: &str) {
    fails_under(text, &facts(4, "0.19.6"), place, what, hint);
}

#[track_caller]
fn fails_under(text: &str, facts: &Facts, place: &str, what: &str, hint: &str) {
    let failure = read_as(text, facts, Auto::DeepSpeed).expect_err(text);
    let place = if place.is_empty() { "ds.json".to_owned() } else { format!("ds.json:{place}") };
    assert_eq!(failure.place.as_deref(), Some(place.as_str()), "{failure}");
    assert!(failure.what.contains(what), "{what:?} in {failure}");
    assert!(failure.hint.as_deref().unwrap_or_default().contains(hint), "{hint:?} in {failure}");
}

/// In the style of transformers' example for stage 3 with offload.
const TRAINER_STAGE_3: &str = r#"{
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
        "hysteresis": 2, "min_loss_scale": 1
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true},
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}"#;

#[test]
fn a_file_of_autos_leaves_the_numbers_to_flags() {
    let layer = read(TRAINER_STAGE_3).unwrap();
    assert_eq!(
        flags(&layer),
        "--stage 3; --policy deepspeed; --clip 1; --optimizer adamw; --optimizer-form cpu; --schedule warmup-lr; \
         --schedule-params warmup_min_lr=auto warmup_max_lr=auto warmup_num_steps=auto; --log-every 2000"
    );
    for (path, saying, why) in [
        ("train_batch_size", Saying::NoEffect, "--global-batch"),
        ("gradient_accumulation_steps", Saying::NoEffect, "--accum"),
        ("bf16.enabled", Saying::Same, "taken as on"),
        ("fp16.enabled", Saying::NoEffect, "taken as off"),
        ("fp16.loss_scale", Saying::NoEffect, "fp16 only"),
        ("gradient_clipping", Saying::Same, "1.0"),
        ("optimizer.params.lr", Saying::NoEffect, "--lr"),
        ("optimizer.params.betas", Saying::NoEffect, "--beta1"),
        ("zero_optimization.offload_optimizer.device", Saying::NoEffect, "host memory"),
        ("zero_optimization.offload_param.pin_memory", Saying::NoEffect, "host memory"),
        ("zero_optimization.sub_group_size", Saying::NoEffect, "unit by unit"),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save", Saying::Same, "model/"),
        ("wall_clock_breakdown", Saying::NoEffect, "metrics.jsonl"),
    ] {
        let (said, because) = remark(&layer, path);
        assert!(said == saying && because.contains(why), "{path}: {said:?} {because}");
    }
    let stage = &layer.settings[0].source;
    assert_eq!(stage.to_string(), "ds.json:16:9 (zero_optimization.stage: 3)");
}

#[test]
fn the_run_of_the_two_engines() {
    let text = r#"{
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1,
        "zero_optimization": {
            "stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}
        },
        "bf16": {"enabled": true},
        "gradient_clipping": 1.0,
        "prescale_gradients": false,
        "wall_clock_breakdown": false
    }"#;
    let layer = read(text).unwrap();
    assert_eq!(
        flags(&layer),
        "--micro-batch 2; --accum 1; --stage 3; --policy deepspeed; --clip 1.0; --optimizer-form torch; --log-every 1",
        "no optimizer is named, so none is set"
    );
    assert_eq!(remark(&layer, "prescale_gradients").0, Saying::Same);
    assert_eq!(remark(&layer, "zero_optimization.offload_param.device"), (Saying::Same, "nothing is offloaded"));
    // Releases before 0.19.2 cast the rotary frequencies too.
    let old = read_as(text, &facts(4, "0.14"), Auto::DeepSpeed).unwrap();
    assert_eq!(flags(&old), flags(&layer));
    let (saying, why) = remark(&old, "bf16.enabled");
    assert!(saying == Saying::Differs && why.contains("DeepSpeed 0.14.0 casts buffers"), "{why}");
}

#[test]
fn a_tutorial_file_with_every_number_written() {
    let text = r#"{
        // as first steps are taught
        train_batch_size: 16
        steps_per_print: 0
        optimizer: {
            type: Adam
            params: {lr: 0.001, betas: [0.8, 0.999], eps: 1e-8, weight_decay: 3e-7}
        }
        scheduler: {
            type: WarmupLR
            params: {warmup_min_lr: 0, warmup_max_lr: 0.001, warmup_num_steps: 1e3}
        }
        gradient_clipping: 0.5   # not one
        bf16: {enabled: true}
        zero_optimization: {
            stage: 2
            allgather_partitions: true, reduce_scatter: true
            allgather_bucket_size: 5e7, reduce_bucket_size: 50000000
            overlap_comm: true, contiguous_gradients: true, cpu_offload: false
        }
    }"#;
    let layer = read(text).unwrap();
    assert_eq!(
        flags(&layer),
        "--global-batch 16; --micro-batch 4; --stage 2; --policy deepspeed; --clip 0.5; --optimizer adamw; \
         --optimizer-form fused; --lr 0.001; --weight-decay 3e-7; --beta1 0.8; --beta2 0.999; --eps 1e-8; \
         --schedule warmup-lr; --schedule-params warmup_min_lr=0 warmup_max_lr=0.001 warmup_num_steps=1000"
    );
    let micro = &layer.settings[1].source;
    assert_eq!(micro.to_string(), "ds.json (DeepSpeed: train_batch_size 16 / (4 lanes))");
    assert!(remark(&layer, "optimizer.type").1.contains("adam_w_mode"));
    assert!(remark(&layer, "optimizer.params.weight_decay").1.contains("--decay-norms"));
    assert!(remark(&layer, "steps_per_print").1.contains("--log-every"));
}

/// In the style of the stage files of fine-tuning frameworks.
#[test]
fn frameworks_stage_files() {
    let text = |zero: &str| {
        format!(
            r#"{{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "zero_allow_untested_optimizer": true,
  "fp16": {{"enabled": "auto", "auto_cast": false, "loss_scale": 0, "initial_scale_power": 32,
           "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}},
  "bf16": {{"enabled": true}},
  "zero_optimization": {zero}
}}"#
        )
    };
    let stage_0 = r#"{"stage": 0, "allgather_partitions": true, "allgather_bucket_size": 5e8, "overlap_comm": true,
                      "reduce_scatter": true, "reduce_bucket_size": 5e8, "contiguous_gradients": true,
                      "round_robin_gradients": true}"#;
    let layer = read(&text(stage_0)).unwrap();
    assert_eq!(flags(&layer), "--stage 0; --policy deepspeed; --clip 1; --optimizer-form torch");
    assert!(remark(&layer, "zero_optimization.stage").1.contains("below stage 2"), "micro-batches may be several");
    assert_eq!(remark(&layer, "zero_allow_untested_optimizer").0, Saying::NoEffect);

    let stage_2 = r#"{"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "overlap_comm": true}"#;
    let layer = read(&text(stage_2)).unwrap();
    assert_eq!(flags(&layer), "--stage 2; --policy deepspeed; --clip 1; --optimizer-form cpu");
    assert!(!layer.remarks.iter().any(|r| r.source.says.starts_with("zero_optimization.stage: ")));
    // Without an optimizer in the file it takes its own, unless it is told to take any.
    let any = text(stage_2).replacen("{", "{ \"zero_force_ds_cpu_optimizer\": false,", 1);
    let layer = read(&any).unwrap();
    assert_eq!(flags(&layer), "--stage 2; --policy deepspeed; --clip 1; --optimizer-form torch");
    let form = layer.settings.iter().find(|s| s.flag == "optimizer-form").unwrap();
    assert_eq!(form.source.says, "zero_force_ds_cpu_optimizer: false");
}

#[test]
fn a_file_without_precision_trains_in_fp32() {
    let layer = read(r#"{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}"#).unwrap();
    assert_eq!(
        flags(&layer),
        "--micro-batch 1; --accum 8; --stage 0; --policy fp32; --clip-form deepspeed; --clip 1; --optimizer-form torch"
    );
    assert!(layer.settings[2..].iter().all(|s| s.source.place.is_none()), "all of these are implied");
    assert_eq!(layer.settings[3].source.says, "DeepSpeed with neither bf16 nor fp16 trains in fp32");
    assert_eq!(layer.settings[5].source.says, "DeepSpeed 0.19.6 without gradient_clipping");
    let off =
        read(&with_batch(r#""bf16": {"enabled": false}, "fp16": {"enabled": false, "auto_cast": true}"#)).unwrap();
    assert_eq!(value(&off, "policy").as_deref(), Some("fp32"));
    assert_eq!(remark(&off, "fp16.auto_cast").0, Saying::NoEffect);
}

#[test]
fn accelerate_fills_in_what_is_left_open() {
    let facts = facts(2, "0.19.6");
    let under = |text: &str, bf16| read_as(text, &facts, Auto::Accelerate { bf16 });
    let text = r#"{"train_micro_batch_size_per_gpu": 3, "train_batch_size": 6, "steps_per_print": 1e9,
                   "zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}"#;
    let layer = under(text, Some(true)).unwrap();
    let expected =
        "--global-batch 6; --micro-batch 3; --accum 1; --stage 1; --policy deepspeed; --clip 1; --optimizer-form torch";
    assert_eq!(flags(&layer), expected);
    assert_eq!(value(&layer, "policy").as_deref(), Some("implied deepspeed"));
    assert!(remark(&layer, "steps_per_print").1.contains("Accelerate"));
    assert_eq!(value(&under(text, Some(false)).unwrap(), "policy").as_deref(), Some("implied fp32"));
    assert_eq!(value(&under(text, None).unwrap(), "policy").as_deref(), Some("implied fp32"));
    let auto = text.replacen('{', "{\"bf16\": {\"enabled\": \"auto\"},", 1);
    assert_eq!(value(&under(&auto, Some(false)).unwrap(), "policy").as_deref(), Some("fp32"));
    assert_eq!(value(&under(&auto, None).unwrap(), "policy").as_deref(), Some("deepspeed"));
    // Its 1 takes part in the sum.
    let failure = under(&text.replace("\"train_batch_size\": 6", "\"train_batch_size\": 12"), None).unwrap_err();
    assert_eq!(failure.what, "train_batch_size 12 is not 3 × 1 × 2");
    let failure = under(r#"{"train_micro_batch_size_per_gpu": 3}"#, None).unwrap_err();
    assert!(failure.what.contains("no zero_optimization"), "{failure}");
}

#[test]
fn what_a_file_implies_is_its_own() {
    let outer = Arc::new(PathBuf::from("accelerate.yaml"));
    let inner = Arc::new(PathBuf::from("ds.json"));
    let mut layer = Layer::new(outer, Dialect::Accelerate);
    let node = hjson::parse(r#"{"train_batch_size": 4, "zero_optimization": {"stage": 3}}"#).unwrap();
    fill(&mut layer, &inner, &node, &facts(4, "0.19.6"), Auto::Accelerate { bf16: None }).unwrap();
    assert_eq!(layer.dialect, Dialect::Accelerate);
    assert!(layer.settings.iter().all(|s| s.source.file == inner), "{:#?}", layer.settings);
}
