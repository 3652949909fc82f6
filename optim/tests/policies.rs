//! Contributions → sum over lanes → accumulation → clipping → optimizer, bit for bit, for every policy.
//!
//! Loss curves cannot tell the policies' rounding points apart, so here a toy model hands in prescribed gradients and every
//! number that comes out is compared with a scalar reference: gathered weights, accumulated gradients, shadow, both
//! moments, and what the step reports.

#[path = "support/reference.rs"]
mod reference;
#[path = "support/toy.rs"]
mod toy;

use optim::{Footprint, Grid, Hyper, Layout, Sharding, StepReport};
use reference::{Reference, Report, Run, Settings, round, tree};
use spmd_core::ops::Rule;
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

fn hyper(rule: Rule, s: Settings) -> Hyper {
    Hyper {
        rule,
        lr: s.lr,
        beta1: reference::BETA1,
        beta2: reference::BETA2,
        eps: reference::EPS,
        weight_decay: s.weight_decay,
        momentum: reference::MOMENTUM,
        max_norm: s.max_norm,
        seed: reference::SEED,
    }
}

/// What one rank saw of one step.
struct Seen {
    report: StepReport,
    gathered: Vec<Vec<f32>>,
    after: Shards,
    hash: u64,
    /// Data bytes sent in the step.
    sent: u64,
}

/// Ranks and how the run is laid out over them.
#[derive(Debug, Clone, Copy)]
struct On {
    world: usize,
    sharding: Sharding,
}

impl On {
    fn zero3(lanes: usize) -> Self {
        On { world: lanes, sharding: Sharding::zero3(lanes) }
    }

    /// ZeRO-3 on fewer ranks than lanes.
    fn few(lanes: usize, world: usize) -> Self {
        On { world, sharding: Sharding { lanes, ..Sharding::zero3(world) } }
    }

    fn grid(self, rank: usize) -> Grid {
        Grid { rank, world: self.world, shard: self.sharding.group }
    }
}

