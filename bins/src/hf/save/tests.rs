//! Model folders written and read back.

use super::*;
use crate::hf::WeightFiles;
use crate::hf::fixture::{self, tensor, unit};
use crate::hf::weights::{EMBEDDING, HEAD};
use FileDType::{Bf16, F16, F32};
use serde_json::json;
use std::fs;

fn units() -> Vec<UnitSpec> {
    vec![unit(&[(EMBEDDING, &[4, 2])]), unit(&[("model.norm.weight", &[2]), ("model.layers.0.w", &[3, 5])])]
}

fn dtypes(name: &str) -> FileDType {
    match name {
        "model.norm.weight" => F32,
        "model.layers.0.w" => F16,
        _ => Bf16,
    }
}

/// Writes every tensor of `units` as two ranks would, each its own ranges, counting up in eighths from `first`.
fn write_all(writer: &ModelWriter, first: f32) {
    let ranks = [writer, &reopened(writer)];
    for param in units().iter().flat_map(|u| &u.params) {
        let values: Vec<f32> = (0..param.len()).map(|i| first + i as f32 / 8.0).collect();
        let border = param.len() / 2;
        ranks[1].write(&param.name, border, &values[border..]).unwrap();
        ranks[0].write(&param.name, 0, &values[..border]).unwrap();
    }
    ranks.iter().for_each(|rank| rank.sync().unwrap());
}

/// The same plan with no file open, as another process has it.
fn reopened(writer: &ModelWriter) -> ModelWriter {
    ModelWriter {
        dir: writer.dir.clone(),
        layout: writer.layout.clone(),
        tied_head: writer.tied_head,
        files: writer.files.iter().map(|_| OnceLock::new()).collect(),
    }
}

