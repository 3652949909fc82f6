//! Which checkpoint is meant, what it holds, and whether it is whole.

use super::super::{find, inspect::Inspected, verified::verify_all};
use super::*;
use crate::checkpoint::STATE_FILE;
use crate::{Exit, Failure};
use std::fs;

#[test]
fn a_run_means_its_newest_checkpoint_and_for_verify_all_of_them() {
    let top = tempfile::tempdir().unwrap();
    let old = Save { step: 9, ..Save::default() }.make(top.path());
    let new = Save { step: 10, ..Save::default() }.make(top.path());
    assert_eq!(find::newest(top.path()).unwrap(), new);
    assert_eq!(find::newest(&top.path().join("checkpoints")).unwrap(), new);
    assert_eq!(find::newest(&old).unwrap(), old);
    assert_eq!(find::all(top.path()).unwrap(), [new, old]);
}

#[test]
fn what_is_no_checkpoint_is_called_what_it_is() {
    let top = tempfile::tempdir().unwrap();
    let made = |name: &str, files: &[&str]| {
        let dir = top.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        for file in files {
            fs::create_dir_all(dir.join(file).parent().unwrap()).unwrap();
            fs::write(dir.join(file), "{}").unwrap();
        }
        dir
    };
    let cases = [
        (top.path().join("missing"), "nothing"),
        (made("a", &["file"]).join("file"), "a file"),
        (made("empty", &[]), "an empty folder"),
        (made("notes", &["notes.txt"]), "a folder with notes.txt"),
        (made("model", &["config.json", "model-00001-of-00002.safetensors"]), "a model folder"),
        (made("run", &["run.json", "checkpoints/step-000003.partial/shadow.safetensors"]), "only step-000003.partial"),
        (made("fresh", &["run.json"]), "the folder of a run without a complete checkpoint"),
        (made("run/checkpoints/step-000003.partial", &[]), "an unfinished checkpoint"),
        (made("run/checkpoints/step-000001.removed", &[]), "a checkpoint being removed"),
        (made("lost", &["config.json", "model.safetensors", "shadow.safetensors"]), "without state.rkyv"),
    ];
    for (dir, found) in cases {
        let failure = find::newest(&dir).unwrap_err();
        assert_eq!((failure.exit, failure.what.as_str()), (Exit::Input, "this is not a checkpoint"));
        assert!(failure.hint.is_some() && failure.expected.is_some());
        let text = failure.found.unwrap();
        assert!(text.contains(found), "{}: {text}", dir.display());
    }
}

