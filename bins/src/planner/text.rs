//! A plan for people, and as JSON.

use super::{Line, Planned};
use crate::plan::ModelSource;
use crate::table::{Align, bytes, count, number, render};
use models::params;
use serde_json::{Value, json};
use std::fmt;

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.head())?;
        writeln!(f, "settings and where they come from\n{}", self.settings())?;
        self.remarks(f)?;
        writeln!(f, "dtypes, phase by phase, and who decided\n{}", self.dtypes())?;
        writeln!(f, "memory of the largest rank\n{}", self.memory())?;
        writeln!(f, "sent by a rank in a step\n{}", self.wire())?;
        writeln!(f, "time (a prediction, not a measurement)\n{}", self.time())?;
        if let Some(text) = self.updates() {
            writeln!(f, "updates of the size of the learning rate, on these weights\n{text}")?;
        }
        Ok(())
    }
}

fn row<const N: usize>(cells: [String; N]) -> Vec<String> {
    std::iter::once(String::new()).chain(cells).collect()
}

impl Planned {
    fn head(&self) -> String {
        let model = match &self.plan.model {
            ModelSource::Tiny => "tiny (embedded)".to_owned(),
            ModelSource::Folder(dir) => dir.display().to_string(),
        };
        let length = self.steps().map_or("length by epochs".to_owned(), |steps| format!("{steps} steps"));
        format!(
            "{model}: {} parameters; {}; {} tokens a step, {length}\n",
            count(params::count(&self.units) as u64),
            crate::run::layout(&self.plan),
            count(self.tokens()),
        )
    }

