//! The learning rate's course: what may be said of it, and the schedule of a run of a known length.

use super::params::{self, ScheduleParams};
use super::{RunPlan, Warmup};
use crate::cli::{ScheduleKind, ScheduleStepping, TrainArgs};
use crate::config::Version;
use crate::{Failure, Result};
use optim::schedule::deepspeed::{DeepSpeed, First, Momentum, OneCycle, Ramp, Rise};
use optim::{Curve, Schedule, Shape};

/// Whether a schedule is one of DeepSpeed's, which have parameters of their own.
pub(super) fn is_deepspeed(kind: ScheduleKind) -> bool {
    !params::table(kind).is_empty()
}

/// Whether it is one of transformers'.
fn is_transformers(kind: ScheduleKind) -> bool {
    matches!(kind, ScheduleKind::HfConstant | ScheduleKind::HfLinear | ScheduleKind::HfCosine)
}

/// Whether `--warmup-steps` and `--warmup-ratio` say how it warms up.
pub(super) fn takes_warmup(kind: ScheduleKind, params: &ScheduleParams) -> bool {
    !is_deepspeed(kind) || params.is_auto("warmup_num_steps")
}

/// Refuses flags that a schedule does not have.
pub(super) fn written(args: &TrainArgs, params: &ScheduleParams) -> Result<()> {
    let kind = args.schedule.unwrap_or(super::defaults::SCHEDULE);
    let refused = |flag: &str, value: String, expected: &str, hint: &str| {
        Err(Failure::usage(format!("{flag} {value} has no meaning under --schedule {kind}"))
            .at(flag)
            .expected(expected)
            .found(format!("--schedule {kind}"))
            .hint(hint))
    };
    if let Some(decay) = args.decay_steps.filter(|_| kind != ScheduleKind::Wsd) {
        let hint = "add --schedule wsd, or leave --decay-steps out";
        return refused("--decay-steps", decay.to_string(), "--schedule wsd", hint);
    }
    if let Some(min) = args.min_lr.filter(|_| is_transformers(kind) || is_deepspeed(kind)) {
        let hint = match is_deepspeed(kind) {
            true => "leave --min-lr out: this schedule's bounds are set by --schedule-params",
            false => "leave --min-lr out: this schedule ends at 0; --schedule linear and cosine end where you say",
        };
        return refused("--min-lr", min.to_string(), "--schedule linear, cosine or wsd", hint);
    }
    let steps = args.warmup_steps.map(|n| ("--warmup-steps", n.to_string()));
    let warmup = steps.or(args.warmup_ratio.map(|share| ("--warmup-ratio", share.to_string())));
    if let Some((flag, value)) = warmup.filter(|_| !takes_warmup(kind, params)) {
        let has = params::table(kind).iter().any(|param| param.name == "warmup_num_steps");
        let hint = match has {
            true => "--schedule-params warmup_num_steps=auto takes the warm-up from it; else leave it out",
            false => "leave it out: this schedule has no warm-up",
        };
        return refused(flag, value, "--schedule-params warmup_num_steps=auto, or another schedule", hint);
    }
    if args.schedule_stepping == Some(ScheduleStepping::PerLane) && !is_transformers(kind) {
        let expected = "--schedule hf-constant, hf-linear or hf-cosine";
        let hint =
            "leave --schedule-stepping out: only Accelerate steps, and only schedules of that kind, for each lane";
        return refused("--schedule-stepping", "per-lane".to_owned(), expected, hint);
    }
    Ok(())
}

