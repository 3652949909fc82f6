//! The curves of a report: which there are, and what of a run each shows.

use super::read::{Run, Step};
use crate::svg::{Chart, Curve, Point, Unit, smooth};

/// A noisy quantity is smoothed over about this share of the steps, which leaves its course visible and not the rows.
const SMOOTH_SHARE: usize = 30;

/// A quantity that every step reports.
pub(super) struct Quantity {
    /// Name of its file.
    pub(super) file: &'static str,
    title: &'static str,
    /// What it says, in a sentence.
    pub(super) note: &'static str,
    unit: Unit,
    from_zero: bool,
    noisy: bool,
    value: fn(&Step) -> Option<f64>,
    plan: Option<fn(&Step) -> Option<f64>>,
}

const PLAIN: Quantity = Quantity {
    file: "",
    title: "",
    note: "",
    unit: Unit::Plain,
    from_zero: true,
    noisy: false,
    value: |_| None,
    plan: None,
};

/// Every curve, in the order of the page.
pub(super) const QUANTITIES: [Quantity; 7] = [
    Quantity {
        file: "loss",
        title: "Training loss",
        note: "Mean over the supervised tokens of each step.",
        from_zero: false,
        noisy: true,
        value: |s| s.loss,
        ..PLAIN
    },
    Quantity {
        file: "grad_norm",
        title: "Gradient norm",
        note: "Of the whole gradient, before clipping.",
        noisy: true,
        value: |s| s.grad_norm,
        ..PLAIN
    },
    Quantity {
        file: "swallowed",
        title: "Swallowed updates",
        note: "Share of the weight updates that bf16 would round away. A policy that keeps fp32 weights loses none of them.",
        unit: Unit::Share,
        value: |s| s.swallowed,
        ..PLAIN
    },
    Quantity {
        file: "arrived",
        title: "Movement that arrived",
        note: "Movement of the weights over the movement the optimizer asked for: at 100 % nothing is lost.",
        unit: Unit::Share,
        value: |s| s.arrived,
        ..PLAIN
    },
    Quantity { file: "lr", title: "Learning rate", note: "As each step used it.", value: |s| s.lr, ..PLAIN },
    Quantity {
        file: "tokens_per_s",
        title: "Tokens per second",
        note: "All ranks together, without padding.",
        unit: Unit::Count,
        noisy: true,
        value: |s| s.tps,
        ..PLAIN
    },
    Quantity {
        file: "memory",
        title: "Memory of the largest rank, GiB",
        note: "Peak resident memory; dotted, what the start-up table predicted.",
        unit: Unit::Gib,
        value: |s| s.mem_gib,
        plan: Some(|s| s.mem_plan_gib),
        ..PLAIN
    },
];

impl Quantity {
    /// Its chart of these runs, under these names.
    pub(super) fn chart(&self, runs: &[Run], names: &[String]) -> Chart {
        let reach = if self.noisy { reach(runs) } else { 0 };
        let curve = |(run, name): (&Run, &String)| {
            let of = |value: fn(&Step) -> Option<f64>| -> Vec<Point> {
                run.steps.iter().map(|step| (step.step as f64, value(step))).collect()
            };
            let points = of(self.value);
            let smoothed = if reach > 0 { smooth(&points, reach) } else { Vec::new() };
            Curve { name: name.clone(), smoothed, plan: self.plan.map(of).unwrap_or_default(), points }
        };
        let curves = runs.iter().zip(names).map(curve).collect();
        Chart { title: self.title.to_owned(), unit: self.unit, from_zero: self.from_zero, curves }
    }

    /// How the curves of these runs were smoothed, if they were.
    pub(super) fn smoothing(&self, runs: &[Run]) -> Option<String> {
        let reach = reach(runs);
        (self.noisy && reach > 0).then(|| format!("running mean over {} steps", 2 * reach + 1))
    }
}

/// Steps on both sides over which the longest of these runs is smoothed.
fn reach(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.steps.len()).max().unwrap_or(0) / SMOOTH_SHARE / 2
}
