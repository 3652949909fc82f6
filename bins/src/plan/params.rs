//! The parameters of DeepSpeed's schedules, by DeepSpeed's names (deepspeed/runtime/lr_schedules.py).

use crate::cli::ScheduleKind;
use crate::config::Version;
use crate::nearest::nearest;
use crate::{Failure, Result};
use optim::schedule::deepspeed::Rise;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// What may stand behind a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A learning rate, or how fast something grows.
    Positive,
    /// From 0 to 1.
    Share,
    /// From 0 up to, but not including, 1.
    Momentum,
    /// A whole number of steps, at least 1.
    Steps,
    /// The same; earlier versions take less for the least.
    Warmup,
    /// A whole number.
    Count,
    /// `log` or `linear`.
    Rise,
    /// `true` or `false`.
    Switch,
}

impl Kind {
    const fn expected(self) -> &'static str {
        match self {
            Kind::Positive => "a number that is 0 or more",
            Kind::Share => "a number from 0 to 1",
            Kind::Momentum => "a number from 0 up to, but not including, 1",
            Kind::Steps | Kind::Warmup => "a whole number that is 1 or more",
            Kind::Count => "a whole number that is 0 or more",
            Kind::Rise => "log or linear",
            Kind::Switch => "true or false",
        }
    }

    /// Reads a value; none if it is not of this kind.
    fn read(self, text: &str, version: Version) -> Option<ParamValue> {
        let number = || text.parse::<f64>().ok().filter(|x| x.is_finite());
        // Beyond 2^53 f64 has no odd numbers, and no run has so many steps.
        let whole = || number().filter(|x| x.fract() == 0.0 && x.abs() <= (1u64 << 53) as f64);
        match self {
            Kind::Positive => number().filter(|x| *x >= 0.0).map(ParamValue::Number),
            Kind::Share => number().filter(|x| (0.0..=1.0).contains(x)).map(ParamValue::Number),
            Kind::Momentum => number().filter(|x| (0.0..1.0).contains(x)).map(ParamValue::Number),
            Kind::Steps => whole().filter(|x| *x >= 1.0).map(ParamValue::Number),
            Kind::Warmup => whole().filter(|x| *x >= 1.0 || version < Version(0, 19, 6)).map(ParamValue::Number),
            Kind::Count => whole().filter(|x| *x >= 0.0).map(ParamValue::Number),
            Kind::Rise => match text {
                "log" => Some(ParamValue::Rise(Rise::Log)),
                "linear" => Some(ParamValue::Rise(Rise::Linear)),
                _ => None,
            },
            Kind::Switch => text.to_lowercase().parse().ok().map(ParamValue::Switch),
        }
    }
}

/// A parameter of a schedule.
#[derive(Debug, Clone, Copy)]
pub(super) struct Param {
    pub(super) name: &'static str,
    kind: Kind,
    /// Whether `auto` takes it from other settings.
    auto: bool,
    required: bool,
}

const fn param(name: &'static str, kind: Kind) -> Param {
    Param { name, kind, auto: false, required: false }
}

const fn auto(name: &'static str, kind: Kind) -> Param {
    Param { auto: true, ..param(name, kind) }
}

const fn required(param: Param) -> Param {
    Param { required: true, ..param }
}

const WARMUP_STEPS: Param = auto("warmup_num_steps", Kind::Warmup);
const WARMUP_TYPE: Param = param("warmup_type", Kind::Rise);
const WARMUP_MIN: Param = auto("warmup_min_lr", Kind::Positive);
const WARMUP_MAX: Param = auto("warmup_max_lr", Kind::Positive);
const TOTAL: Param = required(auto("total_num_steps", Kind::Steps));

