//! Weights read from folders, whole and damaged.

use super::*;
use crate::Exit;
use crate::hf::fixture::{self, Tensor, tensor, unit};
use FileDType::{Bf16, F16, F32};
use serde_json::json;
use tempfile::TempDir;

fn folder(tensors: &[Tensor]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fixture::write(&dir.path().join("model.safetensors"), tensors);
    dir
}

/// Writes `tensors` with a spoiled header or data, and returns what opening says.
fn spoiled(spoil: impl Fn(&mut serde_json::Map<String, Value>, &mut Vec<u8>)) -> Failure {
    let tensors = [tensor("a", F32, &[2, 3], 0.0), tensor("b", Bf16, &[4], 1.0)];
    let mut header = fixture::header(&tensors);
    let mut data: Vec<u8> = tensors.iter().flat_map(fixture::bytes).collect();
    spoil(&mut header, &mut data);
    let dir = tempfile::tempdir().unwrap();
    fixture::write_raw(&dir.path().join("model.safetensors"), &header, &data);
    let failure = WeightFiles::open(dir.path()).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    assert!(failure.place.as_ref().unwrap().contains("model.safetensors"), "{failure}");
    failure
}

#[track_caller]
fn says(failure: &Failure, parts: &[&str]) {
    let text = failure.to_string();
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }
}

#[test]
fn mixed_dtypes_read_exactly_and_by_range() {
    let tensors = [tensor("a", F32, &[2, 3], 0.1), tensor("b", Bf16, &[5], 1.0), tensor("c", F16, &[2, 2], 2.0)];
    let dir = folder(&tensors);
    let files = WeightFiles::open(dir.path()).unwrap();
    for t in &tensors {
        assert_eq!(files.dtype_of(&t.name), Some(t.dtype));
        for (start, end) in [(0, t.values.len()), (1, 3), (2, 2)] {
            let mut out = vec![f32::NAN; end - start];
            files.read(&t.name, start..end, &mut out).unwrap();
            assert_eq!(out, t.values[start..end]);
        }
    }
    assert_eq!(files.dtype_of("none"), None);
    assert_eq!(files.read("none", 0..0, &mut []).unwrap_err().exit, Exit::Input);
    assert_eq!(files.read("b", 3..6, &mut [0.0; 3]).unwrap_err().exit, Exit::Bug);
}

#[test]
fn a_range_longer_than_the_scratch_is_read_whole() {
    // Two and a half times the scratch of a two-byte dtype, at an odd start.
    let len = SCRATCH / 2 * 5 / 2;
    let values: Vec<f32> = (0..len).map(|i| (i % 251) as f32).collect();
    let dir = folder(&[Tensor { name: "x".into(), dtype: Bf16, shape: vec![len], values: values.clone() }]);
    let mut out = vec![0.0; len - 7];
    WeightFiles::open(dir.path()).unwrap().read("x", 7..len, &mut out).unwrap();
    assert_eq!(out, values[7..]);
}

#[test]
fn a_value_that_is_not_finite_is_named_with_its_place() {
    for (dtype, bad, shown) in [(F32, f32::NAN, "NaN"), (Bf16, f32::INFINITY, "inf"), (F16, f32::NEG_INFINITY, "-inf")]
    {
        let mut t = tensor("w", dtype, &[3, 4], 0.0);
        t.values[6] = bad;
        let dir = folder(&[t]);
        let files = WeightFiles::open(dir.path()).unwrap();
        let failure = files.read("w", 5..12, &mut [0.0; 7]).unwrap_err();
        assert_eq!(failure.exit, Exit::Input);
        says(&failure, &["model.safetensors, tensor w, index 6 (row 1, column 2)", shown]);
        files.read("w", 7..12, &mut [0.0; 5]).unwrap();
    }
}

#[test]
fn headers_that_lie_are_refused_naming_the_tensor() {
    let f = spoiled(|h, _| h["b"]["data_offsets"] = json!([20, 28]));
    says(&f, &["overlap", "tensor b", "byte 24", "[20, 28]"]);
    let f = spoiled(|h, d| {
        h["b"]["data_offsets"] = json!([32, 40]);
        d.resize(40, 0);
    });
    says(&f, &["hole", "tensor b", "[32, 40]"]);
    says(&spoiled(|h, _| h["a"]["shape"] = json!([3, 3])), &["tensor a", "36 bytes", "[0, 24]"]);
    says(&spoiled(|h, _| h["a"]["shape"] = json!([u64::MAX, 3])), &["tensor a"]);
    says(&spoiled(|h, _| h["b"]["data_offsets"] = json!([u64::MAX, 8])), &["tensor b"]);
    says(&spoiled(|h, _| h["b"]["dtype"] = json!("F31")), &["tensor b", "F31"]);
    says(&spoiled(|h, _| h["b"] = json!(7)), &["tensor b", "7"]);
    says(&spoiled(|_, d| d.truncate(29)), &["truncated", "tensor b", "8 bytes", "5 bytes before the file ends"]);
    says(&spoiled(|_, d| d.extend([0; 3])), &["longer than its header"]);
}

