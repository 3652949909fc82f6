//! Which release of an engine a file was written for: defaults and arithmetic have changed between them.

use crate::{Failure, Result};
use std::fmt;

/// A release, as far as it matters: `0.19.6`, `1.15`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

impl std::str::FromStr for Version {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split('.').map(|part| part.parse::<u32>().map_err(|_| ()));
        let mut next = |missing: Result<u32, ()>| parts.next().unwrap_or(missing);
        // `0.14` is its first release.
        let version = Version(next(Err(()))?, next(Ok(0))?, next(Ok(0))?);
        if parts.next().is_some() { Err(()) } else { Ok(version) }
    }
}

/// The dtype in which a script loads the model's weights, which no configuration file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadDType {
    /// `torch_dtype=torch.bfloat16`.
    Bf16,
    /// `torch_dtype=torch.float32`.
    Fp32,
}

/// What a file cannot say about the program it was written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Assume {
    /// DeepSpeed.
    pub deepspeed: Version,
    /// Accelerate.
    pub accelerate: Version,
    /// How the script loads weights; none: in the dtype that config.json names.
    pub load: Option<LoadDType>,
}

impl Default for Assume {
    /// The newest releases whose sources were read.
    fn default() -> Self {
        Assume { deepspeed: Version(0, 19, 6), accelerate: Version(1, 15, 0), load: None }
    }
}

impl Assume {
    /// As it would be written.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = vec![format!("deepspeed={}", self.deepspeed), format!("accelerate={}", self.accelerate)];
        words.extend(self.load.map(|load| match load {
            LoadDType::Bf16 => "load=bf16".to_owned(),
            LoadDType::Fp32 => "load=fp32".to_owned(),
        }));
        words
    }

    /// Reads `deepspeed=0.14`, `accelerate=0.28`, `load=bf16` and the like; a later one of a name wins.
    ///
    /// # Errors
    /// Exit 2: another name, or what is no version or dtype.
    pub fn read(written: &[String]) -> Result<Self> {
        let mut assume = Assume::default();
        for text in written {
            let wrong = || {
                Failure::usage(format!("--assume {text} cannot be read"))
                    .at("--assume")
                    .expected("deepspeed=VERSION, accelerate=VERSION, load=bf16 or load=fp32")
                    .found(text)
                    .hint("for instance --assume deepspeed=0.14")
            };
            let (name, value) = text.split_once('=').ok_or_else(wrong)?;
            match name {
                "deepspeed" => assume.deepspeed = value.parse().map_err(|()| wrong())?,
                "accelerate" => assume.accelerate = value.parse().map_err(|()| wrong())?,
                "load" => {
                    assume.load = Some(match value {
                        "bf16" | "bfloat16" => LoadDType::Bf16,
                        "fp32" | "float32" => LoadDType::Fp32,
                        _ => return Err(wrong()),
                    });
                }
                _ => return Err(wrong()),
            }
        }
        Ok(assume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_and_may_be_short() {
        let of = |text: &str| text.parse::<Version>();
        assert_eq!(of("0.14"), Ok(Version(0, 14, 0)));
        assert!(of("0.19.3").unwrap() < Version(0, 19, 6) && of("1").unwrap() > Version(0, 30, 0));
        for text in ["", "0.14.1.2", "v1", "1.x", "1..2"] {
            assert_eq!(of(text), Err(()), "{text}");
        }
    }

    #[test]
    fn assumptions_are_read_by_name() {
        let read = |text: &str| Assume::read(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let assume = read("deepspeed=0.14 load=bf16 accelerate=0.28.0").unwrap();
        let expected = (Version(0, 14, 0), Version(0, 28, 0), Some(LoadDType::Bf16));
        assert_eq!((assume.deepspeed, assume.accelerate, assume.load), expected);
        for text in ["deepspeed", "deepspeed=new", "torch=2.1", "load=fp16", "deepspeed:0.14"] {
            let failure = read(text).unwrap_err();
            assert!(failure.what.contains(text) && failure.expected.is_some(), "{failure}");
        }
    }
}
