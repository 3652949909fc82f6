//! Contributions → sum over lanes → accumulation → clipping → AdamW, bit for bit, for every policy.
//!
//! Loss curves cannot tell the policies' rounding points apart, so here a toy model hands in prescribed gradients and every
//! number that comes out is compared with a scalar reference: gathered weights, accumulated gradients, shadow, both
//! moments, and what the step reports.

#[path = "support/reference.rs"]
mod reference;
#[path = "support/toy.rs"]
mod toy;

use optim::{Hyper, StepReport};
use reference::{Reference, Report, Settings, round, tree};
use spmd_core::rng::mix;
use spmd_core::{DType, Policy};
use toy::{Answers, At, Shards, on_ranks};

const ACCUM: u32 = 3;
const TARGETS: u64 = 1000;
/// Clipping off, on but not needed, and needed; with and without weight decay.
const STEPS: [Settings; 4] = [
    Settings { lr: 1e-3, weight_decay: 0.1, max_norm: 0.0 },
    Settings { lr: 2e-3, weight_decay: 0.1, max_norm: 1e6 },
    Settings { lr: 2e-3, weight_decay: 0.01, max_norm: 0.5 },
    Settings { lr: 1e-5, weight_decay: 0.0, max_norm: 1.0 },
];
const ANSWERS: Answers = Answers { gradient, loss };

/// Random contributions. The kind of an element and its exponent are the same on every lane and differ from element to
/// element, so that every policy meets each kind in every unit of some size.
fn gradient(at: At, stage: usize, position: usize, out: &mut [f32]) {
    let shared = [at.step, at.micro, stage as u32, position as u32].into_iter().fold(1, |h, x| mix(h ^ u64::from(x)));
    let own = mix(shared ^ 0x5eed ^ u64::from(at.lane) << 32);
    for (i, x) in out.iter_mut().enumerate() {
        *x = contribution(mix(shared ^ i as u64), mix(own ^ i as u64));
    }
}

fn contribution(shared: u64, own: u64) -> f32 {
    let power = |n: u64| (-(n as f64)).exp2() as f32;
    let scale = power(shared % 8);
    let sign = if own >> 63 == 0 { 1.0 } else { -1.0 };
    // Eight and twenty-four significant bits, between 1 and 2.
    let (short, long) = (1.0 + (own % 128) as f32 / 128.0, 1.0 + (own % (1 << 23)) as f32 / (1 << 23) as f32);
    let magnitude = match shared >> 8 & 7 {
        // bf16 numbers of one exponent: a sum of two needs nine bits, so half of the odd ones are exact ties.
        0 | 1 => short * scale,
        // A large number of either sign on some lanes and small ones on others: what survives depends on the order.
        2 | 3 if own >> 40 & 1 == 0 => scale,
        2 | 3 => short * scale * power(14 + (own >> 32) % 8),
        // Contributions halfway between two bf16 numbers.
        4 => (short + 1.0 / 256.0) * scale,
        // fp32 numbers of one exponent, and of many.
        5 => long * scale,
        6 => long * scale * power((own >> 32) % 12),
        // No gradient, of either sign of zero.
        _ => 0.0,
    };
    sign * magnitude
}

fn loss(at: At) -> f64 {
    let x = mix(u64::from(at.lane) << 40 ^ u64::from(at.step) << 20 ^ u64::from(at.micro));
    (x >> 11) as f64 / (1u64 << 53) as f64 * 1e3
}

fn hyper(s: Settings) -> Hyper {
    Hyper {
        lr: s.lr,
        beta1: reference::BETA1,
        beta2: reference::BETA2,
        eps: reference::EPS,
        weight_decay: s.weight_decay,
        max_norm: s.max_norm,
        seed: reference::SEED,
    }
}

/// What one rank saw of one step.
struct Seen {
    report: StepReport,
    gathered: Vec<Vec<f32>>,
    after: Shards,
}

fn train(policy: Policy, lanes: usize, decay_norms: bool) -> Vec<Vec<Seen>> {
    on_ranks(lanes, |comm| {
        let mut t = toy::trainer(comm, policy.precision(), decay_norms, ANSWERS);
        let run = |(step, s): (usize, &Settings)| {
            let (report, grad) = toy::step(&mut t, step as u32, ACCUM, TARGETS, &hyper(*s));
            let (report, gathered) = (report.expect("finite"), t.model.gathered.clone());
            Seen { report, gathered, after: toy::shards(&t, grad) }
        };
        STEPS.iter().enumerate().map(run).collect()
    })
}

/// Compares bits, names the first difference, and wants zeros behind the unit's end.
fn same(what: &str, unit: usize, ranks: impl Iterator<Item = Vec<f32>>, expected: &[f32]) {
    let whole: Vec<f32> = ranks.flatten().collect();
    let (found, padding) = whole.split_at(expected.len());
    assert!(padding.iter().all(|x| x.to_bits() == 0), "{what} of unit {unit}: the padding is not zero");
    let differs = (0..found.len()).filter(|i| found[*i].to_bits() != expected[*i].to_bits());
    let differs: Vec<usize> = differs.collect();
    if let Some(i) = differs.first() {
        let (count, len) = (differs.len(), found.len());
        panic!("{what} of unit {unit}: {count} of {len} differ, first [{i}] {:e} not {:e}", found[*i], expected[*i]);
    }
}

