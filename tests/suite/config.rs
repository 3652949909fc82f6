//! Files of two engines, each run as the flags it means; whether two of them are the same run; plans, grids and reports.

use crate::once::{ALONE, BOTH, refuses};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tempfile::TempDir;
use umbra_tests::{Metrics, Output, Train, command, fixtures, folder, model, run};

const DEEPSPEED: &str = r#"{
  // what a script of the Trainer's would have filled in
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 1.0,
  "bf16": { "enabled": "auto" },
  "zero_optimization": { "stage": 3, "overlap_comm": true, "reduce_bucket_size": 5e8 },
  "optimizer": { "type": "AdamW", "params": { "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1 } }
}"#;

const FSDP: &str = "\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: MIXED
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: MistralDecoderLayer
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
num_machines: 1
num_processes: 2
use_cpu: false
";

/// Files of one test.
struct Files(TempDir);

impl Files {
    fn new(files: &[(&str, &str)]) -> Self {
        let dir = folder();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).expect("a file");
        }
        Files(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `umbra` with these words, in which `@name` is a file of this test.
    fn umbra(&self, ranks: usize, line: &str) -> Output {
        run(command(ranks).args(self.words(line)))
    }

    fn words(&self, line: &str) -> Vec<String> {
        let word = |word: &str| match word.strip_prefix('@') {
            Some(name) => self.path(name).display().to_string(),
            None => word.to_owned(),
        };
        line.split_whitespace().map(word).collect()
    }

    /// A run on the rows of the curves.
    fn train(&self, ranks: usize, out: &str, flags: &str) -> Metrics {
        let flags: Vec<String> = self.words(flags);
        let data = fixtures().join("curves/rows128.jsonl");
        let out = self.path(out);
        Train { ranks, model: &model("mistral-tiny"), data: &data, out: &out }.run(&flags.join(" "))
    }
}

fn same_results(a: &Metrics, b: &Metrics, what: &str) {
    assert_eq!(a.results(), b.results(), "{what}");
}

/// Each file makes the bits of the flags it stands for, and so the curve of its engine, which `curves.rs` holds those to.
#[test]
fn a_file_is_the_flags_it_means() {
    let (mixed, low) = (FSDP.replace("MIXED", "bf16"), FSDP.replace("MIXED", "no"));
    let files = Files::new(&[("ds.json", DEEPSPEED), ("mixed.yaml", &mixed), ("low.yaml", &low)]);
    let rest = "--steps 4 --hash-every 1 --warmup-steps 2 --decay-norms";
    let same = "--micro-batch 2 --lr 1e-3 --weight-decay 0.1 --clip 1";
    let cases = [
        ("ds.json", String::new(), format!("--policy deepspeed {same}")),
        ("mixed.yaml", same.to_owned(), format!("--policy fsdp-mixed {same}")),
        ("low.yaml", same.to_owned(), format!("--policy fsdp-low {same}")),
    ];
    for (name, flags, meant) in cases {
        let by_file = files.train(2, &format!("{name}-file"), &format!("{rest} {flags} --config @{name}"));
        let by_flags = files.train(2, &format!("{name}-flags"), &format!("{rest} {meant}"));
        same_results(&by_file, &by_flags, name);
        let json = fs::read_to_string(files.path(&format!("{name}-file")).join("run.json")).expect("run.json");
        let json: Value = serde_json::from_str(&json).expect("JSON");
        let policy = &json["settings"]["policy"];
        assert_eq!(policy["from"], "config", "{policy}");
        assert!(policy["at"].as_str().is_some_and(|at| at.contains(name)), "{policy}");
    }
}

/// Two files of one run, and of runs that are not one.
#[test]
fn two_files_are_told_to_be_the_same_run_or_not() {
    let (mixed, low) = (FSDP.replace("MIXED", "bf16"), FSDP.replace("MIXED", "no"));
    let stage2 = DEEPSPEED.replace("\"stage\": 3", "\"stage\": 2");
    let files = Files::new(&[
        ("ds.json", DEEPSPEED),
        ("stage2.json", &stage2),
        ("mixed.yaml", &mixed),
        ("low.yaml", &low),
        ("ds.toml", "micro-batch = 2\npolicy = \"deepspeed\"\nclip = 1.0\nlr = 1e-3\nweight-decay = 0.1\n"),
    ]);
    let diff = |line: &str| {
        let output = files.umbra(1, &format!("config diff {line} --json"));
        let json: Value = serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", output.stderr));
        (output.code, json)
    };
    let (code, same) = diff("@ds.json @ds.toml --prove --steps 2");
    assert_eq!((code, &same["verdict"]), (Some(0), &Value::from("same-run")), "{same:#}");
    assert_eq!(same["proof"]["same"], true);
    let (code, bits) = diff("@ds.json @stage2.json --prove --steps 2");
    assert_eq!((code, &bits["verdict"]), (Some(0), &Value::from("same-bits")), "{bits:#}");
    assert_eq!(bits["proof"]["same"], true);
    // The two engines' aligned modes part in the last bits of the optimizer alone.
    let (code, other) = diff("@ds.json @mixed.yaml");
    assert_eq!((code, &other["verdict"]), (Some(3), &Value::from("rounding")), "{other:#}");
    let names: Vec<&str> = other["differences"].as_array().unwrap().iter().filter_map(|d| d["name"].as_str()).collect();
    // One micro-batch is not added to anything, so the dtype it would be added in is no difference.
    assert_eq!(names, ["optimizer arithmetic", "clip factor"], "{other:#}");
    let left = other["left_to_the_command_line"]["b"].as_array().unwrap();
    assert!(left.contains(&Value::from("--lr 1e-3")), "{other:#}");
    let (_, shadow) = diff("@ds.json @low.yaml");
    let shadow =
        shadow["differences"].as_array().unwrap().iter().find(|d| d["name"].as_str().unwrap().starts_with("shadow"));
    let shadow = shadow.expect("the difference this program is about");
    assert_eq!((&shadow["a"]["value"], &shadow["b"]["value"]), (&Value::from("fp32"), &Value::from("bf16")));
    assert!(shadow["b"]["from"].as_str().unwrap().contains("low.yaml"), "{shadow}");
}

#[test]
fn what_a_file_cannot_mean_is_refused_at_its_place() {
    let files = Files::new(&[
        ("typo.json", "{\n  \"train_micro_batch_size_per_gpu\": 1,\n  \"zero_optimizaton\": { \"stage\": 3 }\n}"),
        ("twice.json", "{\n  \"train_micro_batch_size_per_gpu\": 1,\n  \"train_micro_batch_size_per_gpu\": 2\n}"),
        ("fp16.json", "{\"train_micro_batch_size_per_gpu\": 1, \"fp16\": {\"enabled\": true}}"),
        (
            "batch.json",
            "{\"train_batch_size\": 7,\n \"train_micro_batch_size_per_gpu\": 2,\n \"gradient_accumulation_steps\": 2}",
        ),
        ("cut.json", "{\"bf16\": "),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config:\n  fsdp_shardng_strategy: FULL_SHARD\n"),
        ("lr.toml", "lr = 1e-4\n"),
        ("lr2.toml", "steps = 3\nlr = 1e-5\n"),
    ]);
    let cases: [(&[usize], &str, &[&str]); 8] = [
        (BOTH, "@typo.json", &["typo.json:3:3", "zero_optimization"]),
        (ALONE, "@twice.json", &["twice.json:3:3", "twice.json:2:3", "twice"]),
        (ALONE, "@fp16.json", &["fp16", "bf16"]),
        (ALONE, "@batch.json", &["batch.json:1:2", "batch.json:2:2", "7"]),
        (ALONE, "@cut.json", &["cut.json:1:10", "well-formed"]),
        (ALONE, "@a.yaml", &["a.yaml:3:3", "fsdp_sharding_strategy"]),
        (ALONE, "@lr.toml @lr2.toml", &["lr.toml:1:1", "lr2.toml:2:1", "contradict"]),
        (ALONE, "@missing.json", &["missing.json", "--config"]),
    ];
    for (ranks, config, says) in cases {
        let words = files.words(&format!("train --steps 1 --out @out --config {config}"));
        refuses(ranks, &words, 2, says);
        assert!(!files.path("out").exists(), "{config}");
    }
}

/// A run of 7 billion parameters on 64 GPUs is planned at once from `config.json` alone, and does not fit on few.
#[test]
fn a_large_run_is_planned_from_its_configuration() {
    let config = r#"{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 32768, "initializer_range": 0.02, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#;
    let files = Files::new(&[("ds.json", DEEPSPEED)]);
    fs::create_dir(files.path("7b")).expect("a folder");
    fs::write(files.path("7b/config.json"), config).expect("a file");
    let plan = |line: &str| {
        let before = Instant::now();
        let output = files.umbra(1, &format!("plan --model @7b --config @ds.json --json {line}"));
        let took = before.elapsed().as_secs_f64();
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        (serde_json::from_str::<Value>(&output.stdout).expect("JSON"), took)
    };
    let (wide, took) = plan("--ranks 64 --gpu h200 --network 400Gb --steps 10000 --seq-len 4096");
    assert_eq!(wide["parameters"], 7_241_732_096u64);
    // 12 bytes a parameter of shadow and moments.
    let state = wide["memory"]["segments"][0]["bytes"].as_f64().unwrap();
    assert!((state / (7_241_732_096.0 * 12.0 / 64.0) - 1.0).abs() < 0.01, "{state}");
    assert_eq!(wide["memory"]["fits"], true);
    assert!(wide["prediction"]["days"].as_f64().unwrap() > 0.0);
    // The quickest of a few: the machine may be busy with something else.
    let wide_again = || plan("--ranks 64 --gpu h200 --network 400Gb --steps 10000 --seq-len 4096").1;
    let quickest = (0..4).map(|_| wide_again()).fold(took, f64::min);
    assert!(quickest < 0.5, "{quickest} s");
    let (narrow, _) = plan("--ranks 1 --gpu h200 --memory 80GB --seq-len 4096");
    assert_eq!(narrow["memory"]["fits"], false);
    let remedies = narrow["memory"]["remedies"].as_array().unwrap();
    assert!(
        !remedies.is_empty() && remedies.iter().all(|r| r["bytes"].as_u64() <= narrow["memory"]["available"].as_u64())
    );
    let by = |phase: &str| {
        let lines = wide["dtypes"].as_array().unwrap();
        let line = lines.iter().find(|l| l["phase"] == phase).unwrap_or_else(|| panic!("{phase}"));
        (line["dtype"].as_str().unwrap().to_owned(), line["by"].as_str().unwrap().to_owned())
    };
    assert_eq!(by("at rest").0, "fp32");
    assert_eq!(by("wire").0, "bf16");
    assert!(by("at rest").1.contains("ds.json:6:13"), "{}", by("at rest").1);
}

/// What bf16 weights would swallow is said before the run; the run's first step finds it.
#[test]
fn the_swallowed_share_is_predicted() {
    let files = Files::new(&[]);
    let tiny = model("mistral-tiny");
    let plan = files.umbra(1, &format!("plan --model {} --lr 1e-5 --json", tiny.display()));
    let plan: Value = serde_json::from_str(&plan.stdout).expect("JSON");
    let predicted = plan["swallowed"]["share"].as_f64().unwrap();
    for policy in ["shadow", "fsdp-low"] {
        let found = files.train(1, policy, &format!("--lr 1e-5 --steps 1 --policy {policy}")).column("swallowed")[0];
        assert!((found - predicted).abs() < 0.02, "{policy}: {found}, predicted {predicted}");
    }
}

/// A grid goes on where it was stopped, and ends in one report.
#[test]
fn a_grid_is_run_once_and_reported() {
    let files = Files::new(&[("small.toml", "micro-batch = 1\n"), ("large.toml", "micro-batch = 2\n")]);
    let line = format!(
        "compare --configs @small.toml @large.toml --policies shadow,fsdp-low --lrs 1e-3 --model {} --data {} --seq-len 64 \
         --truncate --steps 2 --keep 0 --out @grid",
        model("mistral-tiny").display(),
        fixtures().join("curves/rows128.jsonl").display()
    );
    let first = files.umbra(2, &line);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    let names = ["small-shadow-lr1e-3", "small-fsdp-low-lr1e-3", "large-shadow-lr1e-3", "large-fsdp-low-lr1e-3"];
    for name in names {
        assert_eq!(Metrics::lines(&files.path("grid").join(name)), 2, "{name}");
        assert!(first.stdout.contains(name), "{}", first.stdout);
    }
    let page = fs::read_to_string(files.path("grid/report.html")).expect("report.html");
    assert!(names.iter().all(|name| page.contains(name)) && page.contains("<svg"), "every run is in the report");
    assert!(!page.contains("http://") || !page.contains("src=\"http"), "nothing is fetched");
    let again = files.umbra(2, &line);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert_eq!(again.stderr.matches("finished").count(), 4, "{}", again.stderr);
}

/// A file in another format is the same run again, or it is said what is lost.
#[test]
fn a_file_converts_without_loss_or_says_what_is_lost() {
    let files = Files::new(&[("ds.json", DEEPSPEED)]);
    let converted = |to: &str, out: &str| {
        let output = files.umbra(1, &format!("config convert @ds.json --to {to} --lanes 2 --out @{out}"));
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        output.stderr
    };
    assert_eq!(converted("umbra", "run.toml"), "");
    let same = files.umbra(1, "config diff @ds.json @run.toml --lanes 2");
    assert_eq!(same.code, Some(0), "{}{}", same.stdout, same.stderr);
    assert_eq!(converted("deepspeed", "again.json"), "");
    let same = files.umbra(1, "config diff @ds.json @again.json --lanes 2");
    assert_eq!(same.code, Some(0), "{}{}", same.stdout, same.stderr);
    let lost = converted("accelerate", "run.yaml");
    assert!(lost.contains("cannot say: lr"), "{lost}");
    assert!(Path::new(&files.path("run.yaml")).exists());
}

/// What one file says by silence is not what another one writes; what an engine's release changes is a difference.
#[test]
fn silence_and_releases_are_no_agreement() {
    let ds = |rest: &str| {
        format!(
            "{{\"train_micro_batch_size_per_gpu\": 1, \"gradient_clipping\": 1.0, \"bf16\": {{\"enabled\": true}}{rest}}}"
        )
    };
    let adam =
        |params: &str| ds(&format!(", \"optimizer\": {{\"type\": \"AdamW\", \"params\": {{\"lr\": 1e-3{params}}}}}"));
    let warm =
        adam("").replacen('{', "{\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_num_steps\": 3}}, ", 1);
    let files = Files::new(&[
        ("a.json", &adam("")),
        ("b.json", &adam(", \"eps\": 1e-3, \"betas\": [0.5, 0.6]")),
        ("sgd.json", &ds(", \"optimizer\": {\"type\": \"SGD\", \"params\": {\"lr\": 1e-3, \"momentum\": 0.9}}")),
        ("warm.json", &warm),
        ("off.json", &ds(", \"zero_optimization\": {\"stage\": 2, \"offload_optimizer\": {\"device\": \"cpu\"}}")),
        ("plain.toml", "accum = 1\n"),
        ("rounded.toml", "accum = 1\naccumulate = \"bf16\"\n"),
        ("rows.toml", "accum = 1\nseq-len = 64\n"),
    ]);
    let verdict = |line: &str| {
        let output = files.umbra(1, &format!("config diff {line} --json"));
        let json: Value =
            serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{line}: {e}: {}", output.stderr));
        (json["verdict"].as_str().unwrap().to_owned(), json["proof"]["same"].as_bool())
    };
    assert_eq!(verdict("@a.json @b.json").0, "different");
    assert_eq!(verdict("@a.json @sgd.json").0, "different");
    let releases = "@warm.json @warm.json --assume deepspeed=0.14 --assume-b deepspeed=0.19.6 --prove --steps 2";
    assert_eq!(verdict(releases), ("different".to_owned(), Some(false)));
    assert_eq!(verdict("@plain.toml @rounded.toml --prove --steps 2"), ("rounding".to_owned(), Some(false)));
    assert_eq!(verdict("@plain.toml @rows.toml").0, "different");
    // A file and what it is converted to, CPUAdam and an older release among it.
    for (name, assume) in [("off.json", ""), ("warm.json", "--assume deepspeed=0.14")] {
        let output = files.umbra(1, &format!("config convert @{name} --to umbra --out @{name}.toml {assume}"));
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{name}");
        let line = format!("@{name} @{name}.toml {assume} --prove --steps 2");
        assert_eq!(verdict(&line), ("same-run".to_owned(), Some(true)), "{name}");
    }
}

/// Flags settle what a file leaves open or gets wrong about the rows of a step, and a slip is named before that.
#[test]
fn flags_beat_files_about_rows_and_slips_come_first() {
    let files = Files::new(&[
        ("none.json", "{\"bf16\": {\"enabled\": true}}"),
        ("slip.json", "{\"bf16\": {\"enabled\": true},\n \"train_micro_batch_size_per_gpus\": 1}"),
        ("fsdp.yaml", &FSDP.replace("MIXED", "bf16")),
        ("ds.json", DEEPSPEED),
    ]);
    let plan = files.umbra(1, "plan --config @none.json --micro-batch 2");
    assert_eq!(plan.code, Some(0), "{}", plan.stderr);
    refuses(ALONE, &files.words("plan --config @none.json"), 2, &["train_micro_batch_size_per_gpu"]);
    refuses(ALONE, &files.words("plan --config @slip.json"), 2, &["slip.json:2:2", "did you mean"]);
    refuses(ALONE, &files.words("plan --ranks 2 --config @fsdp.yaml @ds.json"), 2, &["contradict", "--policy"]);
    refuses(ALONE, &files.words("plan --config /dev/zero"), 2, &["/dev/zero", "device"]);
}
