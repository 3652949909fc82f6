//! The optimizer path as straight scalar code over whole units: no shards, no kernels, no code of the product's except the
//! generator of random words. Rounding to bf16 is `half`'s.

use crate::toy::{Answers, At, STAGES, start_weight, units};
use spmd_core::DType::{Bf16, F32};
use spmd_core::ops::Rule;
use spmd_core::rng::{Purpose, Stream, stochastic_bf16, tensor_key};
use spmd_core::{DType, ParamKind, Policy, Precision, bf16};

/// The roles of a policy, written down a second time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Roles {
    pub(crate) shadow: DType,
    pub(crate) compute: DType,
    pub(crate) grad: DType,
    pub(crate) wire: DType,
    pub(crate) reduced: DType,
    pub(crate) accumulate: DType,
    pub(crate) moments: DType,
    pub(crate) form: Form,
}

/// How a run is stepped: by a policy, perhaps with other roles for gradients, and a rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Run {
    pub(crate) policy: Policy,
    /// wire, reduced and accumulate.
    pub(crate) gradients: Option<[DType; 3]>,
    pub(crate) rule: Rule,
}

impl From<Policy> for Run {
    fn from(policy: Policy) -> Self {
        Run { policy, gradients: None, rule: Rule::AdamW }
    }
}

impl Run {
    pub(crate) fn precision(self) -> Precision {
        let precision = self.policy.precision();
        let Some([wire, reduced, accumulate]) = self.gradients else { return precision };
        Precision { wire, reduced, accumulate, ..precision }
    }

    fn roles(self) -> Roles {
        let roles = roles(self.policy);
        let Some([wire, reduced, accumulate]) = self.gradients else { return roles };
        Roles { wire, reduced, accumulate, ..roles }
    }
}

/// How AdamW's arithmetic goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Torch,
    TorchStochastic,
    TorchPerOp,
    DeepSpeed,
}

fn roles(policy: Policy) -> Roles {
    let make = |[shadow, compute, grad, wire, reduced, accumulate, moments]: [DType; 7], form| Roles {
        shadow,
        compute,
        grad,
        wire,
        reduced,
        accumulate,
        moments,
        form,
    };
    match policy {
        Policy::Shadow => make([F32, Bf16, F32, F32, F32, F32, F32], Form::Torch),
        Policy::DeepSpeed => make([F32, Bf16, Bf16, Bf16, Bf16, Bf16, F32], Form::DeepSpeed),
        Policy::FsdpMixed => make([F32, Bf16, Bf16, Bf16, Bf16, F32, F32], Form::Torch),
        Policy::FsdpLow => make([Bf16; 7], Form::TorchPerOp),
        Policy::LowSr => make([Bf16, Bf16, Bf16, Bf16, F32, F32, Bf16], Form::TorchStochastic),
        Policy::Fp32 => make([F32; 7], Form::Torch),
    }
}

pub(crate) fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        F32 => x,
        Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Halves while the count is even, otherwise a left fold.
pub(crate) fn tree(x: &[f32]) -> f32 {
    match x.len() % 2 {
        0 => tree(&x[..x.len() / 2]) + tree(&x[x.len() / 2..]),
        _ => x[1..].iter().fold(x[0], |sum, x| sum + x),
    }
}

/// The settings of one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
    pub(crate) max_norm: f64,
}

pub(crate) const BETA1: f64 = 0.9;
pub(crate) const BETA2: f64 = 0.999;
pub(crate) const EPS: f64 = 1e-8;
pub(crate) const MOMENTUM: f64 = 0.9;
pub(crate) const SEED: u64 = 17;

/// What a step reports.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Report {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) clip_coef: f64,
    pub(crate) swallowed: Option<f64>,
    pub(crate) arrived: Option<f64>,
}

/// Weights and moments of every unit, whole.
#[derive(Debug, Clone)]
pub(crate) struct Reference {
    roles: Roles,
    rule: Rule,
    lanes: u32,
    decay_norms: bool,
    answers: Answers,
    t: u32,
    pub(crate) shadow: Vec<Vec<f32>>,
    pub(crate) exp_avg: Vec<Vec<f32>>,
    pub(crate) exp_avg_sq: Vec<Vec<f32>>,
}

impl Reference {
    pub(crate) fn new(run: Run, lanes: u32, decay_norms: bool, answers: Answers) -> Self {
        let roles = run.roles();
        // DeepSpeed's model is made in bf16 before its fp32 copy is.
        let load = |x| round(roles.shadow, if run.policy == Policy::DeepSpeed { round(Bf16, x) } else { x });
        let params = units().into_iter().map(|u| u.params);
        let shadow: Vec<Vec<f32>> = params
            .map(|p| p.iter().flat_map(|p| (0..p.len()).map(|i| load(start_weight(&p.name, i)))).collect())
            .collect();
        let zeros: Vec<Vec<f32>> = shadow.iter().map(|u| vec![0.0; u.len()]).collect();
        Reference {
            roles,
            rule: run.rule,
            lanes,
            decay_norms,
            answers,
            t: 0,
            shadow,
            exp_avg: zeros.clone(),
            exp_avg_sq: zeros,
        }
    }

