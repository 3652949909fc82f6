//! The MPI transport, for real: every test starts ranks with mpirun.
#![cfg(feature = "mpi")]

use collectives::{conformance, threads};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One job at a time: two of them on few cores would measure each other.
static ONE_JOB: Mutex<()> = Mutex::new(());

const PROBE: &str = env!("CARGO_BIN_EXE_collectives-probe");

struct Job {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    took: Duration,
}

fn mpirun(ranks: usize, scenario: &str) -> Job {
    let _one = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
    let begin = Instant::now();
    let output = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--timeout", "120"])
        .args(["-n", &ranks.to_string(), PROBE, scenario])
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("mpirun has to be installed for the MPI tests");
    job(output, begin.elapsed())
}

fn job(output: Output, took: Duration) -> Job {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let job = Job { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr), took };
    println!("exit {:?} after {:?}\n{}\n{}", job.code, job.took, job.stdout, job.stderr);
    job
}

fn conforms_like_threads(ranks: usize) {
    let job = mpirun(ranks, "conformance");
    assert_eq!(job.code, Some(0));
    let received = threads::run(ranks, Duration::from_secs(60), |comm| conformance::run(&comm));
    let fingerprint = |r: collectives::Result<Result<Vec<u8>, conformance::Failed>>| {
        conformance::fingerprint(&r.expect("no rank died").expect("threads conform"))
    };
    let expected: Vec<u64> = received.into_iter().map(fingerprint).collect();
    let transport = if ranks == 1 { "solo" } else { "mpi" };
    assert_eq!(job.stdout.trim(), format!("{transport} {expected:?}"));
}

#[test]
fn one_rank_conforms() {
    conforms_like_threads(1);
}

#[test]
fn two_ranks_conform_and_give_the_bytes_of_threads() {
    conforms_like_threads(2);
}

#[test]
fn three_ranks_conform_and_give_the_bytes_of_threads() {
    conforms_like_threads(3);
}

#[test]
fn four_ranks_conform_and_give_the_bytes_of_threads() {
    conforms_like_threads(4);
}

#[test]
fn six_ranks_conform_and_give_the_bytes_of_threads() {
    conforms_like_threads(6);
}

#[test]
fn seven_ranks_conform_and_give_the_bytes_of_threads() {
    conforms_like_threads(7);
}

/// A job that breaks ends by itself. It takes well under five seconds on two slow cores; thirty are for a loaded machine
/// and still far below the probe's own time-out of sixty, which would end a job that hangs.
fn ends(job: &Job) {
    assert!(job.took < Duration::from_secs(30), "took {:?}", job.took);
}

#[test]
fn a_panicking_rank_ends_the_job_with_one_message_and_code_5() {
    for scenario in ["panic", "panic-thread"] {
        let job = mpirun(4, scenario);
        ends(&job);
        assert_eq!(job.code, Some(5));
        assert_eq!(job.stderr.matches("panicked").count(), 1);
        let message = job.stderr.lines().find(|line| line.contains("panicked")).expect("there is one");
        assert!(message.starts_with("rank 1 panicked at ") && message.ends_with(": the cat is on the keyboard"));
    }
}

#[test]
fn a_rank_that_aborts_ends_the_job_with_its_code() {
    let job = mpirun(3, "abort");
    ends(&job);
    assert_eq!(job.code, Some(3));
}

#[test]
fn a_rank_that_exits_or_is_killed_ends_the_job() {
    let job = mpirun(3, "exit");
    ends(&job);
    assert_eq!(job.code, Some(4));
    let job = mpirun(3, "kill");
    ends(&job);
    // 128 + SIGKILL, as a shell reports it.
    assert_eq!(job.code, Some(137));
}

#[test]
fn leaving_without_finish_does_not_hang() {
    let job = mpirun(3, "leave");
    ends(&job);
    assert_eq!(job.stdout.matches("leaves").count(), 3);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let job = mpirun(3, "missing");
    ends(&job);
    assert_eq!(job.code, Some(5));
    assert!(job.stderr.contains("Timeout") && job.stderr.contains("missing: [1], world: 3"));
}

#[test]
fn a_rank_that_does_not_come_is_missed_in_every_group() {
    let job = mpirun(4, "missing-group");
    ends(&job);
    assert_eq!(job.code, Some(5));
    // Rank 3 moves data with rank 2 alone and hears of rank 1 all the same.
    let told = job.stderr.lines().find(|line| line.starts_with("rank 3: ")).expect("rank 3 was told");
    assert!(told.contains("Timeout") && told.contains("missing: [1], world: 4"), "{told}");
}

#[test]
fn waiting_for_a_rank_leaves_the_core_alone() {
    let job = mpirun(2, "busy");
    assert_eq!(job.code, Some(0));
    let ticks: u64 = job.stdout.trim().strip_prefix("ticks ").and_then(|n| n.parse().ok()).expect("a number");
    // A spinning wait takes the whole second (100 ticks). Looking twice a millisecond takes 2000 short looks.
    assert!(ticks < 30, "{ticks} hundredths of a second");
}

#[test]
fn a_process_that_mpi_sees_alone_refuses_to_be_one_of_several() {
    let _one = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
    let begin = Instant::now();
    let output = Command::new(PROBE).arg("conformance").env("SLURM_STEP_NUM_TASKS", "2").output();
    let job = job(output.expect("the probe is built"), begin.elapsed());
    assert!(job.stdout.starts_with("refused: SLURM_STEP_NUM_TASKS=2 says 2 ranks, but MPI sees this process alone"));
}