fn save(dir: &Path, tied_head: bool, max_shard_bytes: u64, source: Option<&Path>, config: &Value, first: f32) {
    let writer = ModelWriter::plan(dir, &units(), dtypes, tied_head, max_shard_bytes);
    let before = dir.exists().then(|| names(dir));
    writer.create().unwrap();
    write_all(&writer, first);
    assert_eq!(dir.exists().then(|| names(dir)), before, "nothing changes under the final name before all is written");
    let text = match source {
        Some(source) => super::read_text(&source.join("config.json")).unwrap_or_else(|_| super::json_text(config)),
        None => super::json_text(config),
    };
    writer.finish(&text, &super::companions(source).unwrap()).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Every tensor of the folder has the values `write_all` gave it.
fn holds(dir: &Path, tied_head: bool, first: f32) {
    let files = WeightFiles::open(dir).unwrap();
    files.check(&units(), true).unwrap();
    assert_eq!(files.contains(HEAD), tied_head);
    for param in units().iter().flat_map(|u| &u.params) {
        assert_eq!(files.dtype_of(&param.name), Some(dtypes(&param.name)));
        let mut out = vec![0.0; param.len()];
        files.read(&param.name, 0..param.len(), &mut out).unwrap();
        let expected: Vec<f32> = (0..param.len()).map(|i| first + i as f32 / 8.0).collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn one_file_reads_back_in_our_reader_and_in_the_safetensors_crate() {
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join("run/model");
    save(&dir, false, MAX_SHARD_BYTES, None, &json!({"dtype": "bfloat16"}), 1.0);
    assert_eq!(names(&dir), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(names(&top.path().join("run")), ["model"]);
    holds(&dir, false, 1.0);
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
}

#[test]
fn shards_hold_at_most_the_limit_and_the_index_names_them() {
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join("model");
    // 16 bytes of embedding, 8 of norm, 30 of w, 16 of the head's copy: 24 hold the first two, the others stand alone.
    save(&dir, true, 24, None, &json!({}), 0.5);
    let shard = |i: usize| format!("model-{i:05}-of-00003.safetensors");
    let (config, index, tokenizer) = ("config.json", "model.safetensors.index.json", "tokenizer.json");
    assert_eq!(names(&dir), [config, &shard(1), &shard(2), &shard(3), index, tokenizer]);
    let index: Value = serde_json::from_slice(&fs::read(dir.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 70);
    let map = json!({EMBEDDING: shard(1), "model.norm.weight": shard(1), "model.layers.0.w": shard(2), HEAD: shard(3)});
    assert_eq!(index["weight_map"], map);
    holds(&dir, true, 0.5);
    // Most elements (8 + 8 in two copies, against 15 and 2) are bf16.
    let config: Value = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    assert_eq!(config, json!({"torch_dtype": "bfloat16"}));
}

#[test]
fn the_source_files_are_carried_over_and_config_json_is_kept_byte_for_byte() {
    let top = tempfile::tempdir().unwrap();
    let (source, dir) = (top.path().join("source"), top.path().join("model"));
    fs::create_dir(&source).unwrap();
    let text = "{\n \"dtype\":  \"float16\", \"rms_norm_eps\": 1e-05}";
    fs::write(source.join("config.json"), text).unwrap();
    for name in ["tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md"] {
        fs::write(source.join(name), name).unwrap();
    }
    let mut config: Value = serde_json::from_str(text).unwrap();
    save(&dir, false, MAX_SHARD_BYTES, Some(&source), &config, 0.0);
    assert_eq!(fs::read_to_string(dir.join("config.json")).unwrap(), text);
    let expected =
        ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"];
    assert_eq!(names(&dir), expected);

    // No tensor has the dtype that the file names: it is corrected, the rest stays.
    config["dtype"] = json!("float64");
    save(&dir, false, MAX_SHARD_BYTES, Some(&source), &config, 0.0);
    let written: Value = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    assert_eq!(written, json!({"dtype": "float16", "rms_norm_eps": 1e-5}));
}

#[test]
fn a_model_folder_is_replaced_and_anything_else_is_left_alone() {
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join("model");
    fs::create_dir(&dir).unwrap();
    save(&dir, false, MAX_SHARD_BYTES, None, &json!({"dtype": "bfloat16"}), 0.0);
    // An unfinished folder of an earlier run does not stand in the way.
    ModelWriter::plan(&dir, &units(), dtypes, false, 24).create().unwrap();
    save(&dir, false, 24, None, &json!({"dtype": "bfloat16"}), 2.0);
    assert_eq!(names(top.path()), ["model"]);
    assert!(!dir.join("model.safetensors").exists());
    holds(&dir, false, 2.0);

    fs::write(dir.join("notes.md"), "mine").unwrap();
    let failure = ModelWriter::plan(&dir, &units(), dtypes, false, 24).create().unwrap_err();
    assert_eq!((failure.exit, failure.found.as_deref()), (Exit::Disk, Some("notes.md")));
    assert_eq!(names(top.path()), ["model"]);
    fs::remove_file(dir.join("notes.md")).unwrap();
    fs::create_dir(dir.join("config.json.d")).unwrap();
    assert!(check_target(&dir).is_err());
    assert_eq!(check_target(&dir.join("config.json")).unwrap_err().exit, Exit::Disk);
}

#[test]
fn values_are_rounded_to_nearest_even_and_overflow_is_refused() {
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join("model");
    let writer = ModelWriter::plan(&dir, &units(), dtypes, false, MAX_SHARD_BYTES);
    writer.create().unwrap();
    // bf16 has 8 significant bits: 1 + 2^-8 lies half way between 1 and 1 + 2^-7, and 1 is even; 1 + 3·2^-8 lies half way
    // between 1 + 2^-7 and 1 + 2^-6, which is even.
    writer.write(EMBEDDING, 2, &[1.0 + 0.00390625, 1.0 + 3.0 * 0.00390625]).unwrap();
    let failure = writer.write("model.layers.0.w", 3, &[65504.0, 65520.0]).unwrap_err();
    assert_eq!(failure.exit, Exit::NotFinite);
    assert_eq!(failure.place.as_deref(), Some("tensor model.layers.0.w, index 4"));
    assert_eq!(writer.write("model.norm.weight", 1, &[0.0, 0.0]).unwrap_err().exit, Exit::Bug);
    assert_eq!(writer.write("none", 0, &[]).unwrap_err().exit, Exit::Bug);
    writer.finish(r#"{"dtype": "bfloat16"}"#, &[]).unwrap();
    let mut out = [0.0; 4];
    WeightFiles::open(&dir).unwrap().read(EMBEDDING, 0..4, &mut out).unwrap();
    assert_eq!(out, [0.0, 0.0, 1.0, 1.015625]);
}

#[test]
fn a_folder_that_cannot_be_made_is_exit_7_with_a_hint() {
    let top = tempfile::tempdir().unwrap();
    fs::write(top.path().join("file"), "").unwrap();
    let dir = top.path().join("file/model");
    let failure = ModelWriter::plan(&dir, &units(), dtypes, false, 24).create().unwrap_err();
    assert_eq!(failure.exit, Exit::Disk);
    assert!(failure.hint.is_some());
    for (kind, part) in [(io::ErrorKind::StorageFull, "full"), (io::ErrorKind::PermissionDenied, "writable")] {
        assert!(disk_failure("x", &dir, &kind.into()).hint.unwrap().contains(part));
    }
}

#[test]
fn a_source_read_and_written_without_training_keeps_its_bytes() {
    let top = tempfile::tempdir().unwrap();
    let (source, dir) = (top.path().join("source"), top.path().join("model"));
    fs::create_dir(&source).unwrap();
    let stored = [
        tensor(EMBEDDING, Bf16, &[4, 2], -3.0),
        tensor("model.norm.weight", F32, &[2], 0.1),
        tensor("model.layers.0.w", F16, &[3, 5], 7.0),
    ];
    fixture::write(&source.join("model.safetensors"), &stored);
    let files = WeightFiles::open(&source).unwrap();
    let writer =
        ModelWriter::plan(&dir, &units(), |n| files.dtype_of(n).unwrap(), files.contains(HEAD), MAX_SHARD_BYTES);
    writer.create().unwrap();
    for t in &stored {
        let mut values = vec![0.0; t.values.len()];
        files.read(&t.name, 0..values.len(), &mut values).unwrap();
        writer.write(&t.name, 0, &values).unwrap();
    }
    writer.finish(r#"{"dtype": "bfloat16"}"#, &[]).unwrap();
    let data = |dir: &Path| {
        let bytes = fs::read(dir.join("model.safetensors")).unwrap();
        let (n, _) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        bytes[8 + n..].to_vec()
    };
    assert_eq!(data(&dir), data(&source));
}
