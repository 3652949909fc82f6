//! What a run leaves behind: the model folder, metrics.jsonl, run.json, one line on standard output; and what another
//! start in the same folder does.

use crate::once::{BOTH, message, refuses, strings};
use half::{bf16, f16};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::SystemTime;
use umbra_tests::broken::{Copy, join, span, split};
use umbra_tests::{Metrics, command, fixtures, folder, run};

const FIXTURES: [&str; 3] = ["mistral-tiny", "mistral-odd-tied", "llama-scaled-rope"];

/// Name, dtype, shape and bytes of a tensor.
type Tensor = (String, Value, Value, Vec<u8>);

/// Every tensor of a folder, in the order of the names.
fn tensors(folder: &Path) -> Vec<Tensor> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).expect("a model folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let (header, data) = split(&fs::read(&path).expect("weights"));
        for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
            let bytes = data[span(&header, name)].to_vec();
            all.push((name.clone(), entry["dtype"].clone(), entry["shape"].clone(), bytes));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Two steps at learning rate 0: what is read is what is written.
fn identity(copy: &Copy, ranks: usize, policy: &str) {
    let dir = folder();
    // Folders are made on the way, and a space in a name is a character like any other.
    let out = dir.path().join("made on the way").join("out");
    let mut command = command(ranks);
    command.args(["train", "--lr", "0", "--steps", "2", "--seq-len", "64", "--truncate", "--policy", policy]);
    command.arg("--model").arg(copy.path()).arg("--data").arg(data(copy)).arg("--out").arg(&out);
    let output = run(&mut command);
    let what = format!("{policy} on {ranks} ranks:\n{}", output.stderr);
    assert_eq!(output.code, Some(0), "{what}");
    assert_eq!(output.stdout, format!("{}\n", out.join("model").display()), "{what}");
    let (before, after) = (tensors(copy.path()), tensors(&out.join("model")));
    assert_eq!(before.len(), after.len(), "{what}");
    for (before, after) in before.iter().zip(&after) {
        assert!(
            before == after,
            "{} {} {} became {} {} {}: {what}",
            before.0,
            before.1,
            before.2,
            after.0,
            after.1,
            after.2
        );
    }
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let read = |folder: &Path| fs::read(folder.join(name)).ok();
        assert!(read(copy.path()) == read(&out.join("model")), "{name} is carried over: {what}");
    }
    let names = |path: &Path| fs::read_dir(path).expect("a folder").map(|e| e.expect("an entry").file_name()).collect();
    let mut names: Vec<_> = names(&out);
    names.sort();
    assert_eq!(names, ["checkpoints", "metrics.jsonl", "model", "run.json"], "nothing else is left: {what}");
}

/// Rows below every fixture's vocabulary.
fn data(copy: &Copy) -> std::path::PathBuf {
    let path = copy.file("rows.jsonl");
    let row =
        |i: usize| json!({"input_ids": (0..20 + i).map(|t| (i * 31 + t * 7) % 250).collect::<Vec<_>>()}).to_string();
    fs::write(&path, (0..12).map(|i| row(i) + "\n").collect::<String>()).expect("rows to be written");
    path
}

/// A fixture with files that Umbra has no need to understand.
fn with_companions(name: &str) -> Copy {
    let copy = Copy::of(name);
    fs::write(copy.file("tokenizer.json"), "{ \"any\":  \"bytes\" }").expect("a file");
    fs::write(copy.file("tokenizer_config.json"), "{}\n").expect("a file");
    copy
}

#[test]
fn without_a_learning_rate_every_tensor_comes_out_as_it_went_in() {
    for name in FIXTURES {
        let copy = with_companions(name);
        identity(&copy, 1, "shadow");
        identity(&copy, 1, "fp32");
        identity(&copy, 2, "shadow");
        identity(&copy, 3, "fp32");
    }
}

#[test]
fn half_precision_comes_out_as_it_went_in() {
    let copy = with_companions("llama-scaled-rope");
    let path = copy.file("model.safetensors");
    let (mut header, mut data) = split(&fs::read(&path).expect("weights"));
    for entry in header.values_mut().filter(|entry| entry.get("dtype").is_some()) {
        entry["dtype"] = json!("F16");
    }
    for value in data.as_chunks_mut::<2>().0 {
        *value = f16::from_f32(bf16::from_le_bytes(*value).to_f32()).to_le_bytes();
    }
    fs::write(path, join(&header, &data)).expect("weights to be written");
    copy.edit_config(|c| drop(c.insert("torch_dtype".to_owned(), json!("float16"))));
    identity(&copy, 1, "shadow");
    identity(&copy, 3, "fp32");
}

