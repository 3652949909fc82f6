//! Umbra against FSDP and DeepSpeed: loss and gradient norm of every step of `fixtures/curves`, policy by policy.
//!
//! The bounds are what the engines differ by among themselves and from one processor to another: at a learning rate of 1e-3
//! a difference in the last bf16 bit of step 0 is a difference of about 0.001 in the loss some steps later.

use umbra_tests::{Metrics, Train, fixtures, folder, model};

/// How far a run may be from its curve.
struct Bounds {
    /// Largest difference of the loss.
    loss: f64,
    /// Median relative difference of the gradient norm.
    norm_median: f64,
}

/// For policies with an fp32 shadow and bf16 arithmetic.
const BF16: Bounds = Bounds { loss: 0.0016, norm_median: 1e-3 };
/// For fp32 throughout.
const FP32: Bounds = Bounds { loss: 2e-4, norm_median: 1e-3 };
/// For bf16 weights: their norm is itself rounded to bf16 by the engine (8 bits, 0.2 % on average).
const LOW: Bounds = Bounds { loss: 0.003, norm_median: 5e-3 };
/// Largest relative difference of the gradient norm at any step.
const NORM_LARGEST: f64 = 0.02;

/// OpenBLAS adds in another order on another processor, and these runs take each difference in the last bit on and on: the
/// largest of a curve's norms is 0.62 % off with the kernels for AVX2 and 2.01 % with those for AVX-512. So that the
/// bounds mean the same on every machine, all take the first, which every processor since has.
const KERNELS: (&str, &str) = ("OPENBLAS_CORETYPE", "Haswell");

/// Runs what an engine ran and compares. `flags` holds policy, batch and length.
fn follow(curve: &str, ranks: usize, flags: &str, bounds: &Bounds) -> Metrics {
    let curves = fixtures().join("curves");
    let out = folder();
    let schedule = if curve.starts_with("lr1e-5") {
        "--lr 1e-5"
    } else {
        "--lr 1e-3 --weight-decay 0.1 --decay-norms --warmup-steps 5 --clip 1"
    };
    let run = Train { ranks, model: &model("mistral-tiny"), data: &curves.join("rows128.jsonl"), out: out.path() };
    let ours = run.run_with(KERNELS, &format!("{schedule} {flags}"));
    let theirs = Metrics::read_file(&curves.join(format!("{curve}.jsonl")));
    assert_eq!(ours.0.len(), theirs.0.len(), "{curve}: steps");

    let pairs = |name: &str| ours.column(name).into_iter().zip(theirs.column(name)).collect::<Vec<_>>();
    let loss = pairs("loss").iter().map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let mut norms: Vec<f64> = pairs("grad_norm").iter().map(|(a, b)| (a / b - 1.0).abs()).collect();
    norms.sort_by(f64::total_cmp);
    let (median, largest) = (norms[norms.len() / 2], norms[norms.len() - 1]);
    println!("{curve}: loss {loss:.5}, grad_norm median {:.3} %, largest {:.2} %", median * 100.0, largest * 100.0);
    for (step, (a, b)) in pairs("lr").iter().enumerate() {
        assert!((a - b).abs() <= 1e-12, "{curve}: learning rate of step {step}: {a} {b}");
    }
    assert!(loss <= bounds.loss, "{curve}: loss {loss}");
    assert!(median <= bounds.norm_median, "{curve}: grad_norm median {median}");
    assert!(largest <= NORM_LARGEST, "{curve}: grad_norm largest {largest}");
    ours
}

#[test]
fn deepspeed_zero3_bf16() {
    follow("deepspeed-bf16-w2", 2, "--policy deepspeed --micro-batch 2 --steps 40", &BF16);
    follow("deepspeed-bf16-w2-accum4", 2, "--policy deepspeed --micro-batch 2 --accum 4 --steps 20", &BF16);
}

#[test]
fn fsdp2_fp32() {
    follow("fsdp2-fp32-w2", 2, "--policy fp32 --micro-batch 2 --steps 40", &FP32);
}

#[test]
fn fsdp2_mixed() {
    follow("fsdp2-mixed-w2", 2, "--policy fsdp-mixed --micro-batch 2 --steps 40", &BF16);
    follow("fsdp2-mixed-w2-accum4", 2, "--policy fsdp-mixed --micro-batch 2 --accum 4 --steps 20", &BF16);
    follow("fsdp2-mixed-w4", 4, "--policy fsdp-mixed --micro-batch 1 --steps 40", &BF16);
}

#[test]
fn fsdp2_mixed_reduced_in_fp32_is_nearest_to_shadow() {
    follow("fsdp2-mixed-reduce-fp32-w2", 2, "--policy shadow --micro-batch 2 --steps 40", &BF16);
}

#[test]
fn fsdp2_low() {
    follow("fsdp2-low-w2", 2, "--policy fsdp-low --micro-batch 2 --steps 40", &LOW);
}

/// FSDP1 also rounds RoPE's buffer to bf16 where Umbra keeps fp32; over rows this short the difference is within bounds.
#[test]
fn fsdp1_mixed_and_low() {
    follow("fsdp1-mixed-w2", 2, "--policy fsdp-mixed --micro-batch 2 --steps 40", &BF16);
    follow("fsdp1-low-w2", 2, "--policy fsdp-low --micro-batch 2 --steps 40", &LOW);
}

/// The case Umbra exists for: at 1e-5 policies with an fp32 shadow learn, and bf16 weights stand still.
#[test]
fn a_small_learning_rate_ends_where_the_engines_end() {
    let expected = [
        ("deepspeed-bf16", "deepspeed", &BF16, 5.582, 0.003),
        ("fsdp2-mixed", "fsdp-mixed", &BF16, 5.582, 0.003),
        ("fsdp2-low", "fsdp-low", &LOW, 6.28305, 0.02),
    ];
    for (engine, policy, bounds, loss, within) in expected {
        let flags = format!("--policy {policy} --micro-batch 2 --steps 60");
        let ours = follow(&format!("lr1e-5-{engine}-w2"), 2, &flags, bounds);
        let (losses, swallowed) = (ours.column("loss"), ours.column("swallowed"));
        println!("{policy}: ends at {:.4}, swallowed {:.4}", losses[59], swallowed[59]);
        assert!((losses[59] - loss).abs() <= within, "{policy} ends at {}", losses[59]);
        assert!(swallowed.iter().all(|s| (0.9..=1.0).contains(s)), "{policy} swallows {swallowed:?}");
    }
}
