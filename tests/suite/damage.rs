//! Checkpoints that are not as they were written, disks that are full, and which checkpoints are kept.

use crate::once::message;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use umbra_tests::broken::split;
use umbra_tests::cases::{Model, uneven_rows};
use umbra_tests::disk::SmallDisk;
use umbra_tests::job::Job;
use umbra_tests::runs::{
    Recipe, assert_same_end, assert_whole, checkpoint, copy, names, of_checkpoint, run_json, steps,
};
use umbra_tests::{Metrics, exclusive, folder};

/// Six steps of a small model, a checkpoint of about 100 KB after every second one.
fn recipe(model: &Model, flags: &str) -> Recipe {
    let flags = format!("--lanes 2 --lr 1e-3 --steps 6 --hash-every 1 {flags}");
    Recipe::new(model.path(), uneven_rows(24), &flags)
}

/// A run that was stopped with checkpoints of steps 2 and 4, and the same run without a stop.
struct Stopped {
    dir: tempfile::TempDir,
    _model: Model,
    recipe: Recipe,
}

impl Stopped {
    fn new(flags: &str) -> Self {
        let model = Model::one_small_layer();
        let recipe = recipe(&model, &format!("--save-every 2 {flags}"));
        let dir = folder();
        recipe.run(1, &dir.path().join("whole"), "");
        let stopped = dir.path().join("stopped");
        recipe.stopped_at(4, 1, &stopped, "");
        // Its kill may have come in the middle of the next save; whoever waits for that save is to see a new one.
        let unfinished = checkpoint(&stopped, 6).with_extension("partial");
        if unfinished.exists() {
            fs::remove_dir_all(unfinished).expect("the rest of a save to be removed");
        }
        Stopped { dir, _model: model, recipe }
    }

    fn whole(&self) -> PathBuf {
        self.dir.path().join("whole")
    }

    /// A copy of the stopped run.
    fn again(&self, name: &str) -> PathBuf {
        let out = self.dir.path().join(name);
        copy(&self.dir.path().join("stopped"), &out);
        out
    }
}

/// Flips one bit of a file.
fn flip(path: &Path, at: u64) {
    let file =
        OpenOptions::new().read(true).write(true).open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 4], at).expect("a byte to be written");
}

/// The first byte of a tensor in a safetensors file.
fn first_byte(path: &Path, tensor: &str) -> u64 {
    let bytes = fs::read(path).expect("a file");
    let (header, data) = split(&bytes);
    (bytes.len() - data.len() + umbra_tests::broken::span(&header, tensor).start) as u64
}

const TENSOR: &str = "model.layers.0.self_attn.q_proj.weight";