impl RunPlan {
    /// Warm-up in steps for a run of `total` steps. A share is rounded up, in f64 as transformers does.
    ///
    /// # Errors
    /// A usage failure if the warm-up is longer than the run.
    pub fn warmup_steps(&self, total: u64) -> Result<u64> {
        match self.warmup {
            Warmup::Ratio(ratio) => Ok(((ratio * total as f64).ceil() as u64).min(total)),
            Warmup::Steps(steps) if steps <= total => Ok(steps),
            Warmup::Steps(steps) => Err(Failure::usage("the warm-up is longer than the run")
                .at("--warmup-steps")
                .expected(format!("at most {total} steps, the length of the run"))
                .found(steps)
                .hint("a longer run, a shorter warm-up, or --warmup-ratio, which fits any length")),
        }
    }

    /// Steps over which `wsd` decays in a run of `total` steps: `--decay-steps`, or the last 20 % rounded up, as far as
    /// the warm-up leaves room.
    ///
    /// # Errors
    /// A usage failure if warm-up and decay together are longer than the run.
    pub fn decay_steps(&self, total: u64) -> Result<u64> {
        let warmup = self.warmup_steps(total)?;
        match self.decay_steps {
            None => Ok(total.div_ceil(5).min(total - warmup)),
            Some(decay) if decay <= total - warmup => Ok(decay),
            Some(decay) => Err(Failure::usage("warm-up and decay together are longer than the run")
                .at("--decay-steps")
                .expected(format!("at most {} steps ({total} less {warmup} of warm-up)", total - warmup))
                .found(decay)
                .hint("a longer run, or fewer steps of decay")),
        }
    }

    /// The learning rate of a run of `total` steps.
    ///
    /// # Errors
    /// A usage failure if warm-up and decay do not fit the run, or a momentum that grows reaches 1 in it.
    pub fn schedule(&self, total: u64) -> Result<Schedule> {
        let stride = match self.schedule_stepping {
            ScheduleStepping::Once => 1,
            ScheduleStepping::PerLane => self.lanes as u64,
        };
        let transformers = |curve| Shape::Transformers { curve, stride };
        let shape = match self.schedule {
            ScheduleKind::Constant => Shape::Constant,
            ScheduleKind::Linear => Shape::Linear,
            ScheduleKind::Cosine => Shape::Cosine,
            ScheduleKind::Wsd => Shape::Wsd { decay_steps: self.decay_steps(total)? },
            ScheduleKind::HfConstant => transformers(Curve::Constant),
            ScheduleKind::HfLinear => transformers(Curve::Linear),
            ScheduleKind::HfCosine => transformers(Curve::Cosine),
            ScheduleKind::WarmupLr
            | ScheduleKind::WarmupDecayLr
            | ScheduleKind::WarmupCosineLr
            | ScheduleKind::OneCycle
            | ScheduleKind::LrRangeTest => Shape::DeepSpeed(self.deepspeed(total)?),
        };
        let warmup_steps = self.warmup_steps(total)?;
        let schedule = Schedule { lr: self.lr, min_lr: self.min_lr, warmup_steps, shape, total_steps: total };
        match schedule.betas(total.saturating_sub(1)) {
            Some([beta1, _]) if beta1 >= 1.0 => Err(Failure::usage("the momentum grows to 1 or more in this run")
                .at("--schedule-params decay_mom_rate")
                .expected("a momentum below 1 at the last step")
                .found(beta1)
                .hint("a smaller decay_mom_rate or a shorter run")),
            _ => Ok(schedule),
        }
    }

