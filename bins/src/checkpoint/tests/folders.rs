//! A checkpoint is whole or it is not there; old ones go, and nothing else does.

use super::*;

fn steps(out_dir: &Path) -> Vec<u64> {
    list(out_dir).unwrap().into_iter().map(|(step, _)| step).collect()
}

fn at_step(step: u64) -> Save {
    Save { step, ..Save::new(Files::Shared, 2) }
}

#[test]
fn a_save_that_ends_early_leaves_the_earlier_checkpoint_and_nothing_that_looks_like_one() {
    let top = tempfile::tempdir().unwrap();
    assert_eq!(list(top.path()).unwrap(), []);
    let first = at_step(1).save(top.path());
    let save = at_step(2);
    let plan = save.plan(top.path());
    plan.create().unwrap();
    let mut written = vec![save.write(top.path(), 0).unwrap()];
    // One rank has written, the other was lost.
    assert_eq!(steps(top.path()), [1]);
    let failure = plan.commit(run_facts(), &written).unwrap_err();
    assert_eq!((failure.exit, steps(top.path())), (Exit::Bug, vec![1]));
    let partial = top.path().join("checkpoints/step-000002.partial");
    assert!(partial.is_dir() && !is_checkpoint(&partial));

    // The next attempt starts anew, and a save of the other rank's is not mixed up with it.
    plan.create().unwrap();
    assert_eq!(names(&partial), Vec::<String>::new());
    written[0] = save.write(top.path(), 0).unwrap();
    written.push(Written::from_bytes(&save.write(top.path(), 1).unwrap().to_bytes().unwrap()).unwrap());
    plan.commit(run_facts(), &written).unwrap();
    assert_eq!(steps(top.path()), [2, 1]);
    for dir in [first, plan.dir()] {
        assert_eq!(verify(&dir, &mut no_progress).unwrap(), []);
    }
    plan.create().unwrap();
    plan.discard();
    assert_eq!(names(&top.path().join("checkpoints")), ["step-000001", "step-000002"]);
    assert!(Written::from_bytes(&[1, 2, 3]).is_err());
}

#[test]
fn a_second_save_of_a_step_replaces_the_first() {
    let top = tempfile::tempdir().unwrap();
    let dir = at_step(3).save(top.path());
    fs::write(dir.join("config.json"), "damaged").unwrap();
    Save { files: Files::PerRank, ..at_step(3) }.save(top.path());
    assert_eq!(names(&top.path().join("checkpoints")), ["step-000003"]);
    assert_eq!(verify(&dir, &mut no_progress).unwrap(), []);
    assert!(!dir.join("model.safetensors.index.json").exists());
}

#[test]
fn the_oldest_are_removed_but_never_the_newest_nor_one_in_use_nor_somebody_elses() {
    let top = tempfile::tempdir().unwrap();
    for step in [1, 2, 3, 4, 1_000_000] {
        at_step(step).save(top.path());
    }
    let dir = |step: u64| top.path().join(format!("checkpoints/step-{step:06}"));
    let kept = |n: usize, in_use: Option<&Path>| {
        let removed = keep(top.path(), n, in_use).unwrap();
        (removed, steps(top.path()))
    };
    assert_eq!(kept(9, None), (vec![], vec![1_000_000, 4, 3, 2, 1]));
    let spelled = top.path().join("checkpoints/../checkpoints/step-000001");
    assert_eq!(kept(3, Some(&spelled)), (vec![dir(2)], vec![1_000_000, 4, 3, 1]));
    fs::write(dir(3).join("notes.txt"), "mine").unwrap();
    assert_eq!(kept(1, None), (vec![dir(4), dir(1)], vec![1_000_000, 3]));
    assert_eq!(kept(0, None), (vec![], vec![1_000_000, 3]));
    fs::remove_file(dir(3).join("notes.txt")).unwrap();
    assert_eq!(kept(0, None), (vec![dir(3)], vec![1_000_000]));
}

