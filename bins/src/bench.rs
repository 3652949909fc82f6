//! `umbra bench step`: a training step beside the matrix products it is made of, timed in the same run.

use crate::cli::BenchStepArgs;
use crate::cli::TrainArgs;
use crate::host::{clock, sgemm_rate};
use crate::launch::meet;
use crate::metrics::median;
use crate::plan::{RunPlan, defaults};
use crate::run;
use crate::source::Source;
use crate::table::{Align, bytes, render};
use crate::{Failure, Result, memory, tiny};
use collectives::Comm;
use models::{Mistral, params};
use optim::{Hyper, StepReport, Trainer, train_step};
use spmd_core::ops::Rule;
use spmd_core::rng::{Purpose, Stream};
use spmd_core::{Batch, Device, gemm_log};

/// Steps that touch memory for the first time and are not counted.
const WARM_UP: u64 = 2;
/// The product that stands for what a rank can multiply at best: this many rows, columns and terms.
const SGEMM: usize = 1024;

/// What one rank measured.
#[derive(Debug)]
struct Measured {
    step_seconds: Vec<f64>,
    report: StepReport,
    /// The products of one step, replayed alone: seconds and operations.
    products: f64,
    flops: f64,
    /// A 1024³ product's operations a second.
    sgemm: f64,
    peak: u64,
}

/// Runs the benchmark on every rank; rank 0 prints the table.
///
/// # Errors
/// The failure to show, the same on every rank.
pub fn step(args: &BenchStepArgs, threads: usize, comm: &Comm) -> Result<()> {
    let source = Source::drawn(tiny::bench_config(), 0);
    let written = TrainArgs {
        micro_batch: Some(args.micro_batch),
        policy: Some(args.policy),
        lanes: args.lanes,
        stage: args.stage,
        recompute: args.recompute,
        threads: Some(threads),
        ..TrainArgs::default()
    };
    let plan = RunPlan::resolve(&written, comm.world(), threads, None)?;
    let baseline = memory::resident().unwrap_or(0);
    let device = meet(comm, Device::cpu(threads).map_err(Failure::from))?;
    let planned: u64 = run::prepare::segments(&plan, &source.config, source.units(), args.seq_len, plan.sharding())?
        .iter()
        .map(|(_, n)| n)
        .sum();
    let measured = meet(comm, measure(args, &plan, &source, &device, comm))?;
    let own = [
        median(&measured.step_seconds).unwrap_or(0.0),
        measured.products,
        measured.flops,
        measured.sgemm,
        measured.peak as f64,
        baseline as f64,
        measured.report.comm_seconds,
        measured.report.optim_seconds,
    ];
    let all = comm.gather_f64(&own).map_err(Failure::from)?;
    let column = |i: usize| all.iter().skip(i).step_by(own.len()).copied();
    let largest = |i: usize| column(i).fold(0.0, f64::max);
    let tokens = (args.micro_batch * args.seq_len * plan.lanes) as f64;
    let (seconds, products) = (largest(0), largest(1));
    // Products are replayed on one thread, so with several there is nothing to compare a step with.
    let ratio = if threads == 1 { format!("{:.3}", seconds / products) } else { "only with --threads 1".to_owned() };
    let predicted = planned as f64 + largest(5);
    let rows = [
        ("model", format!("{}, {:.1}M parameters", source.shape(), params::count(source.units()) as f64 / 1e6)),
        ("policy", format!("{}: {}", args.policy, args.policy.about())),
        ("ranks", format!("{} ({}), {}", comm.world(), comm.transport(), device.name())),
        ("layout", crate::run::layout(&plan)),
        ("step", format!("{tokens} tokens, median of {}: {:.1} ms", args.steps, seconds * 1e3)),
        ("tokens/s", format!("{:.0}", tokens / seconds)),
        ("its products alone", format!("{:.1} ms ({:.1} GFLOP/s a rank)", products * 1e3, largest(2) / products / 1e9)),
        ("step / products", ratio),
        ("sgemm 1024^3", format!("{:.1} GFLOP/s a rank", column(3).sum::<f64>() / comm.world() as f64 / 1e9)),
        ("waiting for ranks", format!("{:.1} ms", largest(6) * 1e3)),
        ("norm, clip, AdamW", format!("{:.1} ms", largest(7) * 1e3)),
        (
            "memory",
            format!(
                "peak {} of the largest rank, planned {} ({:+.1} %)",
                bytes(largest(4) as u64),
                bytes(predicted as u64),
                100.0 * (largest(4) / predicted - 1.0)
            ),
        ),
    ];
    if comm.rank() == 0 {
        let rows: Vec<Vec<String>> = rows.into_iter().map(|(name, text)| vec![name.to_owned(), text]).collect();
        crate::host::answer(&render(&[Align::Left, Align::Left], &rows))?;
    }
    Ok(())
}

