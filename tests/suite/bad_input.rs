//! What is wrong with a command line, a model folder, rows or an output folder is said once, on one screen, with the
//! place and the right exit code, alone and under mpirun, and nothing is left behind.

use crate::once::{ALONE, BOTH, ranks_of, refuses, strings};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use umbra_tests::broken::{Copy, span};
use umbra_tests::{folder, model, write_rows};

const SMALL: &str = "mistral-odd-tied";

/// Eight rows of twelve tokens.
fn rows(path: &Path) {
    let row = |i: u32| ((0..12).map(|t| (i * 31 + t * 7) % 257).collect::<Vec<_>>(), vec![]);
    let rows: Vec<(Vec<u32>, Vec<i64>)> = (0..8).map(row).collect();
    let labelled: Vec<_> =
        rows.into_iter().map(|(ids, _)| (ids.clone(), ids.iter().map(|i| *i as i64).collect())).collect();
    write_rows(path, &labelled);
}

/// A run of one step on good rows with `args` besides is refused.
fn refused(ranks: &[usize], args: &[&str], exit: i32, says: &[&str]) {
    let dir = folder();
    let (data, out) = (dir.path().join("rows.jsonl"), dir.path().join("out"));
    rows(&data);
    let mut all = strings(&["train", "--out"]);
    all.push(out.display().to_string());
    // What a case gives itself is not given here.
    if !args.contains(&"--model") {
        all.extend(["--model".to_owned(), model(SMALL).display().to_string()]);
    }
    if !args.contains(&"--data") {
        all.extend(["--data".to_owned(), data.display().to_string()]);
    }
    all.extend(strings(args));
    refuses(ranks, &all, exit, says);
    assert!(!out.exists(), "{args:?} left {}", out.display());
}

fn refused_model(copy: &Copy, exit: i32, says: &[&str]) {
    let path = copy.path().display().to_string();
    refused(BOTH, &["--model", &path], exit, says);
}

/// A data file of this content is refused.
fn refused_data(ranks: &[usize], name: &str, content: &str, args: &[&str], says: &[&str]) {
    let dir = folder();
    let path = dir.path().join(name);
    fs::write(&path, content).expect("rows to be written");
    let path = path.display().to_string();
    refused(ranks, &[&["--data", &path][..], args].concat(), 3, says);
}

#[test]
fn values_that_mean_nothing() {
    let cases = [
        (&["--accum", "0"][..], &["--accum", "1 or more"][..]),
        (&["--micro-batch", "0"], &["--micro-batch"]),
        (&["--steps", "0"], &["--steps"]),
        (&["--lr", "-1"], &["--lr", "0 or more", "-1"]),
        (&["--seq-len", "1"], &["--seq-len"]),
        (&["--seq-len", "129"], &["--seq-len", "128", "129"]),
        (&["--steps", "five"], &["--steps", "five"]),
        (&["--no-such-flag"], &["--no-such-flag"]),
        (&["--polcy", "shadow"], &["--polcy", "--policy"]),
        (&["--policy", "shadov"], &["shadov", "'shadow'"]),
        (&["--policy", "fsdp-lo"], &["fsdp-lo", "'fsdp-low'"]),
    ];
    for (i, (args, says)) in cases.into_iter().enumerate() {
        // Both doors: what the parser refuses, and what is said of a value that it has read.
        refused(if args == ["--no-such-flag"] { BOTH } else { ranks_of(i) }, args, 2, says);
    }
}

#[test]
fn settings_that_contradict_each_other() {
    refused(BOTH, &["--steps", "2", "--epochs", "1"], 2, &["--steps 2", "--epochs 1"]);
    refused(ALONE, &["--global-batch", "24", "--accum", "5"], 2, &["--accum 5", "--global-batch 24"]);
    refused(ALONE, &["--global-batch", "7", "--micro-batch", "2"], 2, &["--global-batch", "7", "--micro-batch"]);
    refused(ALONE, &["--lr", "1e-4", "--min-lr", "1e-3"], 2, &["--min-lr", "0.0001", "0.001"]);
    refused(ALONE, &["--warmup-steps", "2", "--warmup-ratio", "0.5"], 2, &["--warmup-steps 2", "--warmup-ratio 0.5"]);
    refused(BOTH, &["--steps", "3", "--warmup-steps", "5"], 2, &["--warmup-steps", "at most 3", "5"]);
}

