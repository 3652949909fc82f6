//! What is written is read back, bit for bit, whatever the ranks, the files and the dtype.

use super::*;
use crate::hf::WeightFiles;
use crate::hf::weights::HEAD;
use spmd_core::{ViewMut, bf16};

/// Reads every tensor in every role in pieces of `step` elements and compares bits.
fn holds(save: &Save, reader: &Reader, step: usize) {
    for (u, unit) in save.units.iter().enumerate() {
        for (param, range) in unit.params.iter().zip(unit.ranges()) {
            for role in [Role::Model, Role::Shadow, Role::ExpAvg, Role::ExpAvgSq] {
                let stored = if role == Role::Model { Role::Shadow } else { role };
                let round = |x: f32| match role {
                    Role::Model => DType::Bf16.round(x),
                    _ => save.dtype.round(x),
                };
                let expected: Vec<f32> = range.clone().map(|i| round(value(stored, u, i))).collect();
                let mut found = vec![0.0; expected.len()];
                for (i, part) in found.chunks_mut(step).enumerate() {
                    reader.read(role, &param.name, i * step, part).unwrap();
                }
                assert_eq!(bits(&found), bits(&expected), "{role} of {}", param.name);
            }
        }
    }
}

#[test]
fn every_world_file_mode_and_dtype_reads_back_by_any_ranges() {
    for files in [Files::Shared, Files::PerRank] {
        for (world, dtype) in [(1, DType::F32), (2, DType::F32), (3, DType::F32), (2, DType::Bf16), (40, DType::F32)] {
            let top = tempfile::tempdir().unwrap();
            let save = Save { dtype, ..Save::new(files, world) };
            let dir = save.save(top.path());
            assert_eq!(dir, top.path().join("checkpoints/step-000010"));
            let reader = Reader::open(&dir).unwrap();
            for step in [1, 7, 64, 1 << 20] {
                holds(&save, &reader, step);
            }
            assert_eq!(reader.verify(&mut no_progress), []);
            let on_disk: u64 = names(&dir).iter().map(|n| fs::metadata(dir.join(n)).unwrap().len()).sum();
            let state = fs::metadata(dir.join(STATE_FILE)).unwrap().len();
            assert_eq!(on_disk - state, save.plan(top.path()).bytes());
        }
    }
}

#[test]
fn the_state_says_what_was_given() {
    let top = tempfile::tempdir().unwrap();
    let save = Save::new(Files::Shared, 3);
    let reader = Reader::open(&save.save(top.path())).unwrap();
    let state = reader.state();
    assert_eq!((state.step, state.world, &state.run), (10, 3, &run_facts()));
    assert_eq!(state.config_json, save.facts().config_json);
    assert!(state.stores_tied_head && state.stores_model());
    assert_eq!(state.tensors[2].shape, [13, 11]);
    assert_eq!((&*state.tensors[2].name, state.tensors[2].source_dtype), ("model.layers.0.w", FileDType::F16));
    let expected = RoleDTypes { shadow: FileDType::F32, exp_avg: FileDType::F32, exp_avg_sq: FileDType::F32 };
    assert_eq!(state.dtypes, expected);
}