#[test]
fn files_too_short_for_their_header_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for (bytes, part) in [
        (vec![1, 2, 3], "3 bytes"),
        (u64::MAX.to_le_bytes().to_vec(), "18446744073709551615"),
        ([&100u64.to_le_bytes()[..], b"{}"].concat(), "a header length of 100 in a file of 10 bytes"),
        ([&2u64.to_le_bytes()[..], b"{]"].concat(), "not JSON"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        says(&WeightFiles::open(dir.path()).unwrap_err(), &["model.safetensors", part]);
    }
}

#[test]
fn metadata_may_be_absent_empty_or_null() {
    for metadata in [json!({}), json!(null), json!({"format": "pt"})] {
        let dir = tempfile::tempdir().unwrap();
        let t = [tensor("a", F32, &[2], 0.0)];
        let mut header = fixture::header(&t);
        header.insert("__metadata__".into(), metadata);
        fixture::write_raw(&dir.path().join("model.safetensors"), &header, &fixture::bytes(&t[0]));
        assert!(WeightFiles::open(dir.path()).unwrap().contains("a"));
    }
}

#[test]
fn shards_are_found_by_the_index_and_stale_files_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fixture::write(&path("model-00001-of-00002.safetensors"), &[tensor("a", F32, &[3], 1.0)]);
    fixture::write(&path("model-00002-of-00002.safetensors"), &[tensor("b", Bf16, &[2], 2.0)]);
    fixture::write(&path("model-00001-of-00009.safetensors"), &[tensor("stale", F32, &[1], 0.0)]);
    let index = |map: Value| {
        std::fs::write(path("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
        WeightFiles::open(dir.path())
    };
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let files = index(json!({"a": one, "b": two})).unwrap();
    assert!(files.contains("a") && !files.contains("stale"));
    let mut out = [0.0; 2];
    files.read("b", 0..2, &mut out).unwrap();
    assert_eq!(out, [2.0, 2.125]);

    says(&index(json!({"a": one, "b": one})).unwrap_err(), &["tensor b in model-00001", "no such tensor"]);
    says(&index(json!({"a": "gone.safetensors"})).unwrap_err(), &["gone.safetensors", "tensor a"]);
    says(&index(json!({"a": "../x.safetensors"})).unwrap_err(), &["../x.safetensors"]);
    says(&index(json!({"a": 3})).unwrap_err(), &["weight_map[a] is 3"]);
    std::fs::write(path("model.safetensors.index.json"), "{}").unwrap();
    says(&WeightFiles::open(dir.path()).unwrap_err(), &["no weight_map"]);
}

#[test]
fn a_folder_without_weights_says_what_it_has_instead() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    says(&WeightFiles::open(dir.path()).unwrap_err(), &["pytorch_model.bin", "safe_serialization"]);
}

const TABLE: (&str, &[usize]) = (EMBEDDING, &[4, 2]);
const NORM: (&str, &[usize]) = ("model.norm.weight", &[2]);
const OUT: (&str, &[usize]) = (HEAD, &[4, 2]);

fn checked(stored: &[Tensor], wanted: &[(&str, &[usize])], tied: bool) -> Result<()> {
    let dir = folder(stored);
    WeightFiles::open(dir.path()).unwrap().check(&[unit(wanted)], tied)
}

fn of(param: (&str, &[usize])) -> Tensor {
    tensor(param.0, F32, param.1, 0.0)
}

#[test]
fn the_right_tensors_pass_and_old_buffers_are_ignored() {
    let inv_freq = tensor("model.layers.0.self_attn.rotary_emb.inv_freq", F32, &[4], 0.0);
    checked(&[of(TABLE), of(NORM), of(OUT), inv_freq], &[TABLE, NORM, OUT], false).unwrap();
    checked(&[of(TABLE), of(NORM)], &[TABLE, NORM], true).unwrap();
}

