//! The one error the binary shows: what was expected, what was found, where, and what to try, with its exit code.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Exit codes of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Exit {
    /// A fault of ours.
    Bug = 1,
    /// Usage or configuration.
    Usage = 2,
    /// A bad model, data file or checkpoint.
    Input = 3,
    /// It does not fit in memory.
    Memory = 4,
    /// A rank was lost, hung or panicked.
    Lost = 5,
    /// Loss or gradient not finite.
    NotFinite = 6,
    /// Disk or output folder.
    Disk = 7,
    /// Interrupted and saved: run me again.
    Again = 75,
}

/// A failure to show to the user on one screen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The process exit code.
    pub exit: Exit,
    /// One sentence: what went wrong.
    pub what: String,
    /// File, line, tensor, flag: the place.
    pub place: Option<String>,
    /// What was expected there.
    pub expected: Option<String>,
    /// What was found.
    pub found: Option<String>,
    /// The next thing to try.
    pub hint: Option<String>,
}

/// Result with a [`Failure`].
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// A failure with only its sentence; the builder methods add the rest.
    pub fn new(exit: Exit, what: impl Into<String>) -> Self {
        Failure { exit, what: what.into(), place: None, expected: None, found: None, hint: None }
    }

    /// A usage or configuration failure (exit 2).
    pub fn usage(what: impl Into<String>) -> Self {
        Failure::new(Exit::Usage, what)
    }

    /// A bad model, data file or checkpoint (exit 3).
    pub fn input(what: impl Into<String>) -> Self {
        Failure::new(Exit::Input, what)
    }

    /// A disk or output folder failure (exit 7).
    pub fn disk(what: impl Into<String>) -> Self {
        Failure::new(Exit::Disk, what)
    }

    /// Where it is.
    #[must_use]
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.place = Some(place.to_string());
        self
    }

    /// What was expected.
    #[must_use]
    pub fn expected(mut self, expected: impl fmt::Display) -> Self {
        self.expected = Some(expected.to_string());
        self
    }

    /// What was found.
    #[must_use]
    pub fn found(mut self, found: impl fmt::Display) -> Self {
        self.found = Some(found.to_string());
        self
    }

    /// What to try next.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }
}

impl Failure {
    /// The failure as the reason of something that goes on all the same.
    pub fn as_reason(&self) -> String {
        self.to_string().replacen("error:", "reason:", 1)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.what)?;
        let rows = [("where", &self.place), ("expected", &self.expected), ("found", &self.found), ("try", &self.hint)];
        for (name, text) in rows {
            if let Some(text) = text {
                write!(f, "\n  {:<9} {}", format!("{name}:"), text.replace('\n', "\n            "))?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}
