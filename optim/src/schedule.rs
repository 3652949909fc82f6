//! The learning rate as a pure function of the step. Never scaled by world size.

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
}

/// A schedule: step `s` of `total_steps`, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The peak.
    pub lr: f64,
    /// What the shape ends at.
    pub min_lr: f64,
    /// Steps of linear warm-up: step `s` uses `lr·min(1, (s+1)/N)`.
    pub warmup_steps: u64,
    /// What follows.
    pub shape: Shape,
    /// Steps of the whole run.
    pub total_steps: u64,
}

impl Schedule {
    /// The learning rate of step `step`. After the warm-up of `N` of `T` steps the progress is `p = (s−N+1)/(T−N)`, so
    /// that the last step ends at the minimum.
    pub fn at(&self, step: u64) -> f64 {
        let (n, t) = (self.warmup_steps, self.total_steps.max(1));
        if step < n {
            return self.lr * ((step + 1) as f64 / n as f64).min(1.0);
        }
        let fall = |from: f64, steps: f64| (from / steps).clamp(0.0, 1.0);
        let p = fall((step - n + 1) as f64, t.saturating_sub(n).max(1) as f64);
        let share = match self.shape {
            Shape::Constant => 1.0,
            Shape::Linear => 1.0 - p,
            Shape::Cosine => (1.0 + (std::f64::consts::PI * p).cos()) / 2.0,
            Shape::Wsd { decay_steps } => {
                let start = t.saturating_sub(decay_steps);
                1.0 - fall((step + 1).saturating_sub(start) as f64, decay_steps.max(1) as f64)
            }
        };
        self.min_lr + (self.lr - self.min_lr) * share
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
}
