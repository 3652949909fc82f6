//! The first steps, the turns and the ends, worked out by hand. Whole sequences are compared where schedules are resolved.

use super::*;

const RAMP: Ramp = Ramp { min: 0.0, max: 1e-3, steps: 10, rise: Rise::Linear };

fn close(got: f64, exact: f64) {
    assert!((got - exact).abs() <= 1e-14 * exact.abs(), "{got:e} is not {exact:e}");
}

fn all(schedule: DeepSpeed, lr: f64, expected: &[(u64, f64)]) {
    expected.iter().for_each(|(step, rate)| close(schedule.at(lr, *step), *rate));
}

#[test]
fn the_rate_lags_a_step_behind() {
    let first = First::Initial;
    let ramps = [DeepSpeed::WarmupLr { ramp: RAMP, first }, DeepSpeed::WarmupDecayLr { ramp: RAMP, first, total: 20 }];
    for schedule in ramps {
        all(schedule, 7.0, &[(0, 0.0), (1, 0.0), (2, 1e-4), (3, 2e-4), (10, 9e-4), (11, 1e-3)]);
    }
    all(ramps[0], 7.0, &[(12, 1e-3), (500, 1e-3)]);
    all(ramps[1], 7.0, &[(12, 9e-4), (20, 1e-4), (21, 0.0), (500, 0.0)]);
    // Before 0.15.3 nothing is set before the first step.
    let first = First::Optimizer;
    all(DeepSpeed::WarmupLr { ramp: RAMP, first }, 7.0, &[(0, 7.0), (1, 0.0), (2, 1e-4)]);
    let log = Ramp { rise: Rise::Log, min: 1e-4, ..RAMP };
    all(
        DeepSpeed::WarmupLr { ramp: log, first: First::Initial },
        7.0,
        &[(0, 1e-4), (1, 1e-4), (2, 1e-4 + 9e-4 * 2f64.ln() / 10f64.ln()), (10, 1e-3)],
    );
    // Fewer than two steps of warm-up count as two.
    all(DeepSpeed::WarmupLr { ramp: Ramp { steps: 0, ..RAMP }, first }, 7.0, &[(1, 0.0), (2, 5e-4), (3, 1e-3)]);
}

#[test]
fn the_cosine_is_a_share_of_the_optimizers_rate() {
    let ramp = Ramp { min: 0.2, max: 1.0, steps: 4, rise: Rise::Linear };
    let cosine = |first, clamped| DeepSpeed::WarmupCosineLr { ramp, first, total: 12, floor: 0.1, clamped };
    let new = cosine(First::Initial, true);
    // i = 4 is one step into the cosine of eight.
    let share = |p: f64| 0.1 + 0.9 * (1.0 + (PI * p).cos()) / 2.0;
    all(new, 2.0, &[(0, 0.0), (1, 0.4), (2, 0.8), (4, 1.6), (5, 2.0 * share(0.125)), (8, 2.0 * share(0.5)), (12, 0.2)]);
    all(new, 2.0, &[(13, 0.2), (100, 0.2)]);
    let old = cosine(First::Optimizer, false);
    all(old, 2.0, &[(0, 2.0), (1, 0.4), (12, 0.2), (13, 2.0 * share(1.125)), (20, 2.0)]);
}

#[test]
fn a_cycle_rises_falls_and_decays_and_momentum_mirrors_it() {
    let cycle = OneCycle {
        lr: [1.0, 3.0],
        sizes: [4, 2],
        stairs: [0, 0],
        decay_size: 2,
        decay_rate: 0.5,
        momentum: Some(Momentum { bounds: [0.8, 0.9], decay_rate: 0.01 }),
    };
    let schedule = DeepSpeed::OneCycle(cycle);
    all(schedule, 7.0, &[(0, 1.0), (1, 1.5), (2, 2.0), (4, 3.0), (5, 2.0), (6, 1.0), (7, 1.0 / 1.25), (8, 1.0 / 1.5)]);
    let beta1 = |step| schedule.betas(step).unwrap()[0];
    for (step, expected) in [(0, 0.8), (1, 0.875), (2, 0.85), (4, 0.8), (5, 0.85), (6, 0.9), (7, 0.9 * 1.005)] {
        close(beta1(step), expected);
        assert_eq!(schedule.betas(step).unwrap()[1], 0.99);
    }
    let still = OneCycle { decay_size: 0, momentum: None, ..cycle };
    all(DeepSpeed::OneCycle(still), 7.0, &[(6, 1.0), (7, 1.0), (99, 1.0)]);
    assert_eq!(DeepSpeed::OneCycle(still).betas(3), None);
    // Two stairs up (at the middle and at the top), one down.
    let stairs = DeepSpeed::OneCycle(OneCycle { stairs: [2, 1], ..cycle });
    all(stairs, 7.0, &[(1, 1.0), (2, 2.0), (3, 2.0), (4, 3.0), (5, 1.0), (6, 1.0)]);
}

#[test]
fn the_range_test_grows() {
    let test = |staircase| DeepSpeed::LrRangeTest { min: 1.0, size: 4, rate: 2.0, staircase };
    all(test(false), 7.0, &[(0, 1.0), (1, 1.5), (2, 2.0), (4, 3.0), (400, 201.0)]);
    all(test(true), 7.0, &[(0, 1.0), (3, 1.0), (4, 3.0), (7, 3.0), (8, 5.0)]);
}
