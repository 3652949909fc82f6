//! The documented formulas, an element at a time.

use super::*;

/// What one element becomes before storage, and its Δ.
pub(super) fn one(
    s: &StepScalars,
    rule: Rule,
    arithmetic: Arithmetic,
    decay: bool,
    [p, m, v, g]: [f32; 4],
) -> [f32; 4] {
    let r = |x: f32| if arithmetic == Bf16PerOp { Bf16.round(x) } else { x };
    let g = r(g * s.clip_coef);
    let decayed = if decay && s.weight_decay != 0.0 { r(g + s.weight_decay as f32 * p) } else { g };
    match rule {
        AdamW => adam(s, arithmetic, if decay { s.weight_decay } else { 0.0 }, [p, m, v, g]),
        Adam => adam(s, arithmetic, 0.0, [p, m, v, decayed]),
        Sgd if s.momentum == 0.0 => {
            let step = s.lr as f32 * decayed;
            [r(p - step), m, v, -step]
        }
        Sgd => {
            let b = r(r(s.momentum as f32 * m) + decayed);
            let step = s.lr as f32 * b;
            [r(p - step), b, v, -step]
        }
    }
}

/// Adam with decoupled decay on a clipped gradient.
fn adam(s: &StepScalars, arithmetic: Arithmetic, wd: f64, [p, m, v, g]: [f32; 4]) -> [f32; 4] {
    let (bc1, bc2) = (1.0 - s.beta1.powf(s.t as f64), 1.0 - s.beta2.powf(s.t as f64));
    let (lr, step) = (s.lr as f32, (s.lr / bc1) as f32);
    let (b1, b2, eps) = (s.beta1 as f32, s.beta2 as f32, s.eps as f32);
    let (c1, c2) = ((1.0 - s.beta1) as f32, (1.0 - s.beta2) as f32);
    let asked = |m: f32, d: f32| -((s.lr * wd) as f32 * p) - (step * m) / d;
    match arithmetic {
        Fp32Torch => {
            let m = m + c1 * (g - m);
            let v = v * b2;
            let v = v + (c2 * g) * g;
            let d = v.sqrt() / bc2.sqrt() as f32 + eps;
            [p * (1.0 - s.lr * wd) as f32 - (step * m) / d, m, v, asked(m, d)]
        }
        Fp32Fused => {
            let correction = |b: f32| (1.0 - (b as f64).powf(s.t as f64)) as f32;
            let m = b1 * m + (1.0 - b1) * g;
            let v = b2 * v + ((1.0 - b2) * g) * g;
            let u = (m / correction(b1)) / ((v / correction(b2)).sqrt() + eps) + wd as f32 * p;
            [p - lr * u, m, v, -(lr * u)]
        }
        Fp32Cpu => {
            let power = |b: f32| (0..s.t).fold(1.0f32, |power, _| power * b);
            let m = g * (1.0 - b1) + m * b1;
            let v = (g * g) * (1.0 - b2) + v * b2;
            let d = v.sqrt() * (1.0 / (1.0 - power(b2)).sqrt()) + eps;
            let (shrink, move_by) = (-lr * wd as f32, -lr / (1.0 - power(b1)));
            let shrunk = p + shrink * p;
            [(m / d) * move_by + shrunk, m, v, shrink * p + (m / d) * move_by]
        }
        Bf16PerOp => {
            let r = |x: f32| Bf16.round(x);
            let decayed = r(p * (1.0 - s.lr * wd) as f32);
            let m = r(m + c1 * (g - m));
            let v = r(v * b2);
            let v = r(v + (c2 * g) * g);
            let d = r(r(r(v.sqrt()) / bc2.sqrt() as f32) + eps);
            [r(decayed - (step * m) / d), m, v, asked(m, v.sqrt() / bc2.sqrt() as f32 + eps)]
        }
    }
}