#[test]
fn inspect_says_what_is_in_it() {
    let top = tempfile::tempdir().unwrap();
    let save = Save { world: 2, state_hash: Some(0xabc), ..Save::default() };
    let dir = save.make(top.path());
    let found = Inspected::read(&dir).unwrap();
    let said = json(&found.json());
    assert_eq!(said["step"], 4);
    assert_eq!((&said["world"], &said["stage"], &said["shard_group"]), (&json("2"), &json("3"), &json("2")));
    assert_eq!((&said["tokens"], &said["epoch"], &said["row_in_epoch"]), (&json("12345"), &json("1"), &json("7")));
    assert_eq!(said["state_hash"], "0000000000000abc");
    assert_eq!(said["settings"]["lr"]["from"], "default");
    assert_eq!(said["dtypes"], json(r#"{"shadow": "F32", "exp_avg": "F32", "exp_avg_sq": "F32", "model": "BF16"}"#));
    let weights: usize = save.units.iter().map(UnitSpec::len).sum();
    assert_eq!(said["model"]["parameters"], weights);
    assert_eq!(said["tensors"].as_array().unwrap().len(), save.units.iter().map(|u| u.params.len()).sum::<usize>());
    assert_eq!(said["tensors"][0]["shape"], json("[11, 12]"));
    assert_eq!(said["tensors"][0]["source_dtype"], "F16");
    // Every file is listed in its length: their sum is the folder's.
    let on_disk = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum::<u64>();
    assert_eq!(said["bytes"], on_disk);
    assert!(said["files"].as_array().unwrap().iter().all(|f| f["fault"].is_null()));

    let text = found.text(false);
    for part in ["4 completed, 12345 tokens", "1 whole passes, then 7 rows", "0000000000000abc", "on 2 ranks: stage 3"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(words.windows(3).any(|w| w == ["lr", "1e-5", "default"]), "{text}");
    assert!(text.contains("Mistral, 1 layers, hidden 12"), "{text}");
    assert!(!text.contains("11 x 12"));
    assert!(found.text(true).contains("11 x 12"));
}

#[test]
fn inspect_flags_tensors_without_elements_and_files_that_are_not_there() {
    let top = tempfile::tempdir().unwrap();
    let mut save = Save::default();
    save.units[0].params.push(matrix("empty.weight", &[0, 3]));
    let dir = save.make(top.path());
    fs::remove_file(dir.join("exp_avg.safetensors")).unwrap();
    fs::write(dir.join("shadow.safetensors"), "short").unwrap();
    let found = Inspected::read(&dir).unwrap();
    let text = found.text(true);
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(line("empty.weight").ends_with("HAS NO ELEMENTS"));
    assert!(line("exp_avg.safetensors").ends_with("MISSING"));
    assert!(line("shadow.safetensors").contains("DAMAGED: 5 bytes"));
    assert!(!line("exp_avg_sq.safetensors").contains("MISSING"));
    assert_eq!(text.matches("HAS NO ELEMENTS").count(), 1);
}

#[test]
fn inspect_tells_a_checkpoint_of_one_file_a_rank() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save { files: Files::PerRank, world: 2, ..Save::default() }.make(top.path());
    let found = Inspected::read(&dir).unwrap();
    let said = json(&found.json());
    assert_eq!(said["files"][0]["holds"], json(r#"["shadow", "exp_avg", "exp_avg_sq"]"#));
    assert_eq!(said["dtypes"].get("model"), None);
    assert!(found.text(false).contains("no model files"));
}

/// What verify says, and how it ends.
fn verified(dir: &Path) -> (String, Result<(), Failure>) {
    let mut said = String::new();
    let ended = verify_all(&find::all(dir).unwrap(), &mut |text| {
        said += text;
        Ok(())
    });
    (said, ended)
}

#[test]
fn verify_counts_what_is_right() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save::default().make(top.path());
    let state = crate::checkpoint::read::read_state(&dir).unwrap();
    // Each tensor is one block in each of four files; each of the four has a header, and config and tokenizer are whole.
    let tensors = state.tensors.len();
    let (said, ended) = verified(&dir);
    assert!(said.starts_with("ok: 7 files, ") && said.ends_with(&format!(", {} checksums\n", 4 * tensors + 6 + 1)));
    ended.unwrap();
}

#[test]
fn verify_names_the_file_and_tensor_and_looks_at_every_checkpoint() {
    let top = tempfile::tempdir().unwrap();
    let bad = Save { step: 1, ..Save::default() }.make(top.path());
    let lost = Save { step: 2, ..Save::default() }.make(top.path());
    let good = Save { step: 3, ..Save::default() }.make(top.path());
    damage(&bad.join("exp_avg.safetensors"));
    fs::remove_file(lost.join(STATE_FILE)).unwrap();
    let (said, ended) = verified(top.path());
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 3, "{said}");
    let start = format!("{}: exp_avg.safetensors, exp_avg of tensor lm_head.weight, bytes ", bad.display());
    assert!(lines[0].starts_with(&start), "{said}");
    assert!(lines[1].starts_with(&format!("{}: state.rkyv: ", lost.display())), "{said}");
    assert!(lines[2].starts_with(&format!("{}: ok: ", good.display())), "{said}");
    let failure = ended.unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    assert_eq!(failure.found.as_deref(), Some("2 fault(s), in 2 of 3 checkpoint(s)"));
    let (said, ended) = verified(&good);
    assert!(said.starts_with("ok: ") && ended.is_ok());
    assert_eq!(verified(&bad).1.unwrap_err().exit, Exit::Input);
}
