//! Aligned tables and human units, and the start-up table made of them.

use spmd_core::precision::Rounding;
use spmd_core::{Policy, Precision};
use std::fmt::Write;

/// Which side a column's text is flush with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Renders rows as columns two spaces apart, each as wide as its widest cell; no line ends in spaces. Columns beyond
/// `aligns` are flush left. A row may have fewer cells than the others.
pub fn render(aligns: &[Align], rows: &[Vec<String>]) -> String {
    let width = |s: &str| s.chars().count();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> =
        (0..columns).map(|c| rows.iter().filter_map(|row| row.get(c)).map(|s| width(s)).max().unwrap_or(0)).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c] - width(cell));
            let gap = if c == 0 { "" } else { "  " };
            line += gap;
            match aligns.get(c) {
                Some(Align::Right) => line.extend([&pad, cell.as_str()]),
                _ => line.extend([cell.as_str(), &pad]),
            }
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

/// Bytes in binary units with three digits or so: `512 B`, `1.50 KiB`, `128 MiB`, `1.25 GiB`.
pub fn bytes(n: u64) -> String {
    let (mut x, mut unit) = (n as f64, "B");
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if x < 1023.5 {
            break;
        }
        (x, unit) = (x / 1024.0, larger);
    }
    if unit == "B" { format!("{n} B") } else { format!("{} {unit}", three_digits(x)) }
}

/// A count in decimal units: `999`, `12.3k`, `134.5M`, `7.2B`.
pub fn count(n: u64) -> String {
    let (scale, unit) = match n {
        0..=9_999 => return n.to_string(),
        10_000..=999_949 => (1e3, "k"),
        999_950..=999_949_999 => (1e6, "M"),
        _ => (1e9, "B"),
    };
    format!("{:.1}{unit}", n as f64 / scale)
}

fn three_digits(x: f64) -> String {
    match x {
        x if x < 9.995 => format!("{x:.2}"),
        x if x < 99.95 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    }
}

/// A learning rate or another small number, short: `1e-5`, `0.002`, `1`.
pub fn number(x: f64) -> String {
    if x != 0.0 && (x.abs() < 1e-3 || x.abs() >= 1e6) { format!("{x:e}") } else { format!("{x}") }
}

/// What one ZeRO stage takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageFacts {
    /// 0 to 3.
    pub stage: u8,
    /// Bytes of the largest rank, the process itself left out.
    pub bytes: u64,
    /// Bytes it sends to other ranks in a step.
    pub sent: u64,
    /// Whether it is the run's.
    pub chosen: bool,
}

/// What the start-up table says about a run.
#[derive(Debug, Clone, PartialEq)]
pub struct StartupFacts {
    /// `tiny (embedded)` or the folder.
    pub model: String,
    /// Family and geometry in a few words: `Mistral, 8 layers, hidden 512, 8 heads, 4 kv heads, window 256`.
    pub shape: String,
    /// Parameters; a tied weight counts once.
    pub params: u64,
    /// Precision policy.
    pub policy: Policy,
    /// Its roles, with what was set beside it.
    pub precision: Precision,
    /// What steps the weights, in words.
    pub optimizer: String,
    /// Ranks.
    pub world: usize,
    /// Ranks, stage, groups and lanes in words.
    pub layout: String,
    /// What each stage would take; empty where there is nothing to choose.
    pub stages: Vec<StageFacts>,
    /// Whether the layout keeps the bits of its lanes.
    pub same_bits: bool,
    /// Canonical ranks.
    pub lanes: usize,
    /// What computes, its threads included: `Device::name`.
    pub device: String,
    /// Where rows come from.
    pub data: String,
    /// How many rows there are.
    pub rows: u64,
    /// Rows that were cut to `--seq-len`.
    pub cut: u64,
    /// Rows in which nothing is to be predicted.
    pub without_target: u64,
    /// Longest row in tokens.
    pub seq_len: usize,
    /// Rows of a micro-batch, per lane.
    pub micro_batch: usize,
    /// Micro-batches of a step.
    pub accum: usize,
    /// Most tokens in a step, all ranks.
    pub tokens_per_step: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Passes over the data.
    pub epochs: f64,
    /// The learning rate's course in words: `1e-5, cosine to 0, 10 steps of warm-up`.
    pub schedule: String,
    /// What the largest rank holds, by segment, in bytes.
    pub segments: Vec<(String, u64)>,
    /// Memory of the process before any of it (code, libraries, MPI), in bytes, as measured.
    pub baseline: Option<u64>,
    /// What the largest rank may still have, in bytes.
    pub available: Option<u64>,
    /// Where results go.
    pub out: String,
    /// Whether this is the preset of a run without model and data.
    pub preset: bool,
}