#[test]
fn missing_extra_and_misshapen_tensors_are_all_listed_with_a_cause() {
    let q = "model.layers.0.self_attn.q_proj";
    let (weight, bias) = (format!("{q}.weight"), format!("{q}.bias"));
    let stored = [tensor(EMBEDDING, F32, &[5, 2], 0.0), tensor(&bias, F32, &[2], 0.0)];
    let failure = checked(&stored, &[TABLE, NORM, (weight.as_str(), &[2, 2])], true).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    let missing = format!("2 missing: {}, {weight}", NORM.0);
    let misshapen = format!("1 misshapen: {EMBEDDING} is [5, 2], expected [4, 2]");
    says(&failure, &[&missing, &format!("1 extra: {bias}"), &misshapen, "biases"]);

    let mut stored: Vec<Tensor> = (0..11).map(|i| tensor(&format!("model.layers.9.x{i:02}"), F32, &[1], 0.0)).collect();
    stored.push(of(TABLE));
    let failure = checked(&stored, &[TABLE], true).unwrap_err();
    says(&failure, &["11 extra", "model.layers.9.x07 and 3 more", "num_hidden_layers"]);
}

#[test]
fn causes_are_told_apart() {
    let bare = tensor("embed_tokens.weight", F32, &[4, 2], 0.0);
    says(&checked(&[bare, of(NORM)], &[TABLE, NORM], true).unwrap_err(), &["lack `model.`"]);
    let wrapped = tensor("module.model.norm.weight", F32, &[2], 0.0);
    says(&checked(&[wrapped], &[NORM], true).unwrap_err(), &["`module.`"]);
    says(&checked(&[of(TABLE)], &[TABLE, OUT], false).unwrap_err(), &["tie_word_embeddings"]);
    let rows = tensor(EMBEDDING, F32, &[6, 2], 0.0);
    says(&checked(&[rows], &[TABLE], true).unwrap_err(), &["6 rows", "vocab_size 4"]);
    says(&checked(&[of(TABLE)], &[TABLE, NORM], true).unwrap_err(), &["incomplete"]);
    let lora = tensor("model.layers.0.lora_A.weight", F32, &[1], 0.0);
    says(&checked(&[of(TABLE), lora], &[TABLE], true).unwrap_err(), &["merge"]);
    let k: (&str, &[usize]) = ("model.layers.0.self_attn.k_proj.weight", &[2, 2]);
    says(&checked(&[tensor(k.0, F32, &[4, 2], 0.0)], &[k], true).unwrap_err(), &["num_key_value_heads"]);
    let up: (&str, &[usize]) = ("model.layers.0.mlp.up_proj.weight", &[2, 2]);
    says(&checked(&[tensor(up.0, F32, &[4, 2], 0.0)], &[up], true).unwrap_err(), &["intermediate_size"]);
}

#[test]
fn dtypes_that_are_not_read_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let header = json!({"model.norm.weight": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}});
    fixture::write_raw(&dir.path().join("model.safetensors"), header.as_object().unwrap(), &[0, 0]);
    let files = WeightFiles::open(dir.path()).unwrap();
    says(&files.check(&[unit(&[NORM])], true).unwrap_err(), &["model.norm.weight", "I8", "F32, BF16 or F16"]);
    assert_eq!(files.dtype_of("model.norm.weight"), None);
}

#[test]
fn a_tied_model_may_store_its_head_only_as_an_exact_copy() {
    checked(&[of(TABLE), of(OUT)], &[TABLE], true).unwrap();
    let mut other = of(OUT);
    other.values[3] += 1.0;
    // Values are four bytes; 0.375 and 1.375 differ first in their third byte (0x3EC00000, 0x3FB00000).
    says(&checked(&[of(TABLE), other], &[TABLE], true).unwrap_err(), &[HEAD, "byte 14", "tie_word_embeddings"]);
    let half = tensor(HEAD, Bf16, &[4, 2], 0.0);
    says(&checked(&[of(TABLE), half], &[TABLE], true).unwrap_err(), &["BF16 [4, 2] against F32 [4, 2]"]);
    says(&checked(&[of(TABLE), of(OUT)], &[TABLE, NORM], true).unwrap_err(), &["1 missing: model.norm.weight"]);
}

#[test]
fn a_tied_model_stored_under_its_head_alone_is_read_as_the_table() {
    let dir = folder(&[of(OUT), tensor("n", F32, &[2], 0.0)]);
    let mut files = WeightFiles::open(dir.path()).unwrap();
    files.adopt_head();
    files.check(&[unit(&[TABLE, ("n", &[2])])], true).unwrap();
    let mut out = [0.0; 8];
    files.read(EMBEDDING, 0..8, &mut out).unwrap();
    assert_eq!(out, of(OUT).values[..]);
}

/// Readers differ in which of the two they take, so neither is.
#[test]
fn a_tensor_in_two_files_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    fixture::write(&dir.path().join(a), &[tensor("a", F32, &[2], 0.0)]);
    fixture::write(&dir.path().join(b), &[tensor("b", F32, &[2], 1.0), tensor("a", F32, &[2], 9.0)]);
    let index = json!({"metadata": {}, "weight_map": {"a": a, "b": b}});
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let failure = WeightFiles::open(dir.path()).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    says(&failure, &["tensor a", "two weight files", a, b]);
}