#[test]
fn flags_of_later_versions_are_refused_by_name() {
    let flags = "--eval-data x.jsonl|--eval-every 5|--pack on|--device cuda";
    for (i, flag) in flags.split('|').enumerate() {
        let args: Vec<&str> = flag.split(' ').collect();
        refused(ranks_of(i), &args, 2, &[args[0], "later version", "try:"]);
    }
    let commands = ["data", "doctor", "bench kernels", "bench collectives"];
    for (i, command) in commands.into_iter().enumerate() {
        let args: Vec<String> = command.split(' ').map(str::to_owned).collect();
        refuses(ranks_of(i), &args, 2, &[command, "not built yet"]);
    }
}

#[test]
fn a_folder_that_is_not_there_or_holds_another_model() {
    refused(BOTH, &["--model", "/no/such/folder"], 3, &["/no/such/folder", "--model"]);
    let copy = Copy::of(SMALL);
    copy.edit_config(|c| {
        c.insert("architectures".to_owned(), json!(["GPT2LMHeadModel"]));
        c.insert("model_type".to_owned(), json!("gpt2"));
    });
    refused_model(&copy, 3, &["config.json", "gpt2", "mistral"]);
    fs::write(copy.file("config.json"), "{ \"model_type\": ").expect("config.json to be written");
    refused_model(&copy, 3, &["config.json"]);
    fs::remove_file(copy.file("config.json")).expect("config.json to be there");
    refused_model(&copy, 3, &["config.json"]);
}

#[test]
fn weights_that_are_not_what_the_files_say() {
    let first = "model-00001-of-00002.safetensors";
    let truncated = Copy::of(SMALL);
    let bytes = fs::read(truncated.file(first)).expect("weights");
    fs::write(truncated.file(first), &bytes[..bytes.len() - 1000]).expect("weights to be written");
    refused_model(&truncated, 3, &[first, "expected", "found"]);
    fs::write(truncated.file(first), &bytes[..5]).expect("weights to be written");
    refused_model(&truncated, 3, &[first]);
    let huge = [&u64::MAX.to_le_bytes()[..], &bytes[8..]].concat();
    fs::write(truncated.file(first), huge).expect("weights to be written");
    refused_model(&truncated, 3, &[first]);
    fs::remove_file(truncated.file(first)).expect("weights");
    refused_model(&truncated, 3, &["model.safetensors.index.json", first]);

    const NAME: &str = "model.layers.0.input_layernorm.weight";
    let lies = Copy::of(SMALL);
    lies.edit_weights(first, |header, data| {
        let at = span(header, NAME);
        let beyond = data.len() as u64;
        header[NAME]["data_offsets"] = json!([beyond, beyond + at.len() as u64]);
    });
    refused_model(&lies, 3, &[first]);
}

/// A tensor of a copy of the small fixture, and the file it is in.
fn place(copy: &Copy, tensor: &str) -> String {
    let index: Value = serde_json::from_slice(&fs::read(copy.file("model.safetensors.index.json")).unwrap()).unwrap();
    index["weight_map"][tensor].as_str().expect("a tensor of the index").to_owned()
}

