//! How far a long read is, on standard error: a moving line on a terminal, otherwise a line now and then.

use crate::host::note;
use crate::table::bytes;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// What is over sooner is not worth a line.
const FIRST: Duration = Duration::from_secs(1);
/// Between two lines of a log file.
const NEXT: Duration = Duration::from_secs(10);

/// Progress in bytes. What it has shown on a terminal is gone when it is dropped.
#[derive(Debug)]
pub(super) struct Meter {
    what: String,
    terminal: bool,
    due: Instant,
    bar: Option<ProgressBar>,
}

impl Meter {
    /// Progress of `what`, which is said in front of the figures.
    pub(super) fn new(what: impl Into<String>) -> Self {
        Meter { what: what.into(), terminal: std::io::stderr().is_terminal(), due: Instant::now() + FIRST, bar: None }
    }

    /// `done` of `total` bytes are read.
    pub(super) fn at(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if Instant::now() >= self.due {
            match self.terminal {
                true => self.bar = Some(bar(&self.what, done, total)),
                false => note(format_args!("{}: {} of {}", self.what, bytes(done), bytes(total))),
            }
            self.due = Instant::now() + NEXT;
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(what: &str, done: u64, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total).with_position(done).with_elapsed(FIRST).with_message(what.to_owned());
    // The template is a constant; if it could not be read the default style would do.
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:20} {binary_bytes}/{binary_total_bytes}  ETA {eta}") {
        bar.set_style(style);
    }
    bar
}