/// The parameters of a schedule; none where it has none.
pub(super) const fn table(kind: ScheduleKind) -> &'static [Param] {
    match kind {
        ScheduleKind::WarmupLr => const { &[WARMUP_MIN, WARMUP_MAX, WARMUP_STEPS, WARMUP_TYPE] },
        ScheduleKind::WarmupDecayLr => const { &[TOTAL, WARMUP_MIN, WARMUP_MAX, WARMUP_STEPS, WARMUP_TYPE] },
        ScheduleKind::WarmupCosineLr => {
            const {
                &[
                    TOTAL,
                    param("warmup_min_ratio", Kind::Share),
                    WARMUP_STEPS,
                    param("cos_min_ratio", Kind::Share),
                    WARMUP_TYPE,
                ]
            }
        }
        ScheduleKind::OneCycle => {
            const {
                &[
                    required(param("cycle_min_lr", Kind::Positive)),
                    required(param("cycle_max_lr", Kind::Positive)),
                    param("decay_lr_rate", Kind::Positive),
                    param("cycle_first_step_size", Kind::Steps),
                    param("cycle_second_step_size", Kind::Count),
                    param("cycle_first_stair_count", Kind::Count),
                    param("cycle_second_stair_count", Kind::Count),
                    param("decay_step_size", Kind::Count),
                    param("cycle_momentum", Kind::Switch),
                    param("cycle_min_mom", Kind::Momentum),
                    param("cycle_max_mom", Kind::Momentum),
                    param("decay_mom_rate", Kind::Positive),
                ]
            }
        }
        ScheduleKind::LrRangeTest => {
            const {
                &[
                    param("lr_range_test_min_lr", Kind::Positive),
                    param("lr_range_test_step_size", Kind::Steps),
                    param("lr_range_test_step_rate", Kind::Positive),
                    param("lr_range_test_staircase", Kind::Switch),
                ]
            }
        }
        ScheduleKind::Constant
        | ScheduleKind::Linear
        | ScheduleKind::Cosine
        | ScheduleKind::Wsd
        | ScheduleKind::HfConstant
        | ScheduleKind::HfLinear
        | ScheduleKind::HfCosine => &[],
    }
}

/// A value as it was written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ParamValue {
    /// Taken from other settings.
    Auto,
    /// A number, whole or not.
    Number(f64),
    /// The form of a warm-up.
    Rise(Rise),
    /// On or off.
    Switch(bool),
}

impl fmt::Display for ParamValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParamValue::Auto => f.write_str("auto"),
            ParamValue::Number(x) => f.write_str(&crate::table::number(*x)),
            ParamValue::Rise(Rise::Log) => f.write_str("log"),
            ParamValue::Rise(Rise::Linear) => f.write_str("linear"),
            ParamValue::Switch(on) => on.fmt(f),
        }
    }
}

impl Serialize for ParamValue {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        match self {
            ParamValue::Number(x) => out.serialize_f64(*x),
            ParamValue::Switch(on) => out.serialize_bool(*on),
            ParamValue::Auto | ParamValue::Rise(_) => out.collect_str(self),
        }
    }
}

/// What was written of a schedule's parameters, by name.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(transparent)]
pub struct ScheduleParams(BTreeMap<&'static str, ParamValue>);

impl fmt::Display for ScheduleParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let written: Vec<String> = self.0.iter().map(|(name, value)| format!("{name} {value}")).collect();
        f.write_str(if written.is_empty() { "defaults" } else { "" })?;
        f.write_str(&written.join(", "))
    }
}

