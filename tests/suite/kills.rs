//! Runs that are killed at any moment: whatever has the name of a checkpoint is one, there always is one after the first
//! save, and the next start ends as if nothing had happened.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;
use umbra_tests::cases::{Model, Wave, uneven_rows};
use umbra_tests::job::{Job, all_gone, kill, using};
use umbra_tests::runs::{Recipe, assert_same_end, assert_whole, checkpoint, names, run_json, steps};
use umbra_tests::{Metrics, exclusive, folder};

/// Where a kill falls.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// So many milliseconds after the start.
    Start(u64),
    /// So many after a step is recorded.
    Step(u64, u64),
    /// So many after the n-th save has begun to be seen.
    Save(u64, u64),
}

/// One kill, and what is started before and after it.
#[derive(Debug)]
struct Kill {
    lanes: usize,
    ranks: usize,
    again: usize,
    keep: u64,
    files: &'static str,
    moment: Moment,
    /// The rank that is killed, or mpirun after the last of them.
    victim: usize,
}

const STEPS: u64 = 8;
/// A save of each second step.
const EVERY: u64 = 2;

impl Kill {
    /// The `i`-th: every second one during a save.
    fn new(i: u64, wave: &mut Wave) -> Self {
        let mut pick = |all: &[usize]| all[wave.below(all.len() as u64) as usize];
        let lanes = if i % 4 == 3 { 3 } else { 4 };
        let (ranks, again) =
            if lanes == 3 { (pick(&[1, 3]), pick(&[1, 3])) } else { (pick(&[1, 2, 2, 4]), pick(&[1, 2, 2, 4])) };
        let (keep, files) = (pick(&[1, 1, 2]) as u64, ["shared", "per-rank"][pick(&[0, 0, 1])]);
        // A save of the small model on one rank takes 48 blocks of two milliseconds, and the waiting for the disk.
        let moment = match (i % 2, wave.below(4)) {
            (0, _) => Moment::Save(1 + wave.below(STEPS / EVERY), wave.below(120)),
            (_, 0) => Moment::Start(wave.below(800)),
            _ => Moment::Step(wave.below(STEPS), wave.below(60)),
        };
        // Ranks and their launcher alike; the only rank of a run without a launcher is both.
        let victim = wave.below(if ranks == 1 { 1 } else { ranks as u64 + 1 }) as usize;
        Kill { lanes, ranks, again, keep, files, moment, victim }
    }

    fn flags(&self) -> String {
        format!("--lanes {} --keep {} --checkpoint-files {}", self.lanes, self.keep, self.files)
    }

    /// Waits for the moment; `false` if the run ended before.
    fn wait(&self, job: &mut Job, out: &Path) -> bool {
        let recorded = || Metrics::lines(out);
        let saves = |saves: &mut Vec<String>| {
            saves.extend(names(out).into_iter().filter(|name| name.ends_with(".partial")));
            saves.sort();
            saves.dedup();
            saves.len() as u64
        };
        let (mut seen, begin) = (Vec::new(), Instant::now());
        let ms = loop {
            let reached = match self.moment {
                Moment::Start(ms) => Some(ms),
                Moment::Step(step, ms) => (recorded() > step).then_some(ms),
                Moment::Save(n, ms) => (saves(&mut seen) >= n).then_some(ms),
            };
            if let Some(ms) = reached {
                break ms;
            }
            if !job.runs() {
                return false;
            }
            assert!(begin.elapsed() < Duration::from_secs(120), "{self:?}: waited too long");
            sleep(Duration::from_millis(1));
        };
        sleep(Duration::from_millis(ms));
        job.runs()
    }

    /// Kills the victim and waits until nothing of the job is left. A rank that is not there yet is the launcher.
    fn strike(&self, job: Job, out: &Path) {
        let ids = using(out);
        let victim = job.ranks().get(self.victim).copied().unwrap_or(job.id());
        kill(&[victim]);
        job.wait();
        all_gone(&ids);
        all_gone(&using(out));
    }
}

/// Looks at the folder all the time until told to stop: once there is a complete checkpoint, there always is one. Returns
/// how often it looked.
fn watch(out: &Path, stop: &AtomicBool) -> u64 {
    let (mut looks, mut seen) = (0, false);
    while !stop.load(Ordering::Relaxed) {
        // The system lists a small folder in one call, during which nothing in it is renamed.
        let there = !steps(out).is_empty();
        assert!(there || !seen, "no complete checkpoint, and there was one: {:?}", names(out));
        seen |= there;
        looks += 1;
        sleep(Duration::from_micros(200));
    }
    looks
}

/// The uninterrupted run for each number of lanes.
struct Wholes {
    recipe: Recipe,
    dir: TempDir,
    made: BTreeMap<usize, PathBuf>,
}

impl Wholes {
    fn new(model: &Model) -> Self {
        let flags = format!("--lr 1e-3 --steps {STEPS} --warmup-steps 3 --hash-every 1 --save-every {EVERY}");
        Wholes { recipe: Recipe::new(model.path(), uneven_rows(26), &flags), dir: folder(), made: BTreeMap::new() }
    }