#[test]
fn every_step_has_every_metric() {
    const KEYS: [&str; 21] = [
        "step",
        "loss",
        "grad_norm",
        "clip_coef",
        "lr",
        "swallowed",
        "arrived",
        "tokens",
        "supervised",
        "tps",
        "tps_per_rank",
        "tflops",
        "mfu",
        "step_ms",
        "data_ms",
        "comm_ms",
        "optim_ms",
        "mem_gib",
        "mem_plan_gib",
        "epoch",
        "eta_s",
    ];
    for ranks in [1, 2] {
        let dir = folder();
        let out = dir.path().join("out");
        let rows = fixtures().join("curves/rows128.jsonl");
        let mut command = command(ranks);
        command.args(["train", "--model"]).arg(umbra_tests::model("mistral-tiny")).arg("--data").arg(rows);
        let output = run(command.args(["--lr", "1e-3", "--steps", "4", "--accum", "2", "--out"]).arg(&out));
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        let metrics = Metrics::read(&out);
        assert_eq!(metrics.column("step"), [0.0, 1.0, 2.0, 3.0]);
        for step in &metrics.0 {
            let object = step.as_object().expect("an object");
            for key in KEYS {
                assert!(object.get(key).is_some_and(Value::is_number), "{key} in {step}");
            }
        }
        // 128 tokens a row, of which the first is no target; two micro-batches of one row on each rank.
        let rows = 2 * ranks as u64;
        let tokens = |s: u64| (s + 1) * rows * 128;
        for (s, step) in metrics.0.iter().enumerate() {
            assert_eq!(
                (step["tokens"].as_u64(), step["supervised"].as_u64()),
                (Some(tokens(s as u64)), Some(rows * 127))
            );
            let epoch = (s + 1) as f64 * rows as f64 / 400.0;
            assert!((step["epoch"].as_f64().expect("a number") - epoch).abs() < 1e-12, "{step}");
        }
        assert_eq!(metrics.0[3]["eta_s"], json!(0.0));
        check_run_json(&out, ranks);
    }
}

fn check_run_json(out: &Path, ranks: usize) {
    let run: Value = serde_json::from_slice(&fs::read(out.join("run.json")).expect("run.json")).expect("JSON");
    let setting = |name: &str| (run["settings"][name]["value"].clone(), run["settings"][name]["from"].clone());
    assert_eq!((&run["finished"], &run["steps"], &run["preset"]), (&json!(true), &json!(4), &json!(false)), "{run}");
    assert_eq!(setting("lr"), (json!(1e-3), json!("flag")));
    assert_eq!(setting("accum"), (json!(2), json!("flag")));
    assert_eq!(setting("policy"), (json!("shadow"), json!("default")));
    assert_eq!(setting("beta2"), (json!(0.999), json!("default")));
    assert_eq!(setting("global_batch"), (json!(2 * ranks), json!("default")));
    assert_eq!(setting("world"), (json!(ranks), json!("launch")));
}

/// Name, bytes and time of change of every file below a folder.
fn state(folder: &Path) -> Vec<(String, Vec<u8>, SystemTime)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let changed = fs::metadata(&path).and_then(|m| m.modified()).expect("a time");
        let bytes = if path.is_dir() { Vec::new() } else { fs::read(&path).expect("a file") };
        all.push((path.display().to_string(), bytes, changed));
        if path.is_dir() {
            all.extend(state(&path));
        }
    }
    all.sort();
    all
}

#[test]
fn a_finished_run_is_left_alone() {
    let dir = folder();
    let out = dir.path().join("out");
    let args = |extra: &[&str]| {
        let mut args = strings(&["train", "--lr", "0.001", "--seq-len", "32", "--out"]);
        args.push(out.display().to_string());
        args.extend(strings(extra));
        args
    };
    let two = ["--steps", "2", "--lanes", "1"];
    assert_eq!(run(command(1).args(args(&two))).code, Some(0));
    let finished = state(&out);

    let again = run(command(1).args(args(&two)).args(["--threads", "1", "--log-every", "7"]));
    assert_eq!((again.code, again.stdout.as_str()), (Some(0), ""), "{}", again.stderr);
    assert!(again.stderr.contains("finished") && again.stderr.lines().count() == 1, "{}", again.stderr);

    let other = run(command(1).args(args(&["--steps", "3", "--seed", "5"])));
    let said = message(&other);
    assert_eq!(other.code, Some(2));
    for text in ["{\"steps\":2} then, {\"steps\":3} now", "seed: 0 then, 5 now", "--override length seed"] {
        assert!(said.contains(text), "no `{text}` in {said}");
    }
    let more_ranks = run(command(2).args(args(&["--steps", "2"])));
    assert_eq!(more_ranks.code, Some(2));
    assert!(message(&more_ranks).contains("2 rank(s) cannot compute 1 lane(s)"), "{}", more_ranks.stderr);

    refuses(BOTH, &args(&["--steps", "2", "--resume", "never"]), 2, &["--resume never", "run.json"]);
    assert!(finished == state(&out), "nothing in it was touched");
}