#[test]
fn leftovers_are_cleaned_by_name_and_foreign_things_stay() {
    let top = tempfile::tempdir().unwrap();
    at_step(5).save(top.path());
    at_step(6).plan(top.path()).create().unwrap();
    let checkpoints = top.path().join("checkpoints");
    fs::rename(at_step(4).save(top.path()), checkpoints.join("step-000004.removed")).unwrap();
    let foreign = ["best", "best.partial", "step-7", "step-7.partial", "step-000008.partial"];
    foreign.iter().for_each(|name| fs::create_dir(checkpoints.join(name)).unwrap());
    fs::write(checkpoints.join("step-000008.partial/thesis.tex"), "").unwrap();
    fs::write(checkpoints.join("step-000009"), "a file").unwrap();
    assert_eq!(steps(top.path()), [5]);
    let mut removed = clean(top.path()).unwrap();
    removed.sort();
    assert_eq!(removed, ["step-000004.removed", "step-000006.partial"].map(|name| checkpoints.join(name)));
    let mut left = foreign.to_vec();
    left.extend(["step-000005", "step-000009"]);
    left.sort_unstable();
    assert_eq!(names(&checkpoints), left);
    assert_eq!(at_step(8).plan(top.path()).create().unwrap_err().found.as_deref(), Some("thesis.tex"));
}

#[test]
fn a_full_disk_is_exit_7_that_says_how_much_is_needed_and_free() {
    let top = tempfile::tempdir().unwrap();
    let first = at_step(1).save(top.path());
    let save = at_step(2);
    let plan = save.plan(top.path());
    plan.create().unwrap();
    // A device that is always full stands in for the file the second rank writes to.
    let full = plan.dir().with_extension("partial").join("exp_avg-00002-of-00003.safetensors");
    std::os::unix::fs::symlink("/dev/full", full).unwrap();
    let failure = save.write(top.path(), 1).unwrap_err();
    assert_eq!(failure.exit, Exit::Disk);
    assert!(failure.place.unwrap().ends_with("exp_avg-00002-of-00003.safetensors"));
    assert_eq!(failure.expected, Some(format!("room for the {} bytes of this checkpoint", plan.bytes())));
    let found = failure.found.unwrap();
    assert!(found.contains("No space left") && found.contains("are free"), "{found}");
    plan.discard();
    assert_eq!(names(&top.path().join("checkpoints")), ["step-000001", "step-000002.partial"]);
    assert_eq!(verify(&first, &mut no_progress).unwrap(), []);
}

#[test]
fn free_space_is_known_of_folders_that_are_not_there_yet() {
    let top = tempfile::tempdir().unwrap();
    let free = free_bytes(&top.path().join("a/b")).unwrap();
    assert!(free > 0 && free < 1 << 60);
    free_bytes(Path::new("not-there-yet")).unwrap();
}

#[test]
fn plans_that_do_not_fit_are_refused() {
    let (top, save) = (tempfile::tempdir().unwrap(), at_step(1));
    let spec = |runs: &[Vec<Run>], source: &SourceFacts| {
        let dtypes = RoleDTypes::new(save.dtype, save.dtype);
        let (out_dir, units, files) = (top.path(), &save.units[..], Files::Shared);
        SavePlan::new(SaveSpec { out_dir, step: 1, units, dtypes, source, files, runs, max_file_bytes: 100 })
    };
    let run = |param: usize, start: usize| vec![vec![Run { unit: 1, param, start, range: 0..2 }]];
    spec(&run(0, 3), &save.facts()).unwrap();
    assert_eq!(spec(&run(0, 4), &save.facts()).unwrap_err().exit, Exit::Bug);
    assert_eq!(spec(&run(3, 0), &save.facts()).unwrap_err().exit, Exit::Bug);
    let other = SourceFacts { dtypes: vec![FileDType::F32], ..save.facts() };
    assert_eq!(spec(&run(0, 3), &other).unwrap_err().exit, Exit::Bug);
    // Slices of another dtype or too short for their runs.
    let plan = spec(&run(0, 3), &save.facts()).unwrap();
    plan.create().unwrap();
    assert_eq!(plan.write_rank(0, |_, _| View::F32(&[0.0])).unwrap_err().exit, Exit::Bug);
    let half = [spmd_core::bf16::ZERO; 4];
    assert_eq!(plan.write_rank(0, |_, _| View::Bf16(&half)).unwrap_err().exit, Exit::Bug);
    fs::remove_dir_all(top.path().join("checkpoints")).unwrap();
    fs::write(top.path().join("checkpoints"), "a file").unwrap();
    assert_eq!(plan.create().unwrap_err().exit, Exit::Disk);
}
