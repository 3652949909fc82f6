//! The learning rate as a pure function of the step. Never scaled by world size.
//!
//! Umbra's own shapes, those of transformers, and those of DeepSpeed ([`deepspeed`]).

pub mod deepspeed;

use deepspeed::DeepSpeed;
use std::f64::consts::PI;

/// What follows the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// 1.
    Constant,
    /// 1 − p.
    Linear,
    /// (1 + cos πp)/2.
    Cosine,
    /// 1, then linear to the minimum over the last steps.
    Wsd {
        /// Steps of the final decay.
        decay_steps: u64,
    },
    /// transformers' multiplier λ(j), warm-up included, at `j = step · stride`.
    Transformers {
        /// The course after warm-up.
        curve: Curve,
        /// Steps of the schedule for each step of the optimizer.
        stride: u64,
    },
    /// One of DeepSpeed's, which has a warm-up and an end of its own.
    DeepSpeed(DeepSpeed),
}

/// The course of a schedule of transformers (transformers/optimization.py).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Curve {
    /// 1.
    Constant,
    /// max(0, (T − j)/max(1, T − N)).
    Linear,
    /// Half a period: (1 + cos πp)/2 with p = (j − N)/max(1, T − N), which rises again beyond T.
    Cosine,
}

/// A schedule: step `s` of `total_steps`, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The peak; under DeepSpeed's schedules the optimizer's own rate.
    pub lr: f64,
    /// What Umbra's shapes end at.
    pub min_lr: f64,
    /// Steps of linear warm-up: step `s` uses `lr·min(1, (s+1)/N)` under Umbra's shapes and `lr·s/N` under those of
    /// transformers.
    pub warmup_steps: u64,
    /// What follows.
    pub shape: Shape,
    /// Steps of the whole run.
    pub total_steps: u64,
}

impl Schedule {
    /// The learning rate of step `step`. After the warm-up of `N` of `T` steps the progress of Umbra's own shapes is
    /// `p = (s−N+1)/(T−N)`, so that the last step ends at the minimum.
    pub fn at(&self, step: u64) -> f64 {
        match self.shape {
            Shape::DeepSpeed(engine) => engine.at(self.lr, step),
            Shape::Transformers { curve, stride } => self.lr * self.multiplier(curve, step.saturating_mul(stride)),
            _ => self.own(step),
        }
    }

    /// β₁ and β₂ of step `step`, where the schedule moves them.
    pub fn betas(&self, step: u64) -> Option<[f64; 2]> {
        match self.shape {
            Shape::DeepSpeed(engine) => engine.betas(step),
            _ => None,
        }
    }

    fn own(&self, step: u64) -> f64 {
        let (n, t) = (self.warmup_steps, self.total_steps.max(1));
        if step < n {
            return self.lr * ((step + 1) as f64 / n as f64).min(1.0);
        }
        let fall = |from: f64, steps: f64| (from / steps).clamp(0.0, 1.0);
        let p = fall((step - n + 1) as f64, t.saturating_sub(n).max(1) as f64);
        let share = match self.shape {
            Shape::Linear => 1.0 - p,
            Shape::Cosine => (1.0 + (PI * p).cos()) / 2.0,
            Shape::Wsd { decay_steps } => {
                let start = t.saturating_sub(decay_steps);
                1.0 - fall((step + 1).saturating_sub(start) as f64, decay_steps.max(1) as f64)
            }
            Shape::Constant | Shape::Transformers { .. } | Shape::DeepSpeed(_) => 1.0,
        };
        self.min_lr + (self.lr - self.min_lr) * share
    }

    /// λ(j): j/N in the warm-up of N steps, then the curve.
    fn multiplier(&self, curve: Curve, j: u64) -> f64 {
        let (n, t) = (self.warmup_steps, self.total_steps);
        if j < n {
            return j as f64 / n as f64;
        }
        let falling = t.saturating_sub(n).max(1) as f64;
        match curve {
            Curve::Constant => 1.0,
            Curve::Linear => t.saturating_sub(j) as f64 / falling,
            Curve::Cosine => (0.5 * (1.0 + (PI * ((j - n) as f64 / falling)).cos())).max(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(shape: Shape) -> Vec<f64> {
        let s = Schedule { lr: 1.0, min_lr: 0.2, warmup_steps: 2, shape, total_steps: 10 };
        (0..10).map(|i| (s.at(i) * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn golden_values() {
        assert_eq!(rates(Shape::Constant), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(Shape::Linear), [0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]);
        let cosine = rates(Shape::Cosine);
        assert_eq!((cosine[5], cosine[9]), (0.6, 0.2)); // p = 1/2 and 1
        assert_eq!(cosine[2], 0.969552); // 0.2 + 0.8 (1 + cos(π/8))/2
        let wsd = rates(Shape::Wsd { decay_steps: 4 });
        assert_eq!(wsd, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]);
    }

    #[test]
    fn transformers_starts_at_zero_and_may_be_stepped_for_each_lane() {
        let rates = |curve, stride| {
            let shape = Shape::Transformers { curve, stride };
            let s = Schedule { lr: 2.0, min_lr: 0.0, warmup_steps: 4, shape, total_steps: 8 };
            (0..8).map(|i| (s.at(i) * 1e6).round() / 1e6).collect::<Vec<_>>()
        };
        assert_eq!(rates(Curve::Constant, 1), [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]);
        assert_eq!(rates(Curve::Linear, 1), [0.0, 0.5, 1.0, 1.5, 2.0, 1.5, 1.0, 0.5]);
        // (1 + cos π/4)/2 and its mirror image.
        assert_eq!(rates(Curve::Cosine, 1), [0.0, 0.5, 1.0, 1.5, 2.0, 1.707107, 1.0, 0.292893]);
        // Two lanes: the run is over at half its steps; linear stays at 0 and cosine rises again.
        assert_eq!(rates(Curve::Linear, 2), [0.0, 1.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(rates(Curve::Cosine, 2), [0.0, 1.0, 2.0, 1.0, 0.0, 1.0, 2.0, 1.0]);
    }
}