#[test]
fn a_tensor_of_another_shape_and_one_with_nan() {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let copy = Copy::of(SMALL);
    let file = place(&copy, EMBEDDING);
    copy.edit_weights(&file, |header, _| header[EMBEDDING]["shape"] = json!([48, 257]));
    refused_model(&copy, 3, &[EMBEDDING, "257", "48"]);

    const PROJECTION: &str = "model.layers.1.mlp.down_proj.weight";
    let copy = Copy::of(SMALL);
    let file = place(&copy, PROJECTION);
    copy.edit_weights(&file, |header, data| {
        let at = span(header, PROJECTION);
        // All ones in the exponent and a mantissa that is not zero, in bf16 and (both halves) in fp32.
        data[at.end - 2..at.end].copy_from_slice(&[0xc1, 0x7f]);
    });
    refused_model(&copy, 3, &[PROJECTION, &file, "NaN"]);
}

#[test]
fn rows_that_cannot_be_used_are_named_by_file_and_line() {
    let good = json!({"input_ids": [1, 2, 3]}).to_string();
    let lines = |third: &str| format!("{good}\n\n{third}\n{good}\n");
    refused_data(
        BOTH,
        "a.jsonl",
        &lines("{\"input_ids\": [1, 257, 3]}"),
        &[],
        &["a.jsonl:3", "257 at position 1", "256"],
    );
    refused_data(ALONE, "a.jsonl", &lines("{\"input_ids\": [1, -1]}"), &[], &["a.jsonl:3", "-1"]);
    refused_data(BOTH, "a.jsonl", &lines("{\"input_ids\": [1, 2"), &[], &["a.jsonl:3", "not JSON"]);
    refused_data(ALONE, "a.jsonl", &lines("plainly not"), &[], &["a.jsonl:3", "not JSON", "plainly not"]);
    refused_data(ALONE, "a.jsonl", &lines("{\"tokens\": [1]}"), &[], &["a.jsonl:3", "tokens", "input_ids"]);
    refused_data(ALONE, "a.jsonl", &lines("{\"input_ids\": [1, 2], \"labels\": [1]}"), &[], &["a.jsonl:3", "labels"]);
    refused_data(
        ALONE,
        "a.jsonl",
        &lines("{\"input_ids\": [1, 2, 3, 4, 5]}"),
        &["--seq-len", "4"],
        &["a.jsonl:3", "5 tokens"],
    );
    refused_data(BOTH, "a.jsonl", "", &[], &["a.jsonl", "empty"]);
    refused_data(
        BOTH,
        "a.jsonl",
        &format!("{good}\n"),
        &["--micro-batch", "4"],
        &["fewer rows", "micro-batch 4", "1 rows"],
    );
    refused_data(ALONE, "a.jsonl", "{\"text\": \"to be\"}\n", &[], &["tokenizer.json", "input_ids"]);
    refused_data(BOTH, "a.txt", "to be or not to be", &[], &["tokenizer.json"]);
    refused(BOTH, &["--data", "/no/such/rows.jsonl"], 3, &["/no/such/rows.jsonl"]);
}

#[test]
fn an_output_folder_that_cannot_be_written() {
    let dir = folder();
    let file = dir.path().join("file");
    fs::write(&file, "not a folder").expect("a file");
    let below = file.join("out").display().to_string();
    for out in [&below, "/proc/out"] {
        refuses(BOTH, &strings(&["train", "--steps", "1", "--out", out]), 7, &[out, "--out"]);
    }
    assert_eq!(fs::read_to_string(&file).expect("the file"), "not a folder");
}

#[test]
fn what_is_not_a_runs_own_is_not_replaced() {
    let dir = folder();
    let target = dir.path().join("model");
    let out = dir.path().display().to_string();
    let train = strings(&["train", "--steps", "1", "--out", &out]);
    fs::create_dir(&target).expect("a folder");
    fs::write(target.join("thesis.txt"), "years of work").expect("a file");
    refuses(BOTH, &train, 7, &["thesis.txt"]);
    fs::remove_file(target.join("thesis.txt")).expect("a file");
    // A model that no run has written, perhaps the very one to start from.
    fs::write(target.join("model.safetensors"), "weights").expect("a file");
    refuses(BOTH, &train, 7, &["run.json", "--out"]);
    assert_eq!(fs::read_to_string(target.join("model.safetensors")).expect("a file"), "weights");
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 1, "nothing was added");
}