fn check(policy: Policy, lanes: usize, decay_norms: bool) {
    let ranks = train(policy, lanes, decay_norms);
    let mut reference = Reference::new(policy, lanes as u32, decay_norms, ANSWERS);
    for (step, settings) in STEPS.iter().enumerate() {
        let name = |what: &str| format!("{policy}, {lanes} lanes, decay_norms {decay_norms}, step {step}: {what}");
        let seen = || ranks.iter().map(|rank| &rank[step]);
        let units = 0..reference.shadow.len();
        for unit in units.clone() {
            let expected = reference.gathered(unit);
            seen().for_each(|s| same(&name("gathered"), unit, [s.gathered[unit].clone()].into_iter(), &expected));
        }
        let grads = reference.gradients(ACCUM);
        let expected = reference.step(&grads, ACCUM, TARGETS, *settings);
        for unit in units {
            let shards = |pick: fn(&Shards) -> &Vec<Vec<f32>>| seen().map(move |s| pick(&s.after)[unit].clone());
            same(&name("gradient"), unit, shards(|s| &s.grad), &grads[unit]);
            same(&name("exp_avg"), unit, shards(|s| &s.exp_avg), &reference.exp_avg[unit]);
            same(&name("exp_avg_sq"), unit, shards(|s| &s.exp_avg_sq), &reference.exp_avg_sq[unit]);
            same(&name("shadow"), unit, shards(|s| &s.shadow), &reference.shadow[unit]);
        }
        for s in seen() {
            let StepReport { loss, grad_norm, clip_coef, swallowed, arrived, .. } = s.report;
            assert_eq!(Report { loss, grad_norm, clip_coef, swallowed, arrived }, expected, "{}", name("report"));
        }
        assert_eq!(expected.clip_coef < 1.0, settings.max_norm > 0.0 && settings.max_norm < 1e6, "both are tried");
    }
}

fn check_all(policy: Policy) {
    for lanes in [1, 3, 4, 6] {
        for decay_norms in [false, true] {
            check(policy, lanes, decay_norms);
        }
    }
}

#[test]
fn shadow() {
    check_all(Policy::Shadow);
}

#[test]
fn deepspeed() {
    check_all(Policy::DeepSpeed);
}

#[test]
fn fsdp_mixed() {
    check_all(Policy::FsdpMixed);
}

#[test]
fn fsdp_low() {
    check_all(Policy::FsdpLow);
}

#[test]
fn low_sr() {
    check_all(Policy::LowSr);
}

#[test]
fn fp32() {
    check_all(Policy::Fp32);
}

/// The contributions are such that another order, or a rounding too many or too few, would show.
#[test]
fn the_contributions_tell_orders_and_roundings_apart() {
    let lanes = |micro: u32, n: u32| -> Vec<Vec<f32>> {
        let contribution = |lane: u32| {
            let mut out = vec![0.0; 9000];
            gradient(At { lane, step: 0, micro }, 0, 0, &mut out);
            out
        };
        let lanes: Vec<_> = (0..n).map(contribution).collect();
        (0..9000).map(|i| lanes.iter().map(|l| l[i]).collect()).collect()
    };
    let differ = |a: &dyn Fn(&[f32]) -> f32, b: &dyn Fn(&[f32]) -> f32, n: u32| {
        lanes(0, n).iter().filter(|x| a(x) != b(x)).count()
    };
    let fold = |x: &[f32]| x.iter().fold(0.0, |a, b| a + b);
    let bf16 = |x: f32| round(DType::Bf16, x);
    let wire = |x: &[f32]| x.iter().map(|x| bf16(*x)).collect::<Vec<f32>>();
    for n in [4, 6] {
        assert!(differ(&tree, &fold, n) > 500, "the order of fp32 contributions");
        assert!(differ(&|x| tree(&wire(x)), &|x| fold(&wire(x)), n) > 100, "the order of bf16 contributions");
        assert!(differ(&|x| bf16(tree(&wire(x))), &|x| bf16(fold(&wire(x))), n) > 50, "the order, rounded");
    }
    let pairs = |x: &[f32]| fold(&x.chunks(2).map(fold).collect::<Vec<f32>>());
    assert!(differ(&tree, &pairs, 6) > 500, "six lanes are two times three, not three times two");
    for n in [3, 6] {
        let reversed = |x: &[f32]| tree(&x.iter().rev().copied().collect::<Vec<f32>>());
        assert!(differ(&tree, &reversed, n) > 500, "the lanes' order inside an odd block");
    }
    for n in [3, 4, 6] {
        assert!(differ(&|x| bf16(tree(x)), &|x| bf16(tree(&wire(x))), n) > 500, "the wire's rounding");
        let partial = |x: &[f32]| bf16(wire(x).iter().fold(0.0, |a, b| bf16(a + b)));
        assert!(differ(&|x| bf16(tree(&wire(x))), &partial, n) > 500, "partial sums stay fp32");
        let tie = |x: &&Vec<f32>| tree(&wire(x)).to_bits() & 0xffff == 0x8000;
        assert!(lanes(0, n).iter().filter(tie).count() > 300, "exact ties");
    }
}