    /// What was set anywhere, then the defaults.
    fn settings(&self) -> String {
        let json = self.plan.to_json();
        let all: Vec<(&String, &Value)> = json["settings"].as_object().into_iter().flatten().collect();
        let (set, unset): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(_, setting)| !matches!(setting["from"].as_str(), Some("default" | "launch")));
        let line = |(name, setting): &(&String, &Value)| {
            let from = setting["at"].as_str().or(setting["from"].as_str()).unwrap_or_default();
            row([(*name).clone(), value(&setting["value"]), from.to_owned()])
        };
        let rows: Vec<Vec<String>> = set.iter().chain(&unset).map(line).collect();
        let mut out = render(&[Align::Left; 4], &rows);
        for (setting, by) in &self.plan.files.given_way {
            out += &format!("  {} gave way to {by}\n", setting.source);
        }
        out
    }

    /// What is said of keys that set nothing.
    fn remarks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for layer in &self.plan.files.layers {
            if layer.remarks.is_empty() {
                continue;
            }
            writeln!(f, "{} ({}): keys that set nothing", layer.file.display(), layer.dialect)?;
            let line = |remark: &crate::config::Remark| {
                let place = remark
                    .source
                    .place
                    .as_ref()
                    .map_or(String::new(), |p| format!("{}:{}", p.spot.line, p.spot.column));
                let saying = match remark.saying {
                    crate::config::Saying::Same => "as it is anyway",
                    crate::config::Saying::NoEffect => "no effect here",
                    crate::config::Saying::Differs => "done differently",
                };
                row([place, remark.source.says.clone(), saying.to_owned(), remark.why.clone()])
            };
            let rows: Vec<Vec<String>> = layer.remarks.iter().map(line).collect();
            writeln!(f, "{}", render(&[Align::Left, Align::Right, Align::Left, Align::Left, Align::Left], &rows))?;
        }
        Ok(())
    }

    fn dtypes(&self) -> String {
        let line = |l: &Line| {
            let size = l.bytes.map_or(String::new(), bytes);
            row([l.phase.to_owned(), l.what.to_owned(), l.dtype.clone(), size, l.by.clone()])
        };
        let rows: Vec<Vec<String>> = self.ledger.iter().map(line).collect();
        render(&[Align::Left, Align::Left, Align::Left, Align::Left, Align::Right, Align::Left], &rows)
    }

    fn memory(&self) -> String {
        let mut rows: Vec<Vec<String>> = self.segments.iter().map(|(name, n)| row([name.clone(), bytes(*n)])).collect();
        rows.push(row(["total, the process itself left out".to_owned(), bytes(self.needed())]));
        let mut out = render(&[Align::Left, Align::Left, Align::Right], &rows);
        let Some(memory) = self.machine.memory else { return out };
        if self.needed() <= memory {
            return out + &format!("  fits: {} of {}\n", bytes(self.needed()), bytes(memory));
        }
        out += &format!("  does not fit: {} of {}\n", bytes(self.needed()), bytes(memory));
        let remedy = |r: &super::Remedy| row([r.flags.clone(), bytes(r.bytes), r.costs.to_owned()]);
        let rows: Vec<Vec<String>> = self.remedies.iter().map(remedy).collect();
        out + &match rows.is_empty() {
            true => "  nothing that could be changed makes it fit\n".to_owned(),
            false => {
                format!(
                    "  what would make it fit, the cheapest first\n{}",
                    render(&[Align::Left, Align::Left, Align::Right], &rows)
                )
            }
        }
    }

    fn wire(&self) -> String {
        let [weights, gradients] = self.sent;
        let rows = [
            row(["all-gather of weights".to_owned(), bytes(weights)]),
            row(["reduce-scatter of gradients".to_owned(), bytes(gradients)]),
            row(["total".to_owned(), bytes(weights + gradients)]),
        ];
        render(&[Align::Left, Align::Left, Align::Right], &rows)
    }

    fn time(&self) -> String {
        let (m, p) = (&self.machine, &self.prediction);
        let rate = self.tokens() as f64 / p.step;
        let mut rows = vec![
            row([
                "on".to_owned(),
                format!(
                    "{}, {:.1} TFLOP/s at its peak, {:.0} % of it expected",
                    m.name,
                    m.peak / 1e12,
                    m.reached * 100.0
                ),
            ]),
            row(["arithmetic".to_owned(), format!("{} for {:.3} TFLOP a step", seconds(p.compute), p.flops / 1e12)]),
        ];
        rows.push(row([
            "wire".to_owned(),
            match m.network {
                Some(speed) => format!(
                    "{} at {:.1} GB/s, hidden behind arithmetic where it is shorter",
                    seconds(p.wire),
                    speed / 1e9
                ),
                None => "taken to be free: --network says how fast it is".to_owned(),
            },
        ]));
        rows.push(row(["a step".to_owned(), seconds(p.step)]));
        rows.push(row([
            "tokens/s".to_owned(),
            format!("{} ({} a rank)", count(rate as u64), count((rate / self.plan.world as f64) as u64)),
        ]));
        rows.push(row(["MFU".to_owned(), format!("{:.1} %", p.mfu * 100.0)]));
        rows.push(row(match self.steps() {
            Some(steps) => ["the whole run".to_owned(), days(p.step * steps as f64)],
            None => ["a billion tokens".to_owned(), days(1e9 / rate)],
        }));
        render(&[Align::Left, Align::Left, Align::Left], &rows)
    }

    fn updates(&self) -> Option<String> {
        let s = self.swallowed.as_ref()?;
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let mut out = format!(
            "  {} of {} looked at would be swallowed by bf16 weights at {}",
            percent(s.share),
            count(s.looked_at as u64),
            number(s.update)
        );
        let others: Vec<String> =
            s.at_other_rates.iter().map(|(lr, share)| format!("{} at {}", percent(*share), number(*lr))).collect();
        out += &format!(" ({})\n", others.join(", "));
        let rows: Vec<Vec<String>> = s
            .lost
            .iter()
            .map(|(policy, lost)| {
                let own = if *policy == self.plan.policy { "this run" } else { "" };
                row([policy.to_string(), percent(*lost), "lost for good".to_owned(), own.to_owned()])
            })
            .collect();
        Some(out + &render(&[Align::Left, Align::Left, Align::Right, Align::Left, Align::Left], &rows))
    }

    /// The same as one JSON object.
    pub fn to_json(&self) -> Value {
        let mut settings = self.plan.to_json();
        let p = &self.prediction;
        let rate = self.tokens() as f64 / p.step;
        let line =
            |l: &Line| json!({ "phase": l.phase, "what": l.what, "dtype": l.dtype, "bytes": l.bytes, "by": l.by });
        let remark = |r: &crate::config::Remark| json!({ "at": r.source.to_string(), "saying": format!("{:?}", r.saying), "why": r.why });
        let file = |layer: &crate::config::Layer| {
            json!({
                "file": layer.file.as_path(),
                "format": layer.dialect.to_string(),
                "remarks": layer.remarks.iter().map(remark).collect::<Vec<_>>(),
            })
        };
        let remedies = self.remedies.iter().map(|r| json!({ "flags": r.flags, "costs": r.costs, "bytes": r.bytes }));
        json!({
            "settings": settings["settings"].take(),
            "files": self.plan.files.layers.iter().map(file).collect::<Vec<_>>(),
            "parameters": params::count(&self.units),
            "tokens_per_step": self.tokens(),
            "steps": self.steps(),
            "dtypes": self.ledger.iter().map(line).collect::<Vec<_>>(),
            "memory": {
                "segments": self.segments.iter().map(|(name, n)| json!({ "name": name, "bytes": n })).collect::<Vec<_>>(),
                "bytes": self.needed(),
                "available": self.machine.memory,
                "fits": self.machine.memory.map(|memory| self.needed() <= memory),
                "remedies": remedies.collect::<Vec<_>>(),
            },
            "sent": { "weights": self.sent[0], "gradients": self.sent[1] },
            "prediction": {
                "machine": self.machine.name,
                "peak_flops": self.machine.peak,
                "flops_per_step": p.flops,
                "compute_s": p.compute,
                "wire_s": p.wire,
                "step_s": p.step,
                "tokens_per_s": rate,
                "mfu": p.mfu,
                "days": self.steps().map(|steps| p.step * steps as f64 / 86400.0),
            },
            "swallowed": self.swallowed.as_ref().map(|s| json!({
                "update": s.update,
                "looked_at": s.looked_at,
                "share": s.share,
                "at_other_rates": s.at_other_rates,
                "lost": s.lost.iter().map(|(policy, lost)| (policy.name().to_owned(), json!(lost))).collect::<serde_json::Map<_, _>>(),
            })),
        })
    }
}

fn value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(n) => n.as_f64().filter(|x| x.fract() != 0.0).map_or(n.to_string(), number),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn seconds(s: f64) -> String {
    match s {
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.2} s"),
        s => format!("{:.1} min", s / 60.0),
    }
}

fn days(s: f64) -> String {
    match s {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} hours", s / 3600.0),
        s => format!("{:.1} days", s / 86400.0),
    }
}
