//! DeepSpeed's schedules (deepspeed/runtime/lr_schedules.py).
//!
//! The engine's counter i starts at −1 and is raised after each optimizer step, so step k is made at f(k − 1). Step 0 is
//! made at the value a schedule sets when it is built, or, where it sets none, at the optimizer's own rate.

use std::f64::consts::PI;

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DeepSpeed {
    /// Up to the ramp's end, and on at it.
    WarmupLr {
        /// The warm-up.
        ramp: Ramp,
        /// What step 0 is made at.
        first: First,
    },
    /// Up to the ramp's end, and down to its start in a straight line.
    WarmupDecayLr {
        /// The warm-up.
        ramp: Ramp,
        /// What step 0 is made at.
        first: First,
        /// T: where the line ends.
        total: u64,
    },
    /// Shares of the optimizer's own rate: up, and down along half a cosine.
    WarmupCosineLr {
        /// The warm-up, to 1.
        ramp: Ramp,
        /// What step 0 is made at; the schedule's own value is 0.
        first: First,
        /// T: where the cosine ends.
        total: u64,
        /// The share it ends at.
        floor: f64,
        /// Whether it stays there beyond T (from 0.19.3 on) or rises again.
        clamped: bool,
    },
    /// Up and down once, then a decay.
    OneCycle(OneCycle),
    /// A rate that grows without end, to find the largest that trains.
    LrRangeTest {
        /// Where it starts.
        min: f64,
        /// Steps of one increase.
        size: u64,
        /// An increase as a multiple of the start.
        rate: f64,
        /// Whether it grows in stairs.
        staircase: bool,
    },
}

/// What step 0 is made at under the three schedules with a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// The schedule's initial value (from 0.15.3 on).
    Initial,
    /// The optimizer's own rate: nothing was set before the first step (earlier versions).
    Optimizer,
}

/// The rise of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ramp {
    /// Its start.
    pub min: f64,
    /// Its end.
    pub max: f64,
    /// Its steps; fewer than two count as two.
    pub steps: u64,
    /// Its form.
    pub rise: Rise,
}

/// The form of a rise over N steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rise {
    /// ln(i + 1)/ln N.
    Log,
    /// i/N.
    Linear,
}

impl Ramp {
    fn steps(&self) -> u64 {
        self.steps.max(2)
    }

    /// A value between start and end.
    fn between(&self, share: f64) -> f64 {
        self.min + (self.max - self.min) * share
    }

    /// The value at i, during the ramp.
    fn at(&self, i: u64) -> Option<f64> {
        let n = self.steps();
        let share = match self.rise {
            Rise::Log => 1.0 / (n as f64).ln() * ((i + 1) as f64).ln(),
            Rise::Linear => i as f64 / n as f64,
        };
        (i < n).then(|| self.between(share))
    }
}

/// A cycle: the rate rises and falls, β₁ the other way round, and both decay afterwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneCycle {
    /// The rate's bounds.
    pub lr: [f64; 2],
    /// Steps of the rise and of the fall.
    pub sizes: [u64; 2],
    /// Stairs of the rise and of the fall; 0 is none (versions before 0.19.6 know no other).
    pub stairs: [u64; 2],
    /// Steps of one unit of decay; 0 is no decay.
    pub decay_size: u64,
    /// How fast the rate decays.
    pub decay_rate: f64,
    /// β₁'s course; none leaves both β alone.
    pub momentum: Option<Momentum>,
}

/// The course of β₁ in a cycle. β₂ is [`Momentum::BETA2`] all along.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    /// Its bounds; β₁ is at the upper one where the rate is at its lower one, but for step 0.
    pub bounds: [f64; 2],
    /// How fast it grows after the cycle.
    pub decay_rate: f64,
}

impl Momentum {
    /// β₂ while β₁ is moved.
    pub const BETA2: f64 = 0.99;
}

impl OneCycle {
    fn total(&self) -> u64 {
        self.sizes[0] + self.sizes[1]
    }