/// What is done to a checkpoint, what `verify` says of it, and whether training needs what is gone.
type Damage = (&'static str, fn(&Path), &'static [&'static str], bool);

const DAMAGES: [Damage; 11] = [
    ("model", |dir| flip_tensor(dir, "model.safetensors"), &["model.safetensors", TENSOR, "xxh3"], false),
    ("shadow", |dir| flip_tensor(dir, "shadow.safetensors"), &["shadow.safetensors", TENSOR, "xxh3"], true),
    ("mean", |dir| flip_tensor(dir, "exp_avg.safetensors"), &["exp_avg.safetensors", TENSOR, "xxh3"], true),
    ("squares", |dir| flip_tensor(dir, "exp_avg_sq.safetensors"), &["exp_avg_sq.safetensors", TENSOR, "xxh3"], true),
    ("header", |dir| flip(&dir.join("shadow.safetensors"), 20), &["shadow.safetensors", "bytes 0..", "xxh3"], false),
    ("config", |dir| flip(&dir.join("config.json"), 30), &["config.json", "bytes 0..", "xxh3"], false),
    ("state", |dir| flip(&dir.join("state.rkyv"), 300), &["state.rkyv", "xxh3"], true),
    ("short state", |dir| cut(dir, "state.rkyv"), &["state.rkyv", "truncated"], true),
    (
        "missing",
        |dir| fs::remove_file(dir.join("exp_avg.safetensors")).unwrap(),
        &["exp_avg.safetensors", "missing"],
        true,
    ),
    ("short", |dir| cut(dir, "shadow.safetensors"), &["shadow.safetensors", "lm_head.weight", "bytes"], true),
    ("no state", |dir| fs::remove_file(dir.join("state.rkyv")).unwrap(), &["state.rkyv"], true),
];

fn flip_tensor(dir: &Path, file: &str) {
    let path = dir.join(file);
    flip(&path, first_byte(&path, TENSOR) + 1);
}

fn cut(dir: &Path, file: &str) {
    let file = OpenOptions::new().write(true).open(dir.join(file)).expect("a file");
    file.set_len(file.metadata().expect("a length").len() - 100).expect("a shorter file");
}

/// `verify` names file and tensor; a run goes on from a damaged checkpoint never, from the one before it if `auto` is
/// written, and then says so. What training does not read does not keep it from going on.
#[test]
fn damage_is_named_and_passed_over_only_when_told() {
    let stopped = Stopped::new("");
    let whole = stopped.whole();
    for (name, damage, says, needed) in DAMAGES {
        let out = stopped.again(name);
        let dir = checkpoint(&out, 4);
        damage(&dir);
        let verified = of_checkpoint(&["verify".as_ref(), &out]);
        assert_eq!(verified.code, Some(3), "{name}: {}\n{}", verified.stdout, verified.stderr);
        let fault = verified.stdout.lines().find(|line| line.contains("step-000004")).unwrap_or_default();
        assert!(says.iter().all(|text| fault.contains(text)), "{name}: {says:?} in\n{}", verified.stdout);
        assert!(verified.stdout.contains("step-000002: ok"), "{name}: {}", verified.stdout);

        let plain = stopped.recipe.attempt(1, &out, "");
        if !needed {
            assert_eq!(plain.code, Some(0), "{name}: {}", plain.stderr);
            assert_same_end(&whole, &out, name);
            continue;
        }
        assert_eq!(plain.code, Some(3), "{name}: {}", plain.stderr);
        let said = message(&plain);
        assert!(said.contains("step-000004") && said.contains("--resume auto"), "{name}: {said}");
        assert_eq!((steps(&out), run_json(&out)["finished"].clone()), (vec![2, 4], false.into()), "{name}");

        let told = stopped.recipe.run(1, &out, "--resume auto").stderr;
        let passed = told.find("passed over").unwrap_or_else(|| panic!("{name}: {told}"));
        assert!(told[passed..].contains("step-000004") && told.contains("step-000002: 2 steps made"), "{name}: {told}");
        assert_same_end(&whole, &out, name);
        // The new run's own are whole; the damaged one is set aside, for whoever wants to see it.
        assert_whole(&out);
        assert_eq!(names(&out), ["step-000004", "step-000004.aside-1", "step-000006"], "{name}");
    }
}

/// What is wrong with the rows is no damage of a checkpoint.
#[test]
fn bad_rows_do_not_make_a_run_pass_a_checkpoint_over() {
    let stopped = Stopped::new("");
    let out = stopped.again("out");
    fs::write(stopped.recipe.data.path(), "{\"input_ids\": [1, 2\n").expect("other rows");
    for told in ["", "--resume auto"] {
        let output = stopped.recipe.attempt(1, &out, told);
        assert_eq!(output.code, Some(3), "{}", output.stderr);
        let said = message(&output);
        assert!(said.contains(&stopped.recipe.data.path().display().to_string()), "{said}");
        assert!(!output.stderr.contains("passed over") && !said.contains("--resume auto"), "{}", output.stderr);
        assert_eq!(steps(&out), [2, 4]);
    }
}

#[test]
fn damage_is_passed_over_by_all_ranks_together() {
    let stopped = Stopped::new("--checkpoint-files per-rank");
    let out = stopped.again("out");
    let file = checkpoint(&out, 4).join("rank-00000-of-00001.safetensors");
    let len = fs::metadata(&file).unwrap().len();
    // The last bytes: what the second rank reads.
    flip(&file, len - 3);
    let plain = stopped.recipe.attempt(2, &out, "");
    assert_eq!(plain.code, Some(3), "{}", plain.stderr);
    let said = message(&plain);
    assert!(said.contains("rank-00000-of-00001.safetensors") && said.contains("--resume auto"), "{said}");
    let told = stopped.recipe.run(2, &out, "--resume auto").stderr;
    assert_eq!(told.matches("passed over").count(), 1, "{told}");
    assert_same_end(&stopped.whole(), &out, "two ranks");
}

#[test]
fn when_every_checkpoint_is_damaged_the_run_does_not_start_over() {
    let stopped = Stopped::new("");
    let out = stopped.again("out");
    for step in [2, 4] {
        flip_tensor(&checkpoint(&out, step), "shadow.safetensors");
    }
    let metrics = fs::read(out.join("metrics.jsonl")).unwrap();
    let plain = stopped.recipe.attempt(1, &out, "");
    assert_eq!(plain.code, Some(3), "{}", plain.stderr);
    assert!(message(&plain).contains("step-000004/shadow.safetensors"), "{}", plain.stderr);
    let told = stopped.recipe.attempt(1, &out, "--resume auto");
    assert_eq!(told.code, Some(3), "{}", told.stderr);
    let last = &told.stderr[told.stderr.rfind("error: ").expect("a message")..];
    assert!(
        last.contains("step-000002/shadow.safetensors") && last.contains("no earlier checkpoint"),
        "{}",
        told.stderr
    );
    assert_eq!(told.stderr.matches("passed over").count(), 1, "{}", told.stderr);
    assert_eq!(steps(&out), [2, 4]);
    assert!(fs::read(out.join("metrics.jsonl")).unwrap() == metrics, "nothing was touched");
}

/// A run whose loss is no longer finite ends, but not before the checkpoint that is being written is whole: it is what
/// somebody goes on from with a smaller rate.
#[test]
fn a_save_is_finished_when_the_loss_is_not_finite() {
    let model = Model::one_small_layer();
    let recipe = Recipe::new(model.path(), uneven_rows(24), "--lanes 2 --lr 1e30 --clip 0 --steps 6 --save-every 1");
    for ranks in [1, 2] {
        let dir = folder();
        let output = recipe.attempt(ranks, dir.path(), "");
        assert_eq!(output.code, Some(6), "{}", output.stderr);
        let found = names(dir.path());
        assert!(!found.is_empty() && found.iter().all(|name| !name.contains('.')), "{ranks} rank(s): {found:?}");
        assert!(verifies(dir.path()));
    }
}

#[test]
fn as_many_checkpoints_are_kept_as_asked_for() {
    let model = Model::one_small_layer();
    let dir = folder();
    let run = |name: &str, flags: &str| {
        let out = dir.path().join(name);
        recipe(&model, flags).run(1, &out, "");
        (steps(&out), out)
    };
    assert_eq!(run("one", "--save-every 1 --keep 1").0, [6]);
    assert_eq!(run("default", "--save-every 1").0, [5, 6]);
    assert_eq!(run("end", "").0, [6]);
    let (none, out) = run("none", "--keep 0");
    assert!(none.is_empty() && !out.join("checkpoints").exists());
    let refused = recipe(&model, "--save-every 2 --keep 0").attempt(1, &dir.path().join("refused"), "");
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(message(&refused).contains("--keep 0"), "{}", refused.stderr);
}

/// A checkpoint into which somebody has put something else stays, whole, and does not count.
#[test]
fn a_checkpoint_with_a_foreign_file_is_not_removed() {
    let stopped = Stopped::new("--keep 1");
    let out = stopped.again("out");
    let note = checkpoint(&out, 4).join("notes.txt");
    fs::write(&note, "the best one so far").unwrap();
    stopped.recipe.run(1, &out, "");
    assert_eq!(steps(&out), [4, 6]);
    assert_eq!(fs::read_to_string(&note).unwrap(), "the best one so far");
    assert_same_end(&stopped.whole(), &out, "beside a kept one");
    // The file is no part of the checkpoint, and verify says so.
    let verified = of_checkpoint(&["verify".as_ref(), &checkpoint(&out, 4)]);
    assert_eq!(verified.code, Some(3));
    assert!(verified.stdout.contains("notes.txt"), "{}", verified.stdout);
}

/// A run whose saves last keeps another one, and a resumed one, out of its folder.
#[test]
fn two_runs_do_not_save_into_one_folder() {
    let stopped = Stopped::new("");
    let out = stopped.again("out");
    let machine = exclusive();
    let mut first = stopped.recipe.start(1, &out, "", 20);
    first.wait_until("its first save", || names(&out).iter().any(|name| name.ends_with("000006.partial")));
    // Started while no other test can take the machine, or the first would be done by then.
    let second = stopped.recipe.start(1, &out, "", 0).wait();
    let ended = first.wait();
    drop(machine);
    assert_eq!(second.code, Some(7), "{}", second.stderr);
    assert!(message(&second).contains("another run is writing"), "{}", second.stderr);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_same_end(&stopped.whole(), &out, "undisturbed");
}

/// Bytes of the files below a folder.
fn bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.map(|path| if path.is_dir() { bytes(&path) } else { fs::metadata(&path).expect("a file").len() }).sum()
}

/// A disk on which a run of the small model has come to its second checkpoint while there is room for one more only by
/// half, with its saves slowed down; `then` is what happens from there.
fn nearly_full(flags: &str, then: impl FnOnce(&Recipe, Job, &SmallDisk, &Path)) {
    let dir = folder();
    let Some(disk) = SmallDisk::new(&dir.path().join("disk"), "4m") else { return };
    let model = Model::one_small_layer();
    let recipe = recipe(&model, &format!("--save-every 2 --keep 1 {flags}"));
    let out = disk.path().join("out");
    let machine = exclusive();
    let mut job = recipe.start(1, &out, "", 10);
    // The save of step 4 has hardly begun: the disk fills up under it.
    job.wait_until("its first checkpoint", || checkpoint(&out, 2).exists());
    let one = bytes(&checkpoint(&out, 2)) as usize;
    disk.fill(one / 2);
    then(&recipe, job, &disk, &out);
    drop(machine);
}

/// Whether every checkpoint of a run is whole; for a test that has the machine to itself already.
fn verifies(out: &Path) -> bool {
    let verified = Command::new(umbra_tests::umbra()).args(["checkpoint", "verify"]).arg(out).output();
    verified.expect("umbra").status.success()
}

fn number_before(text: &str, unit: &str) -> u64 {
    let at = text.find(unit).unwrap_or_else(|| panic!("`{unit}` in {text}"));
    let digits = text[..at].rsplit(|c: char| !c.is_ascii_digit()).next().expect("a number");
    digits.parse().unwrap_or_else(|_| panic!("a number before `{unit}` in {text}"))
}

#[test]
fn a_disk_that_is_full_stops_the_run_and_leaves_the_checkpoint_before() {
    nearly_full("", |recipe, job, disk, out| {
        let one = bytes(&checkpoint(out, 2));
        let output = job.wait();
        assert_eq!(output.code, Some(7), "{}", output.stderr);
        assert_eq!(output.stderr.matches("error: ").count(), 1, "{}", output.stderr);
        // Everything but state.rkyv is known beforehand.
        let needed = number_before(&output.stderr, " bytes of this checkpoint");
        assert!(needed < one && needed > one * 9 / 10, "needed {needed}, of {one}");
        assert!(number_before(&output.stderr, " are free") < one, "{}", output.stderr);
        assert_eq!(names(out), ["step-000002"], "the old one alone");
        let kept = disk.path().with_file_name("kept");
        copy(out, &kept);
        assert!(verifies(out));
        // On a disk with room the same command goes on.
        let mut command = recipe.command(1, &kept, "");
        let again = Job::start(&mut command, Stdio::null()).wait();
        assert_eq!(again.code, Some(0), "{}", again.stderr);
        assert!(again.stderr.contains("step-000002: 2 steps made"), "{}", again.stderr);
    });
}

#[test]
fn a_disk_that_is_full_for_a_while_does_not_stop_a_run_that_may_go_on() {
    nearly_full("--save-failure continue", |_, mut job, disk, out| {
        let mut freed = false;
        while job.runs() {
            if !freed && job.stderr().contains("could not be saved") {
                fs::remove_file(disk.path().join("ballast")).expect("ballast");
                freed = true;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let output = job.wait();
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        assert_eq!(output.stderr.matches("could not be saved").count(), 1, "{}", output.stderr);
        assert_eq!((names(out), Metrics::read(out).0.len()), (vec!["step-000006".to_owned()], 6), "{}", output.stderr);
        assert!(verifies(out) && out.join("model/model.safetensors").exists());
    });
}

/// Without room for another one, the checkpoint before stays, and the run comes to its end and to its model all the same.
#[test]
fn a_disk_that_stays_full_does_not_stop_a_run_that_may_go_on() {
    nearly_full("--save-failure continue", |_, job, _, out| {
        let output = job.wait();
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        assert_eq!(output.stderr.matches("could not be saved").count(), 2, "{}", output.stderr);
        assert_eq!((names(out), Metrics::read(out).0.len()), (vec!["step-000002".to_owned()], 6), "{}", output.stderr);
        assert!(verifies(out) && out.join("model/model.safetensors").exists());
    });
}

/// Where not one checkpoint fits, or not as many as are to be kept, is known before the first step.
#[test]
fn a_disk_that_is_too_small_is_found_before_the_first_step() {
    let dir = folder();
    let model = Model::one_small_layer();
    let one = {
        let out = dir.path().join("measured");
        recipe(&model, "").run(1, &out, "");
        bytes(&checkpoint(&out, 6))
    };
    let sized = |name: &str, size: u64| SmallDisk::new(&dir.path().join(name), &format!("{}k", size / 1024));
    let Some(tiny) = sized("tiny", one * 3 / 4) else { return };
    let out = tiny.path().join("out");
    let refused = recipe(&model, "").attempt(1, &out, "");
    assert_eq!(refused.code, Some(7), "{}", refused.stderr);
    let said = refused.stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    assert!(said.contains("no room for a checkpoint"), "{}", refused.stderr);
    assert!(!out.join("metrics.jsonl").exists(), "no step was made");
    // Room for the run and its end, but not for three checkpoints at a time.
    let Some(small) = sized("small", one * 5 / 2) else { return };
    let warned = recipe(&model, "--save-every 3 --keep 2").attempt(1, &small.path().join("out"), "");
    assert!(warned.stderr.contains("warning: ") && warned.stderr.contains("a save may fail"), "{}", warned.stderr);
}

/// What cannot be written is said before the first step, whatever is there to go on from.
#[test]
fn a_folder_that_may_not_be_written_is_said_to_be_so() {
    let stopped = Stopped::new("");
    let out = stopped.again("out");
    let dir = folder();
    let Some(disk) = SmallDisk::new(&dir.path().join("disk"), "4m") else { return };
    let locked = disk.path().join("out");
    copy(&out, &locked);
    // Root may write to anything but a file system that nobody may write to.
    let remount = |how: &str| {
        let status = Command::new("mount").args(["-o", how]).arg(disk.path()).status();
        assert!(status.expect("mount").success());
    };
    remount("remount,ro");
    let refused = stopped.recipe.attempt(1, &locked, "");
    assert_eq!(refused.code, Some(7), "{}", refused.stderr);
    assert!(message(&refused).contains("--out"), "{}", refused.stderr);
    // To read from, it is good enough.
    let branch = dir.path().join("branch");
    stopped.recipe.run(1, &branch, &format!("--resume {}", locked.display()));
    assert_same_end(&stopped.whole(), &branch, "from a folder to read");
    remount("remount,rw");
}
