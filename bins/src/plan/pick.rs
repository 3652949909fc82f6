//! Which of a flag, a file, a checkpoint, the preset and the default a setting takes its value from.

use super::Origin;
use crate::config::Files;

/// Picks values and notes where they came from.
pub(super) struct Settings<'a> {
    pub(super) preset: bool,
    pub(super) files: &'a Files,
    pub(super) origins: Vec<(&'static str, Origin)>,
}

impl Settings<'_> {
    /// Where a value comes from that is written somewhere.
    pub(super) fn written(&self, name: &str) -> Origin {
        if self.files.sources.contains_key(name) { Origin::Config } else { Origin::Flag }
    }

    /// The flag if it was given, else the preset's value if there is one and it applies, else the default.
    pub(super) fn pick<T>(&mut self, name: &'static str, flag: Option<T>, preset: Option<T>, default: T) -> T {
        let (value, origin) = match (flag, preset) {
            (Some(value), _) => (value, self.written(name)),
            (None, Some(value)) if self.preset => (value, Origin::Preset),
            _ => (default, Origin::Default),
        };
        self.origins.push((name, origin));
        value
    }

    /// A flag without a preset.
    pub(super) fn or<T>(&mut self, name: &'static str, flag: Option<T>, default: T) -> T {
        self.pick(name, flag, None, default)
    }

    /// The flag if it was given, else what the checkpoint says, else the default.
    pub(super) fn kept<T>(&mut self, name: &'static str, flag: Option<T>, kept: Option<T>, default: T) -> T {
        let (value, origin) = match (flag, kept) {
            (Some(value), _) => (value, self.written(name)),
            (None, Some(value)) => (value, Origin::Checkpoint),
            (None, None) => (default, Origin::Default),
        };
        self.origins.push((name, origin));
        value
    }

    pub(super) fn origin(&self, name: &str) -> Option<Origin> {
        self.origins.iter().find(|(n, _)| *n == name).map(|(_, origin)| *origin)
    }
}
