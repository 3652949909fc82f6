//! The matrix of layouts: one run's bits on every number of ranks, stage, group and transport.
//!
//! A recipe (model, policy, lanes, accumulation) is trained on every layout; losses, norms, counts and the hash of weights
//! and moments of every step must be those of its reference, a rank for each lane. `make matrix` runs every combination on
//! ranks that are threads; here is a cover of them ([`umbra_tests::cover`]), and a smaller one on processes.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use umbra_tests::cases::{Data, uneven_rows};
use umbra_tests::cover::cover;
use umbra_tests::job::Job;
use umbra_tests::layouts::{Combination, FIXTURES, Recipe, WORLDS};
use umbra_tests::{Metrics, Output, Train, command, exclusive, folder, model, threads};

/// The two ways to have ranks, and how many of their runs are made at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transport {
    Threads,
    Processes,
}

/// What must be the same, a line a step; or why there is none.
type Numbers = Result<Vec<String>, String>;

fn numbers(transport: Transport, combination: &Combination, data: &Data) -> Numbers {
    let Combination { recipe, layout } = combination;
    let dir = folder();
    let out = dir.path().join("run");
    let mut program: Command = match transport {
        Transport::Threads => threads(layout.ranks),
        Transport::Processes => command(layout.ranks),
    };
    program
        .arg("train")
        .arg("--model")
        .arg(model(recipe.fixture))
        .arg("--data")
        .arg(data.path())
        .arg("--out")
        .arg(&out);
    program.args(combination.flags().split_whitespace());
    let Output { code, stderr, .. } = Job::start(&mut program, Stdio::null()).wait();
    match code {
        Some(0) => Ok(Metrics::read(&out).results()),
        code => Err(format!("exit code {code:?}\n{stderr}")),
    }
}

/// Rows and reference of every recipe.
struct References(BTreeMap<Recipe, (Data, Vec<String>)>);

impl References {
    /// Trains each recipe of `combinations` once, and checks that the matrix compares something: a hash a step, every
    /// gradient clipped, and no two recipes alike.
    fn of(combinations: &[Combination]) -> Self {
        let mut recipes: Vec<Recipe> = combinations.iter().map(|combination| combination.recipe).collect();
        recipes.sort();
        recipes.dedup();
        let made = in_parallel(&recipes, |recipe| {
            let data = recipe.rows();
            let numbers = numbers(Transport::Threads, &recipe.reference(), &data);
            (data, numbers.unwrap_or_else(|failure| panic!("{recipe}: {failure}")))
        });
        let references: BTreeMap<_, _> = recipes.into_iter().zip(made).collect();
        let steps: Vec<&String> = references.values().flat_map(|(_, steps)| steps).collect();
        let mut hashes: Vec<&str> = steps.iter().map(|step| hash(step)).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), references.len() * Recipe::STEPS, "a hash of its own for every step of every recipe");
        assert!(steps.iter().all(|step| !step.contains("clip_coef 1.0") && !step.contains("null")), "{steps:#?}");
        References(references)
    }
}

/// The hash in a step's numbers.
fn hash(step: &str) -> &str {
    step.rsplit_once("state_hash ").map_or("", |(_, hash)| hash.trim_matches('"'))
}