    /// Where between its bounds the rate is at i, from 0 to 1 and back.
    fn scale(&self, i: u64) -> f64 {
        let [first, second] = self.sizes.map(|n| n as f64);
        let (at, total) = ((i + 1) as f64, first + second);
        let (x, top) = (1.0 + at / total - (1.0 + at / total).floor(), first / total);
        let (scale, stairs) =
            if x <= top { (x / top, self.stairs[0]) } else { ((x - 1.0) / (top - 1.0), self.stairs[1]) };
        if stairs == 0 {
            return scale;
        }
        // Counted in whole steps, because the quotient may lie just below a stair.
        let (at, stairs) = (at % total, stairs as f64);
        let position = if at <= first { at * stairs / first } else { (total - at) * stairs / second };
        position.floor() / stairs
    }

    /// Units of decay at i; none during the cycle.
    fn decayed(&self, i: u64) -> Option<f64> {
        let after = (i + 1).checked_sub(self.total()).filter(|after| *after > 0)?;
        Some(if self.decay_size == 0 { 0.0 } else { after as f64 / self.decay_size as f64 })
    }

    fn at(&self, i: u64) -> f64 {
        let [min, max] = self.lr;
        match self.decayed(i) {
            None => min + (max - min) * self.scale(i),
            Some(units) => min / (1.0 + self.decay_rate * units),
        }
    }

    fn betas(&self, step: u64) -> Option<[f64; 2]> {
        let Momentum { bounds: [min, max], decay_rate } = self.momentum?;
        let beta1 = match step.checked_sub(1) {
            None => min,
            Some(i) => match self.decayed(i) {
                None => max - (max - min) * self.scale(i),
                Some(units) => max * (1.0 + decay_rate * units),
            },
        };
        Some([beta1, Momentum::BETA2])
    }
}

impl DeepSpeed {
    /// The rate of step `step`, `lr` being the optimizer's own.
    pub(super) fn at(&self, lr: f64, step: u64) -> f64 {
        match step.checked_sub(1) {
            None => self.first(lr),
            Some(i) => self.after(lr, i),
        }
    }

    /// β₁ and β₂ of step `step`, where they are moved.
    pub(super) fn betas(&self, step: u64) -> Option<[f64; 2]> {
        match self {
            DeepSpeed::OneCycle(cycle) => cycle.betas(step),
            _ => None,
        }
    }

    fn first(&self, lr: f64) -> f64 {
        match *self {
            DeepSpeed::WarmupLr { first: First::Optimizer, .. }
            | DeepSpeed::WarmupDecayLr { first: First::Optimizer, .. }
            | DeepSpeed::WarmupCosineLr { first: First::Optimizer, .. } => lr,
            DeepSpeed::WarmupLr { ramp, .. } | DeepSpeed::WarmupDecayLr { ramp, .. } => ramp.min,
            DeepSpeed::WarmupCosineLr { .. } => 0.0,
            DeepSpeed::OneCycle(cycle) => cycle.lr[0],
            DeepSpeed::LrRangeTest { min, .. } => min,
        }
    }

    /// f(i).
    fn after(&self, lr: f64, i: u64) -> f64 {
        match *self {
            DeepSpeed::WarmupLr { ramp, .. } => ramp.at(i).unwrap_or(ramp.max),
            DeepSpeed::WarmupDecayLr { ramp, total, .. } => ramp.at(i).unwrap_or_else(|| {
                let falling = total.saturating_sub(ramp.steps()).max(1) as f64;
                ramp.between(total.saturating_sub(i) as f64 / falling)
            }),
            DeepSpeed::WarmupCosineLr { ramp, total, floor, clamped, .. } => {
                let share = ramp.at(i).unwrap_or_else(|| {
                    let falling = total.saturating_sub(ramp.steps()).max(1) as f64;
                    let p = (i - ramp.steps() + 1) as f64 / falling;
                    let p = if clamped { p.min(1.0) } else { p };
                    (floor + (1.0 - floor) * ((1.0 + (PI * p).cos()) / 2.0)).max(0.0)
                });
                lr * share
            }
            DeepSpeed::OneCycle(cycle) => cycle.at(i),
            DeepSpeed::LrRangeTest { min, size, rate, staircase } => {
                let interval = (i + 1) as f64 / size as f64;
                min * (1.0 + rate * if staircase { interval.floor() } else { interval })
            }
        }
    }
}

#[cfg(test)]
mod tests;
