//! What rank 0 says while a run goes on, on standard error: one moving line on a terminal, and otherwise now and then a
//! line, so that a log file stays readable.

use crate::host::note;
use crate::metrics::StepRecord;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Without a terminal, a line follows the last one after this time at the latest…
const LATEST: Duration = Duration::from_secs(30);
/// …and after a tenth of the run, but no sooner than this.
const SOONEST: Duration = Duration::from_secs(3);

/// The progress of one run.
#[derive(Debug)]
pub struct Progress {
    total: u64,
    every: u64,
    shown: bool,
    /// The moving line, if standard error is a terminal.
    bar: Option<ProgressBar>,
    said: Instant,
    said_step: u64,
}

impl Progress {
    /// Progress over `total` steps, shown every `every` steps (at least 1) at most. A terminal gets a moving line.
    pub fn new(total: u64, every: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total);
            // The template is a constant; if it could not be read the default style would do.
            if let Ok(style) = ProgressStyle::with_template("{bar:6} {pos}/{len}  {wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        Progress { total, every: every.max(1), shown: true, bar, said: Instant::now(), said_step: 0 }
    }

    /// Progress that shows nothing: for ranks other than 0.
    pub fn hidden() -> Self {
        Progress { total: 0, every: 1, shown: false, bar: None, said: Instant::now(), said_step: 0 }
    }

    /// After each step.
    pub fn step(&mut self, record: &StepRecord) {
        let done = record.step + 1;
        let last = done >= self.total;
        if !self.shown || !(last || done.is_multiple_of(self.every)) {
            return;
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.set_message(with_eta(record));
        } else if !last && due(done - self.said_step.min(done), self.total, self.said.elapsed()) {
            note(format_args!("step {done}/{}  {}", self.total, with_eta(record)));
            self.said = Instant::now();
            self.said_step = done;
        }
    }

    /// A line of text that the moving line does not overwrite.
    pub fn say(&self, text: &str) {
        match &self.bar {
            _ if !self.shown => {}
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }

    /// Ends the progress; `last` is stated once more, whatever standard error is.
    pub fn finish(&mut self, last: Option<&StepRecord>) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if let (true, Some(record)) = (self.shown, last) {
            note(format_args!("step {}/{}  {}", record.step + 1, self.total, describe(record)));
        }
    }
}

/// Whether a log file gets a line, `steps` steps and `elapsed` after the last one.
fn due(steps: u64, total: u64, elapsed: Duration) -> bool {
    elapsed >= LATEST || (elapsed >= SOONEST && steps.saturating_mul(10) >= total)
}

/// A step in one line.
pub fn describe(r: &StepRecord) -> String {
    let swallowed = r.swallowed.map_or("none".to_owned(), |share| format!("{:.1}%", share * 100.0));
    format!("loss {:.4}  grad_norm {:.3}  swallowed {swallowed}  {:.0} tokens/s", r.loss, r.grad_norm, r.tps)
}

fn with_eta(r: &StepRecord) -> String {
    format!("{}  ETA {}", describe(r), clock(r.eta_s))
}

/// Seconds as `45s`, `3m05s`, `2h07m` or `3d04h`.
pub fn clock(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "unknown".to_owned();
    }
    // Beyond u64 the cast saturates.
    let s = seconds.round() as u64;
    match s {
        0..=59 => format!("{s}s"),
        60..=3599 => format!("{}m{:02}s", s / 60, s % 60),
        3600..=86_399 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_one_line() {
        let record = StepRecord {
            loss: 5.58239,
            grad_norm: 1.23456,
            swallowed: Some(0.9781),
            tps: 1234.5,
            eta_s: 185.0,
            ..StepRecord::default()
        };
        assert_eq!(describe(&record), "loss 5.5824  grad_norm 1.235  swallowed 97.8%  1234 tokens/s");
        assert_eq!(with_eta(&record), format!("{}  ETA 3m05s", describe(&record)));
        assert!(describe(&StepRecord { swallowed: None, ..record }).contains("swallowed none"));
    }

    #[test]
    fn clocks_have_two_units() {
        let cases = [
            (0.2, "0s"),
            (59.4, "59s"),
            (59.6, "1m00s"),
            (3599.0, "59m59s"),
            (7620.0, "2h07m"),
            (273_600.0, "3d04h"),
            (f64::NAN, "unknown"),
            (-1.0, "unknown"),
        ];
        for (s, text) in cases {
            assert_eq!(clock(s), text);
        }
    }

    #[test]
    fn a_log_file_gets_a_line_every_tenth_or_every_half_minute() {
        let s = Duration::from_secs;
        assert!(!due(20, 20, s(1)), "a short run says nothing on the way");
        assert!(due(100, 1000, s(5)));
        assert!(!due(99, 1000, s(29)));
        assert!(due(1, 1_000_000, s(30)));
    }
}