/// Runs `work` on every job, two at a time: few runs keep two cores busy. Results come in order.
fn in_parallel<T: Sync, R: Send>(jobs: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = Mutex::new(jobs.iter().enumerate());
    let done = Mutex::new(Vec::new());
    let worker = || {
        while let Some((i, job)) = { next.lock().expect("no worker panics here").next() } {
            let result = work(job);
            done.lock().expect("no worker panics here").push((i, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(worker);
        }
    });
    let mut done = done.into_inner().expect("every worker has ended well");
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Runs `combinations` and holds each against its reference.
fn hold(transport: Transport, combinations: &[Combination], references: &References) {
    let begun = Instant::now();
    let done = AtomicUsize::new(0);
    let results = in_parallel(combinations, |combination| {
        let (data, reference) = &references.0[&combination.recipe];
        let started = Instant::now();
        let difference = differs(&numbers(transport, combination, data), reference);
        let n = done.fetch_add(1, Ordering::Relaxed) + 1;
        if n.is_multiple_of(500) {
            println!("{n} of {} runs, {:.0} s", combinations.len(), begun.elapsed().as_secs_f64());
        }
        (difference, started.elapsed().as_secs_f64())
    });
    let mut table: BTreeMap<Recipe, (usize, usize, f64)> = BTreeMap::new();
    for (combination, (difference, seconds)) in combinations.iter().zip(&results) {
        let row = table.entry(combination.recipe).or_default();
        *row = (row.0 + 1, row.1 + usize::from(difference.is_none()), row.2 + seconds);
    }
    println!("\n{transport:?}\n{:<52} {:>5} {:>6} {:>8}  last hash", "recipe", "runs", "equal", "seconds");
    for (recipe, (runs, equal, seconds)) in &table {
        let last = references.0[recipe].1.last().map_or("", |step| hash(step));
        println!("{:<52} {runs:>5} {equal:>6} {seconds:>8.1}  {last}", recipe.to_string());
    }
    let differ: Vec<_> =
        combinations.iter().zip(&results).filter_map(|(c, (difference, _))| Some((c, difference.as_ref()?))).collect();
    println!(
        "{} runs of {} recipes in {:.0} s: {} differ",
        combinations.len(),
        table.len(),
        begun.elapsed().as_secs_f64(),
        differ.len()
    );
    assert!(differ.is_empty(), "{}", describe(combinations, &differ));
}

/// The first number that is not the reference's.
fn differs(numbers: &Numbers, reference: &[String]) -> Option<String> {
    match numbers {
        Err(failure) => Some(failure.clone()),
        Ok(steps) if steps.len() != reference.len() => Some(format!("{} steps of {}", steps.len(), reference.len())),
        Ok(steps) => {
            let pairs = steps.iter().zip(reference).flat_map(|(a, b)| a.split(", ").zip(b.split(", ")));
            let mut step = "";
            for (found, expected) in pairs {
                if found.starts_with("step ") {
                    step = found;
                }
                if found != expected {
                    return Some(format!("{step}: {found}, the reference has {expected}"));
                }
            }
            None
        }
    }
}

/// What differs, and where: on each axis, how many runs with each value.
fn describe(all: &[Combination], differ: &[(&Combination, &String)]) -> String {
    let mut text = format!("{} of {} runs differ from their reference\n", differ.len(), all.len());
    for (axis, name) in Combination::AXES.iter().enumerate() {
        let mut counts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        all.iter().for_each(|c| counts.entry(c.values()[axis].clone()).or_default().1 += 1);
        differ.iter().for_each(|(c, _)| counts.entry(c.values()[axis].clone()).or_default().0 += 1);
        let counts: Vec<String> = counts.iter().map(|(value, (bad, of))| format!("{value} {bad}/{of}")).collect();
        text += &format!("  {name}: {}\n", counts.join(", "));
    }
    for (combination, difference) in differ.iter().take(10) {
        text += &format!("{combination}\n    {difference}\n");
    }
    text
}

fn chosen(all: &[Combination], strength: usize) -> Vec<Combination> {
    let rows: Vec<Vec<String>> = all.iter().map(Combination::values).collect();
    cover(&rows, strength).into_iter().map(|row| all[row]).collect()
}

/// Every three values of three axes, of one model.
#[test]
fn threads_on_a_cover_of_three_axes() {
    let chosen = chosen(&Combination::all(&FIXTURES[..1]), 3);
    let _machine = exclusive();
    hold(Transport::Threads, &chosen, &References::of(&chosen));
}

/// Every two values of two axes, of both models, without the twelve ranks that take mpirun longest.
#[test]
fn processes_on_a_cover_of_two_axes() {
    let mut all = Combination::all(&FIXTURES);
    all.retain(|combination| combination.layout.ranks < 12);
    let chosen = chosen(&all, 2);
    let _machine = exclusive();
    hold(Transport::Processes, &chosen, &References::of(&chosen));
}

/// Everything: `make matrix`.
#[test]
#[ignore = "takes many minutes: `make matrix`"]
fn the_whole() {
    let all = Combination::all(&FIXTURES);
    let _machine = exclusive();
    let references = References::of(&all);
    hold(Transport::Processes, &chosen(&all, 2), &references);
    hold(Transport::Threads, &all, &references);
}

/// Ranks that are no subtree of the lanes.
#[test]
fn ranks_that_do_not_fit_the_lanes_are_refused_by_the_numbers_that_do() {
    let data = Data::new(uneven_rows(40));
    let model = model(FIXTURES[0]);
    let fit = ["8, 4, 2 or 1 rank(s) for 8 lane(s)", "12, 6, 3 or 1 rank(s) for 12 lane(s)"];
    for ((lanes, worlds), fit) in WORLDS.into_iter().zip(fit) {
        for ranks in (1..=lanes + 1).filter(|ranks| !worlds.contains(ranks)) {
            let dir = folder();
            let out = dir.path().join("run");
            let train = Train { ranks, model: &model, data: &data.path(), out: &out };
            let flags = format!("--lanes {lanes} --steps 1");
            // mpirun takes a second to report that a job has failed.
            let mut attempts = vec![train.attempt_on_threads(&flags)];
            if ranks == 5 {
                attempts.push(train.attempt(&flags));
            }
            for Output { code, stderr, .. } in attempts {
                assert_eq!(code, Some(2), "{ranks} ranks, {lanes} lanes: {stderr}");
                assert!(stderr.contains(fit) && stderr.contains(&format!("{ranks} rank(s)")), "{stderr}");
            }
            assert!(!out.exists(), "nothing is left");
        }
    }
}

/// Three ranks compute eight lanes in passes of three, three and two; twelve ranks leave four idle. The order of the sums is
/// another, so the bits are; but a first loss is the same computation on every lane (f64 sum: the bits are equal), and over a
/// few steps differences of 1e-7 in the gradients stay far below 1e-4 in the loss.
#[test]
fn other_bits_are_made_only_when_allowed_and_said_so() {
    let recipe = Recipe { fixture: FIXTURES[0], policy: spmd_core::Policy::Fp32, lanes: 8, accum: 3 };
    let data = recipe.rows();
    let model = model(recipe.fixture);
    let run = |ranks: usize, flags: &str| {
        let dir = folder();
        let out = dir.path().join("run");
        let train = Train { ranks, model: &model, data: &data.path(), out: &out };
        let output = train.attempt_on_threads(&format!("{} {flags}", recipe.flags()));
        assert_eq!(output.code, Some(0), "{ranks} ranks: {}", output.stderr);
        let run = std::fs::read_to_string(out.join("run.json")).expect("run.json");
        let run: serde_json::Value = serde_json::from_str(&run).expect("JSON");
        (Metrics::read(&out), output.stderr, run["settings"]["different_bits"].clone())
    };
    let (reference, stderr, different) = run(8, "--allow-different-bits");
    // Allowed is not done: eight ranks fit.
    assert_eq!(different["value"], false);
    assert!(!stderr.contains("another order"), "{stderr}");
    for ranks in [3, 12] {
        let (other, stderr, different) = run(ranks, "--allow-different-bits");
        assert_eq!((&different["value"], &different["from"]), (&true.into(), &"flag".into()), "{ranks} ranks");
        assert!(stderr.contains("--allow-different-bits: sums in another order"), "{stderr}");
        let pairs = reference.column("loss").into_iter().zip(other.column("loss"));
        for (a, b) in pairs {
            assert!((a - b).abs() <= 1e-4, "{ranks} ranks: loss {b}, on eight ranks {a}");
        }
        assert_eq!(reference.column("tokens"), other.column("tokens"));
        let hashes = |metrics: &Metrics| metrics.results().iter().map(|step| hash(step).to_owned()).collect::<Vec<_>>();
        assert!(hashes(&reference).iter().zip(hashes(&other)).all(|(a, b)| *a != b), "{ranks} ranks");
    }
}
