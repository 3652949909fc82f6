//! A model folder out of a checkpoint.

use super::super::export::export;
use super::*;
use crate::Exit;
use crate::cli::ExportDType;
use crate::plan::ModelSource;
use std::fs;

fn open(dir: &Path) -> Source {
    Source::open(&ModelSource::Folder(dir.to_owned()), 0).unwrap()
}

#[test]
fn the_folder_holds_the_shadow_in_the_dtype_asked_for() {
    // A shadow that bf16 cannot hold: 1 + 2^-10 rounds to 1, and in fp16 it is exact.
    let fine = 1.0 + 2f32.powi(-10);
    let changes = vec![(Role::Shadow, "model.norm.weight", 5, fine)];
    let top = tempfile::tempdir().unwrap();
    for (files, world) in [(Files::Shared, 1), (Files::PerRank, 3)] {
        let run = top.path().join(format!("run-{world}"));
        let dir = Save { files, world, changes: changes.clone(), ..Save::default() }.make(&run);
        let cases = [
            (ExportDType::Bf16, FileDType::Bf16, "bfloat16", 1.0),
            (ExportDType::Fp32, FileDType::F32, "float32", fine),
            (ExportDType::Source, FileDType::F16, "float16", fine),
        ];
        for (asked, dtype, named, kept) in cases {
            let out = top.path().join(format!("{named}-{world}"));
            let line = export(&dir, &out, asked).unwrap();
            assert!(line.contains(": step 4, ") && line.starts_with(&dir.display().to_string()), "{line}");
            let (opened, mut names) = (open(&out), Vec::new());
            assert_eq!((&opened.config, opened.config_json["dtype"].as_str()), (&source().config, None));
            assert_eq!(opened.config_json["torch_dtype"], named);
            for param in opened.units().iter().flat_map(|unit| &unit.params) {
                assert_eq!(opened.dtype_of(&param.name), dtype, "{}", param.name);
                let mut values = vec![0.0; param.len()];
                opened.fill(param, 0, &mut values).unwrap();
                let mut expected: Vec<f32> = (0..param.len()).map(|i| value(Role::Shadow, &param.name, i)).collect();
                if param.name == "model.norm.weight" {
                    expected[5] = kept;
                }
                assert_eq!(values, expected, "{}", param.name);
            }
            for entry in fs::read_dir(&out).unwrap() {
                names.push(entry.unwrap().file_name().into_string().unwrap());
            }
            names.sort();
            assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
            assert_eq!(fs::read(out.join("tokenizer.json")).unwrap(), fs::read(dir.join("tokenizer.json")).unwrap());
        }
    }
}

#[test]
fn nothing_that_is_there_is_replaced() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save::default().make(&top.path().join("run"));
    let out = top.path().join("out");
    fs::create_dir(&out).unwrap();
    export(&dir, &out, ExportDType::Bf16).unwrap();
    // A model folder is somebody's work like any other file.
    let failure = export(&dir, &out, ExportDType::Bf16).unwrap_err();
    assert_eq!(failure.exit, Exit::Disk);
    assert!(failure.found.unwrap().contains("config.json"));
    for inside in [dir.clone(), dir.join("model"), dir.join("not/there/yet")] {
        assert_eq!(export(&dir, &inside, ExportDType::Bf16).unwrap_err().exit, Exit::Usage, "{}", inside.display());
    }
    let file = top.path().join("file");
    fs::write(&file, "mine").unwrap();
    assert_eq!(export(&dir, &file, ExportDType::Bf16).unwrap_err().exit, Exit::Disk);
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

#[test]
fn damage_is_found_on_the_way_and_leaves_no_folder() {
    let top = tempfile::tempdir().unwrap();
    let (run, out) = (top.path().join("run"), top.path().join("out"));
    for (file, place) in
        [("shadow.safetensors", "shadow of tensor lm_head.weight"), ("tokenizer.json", "tokenizer.json")]
    {
        let dir = Save::default().make(&run);
        damage(&dir.join(file));
        let failure = export(&dir, &out, ExportDType::Fp32).unwrap_err();
        assert_eq!(failure.exit, Exit::Input, "{file}");
        assert!(failure.place.unwrap().contains(place), "{file}");
    }
    let changes = vec![(Role::Shadow, "model.norm.weight", 0, f32::NAN)];
    let dir = Save { changes, ..Save::default() }.make(&run);
    assert_eq!(export(&dir, &out, ExportDType::Bf16).unwrap_err().exit, Exit::Input);
    let left: Vec<_> = fs::read_dir(top.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["run"]);
}