    /// What a rank gathers for `unit`.
    pub(crate) fn gathered(&self, unit: usize) -> Vec<f32> {
        self.shadow[unit].iter().map(|x| round(self.roles.compute, *x)).collect()
    }

    /// Every unit's accumulated gradient: per stage that needs the unit a left fold over micro-batches of the tree over
    /// lanes; a tied unit's two are added at the end.
    pub(crate) fn gradients(&self, accum: u32) -> Vec<Vec<f32>> {
        let r = self.roles;
        let mut grads: Vec<Option<Vec<f32>>> = vec![None; self.shadow.len()];
        // A tied unit's own stage comes before the head, whose contribution is therefore the second here; two numbers have
        // one sum in either order.
        for (stage, needs) in STAGES.iter().enumerate() {
            for (position, unit) in needs.iter().enumerate() {
                let part = self.folded(stage, position, self.shadow[*unit].len(), accum);
                let sum = match grads[*unit].take() {
                    None => part,
                    Some(own) => own.iter().zip(part).map(|(a, b)| round(r.accumulate, a + b)).collect(),
                };
                grads[*unit] = Some(sum);
            }
        }
        grads.into_iter().map(|g| g.expect("every unit is in a stage")).collect()
    }

    fn folded(&self, stage: usize, position: usize, len: usize, accum: u32) -> Vec<f32> {
        let r = self.roles;
        let mut acc = vec![0.0; len];
        for micro in 0..accum {
            let mut contributions = vec![vec![0.0; len]; self.lanes as usize];
            for (lane, out) in contributions.iter_mut().enumerate() {
                (self.answers.gradient)(At { lane: lane as u32, step: self.t, micro }, stage, position, out);
                out.iter_mut().for_each(|x| *x = round(r.wire, round(r.grad, *x)));
            }
            for (i, acc) in acc.iter_mut().enumerate() {
                let lanes: Vec<f32> = contributions.iter().map(|c| c[i]).collect();
                let sum = round(r.reduced, tree(&lanes));
                *acc = round(r.accumulate, if micro == 0 { sum } else { *acc + sum });
            }
        }
        acc
    }

    /// One step on these gradients.
    pub(crate) fn step(&mut self, grads: &[Vec<f32>], accum: u32, targets: u64, s: Settings) -> Report {
        let mut loss = 0.0;
        for micro in 0..accum {
            for lane in 0..self.lanes {
                loss += (self.answers.loss)(At { lane, step: self.t, micro });
            }
        }
        let grad_norm = grads.iter().flat_map(|g| g.chunks(4096).map(block_square)).fold(0.0, |a, b| a + b).sqrt();
        let clip = match self.roles.form {
            _ if s.max_norm == 0.0 => 1.0,
            Form::DeepSpeed => 1.0 / f64::max(1.0, (grad_norm + 1e-6) / s.max_norm),
            _ => f64::min(1.0, s.max_norm / (grad_norm + 1e-6)),
        } as f32;
        self.t += 1;
        let (mut asked, mut swallowed, mut dot, mut square) = (0u64, 0u64, 0.0, 0.0);
        for (unit, grads) in grads.iter().enumerate() {
            let deltas = self.step_unit(unit, grads, clip, s);
            for block in deltas.chunks(4096) {
                let moved = |d: &&(f32, f32, f32)| d.2 != 0.0;
                let lost = |d: &&(f32, f32, f32)| round(Bf16, round(Bf16, d.0) + d.2) == round(Bf16, d.0);
                asked += block.iter().filter(moved).count() as u64;
                swallowed += block.iter().filter(moved).filter(lost).count() as u64;
                dot += eight_lanes(block.iter().map(|(old, new, d)| (*new as f64 - *old as f64) * *d as f64));
                square += eight_lanes(block.iter().map(|(_, _, d)| *d as f64 * *d as f64));
            }
        }
        Report {
            loss: loss / targets as f64,
            grad_norm,
            clip_coef: clip as f64,
            swallowed: (asked > 0).then(|| swallowed as f64 / asked as f64),
            arrived: (square > 0.0).then(|| dot / square),
        }
    }