    fn of(&mut self, lanes: usize) -> &Path {
        let (recipe, dir) = (&self.recipe, self.dir.path());
        self.made.entry(lanes).or_insert_with(|| {
            let out = dir.join(lanes.to_string());
            recipe.run(1, &out, &format!("--lanes {lanes}"));
            out
        })
    }
}

/// Ends [`watch`], also when a test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What kills have found.
#[derive(Debug, Default)]
struct Found {
    /// A run at work.
    struck: u64,
    /// A save that goes on.
    torn: u64,
}

/// One kill and one new start.
fn cycle(kill: &Kill, wholes: &mut Wholes, found: &mut Found) {
    let dir = folder();
    let out = dir.path().join("out");
    let stop = AtomicBool::new(false);
    let what = format!("{kill:?}");
    scope(|threads| {
        let watcher = threads.spawn(|| watch(&out, &stop));
        let stop = Stop(&stop);
        {
            let _machine = exclusive();
            let mut job = wholes.recipe.start(kill.ranks, &out, &kill.flags(), 2);
            found.struck += u64::from(kill.wait(&mut job, &out));
            kill.strike(job, &out);
        }
        found.torn += u64::from(names(&out).iter().any(|name| name.ends_with(".partial")));
        // What bears the name of a checkpoint is whole, and there are no more than are kept and the one just made.
        let left = steps(&out);
        assert!(left.len() as u64 <= kill.keep + 1, "{what}: {left:?}");
        if !left.is_empty() {
            assert_whole(&out);
        }
        let unfinished = out.join("run.json").exists() && run_json(&out)["finished"] == false;
        let again = wholes.recipe.run(kill.again, &out, &kill.flags()).stderr;
        if let (Some(newest), true) = (left.last(), unfinished) {
            assert!(
                again.contains(&format!("step-{newest:06}: {newest} steps made")),
                "{what}: from the newest\n{again}"
            );
        }
        drop(stop);
        assert!(watcher.join().expect("a checkpoint at every moment") > 0);
    });
    assert_same_end(wholes.of(kill.lanes), &out, &what);
    assert_whole(&out);
    let kept: Vec<String> = (0..kill.keep).rev().map(|n| format!("step-{:06}", STEPS - n * EVERY)).collect();
    assert_eq!(names(&out), kept, "{what}: as many as are kept, and nothing else");
}

/// `kills` cycles. Most kills must have found a run at work, and a good part of them a save: the others show less.
fn soak(kills: u64, seed: u64) -> Found {
    let model = Model::one_small_layer();
    let (mut wave, mut wholes, mut found) = (Wave(seed), Wholes::new(&model), Found::default());
    for i in 0..kills {
        cycle(&Kill::new(i, &mut wave), &mut wholes, &mut found);
    }
    assert!(found.struck * 4 >= kills * 3 && found.torn * 3 >= kills, "of {kills} kills only {found:?}");
    found
}

#[test]
fn eight_kills_change_nothing() {
    soak(8, 1);
}

/// `make soak`: SOAK_KILLS of them (100), SOAK_SEED for those of an earlier run.
#[test]
#[ignore = "takes minutes: make soak"]
fn many_kills_change_nothing() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let (kills, seed) = (number("SOAK_KILLS").unwrap_or(100), number("SOAK_SEED").unwrap_or_else(now));
    println!("{kills} kills with SOAK_SEED={seed}");
    let begin = Instant::now();
    let Found { struck, torn } = soak(kills, seed);
    let took = begin.elapsed().as_secs_f64();
    println!("{struck} found a run at work, {torn} a save; all ended in the uninterrupted run's state; {took:.0} s");
}

/// A run that was killed after its last save and before its end has nothing to compute and nothing to save again: its one
/// checkpoint stays as it is, also while the rest is made up for.
#[test]
fn a_run_that_was_killed_at_its_very_end_keeps_its_checkpoint() {
    let model = Model::one_small_layer();
    let mut wholes = Wholes::new(&model);
    let whole = wholes.of(2).to_owned();
    let dir = folder();
    let out = dir.path().join("out");
    wholes.recipe.run(2, &out, "--lanes 2 --keep 1");
    let mut run = run_json(&out);
    run["finished"] = false.into();
    std::fs::write(out.join("run.json"), run.to_string()).expect("run.json to be written");
    std::fs::remove_dir_all(out.join("model")).expect("a model to be removed");
    let changed =
        || std::fs::metadata(checkpoint(&out, STEPS).join("state.rkyv")).and_then(|m| m.modified()).expect("a time");
    let before = changed();
    wholes.recipe.run(2, &out, "--lanes 2 --keep 1");
    assert_same_end(&whole, &out, "ended again");
    assert_eq!(changed(), before, "the checkpoint was not written again");
    assert_eq!(run_json(&out)["finished"], true);
}