impl ScheduleParams {
    /// Reads `NAME=VALUE` words for a schedule of an assumed version.
    ///
    /// # Errors
    /// Exit 2: a schedule without parameters, a name it does not have, a name twice, a value of another kind, or a
    /// parameter that it cannot do without.
    pub(super) fn read(written: &[String], kind: ScheduleKind, version: Version) -> Result<Self> {
        let table = table(kind);
        if let (Some(first), true) = (written.first(), table.is_empty()) {
            return Err(Failure::usage(format!("--schedule {kind} has no parameters"))
                .at("--schedule-params")
                .expected("--schedule warmup-lr, warmup-decay-lr, warmup-cosine-lr, one-cycle or lr-range-test")
                .found(first)
                .hint("choose one of DeepSpeed's schedules, or leave --schedule-params out"));
        }
        let mut params = BTreeMap::new();
        for text in written {
            let (param, value) = read_one(text, table, kind, version)?;
            if params.insert(param.name, value).is_some() {
                return Err(Failure::usage(format!("{} is set twice", param.name))
                    .at(format!("--schedule-params {}", param.name))
                    .expected("each parameter once")
                    .found(written.join(" ")));
            }
        }
        match table.iter().find(|param| param.required && !params.contains_key(param.name)) {
            None => Ok(ScheduleParams(params)),
            Some(Param { name, auto, .. }) => Err(Failure::usage(format!("--schedule {kind} needs {name}"))
                .at("--schedule-params")
                .expected(format!("{name}={}", if *auto { "VALUE, or auto" } else { "VALUE" }))
                .found(if written.is_empty() { "no parameters".to_owned() } else { written.join(" ") })
                .hint(format!("--schedule-params {name}={}", if *auto { "auto" } else { "VALUE" }))),
        }
    }

    /// Whether a parameter is to be taken from other settings.
    pub(super) fn is_auto(&self, name: &str) -> bool {
        self.0.get(name) == Some(&ParamValue::Auto)
    }

    /// A number: as written, or `auto`, or the default where nothing is.
    pub(super) fn number(&self, name: &str, default: f64, auto: f64) -> f64 {
        match self.0.get(name) {
            Some(ParamValue::Number(x)) => *x,
            Some(ParamValue::Auto) => auto,
            _ => default,
        }
    }

    /// A whole number in the same way; one below zero is zero.
    pub(super) fn whole(&self, name: &str, default: u64, auto: u64) -> u64 {
        match self.0.get(name) {
            Some(ParamValue::Number(x)) => *x as u64,
            Some(ParamValue::Auto) => auto,
            _ => default,
        }
    }

    pub(super) fn rise(&self, name: &str, default: Rise) -> Rise {
        match self.0.get(name) {
            Some(ParamValue::Rise(rise)) => *rise,
            _ => default,
        }
    }

    pub(super) fn switch(&self, name: &str, default: bool) -> bool {
        match self.0.get(name) {
            Some(ParamValue::Switch(on)) => *on,
            _ => default,
        }
    }
}

fn read_one(
    text: &str,
    table: &'static [Param],
    kind: ScheduleKind,
    version: Version,
) -> Result<(&'static Param, ParamValue)> {
    let Some((name, value)) = text.split_once('=') else {
        return Err(Failure::usage(format!("--schedule-params {text} cannot be read"))
            .at("--schedule-params")
            .expected("NAME=VALUE")
            .found(text)
            .hint("for instance --schedule-params warmup_num_steps=100"));
    };
    let names = || table.iter().map(|param| param.name);
    let Some(param) = table.iter().find(|param| param.name == name) else {
        let hint = match nearest(name, names()) {
            Some(known) => format!("did you mean {known}?"),
            None => format!("the parameters of --schedule {kind} are those of DeepSpeed's scheduler of that name"),
        };
        return Err(Failure::usage(format!("--schedule {kind} has no parameter {name}"))
            .at("--schedule-params")
            .expected(names().collect::<Vec<_>>().join(", "))
            .found(text)
            .hint(hint));
    };
    if value == "auto" && param.auto {
        return Ok((param, ParamValue::Auto));
    }
    let wrong = || {
        let or_auto = if param.auto { ", or auto" } else { "" };
        let failure = Failure::usage(format!("{name}={value} is no value of that parameter"))
            .at(format!("--schedule-params {name}"))
            .expected(format!("{}{or_auto}", param.kind.expected()))
            .found(value);
        match value {
            "auto" => failure.hint("write the value: there is no setting to take it from"),
            _ => failure,
        }
    };
    Ok((param, param.kind.read(value, version).ok_or_else(wrong)?))
}