impl StartupFacts {
    /// Predicted resident bytes of the largest rank: every segment and the baseline.
    pub fn total(&self) -> u64 {
        self.segments.iter().map(|(_, n)| n).sum::<u64>() + self.baseline.unwrap_or(0)
    }
}

/// The table shown before the first step: what will happen, in which precision, and what memory it takes.
pub fn startup_table(facts: &StartupFacts) -> String {
    let noted = |n: u64, what: &str| if n == 0 { String::new() } else { format!(", {n} {what}") };
    let notes = noted(facts.cut, "cut") + &noted(facts.without_target, "without a target");
    let mut rows = vec![
        vec!["model".to_owned(), format!("{}, {} parameters", facts.model, count(facts.params))],
        vec![String::new(), facts.shape.clone()],
        vec![
            "data".to_owned(),
            format!("{}, {} rows of up to {} tokens{notes}", facts.data, facts.rows, facts.seq_len),
        ],
        vec!["policy".to_owned(), format!("{}: {}", facts.policy, facts.policy.about())],
    ];
    for line in roles(&facts.precision) {
        rows.push(vec![String::new(), line]);
    }
    rows.extend([
        vec!["layout".to_owned(), format!("{}; each: {}", facts.layout, facts.device)],
        vec![
            "step".to_owned(),
            format!(
                "{} tokens: micro-batch {} x accum {} x {} {} x {} tokens",
                facts.tokens_per_step,
                facts.micro_batch,
                facts.accum,
                facts.lanes,
                if facts.lanes == facts.world { "rank(s)" } else { "lane(s)" },
                facts.seq_len
            ),
        ],
        vec!["length".to_owned(), format!("{} steps, {} of the data", facts.steps, epochs(facts.epochs))],
        vec!["optimizer".to_owned(), facts.optimizer.clone()],
        vec!["lr".to_owned(), facts.schedule.clone()],
        vec!["output".to_owned(), facts.out.clone()],
    ]);
    let mut out = render(&[Align::Left, Align::Left], &rows);
    out += &memory_table(facts);
    out += &stage_table(facts);
    if facts.preset {
        out += "\nNo --model and no --data: the preset with the embedded tiny model and text (umbra train --help).\n";
    }
    out
}

/// The dtype of each role, four to a line.
fn roles(p: &Precision) -> Vec<String> {
    let rounding = match p.rounding {
        Rounding::Nearest => "",
        Rounding::Stochastic => " (stochastic rounding)",
    };
    vec![
        format!("shadow {}{rounding}, compute {}, grad {}, wire {}", p.shadow, p.compute, p.grad, p.wire),
        format!("reduced {}, accumulate {}, moments {}{rounding}", p.reduced, p.accumulate, p.moments),
    ]
}

fn epochs(n: f64) -> String {
    if n == 1.0 { "1 pass".to_owned() } else { format!("{n:.2} passes") }
}

/// Bytes of the largest rank, a segment a line.
fn memory_table(facts: &StartupFacts) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let baseline = facts.baseline.map(|n| ("process before training".to_owned(), n));
    for (name, n) in facts.segments.iter().cloned().chain(baseline) {
        rows.push(vec![String::new(), name, bytes(n)]);
    }
    rows.push(vec![String::new(), "total".to_owned(), bytes(facts.total())]);
    let mut out = String::from("memory of the largest rank");
    if let Some(n) = facts.available {
        // Writing to a string cannot fail.
        let _ = write!(out, " ({} available)", bytes(n));
    }
    out.push('\n');
    out + &render(&[Align::Left, Align::Left, Align::Right], &rows)
}

/// What the other stages would take: the same bits, another price.
fn stage_table(facts: &StartupFacts) -> String {
    if facts.stages.is_empty() {
        return String::new();
    }
    let row = |s: &StageFacts| {
        let total = s.bytes + facts.baseline.unwrap_or(0);
        let chosen = if s.chosen { "this run" } else { "" };
        vec![
            String::new(),
            format!("--stage {}", s.stage),
            bytes(total),
            format!("{} sent a step", bytes(s.sent)),
            chosen.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = facts.stages.iter().map(row).collect();
    let aligns = [Align::Left, Align::Left, Align::Right, Align::Right, Align::Left];
    let same = if facts.same_bits { " (the result is the same, bit for bit)" } else { "" };
    format!("the largest rank at each stage{same}\n{}", render(&aligns, &rows))
}

#[cfg(test)]
mod tests;
