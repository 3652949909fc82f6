//! Values that mean nothing, and pairs of flags that contradict each other.

use super::{Length, RunPlan};
use crate::cli::{ResumeArg, TrainArgs, at_least_one, bad_value, sane_threads};
use crate::{Failure, Result};

/// Checks what can be said of each flag alone, and flags that exclude each other.
pub(super) fn written(args: &TrainArgs) -> Result<()> {
    at_least_one("--micro-batch", args.micro_batch)?;
    at_least_one("--accum", args.accum)?;
    at_least_one("--global-batch", args.global_batch)?;
    sane_threads(args.threads)?;
    for (flag, steps) in [
        ("--steps", args.steps),
        ("--log-every", args.log_every),
        ("--decay-steps", args.decay_steps),
        ("--save-every", args.save_every),
        ("--hash-every", args.hash_every),
    ] {
        if steps == Some(0) {
            return Err(bad_value(flag, "a whole number that is 1 or more", 0));
        }
    }
    if let Some(n) = args.seq_len.filter(|&n| n < 2) {
        return Err(bad_value("--seq-len", "2 or more: a row of one token has nothing to predict", n));
    }
    let from = match &args.resume {
        Some(ResumeArg::Dir(dir)) => Some(dir),
        _ => None,
    };
    let paths = [("--out", args.out.as_ref()), ("--dump", args.dump.as_ref()), ("--model", args.model.as_ref())];
    for (flag, path) in paths.into_iter().chain([("--resume", from)]) {
        if path.is_some_and(|p| p.as_os_str().is_empty()) {
            return Err(bad_value(flag, "a path", "empty"));
        }
    }
    numbers(args)?;
    if let (Some(steps), Some(epochs)) = (args.steps, args.epochs) {
        return Err(excluded(format!("--steps {steps}"), format!("--epochs {epochs}"), "the length of the run"));
    }
    if let (Some(steps), Some(ratio)) = (args.warmup_steps, args.warmup_ratio) {
        return Err(excluded(format!("--warmup-steps {steps}"), format!("--warmup-ratio {ratio}"), "the warm-up"));
    }
    if let (Some(every), Some(0)) = (args.save_every, args.keep) {
        return Err(Failure::usage(format!("--save-every {every} contradicts --keep 0, which writes no checkpoints"))
            .at("--save-every, --keep")
            .expected("--keep 1 or more")
            .found("--keep 0")
            .hint("leave one of the two out"));
    }
    Ok(())
}

/// Checks the range of every real number.
fn numbers(args: &TrainArgs) -> Result<()> {
    let not_negative: fn(f64) -> bool = |x| x >= 0.0;
    let positive: fn(f64) -> bool = |x| x > 0.0;
    let decay: fn(f64) -> bool = |x| (0.0..1.0).contains(&x);
    let share: fn(f64) -> bool = |x| (0.0..=1.0).contains(&x);
    let ranges = [
        ("--lr", args.lr, not_negative, "a number that is 0 or more"),
        ("--min-lr", args.min_lr, not_negative, "a number that is 0 or more"),
        ("--weight-decay", args.weight_decay, not_negative, "a number that is 0 or more"),
        ("--clip", args.clip, not_negative, "a number that is 0 (off) or more"),
        ("--eps", args.eps, positive, "a number above 0"),
        ("--epochs", args.epochs, positive, "a number above 0"),
        ("--beta1", args.beta1, decay, "a number from 0 up to, but not including, 1"),
        ("--beta2", args.beta2, decay, "a number from 0 up to, but not including, 1"),
        ("--momentum", args.momentum, decay, "a number from 0 up to, but not including, 1"),
        ("--warmup-ratio", args.warmup_ratio, share, "a share of the run, from 0 to 1"),
    ];
    for (flag, value, fits, expected) in ranges {
        if let Some(x) = value.filter(|&x| !(x.is_finite() && fits(x))) {
            return Err(bad_value(flag, expected, x));
        }
    }
    Ok(())
}

fn excluded(a: String, b: String, what: &str) -> Failure {
    Failure::usage(format!("{a} and {b} both set {what}"))
        .expected("one of them")
        .found(format!("{a} {b}"))
        .hint(format!("leave out {a} or {b}"))
}

/// Micro-batches of a step, if `--accum` or `--global-batch` says how many.
pub(super) fn accum(args: &TrainArgs, micro_batch: usize, lanes: usize) -> Result<Option<usize>> {
    let Some(global) = args.global_batch else { return Ok(args.accum) };
    let rows = global_batch(micro_batch, 1, lanes)?;
    if global % rows != 0 {
        return Err(Failure::usage(format!("--global-batch {global} cannot be split evenly"))
            .at("--global-batch")
            .expected(format!("a multiple of {rows}: {micro_batch} row(s) a micro-batch on {lanes} lane(s)"))
            .found(global)
            .hint(format!("--global-batch {}, or another --micro-batch", rows * (global / rows).max(1))));
    }
    let accum = global / rows;
    match args.accum {
        Some(written) if written != accum => {
            Err(Failure::usage(format!("--accum {written} contradicts --global-batch {global}"))
                .at("--accum, --global-batch")
                .expected(format!("--accum {accum}: {global} rows are {accum} micro-batch(es) of {rows}"))
                .found(format!("--accum {written}"))
                .hint("leave out one of the two"))
        }
        _ => Ok(Some(accum)),
    }
}

/// Rows of a step.
pub(super) fn global_batch(micro_batch: usize, accum: usize, lanes: usize) -> Result<usize> {
    let rows = micro_batch.checked_mul(lanes).and_then(|rows| rows.checked_mul(accum));
    rows.ok_or_else(|| Failure::usage("a step of so many rows cannot be counted").at("--micro-batch, --accum, --lanes"))
}

/// Checks what holds between settings, whatever their origin.
pub(super) fn resolved(plan: &RunPlan) -> Result<()> {
    if plan.min_lr > plan.lr {
        return Err(Failure::usage("--min-lr is above --lr")
            .at("--min-lr")
            .expected(format!("at most {}, the learning rate", plan.lr))
            .found(plan.min_lr));
    }
    if let Length::Steps(total) = plan.length {
        // Checked again by whoever turns epochs into steps.
        plan.schedule(total)?;
    }
    Ok(())
}