    /// One of DeepSpeed's schedules (deepspeed/runtime/lr_schedules.py), with the defaults of the assumed version.
    fn deepspeed(&self, run: u64) -> Result<DeepSpeed> {
        let params = &self.schedule_params;
        let version = self.assume.deepspeed;
        let first = if version >= Version(0, 15, 3) { First::Initial } else { First::Optimizer };
        let total = params.whole("total_num_steps", run, run);
        let rate = |name: &str, default: f64, auto: f64| params.number(name, default, auto);
        Ok(match self.schedule {
            ScheduleKind::WarmupDecayLr => {
                let max = rate("warmup_max_lr", 1e-3, self.lr);
                DeepSpeed::WarmupDecayLr { ramp: self.ramp(max, run)?, first, total }
            }
            ScheduleKind::WarmupCosineLr => DeepSpeed::WarmupCosineLr {
                ramp: Ramp { min: rate("warmup_min_ratio", 0.0, 0.0), ..self.ramp(1.0, run)? },
                first,
                total,
                floor: rate("cos_min_ratio", 1e-4, 1e-4),
                clamped: version >= Version(0, 19, 3),
            },
            ScheduleKind::OneCycle => DeepSpeed::OneCycle(self.one_cycle()),
            ScheduleKind::LrRangeTest => DeepSpeed::LrRangeTest {
                min: rate("lr_range_test_min_lr", 1e-3, 1e-3),
                size: params.whole("lr_range_test_step_size", 2000, 2000),
                rate: rate("lr_range_test_step_rate", 1.0, 1.0),
                staircase: params.switch("lr_range_test_staircase", false),
            },
            _ => {
                // Before 0.17.2 the optimizer's own rate was not looked at.
                let default = if version >= Version(0, 17, 2) { self.lr } else { 1e-3 };
                DeepSpeed::WarmupLr { ramp: self.ramp(rate("warmup_max_lr", default, self.lr), run)?, first }
            }
        })
    }

    fn ramp(&self, max: f64, run: u64) -> Result<Ramp> {
        let params = &self.schedule_params;
        // At least one step, as transformers fills it in.
        let auto = if params.is_auto("warmup_num_steps") { self.warmup_steps(run)?.max(1) } else { 1 };
        Ok(Ramp {
            min: params.number("warmup_min_lr", 0.0, 0.0),
            max,
            steps: params.whole("warmup_num_steps", 1000, auto),
            rise: params.rise("warmup_type", Rise::Log),
        })
    }

    fn one_cycle(&self) -> OneCycle {
        let params = &self.schedule_params;
        let number = |name: &str, default: f64| params.number(name, default, default);
        let whole = |name: &str, default: u64| params.whole(name, default, default);
        let first = whole("cycle_first_step_size", 2000);
        let stairs = whole("cycle_first_stair_count", 0);
        let stairs = [stairs, whole("cycle_second_stair_count", stairs)];
        let momentum = Momentum {
            bounds: [number("cycle_min_mom", 0.8), number("cycle_max_mom", 0.9)],
            decay_rate: number("decay_mom_rate", 0.0),
        };
        OneCycle {
            lr: [number("cycle_min_lr", 0.0), number("cycle_max_lr", 0.0)],
            sizes: [first, whole("cycle_second_step_size", first)],
            // Earlier versions read the counts and do nothing with them.
            stairs: if self.assume.deepspeed >= Version(0, 19, 6) { stairs } else { [0, 0] },
            decay_size: whole("decay_step_size", 0),
            decay_rate: number("decay_lr_rate", 0.0),
            momentum: params.switch("cycle_momentum", true).then_some(momentum),
        }
    }

    /// The schedule in a few words, for people: `1e-5, cosine to 1e-6, 10 steps of warm-up`.
    pub fn schedule_in_words(&self, schedule: &Schedule) -> String {
        if is_deepspeed(self.schedule) {
            let version = self.assume.deepspeed;
            return format!("{} of DeepSpeed {version}: {}", self.schedule, self.schedule_params);
        }
        let number = crate::table::number;
        let end = if self.min_lr > 0.0 { format!(" to {}", number(self.min_lr)) } else { String::new() };
        let warmup = match schedule.warmup_steps {
            0 => String::new(),
            n => format!(", {n} steps of warm-up"),
        };
        let stepping = match self.schedule_stepping {
            ScheduleStepping::Once => String::new(),
            ScheduleStepping::PerLane => format!(", {} steps of it a step", self.lanes),
        };
        format!("{}, {}{end}{warmup}{stepping}", number(self.lr), self.schedule)
    }
}

#[cfg(test)]
mod tests;