fn measure(args: &BenchStepArgs, plan: &RunPlan, source: &Source, device: &Device, comm: &Comm) -> Result<Measured> {
    let precision = plan.precision();
    let config = source.config.clone();
    let model = Mistral::new(device.clone(), config, precision.compute, args.micro_batch, args.seq_len, plan.recompute)
        .map_err(Failure::from)?;
    let mut trainer = Trainer::new(model, device.clone(), comm.clone(), precision, plan.sharding(), false, clock)
        .map_err(Failure::from)?;
    run::load(&mut trainer, source)?;
    let hyper = Hyper {
        rule: Rule::AdamW,
        lr: defaults::LR,
        beta1: defaults::BETA1,
        beta2: defaults::BETA2,
        eps: defaults::EPS,
        weight_decay: 0.0,
        momentum: 0.0,
        max_norm: defaults::CLIP,
        seed: 0,
    };
    let one = |trainer: &mut Trainer<Mistral>, step: u64| -> Result<(f64, StepReport)> {
        let lanes = (0..plan.passes()).map(|pass| pass * plan.world + comm.rank());
        let batches: Vec<Batch> = lanes.map(|lane| random_batch(args, source.config.vocab_size, step, lane)).collect();
        let targets = (batches[0].supervised() * plan.lanes) as u64;
        let started = clock();
        let report = train_step(trainer, &batches, targets, &hyper, &mut |_, _| {}).map_err(Failure::from)?;
        Ok((clock() - started, report))
    };
    for step in 0..WARM_UP {
        gemm_log::start();
        one(&mut trainer, step)?;
    }
    let shapes = gemm_log::take();
    let mut step_seconds = Vec::new();
    let mut report = StepReport::default();
    for step in 0..args.steps {
        let (seconds, r) = one(&mut trainer, WARM_UP + step)?;
        step_seconds.push(seconds);
        report = r;
    }
    let peak = memory::peak_rss().unwrap_or(0);
    drop(trainer);
    comm.barrier().map_err(Failure::from)?;
    let products = replay_seconds(&shapes);
    let flops = shapes.iter().map(gemm_log::GemmShape::flops).sum();
    let sgemm = sgemm_rate(device, SGEMM).map_err(Failure::from)?;
    Ok(Measured { step_seconds, report, products, flops, sgemm, peak })
}

/// The products of one step, alone, on operands that wander through as much memory as the step's do: the best of three.
fn replay_seconds(shapes: &[gemm_log::GemmShape]) -> f64 {
    const OPERANDS: usize = 32 << 20;
    let mut scratch = gemm_log::Scratch::new(shapes, OPERANDS);
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let started = clock();
        gemm_log::replay(shapes, &mut scratch);
        best = best.min(clock() - started);
    }
    best
}

fn random_batch(args: &BenchStepArgs, vocab: usize, step: u64, lane: usize) -> Batch {
    let (rows, cols) = (args.micro_batch, args.seq_len);
    let stream = Stream::new(1, Purpose::Sample, lane as u64, step);
    let ids: Vec<u32> = (0..rows * cols).map(|i| stream.below(i as u64, vocab as u64) as u32).collect();
    let last_of_row = |i: usize| (i + 1).is_multiple_of(cols);
    let target = |i: usize| if last_of_row(i) { Batch::NO_TARGET } else { ids[i + 1] };
    let targets = (0..rows * cols).map(target).collect();
    Batch { rows, cols, tokens: rows * cols, targets, ids }
}