fn train(how: Run, on: On, decay_norms: bool) -> Vec<Vec<Seen>> {
    on_ranks(on.world, |comm| {
        let mut t = toy::trainer(comm, how.precision(), on.sharding, decay_norms, ANSWERS);
        let run = |(step, s): (usize, &Settings)| {
            let before = t.comm.sent_bytes();
            let (report, grad) = toy::step(&mut t, step as u32, ACCUM, TARGETS, &hyper(how.rule, *s));
            let sent = t.comm.sent_bytes() - before;
            let (report, gathered) = (report.expect("finite"), t.model.gathered.clone());
            t.check_held().expect("every buffer as the footprint says");
            let hash = t.state_hash().expect("copies that are the same");
            Seen { report, gathered, after: toy::shards(&t, grad), hash, sent }
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

/// What the reference has before and after a step.
struct Expected {
    gathered: Vec<Vec<f32>>,
    grads: Vec<Vec<f32>>,
    report: Report,
    after: Reference,
}

fn reference(how: Run, lanes: usize, decay_norms: bool) -> Vec<Expected> {
    let mut reference = Reference::new(how, lanes as u32, decay_norms, ANSWERS);
    let step = |settings: &Settings| {
        let gathered = (0..reference.shadow.len()).map(|unit| reference.gathered(unit)).collect();
        let grads = reference.gradients(ACCUM);
        let report = reference.step(&grads, ACCUM, TARGETS, *settings);
        assert_eq!(report.clip_coef < 1.0, settings.max_norm > 0.0 && settings.max_norm < 1e6, "both are tried");
        Expected { gathered, grads, report, after: reference.clone() }
    };
    STEPS.iter().map(step).collect()
}

/// Compares every number with the reference's; returns the state's hash after each step.
fn check(how: Run, on: On, decay_norms: bool, expected: &[Expected]) -> Vec<u64> {
    let ranks = train(how, on, decay_norms);
    // Slices in the order in which they lie in a unit.
    let mut owners: Vec<usize> = (0..on.world).collect();
    owners.sort_by_key(|rank| (on.grid(*rank).position(), on.grid(*rank).replica()));
    for (step, expected) in expected.iter().enumerate() {
        let name = |what: &str| format!("{how:?}, {on:?}, decay_norms {decay_norms}, step {step}: {what}");
        let seen = || ranks.iter().map(|rank| &rank[step]);
        for unit in 0..expected.grads.len() {
            for s in seen() {
                same(&name("gathered"), unit, [s.gathered[unit].clone()].into_iter(), &expected.gathered[unit]);
            }
            let slices = owners.iter().map(|rank| ranks[*rank][step].after.grad[unit].clone());
            same(&name("gradient"), unit, slices, &expected.grads[unit]);
            for copy in ranks.chunks(on.sharding.group) {
                let shards = |pick: fn(&Shards) -> &Vec<Vec<f32>>| {
                    copy.iter().map(move |rank| pick(&rank[step].after)[unit].clone())
                };
                same(&name("exp_avg"), unit, shards(|s| &s.exp_avg), &expected.after.exp_avg[unit]);
                same(&name("exp_avg_sq"), unit, shards(|s| &s.exp_avg_sq), &expected.after.exp_avg_sq[unit]);
                same(&name("shadow"), unit, shards(|s| &s.shadow), &expected.after.shadow[unit]);
            }
        }
        for s in seen() {
            let StepReport { loss, grad_norm, clip_coef, swallowed, arrived, .. } = s.report;
            let report = Report { loss, grad_norm, clip_coef, swallowed, arrived };
            assert_eq!(report, expected.report, "{}", name("report"));
        }
    }
    check_sent(how, on, &ranks);
    ranks[0].iter().map(|seen| seen.hash).collect()
}

/// Every rank sends what the footprint says, every step.
fn check_sent(how: Run, on: On, ranks: &[Vec<Seen>]) {
    let (units, stages) = (toy::units(), toy::stages());
    for (rank, steps) in ranks.iter().enumerate() {
        let layout = Layout::new(&units, on.grid(rank), false);
        let expected = Footprint::new(&layout, &stages, &how.precision(), &on.sharding, ACCUM as usize).sent();
        steps.iter().for_each(|s| assert_eq!(s.sent, expected, "bytes sent under {how:?}, {on:?}"));
    }
}

fn check_all(how: Run) {
    for lanes in [1, 3, 4, 6] {
        for decay_norms in [false, true] {
            check(how, On::zero3(lanes), decay_norms, &reference(how, lanes, decay_norms));
        }
    }
    check_few_ranks(how);
    check_stages(how);
}

/// Fewer ranks than lanes.
fn check_few_ranks(how: Run) {
    for (lanes, worlds) in [(8, &[1, 2, 4][..]), (12, &[1, 3, 6]), (6, &[1, 3]), (5, &[1])] {
        let expected = reference(how, lanes, true);
        let hashes: Vec<_> = worlds.iter().map(|world| check(how, On::few(lanes, *world), true, &expected)).collect();
        assert!(hashes.iter().all(|h| *h == hashes[0]), "{how:?}, {lanes} lanes: {hashes:x?}");
        assert!(hashes[0].windows(2).all(|w| w[0] != w[1]), "every step changes the state");
    }
}

/// Every stage and group, with weights that are kept or not.
fn check_stages(how: Run) {
    let expected = reference(how, 4, false);
    let hashes = check(how, On::zero3(4), false, &expected);
    for (stage, groups) in [(0, &[1][..]), (1, &[1, 2, 4]), (2, &[2, 4]), (3, &[1, 2, 4])] {
        for (group, world) in groups.iter().flat_map(|g| [(*g, 2), (*g, 4)]).filter(|(g, w)| g <= w) {
            for reshard_after_forward in if stage == 3 { &[true, false][..] } else { &[false] } {
                let sharding = Sharding { stage, group, lanes: 4, reshard_after_forward: *reshard_after_forward };
                assert_eq!(check(how, On { world, sharding }, false, &expected), hashes, "{how:?} {sharding:?}");
            }
        }
    }
    // A rank that holds everything may have any number of replicas.
    let sharding = Sharding { stage: 0, group: 1, lanes: 3, reshard_after_forward: false };
    check(how, On { world: 3, sharding }, false, &reference(how, 3, false));
}

#[test]
fn shadow() {
    check_all(Policy::Shadow.into());
}

#[test]
fn deepspeed() {
    check_all(Policy::DeepSpeed.into());
}

#[test]
fn fsdp_mixed() {
    check_all(Policy::FsdpMixed.into());
}

#[test]
fn fsdp_low() {
    check_all(Policy::FsdpLow.into());
}

#[test]
fn low_sr() {
    check_all(Policy::LowSr.into());
}

#[test]
fn fp32() {
    check_all(Policy::Fp32.into());
}

/// What a file of an engine may ask for: DeepSpeed's wire, its accumulation, or both in fp32, and what no engine does.
#[test]
fn other_dtypes_on_a_gradients_way() {
    const F32: DType = DType::F32;
    const BF16: DType = DType::Bf16;
    let cases = [
        (Policy::DeepSpeed, [F32, BF16, BF16]),
        (Policy::DeepSpeed, [BF16, BF16, F32]),
        (Policy::DeepSpeed, [F32, F32, F32]),
        (Policy::FsdpMixed, [F32, F32, F32]),
        (Policy::FsdpLow, [F32, F32, BF16]),
        (Policy::Fp32, [BF16, F32, BF16]),
    ];
    for (policy, gradients) in cases {
        let how = Run { gradients: Some(gradients), ..policy.into() };
        check_few_ranks(how);
        check(how, On::zero3(3), false, &reference(how, 3, false));
    }
}

#[test]
fn momentum_is_one_more_rule() {
    for policy in [Policy::Fp32, Policy::DeepSpeed, Policy::FsdpLow, Policy::LowSr] {
        check_few_ranks(Run { rule: Rule::Sgd, ..policy.into() });
    }
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