    /// Steps one unit and returns (weight before, weight after, update asked for) of each element.
    fn step_unit(&mut self, unit: usize, grads: &[f32], clip: f32, s: Settings) -> Vec<(f32, f32, f32)> {
        let mut deltas = Vec::new();
        for param in &units()[unit].params {
            let decays = param.kind == ParamKind::Matrix || self.decay_norms;
            let s = Settings { weight_decay: if decays { s.weight_decay } else { 0.0 }, ..s };
            let word = |purpose, i: usize| {
                Stream::new(SEED, purpose, tensor_key(&param.name), u64::from(self.t)).u32(i as u64)
            };
            for i in 0..param.len() {
                let at = deltas.len();
                let (p, m, v) = (self.shadow[unit][at], self.exp_avg[unit][at], self.exp_avg_sq[unit][at]);
                let step = if self.rule == Rule::Sgd { sgd } else { adamw };
                let (mut new, delta) = step(self.roles.form, self.t, clip, s, [p, m, v, grads[at]]);
                if self.roles.form == Form::TorchStochastic {
                    new[0] = stochastic_bf16(new[0], word(Purpose::RoundShadow, i));
                    new[1] = stochastic_bf16(new[1], word(Purpose::RoundExpAvg, i));
                    new[2] = stochastic_bf16(new[2], word(Purpose::RoundExpAvgSq, i));
                }
                self.shadow[unit][at] = round(self.roles.shadow, new[0]);
                self.exp_avg[unit][at] = round(self.roles.moments, new[1]);
                self.exp_avg_sq[unit][at] = round(self.roles.moments, new[2]);
                deltas.push((p, self.shadow[unit][at], delta));
            }
        }
        deltas
    }
}

/// The new (weight, exp_avg, exp_avg_sq) before storage, and the update Δ that was asked for. Scalars are computed in f64
/// and rounded to fp32, as torch does; DeepSpeed's kernel takes fp32 scalars and computes 1 − β from them.
fn adamw(form: Form, t: u32, clip: f32, s: Settings, [p, m, v, g]: [f32; 4]) -> ([f32; 3], f32) {
    if form == Form::DeepSpeed {
        return adamw_deepspeed(t, clip, s, [p, m, v, g]);
    }
    let r = |x: f32| if form == Form::TorchPerOp { round(Bf16, x) } else { x };
    let (bc1, bc2) = (1.0 - BETA1.powi(t as i32), 1.0 - BETA2.powi(t as i32));
    let g = r(g * clip);
    let decayed = r(p * (1.0 - s.lr * s.weight_decay) as f32);
    let m = r(m + (1.0 - BETA1) as f32 * (g - m));
    let v = r(v * BETA2 as f32);
    let v = r(v + (1.0 - BETA2) as f32 * g * g);
    let denominator = r(r(r(v.sqrt()) / bc2.sqrt() as f32) + EPS as f32);
    let new = r(decayed - (s.lr / bc1) as f32 * m / denominator);
    let exact = v.sqrt() / bc2.sqrt() as f32 + EPS as f32;
    let delta = -((s.lr * s.weight_decay) as f32 * p) - (s.lr / bc1) as f32 * m / exact;
    ([new, m, v], delta)
}

/// Momentum with L2 decay: the buffer starts at zero.
fn sgd(form: Form, _: u32, clip: f32, s: Settings, [p, m, v, g]: [f32; 4]) -> ([f32; 3], f32) {
    let r = |x: f32| if form == Form::TorchPerOp { round(Bf16, x) } else { x };
    let g = r(g * clip);
    let g = if s.weight_decay == 0.0 { g } else { r(g + s.weight_decay as f32 * p) };
    let buffer = r(r(m * MOMENTUM as f32) + g);
    let delta = s.lr as f32 * buffer;
    ([r(p - delta), buffer, v], -delta)
}

fn adamw_deepspeed(t: u32, clip: f32, s: Settings, [p, m, v, g]: [f32; 4]) -> ([f32; 3], f32) {
    let (b1, b2) = (BETA1 as f32, BETA2 as f32);
    let correction = |b: f32| (1.0 - f64::from(b).powi(t as i32)) as f32;
    let g = g * clip;
    let m = b1 * m + (1.0 - b1) * g;
    let v = b2 * v + (1.0 - b2) * g * g;
    let update = m / correction(b1) / ((v / correction(b2)).sqrt() + EPS as f32) + s.weight_decay as f32 * p;
    let delta = s.lr as f32 * update;
    ([p - delta, m, v], -delta)
}

/// Σ x² of a block: the sum over indices congruent to `i` modulo `stride` is that over `i` and `i + stride` modulo twice
/// the stride, down to single elements of a block filled up with zeros.
fn block_square(x: &[f32]) -> f64 {
    fn part(x: &[f32], i: usize, stride: usize) -> f64 {
        if stride == 4096 {
            let x = f64::from(x.get(i).copied().unwrap_or(0.0));
            return x * x;
        }
        part(x, i, 2 * stride) + part(x, i + stride, 2 * stride)
    }
    part(x, 0, 1)
}

/// The statistics' order inside a block: element `i` belongs to sum `i mod 8`, and the eight are added in order.
fn eight_lanes(terms: impl Iterator<Item = f64>) -> f64 {
    let mut sums = [0.0; 8];
    terms.enumerate().for_each(|(i, term)| sums[i % 8] += term);
    sums.iter().fold(0.0, |a, b| a + b)
}