#[test]
fn shared_files_are_a_model_folder_in_bf16_and_the_moments_have_the_same_names() {
    let top = tempfile::tempdir().unwrap();
    let save = Save::new(Files::Shared, 2);
    let dir = save.save(top.path());
    let model = WeightFiles::open(&dir).unwrap();
    model.check(&save.units, true).unwrap();
    assert_eq!((model.dtype_of(EMBEDDING), model.dtype_of(HEAD)), (Some(FileDType::Bf16), Some(FileDType::Bf16)));
    let config = fs::read_to_string(dir.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config, serde_json::json!({"dtype": "bfloat16", "rms_norm_eps": 1e-5}));
    assert_eq!(fs::read(dir.join("tokenizer.json")).unwrap(), b"{\"a\": 1}");
    // 300 bytes a file hold, of 4-byte numbers, the embedding (168) and the norm (20); then w (572) and v (108) alone, the
    // last norm (4) beside v. Of 2-byte numbers (84, 10, 286, 54, 2, 84): the first two, w, then the rest.
    let shards = |role: &str, n: usize| {
        let mut names: Vec<String> = (1..=n).map(|i| format!("{role}-{i:05}-of-{n:05}.safetensors")).collect();
        names.push(format!("{role}.safetensors.index.json"));
        names
    };
    let mut expected = vec!["config.json".to_owned(), "tokenizer.json".to_owned(), STATE_FILE.to_owned()];
    expected.extend(["model", "shadow", "exp_avg", "exp_avg_sq"].into_iter().flat_map(|role| shards(role, 3)));
    expected.sort();
    assert_eq!(names(&dir), expected);
    let bytes = fs::read(dir.join("exp_avg-00002-of-00003.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let w = file.tensor("model.layers.0.w").unwrap();
    assert_eq!((w.dtype(), w.shape()), (safetensors::Dtype::F32, &[13, 11][..]));
}

#[test]
fn a_rank_file_is_safetensors_and_names_its_runs() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save::new(Files::PerRank, 2).save(top.path());
    let rank = |i: usize| format!("rank-{i:05}-of-00002.safetensors");
    assert_eq!(names(&dir), ["config.json", &rank(0), &rank(1), STATE_FILE, "tokenizer.json"]);
    let bytes = fs::read(dir.join(rank(1))).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    // Rank 1 of 2 owns elements 21..42 of the embedding's 42 and 89.. (175 elements, 88 | 1) of the block's.
    assert_eq!(file.tensor(&format!("shadow/{EMBEDDING}@21")).unwrap().shape(), [21]);
    assert_eq!(file.tensor("exp_avg_sq/model.layers.0.w@84").unwrap().shape(), [59]);
    assert!(!Reader::open(&dir).unwrap().state().stores_model());
}

#[test]
fn a_tensor_of_many_blocks_is_cut_and_found() {
    let top = tempfile::tempdir().unwrap();
    let big = format::CHUNK + 5;
    let units = vec![unit(&[("a", &[3]), ("b", &[big])])];
    let save = Save { units, tied_head: false, max_file_bytes: u64::MAX, ..Save::new(Files::Shared, 1) };
    let reader = Reader::open(&save.save(top.path())).unwrap();
    let b = reader.state().tensor("b").unwrap();
    let blocks: Vec<u64> = reader.state().chunks_of(Role::ExpAvg, b).iter().map(|c| c.elements).collect();
    assert_eq!(blocks, [format::CHUNK as u64, 5]);
    holds(&save, &reader, 300_000);
    holds(&save, &reader, usize::MAX / 8);
}

#[test]
fn a_change_of_dtype_rounds_to_nearest_even_or_widens_exactly() {
    for files in [Files::Shared, Files::PerRank] {
        for (written, read) in [(DType::F32, DType::Bf16), (DType::Bf16, DType::F32), (DType::Bf16, DType::Bf16)] {
            let top = tempfile::tempdir().unwrap();
            let save = Save { dtype: written, ..Save::new(files, 3) };
            let reader = Reader::open(&save.save(top.path())).unwrap();
            let mut buffer = Buffer::zeros(read, 100, "test").unwrap();
            reader.read_into(Role::ExpAvg, "model.layers.0.w", 20, buffer.view_mut()).unwrap();
            // `w` begins after the norm's five elements.
            let expected: Vec<f32> = (25..125).map(|i| DType::Bf16.round(value(Role::ExpAvg, 1, i))).collect();
            assert_eq!(bits(&buffer.view().to_f32()), bits(&expected));
        }
    }
}

#[test]
fn what_a_checkpoint_does_not_have_is_refused() {
    let top = tempfile::tempdir().unwrap();
    let reader = Reader::open(&Save::new(Files::Shared, 1).save(top.path())).unwrap();
    let read = |name: &str, start: usize, n: usize| reader.read(Role::Shadow, name, start, &mut vec![0.0; n]);
    assert_eq!(read("none", 0, 1).unwrap_err().exit, Exit::Input);
    assert_eq!(read("model.norm.weight", 0, 2).unwrap_err().exit, Exit::Bug);
    assert_eq!(read("model.norm.weight", usize::MAX, 2).unwrap_err().exit, Exit::Bug);
    read("model.norm.weight", 1, 0).unwrap();
    // The second copy of the embedding is stored where the source has it, and only of the embedding.
    let mut copy = [0.0; 3];
    reader.read(Role::TiedHead, EMBEDDING, 2, &mut copy).unwrap();
    let expected: Vec<f32> = (2..5).map(|i| DType::Bf16.round(value(Role::Shadow, 0, i))).collect();
    assert_eq!(bits(&copy), bits(&expected));
    assert_eq!(reader.read(Role::TiedHead, "model.norm.weight", 0, &mut [0.0]).unwrap_err().exit, Exit::Input);
}

#[test]
fn a_weight_that_bf16_cannot_hold_is_exit_6_in_writing_and_reading() {
    let top = tempfile::tempdir().unwrap();
    let units = vec![unit(&[("a", &[3])])];
    let save = Save { units, tied_head: false, ..Save::new(Files::Shared, 1) };
    // f32::MAX lies above the largest bf16 by more than half a step.
    let view = |_: usize, _: Role| View::F32(&[1.0, f32::INFINITY, f32::MAX]);
    let plan = save.plan(top.path());
    plan.create().unwrap();
    let failure = plan.write_rank(0, view).unwrap_err();
    assert_eq!((failure.exit, failure.place.as_deref()), (Exit::NotFinite, Some("tensor a, index 2")));
    plan.discard();

    let save = Save { files: Files::PerRank, ..save };
    let plan = save.plan(top.path());
    plan.create().unwrap();
    let written = plan.write_rank(0, view).unwrap();
    let reader = Reader::open(&plan.commit(run_facts(), &[written]).unwrap()).unwrap();
    let mut out = [bf16::ZERO; 2];
    let failure = reader.read_into(Role::Shadow, "a", 1, ViewMut::Bf16(&mut out)).unwrap_err();
    assert_eq!((failure.exit, failure.place.as_deref()), (Exit::NotFinite, Some("tensor a, index 2")));
    let failure = reader.read(Role::Model, "a", 0, &mut [0.0; 3]).unwrap_err();
    assert_eq!((failure.exit, failure.place.as_deref()), (Exit::NotFinite, Some("tensor a, index 2")));
    let mut out = [0.0; 3];
    reader.read(Role::Shadow, "a", 0, &mut out).unwrap();
    assert_eq!(out, [1.0, f32::INFINITY, f32::MAX]);
}