/// Without a checkpoint there is nothing to go on from, so other settings need another folder.
#[test]
fn a_finished_run_without_checkpoints_is_left_alone_too() {
    let dir = folder();
    let out = dir.path().join("out");
    let train = |steps: &str| {
        let mut command = command(1);
        command.args(["train", "--seq-len", "32", "--keep", "0", "--steps", steps, "--out"]);
        run(command.arg(&out))
    };
    assert_eq!(train("2").code, Some(0));
    let finished = state(&out);
    assert!(!out.join("checkpoints").exists());
    let again = train("2");
    assert_eq!((again.code, again.stdout.as_str()), (Some(0), ""), "{}", again.stderr);
    assert!(again.stderr.contains("this run is finished, 2 steps"), "{}", again.stderr);
    let other = train("3");
    let said = message(&other);
    assert_eq!(other.code, Some(2));
    for text in ["{\"steps\":2} then, {\"steps\":3} now", "--out"] {
        assert!(said.contains(text), "no `{text}` in {said}");
    }
    assert!(finished == state(&out), "nothing in it was touched");
}

#[test]
fn the_same_command_again_under_mpirun_says_it_once() {
    let dir = folder();
    let out = dir.path().join("out");
    let train = || run(command(2).args(["train", "--steps", "2", "--seq-len", "32", "--out"]).arg(&out));
    assert_eq!(train().code, Some(0));
    let finished = state(&out);
    let again = train();
    assert_eq!((again.code, again.stdout.as_str()), (Some(0), ""), "{}", again.stderr);
    assert_eq!(again.stderr.matches("this run is finished").count(), 1, "{}", again.stderr);
    assert!(finished == state(&out), "nothing in it was touched");
}

/// Starts a short run of the embedded model into `out`.
fn tiny(out: &Path, steps: &str) -> umbra_tests::Output {
    let mut command = command(1);
    command.args(["train", "--model", "tiny", "--seq-len", "32", "--threads", "1", "--steps", steps, "--out"]);
    run(command.arg(out))
}

/// Files that carry the names of a run's and are somebody else's stay as they are.
#[test]
fn foreign_files_in_the_output_folder_are_kept() {
    for (name, text) in [("run.json", "{\"name\":\"my project\"}"), ("metrics.jsonl", "{\"mine\":1}\n")] {
        let dir = folder();
        fs::write(dir.path().join(name), text).expect("a file");
        let output = tiny(dir.path(), "1");
        assert_eq!(output.code, Some(7), "{name}: {}", output.stderr);
        assert!(output.stderr.contains(name), "{}", output.stderr);
        assert_eq!(fs::read_to_string(dir.path().join(name)).expect("the file"), text);
        assert_eq!(fs::read_dir(dir.path()).expect("the folder").count(), 1, "{name} alone");
    }
}

/// While a run goes on, another one is kept out of its folder; when it was killed, the next one may start again.
#[test]
fn two_runs_do_not_share_a_folder() {
    let dir = folder();
    let out = dir.path().join("run");
    let mut first = std::process::Command::new(umbra_tests::umbra());
    first.args(["train", "--model", "tiny", "--seq-len", "32", "--threads", "1", "--steps", "1000000", "--out"]);
    let mut first = first.arg(&out).stderr(std::process::Stdio::null()).spawn().expect("umbra");
    while fs::metadata(out.join("metrics.jsonl")).map_or(0, |m| m.len()) == 0 {
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(first.try_wait().expect("its state").is_none(), "the first run ended early");
    }
    let second = tiny(&out, "2");
    first.kill().expect("to be killed");
    first.wait().expect("its end");
    assert_eq!(second.code, Some(7), "{}", second.stderr);
    assert!(second.stderr.contains("another run is writing"), "{}", second.stderr);
    let third = tiny(&out, "2");
    assert_eq!(third.code, Some(0), "{}", third.stderr);
    assert!(third.stderr.contains("starts again"), "{}", third.stderr);
    assert_eq!(fs::read_to_string(out.join("metrics.jsonl")).expect("metrics").lines().count(), 2);
}
