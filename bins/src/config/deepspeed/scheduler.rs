//! `scheduler`: DeepSpeed's five schedules by its own names (`deepspeed/runtime/lr_schedules.py`). Only what is written is
//! passed on; whoever makes the schedule knows the defaults of each release.

use super::keys::written;
use crate::config::node::Value;
use crate::config::section::{Field, Section};
use crate::config::{Facts, Layer, Version};
use crate::nearest::nearest;
use crate::{Failure, Result};

/// The type of a parameter.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// A number.
    Number,
    /// A number that may be `"auto"`.
    AutoNumber,
    /// A whole number from 0.
    Count,
    /// A whole number from 1 that may be `"auto"`.
    Total,
    /// The length of the warm-up; may be `"auto"`.
    Warmup,
    /// True or false.
    Bool,
    /// `log` or `linear`.
    Rise,
}
use Kind::{AutoNumber, Bool, Count, Number, Rise, Total, Warmup};

/// A schedule: DeepSpeed's name, the flag's, and its parameters; those with `true` have to be there.
struct Known {
    name: &'static str,
    flag: &'static str,
    params: &'static [(&'static str, Kind, bool)],
}

const KNOWN: [Known; 5] = [
    Known {
        name: "WarmupLR",
        flag: "warmup-lr",
        params: &[
            ("warmup_min_lr", AutoNumber, false),
            ("warmup_max_lr", AutoNumber, false),
            ("warmup_num_steps", Warmup, false),
            ("warmup_type", Rise, false),
        ],
    },
    Known {
        name: "WarmupDecayLR",
        flag: "warmup-decay-lr",
        params: &[
            ("total_num_steps", Total, true),
            ("warmup_min_lr", AutoNumber, false),
            ("warmup_max_lr", AutoNumber, false),
            ("warmup_num_steps", Warmup, false),
            ("warmup_type", Rise, false),
        ],
    },
    Known {
        name: "WarmupCosineLR",
        flag: "warmup-cosine-lr",
        params: &[
            ("total_num_steps", Total, true),
            ("warmup_min_ratio", Number, false),
            ("warmup_num_steps", Warmup, false),
            ("cos_min_ratio", Number, false),
            ("warmup_type", Rise, false),
        ],
    },
    Known {
        name: "OneCycle",
        flag: "one-cycle",
        params: &[
            ("cycle_min_lr", Number, true),
            ("cycle_max_lr", Number, true),
            ("decay_lr_rate", Number, false),
            ("cycle_first_step_size", Count, false),
            ("cycle_second_step_size", Count, false),
            ("cycle_first_stair_count", Count, false),
            ("cycle_second_stair_count", Count, false),
            ("decay_step_size", Count, false),
            ("cycle_momentum", Bool, false),
            ("cycle_min_mom", Number, false),
            ("cycle_max_mom", Number, false),
            ("decay_mom_rate", Number, false),
        ],
    },
    Known {
        name: "LRRangeTest",
        flag: "lr-range-test",
        params: &[
            ("lr_range_test_min_lr", Number, false),
            ("lr_range_test_step_size", Count, false),
            ("lr_range_test_step_rate", Number, false),
            ("lr_range_test_staircase", Bool, false),
        ],
    },
];

/// From here on a warm-up of no steps is an error; before, it is as short as a warm-up can be.
const NEEDS_WARMUP: Version = Version(0, 19, 6);
/// The shortest warm-up there is.
const SHORTEST: u64 = 2;

/// The section as flags.
///
/// # Errors
/// Exit 2: another schedule, a parameter that is not the schedule's or lacks, wrong types.
pub(super) fn read(layer: &mut Layer, top: &mut Section<'_>, facts: &Facts) -> Result<()> {
    let Some(field) = written(top, "scheduler") else { return Ok(()) };
    let mut section = field.section()?;
    let kind = written(&mut section, "type");
    let params = written(&mut section, "params");
    section.finish()?;
    let Some(kind) = kind else {
        return Err(Failure::usage("scheduler has no type")
            .at(field.place())
            .expected(format!("\"type\": one of {}", names()))
            .found(field.node)
            .hint("leave the whole section out to set the schedule by flags"));
    };
    let name = kind.text()?;
    let known = KNOWN.iter().find(|known| known.name.eq_ignore_ascii_case(&name));
    let Some(known) = known else { return Err(unknown(&kind, &name)) };
    layer.set("schedule", known.flag, &kind);
    let mut values = Vec::new();
    let mut given = params.as_ref().map(Field::section).transpose()?;
    for &(key, kind, needed) in known.params {
        match given.as_mut().and_then(|given| written(given, key)) {
            Some(field) => values.push(format!("{key}={}", value(layer, &field, kind, facts)?)),
            None if needed => return Err(missing(known.name, key, kind, params.as_ref().unwrap_or(&field))),
            None => {}
        }
    }
    if let Some(mut given) = given {
        start(layer, &mut given)?;
        given.finish()?;
    }
    if let Some(params) = params.filter(|_| !values.is_empty()) {
        layer.set_all("schedule-params", values, &params);
    }
    Ok(())
}

fn names() -> String {
    KNOWN.map(|known| known.name).join(", ")
}

fn unknown(kind: &Field<'_>, name: &str) -> Failure {
    let why = "of DeepSpeed's schedules Umbra has all five, of torch's none";
    let failure = kind.refused(why, "a schedule of Umbra's own: --schedule linear, cosine or wsd");
    match nearest(name, KNOWN.iter().map(|known| known.name)) {
        Some(known) => failure.hint(format!("did you mean {known:?}?")),
        None => failure,
    }
    .expected(format!("one of {}", names()))
    .found(kind.node)
}

fn missing(name: &str, key: &str, kind: Kind, place: &Field<'_>) -> Failure {
    let failure = Failure::usage(format!("{name} has no {key}"))
        .at(place.place())
        .expected(format!("{key}, which DeepSpeed has no default for"));
    match kind {
        Total => failure.hint(format!("\"{key}\": \"auto\" is the length of the run")),
        _ => failure,
    }
}

/// A parameter as it is passed on.
fn value(layer: &mut Layer, field: &Field<'_>, kind: Kind, facts: &Facts) -> Result<String> {
    if field.is_auto() {
        return match kind {
            AutoNumber | Total | Warmup => Ok("auto".to_owned()),
            _ => Err(field.refused("neither Accelerate nor transformers fills it in", "a value, or leave it out")),
        };
    }
    match kind {
        Number | AutoNumber => {
            let one = alone(field)?;
            one.number()?;
            one.text()
        }
        Count => Ok(alone(field)?.count()?.to_string()),
        Total => Ok(field.positive()?.to_string()),
        Warmup => warmup(layer, field, facts),
        Bool => Ok(field.bool()?.to_string()),
        Rise => Ok(field.choice(&["log", "linear"])?.to_owned()),
    }
}

/// DeepSpeed takes a list with a value for each group of parameters; here there is one.
fn alone<'a>(field: &Field<'a>) -> Result<Field<'a>> {
    let mut one = field.clone();
    if let Value::List(items) = &field.node.value {
        let [item] = items.as_slice() else { return Err(field.bad("one number: there is one rate for all weights")) };
        one.node = item;
    }
    Ok(one)
}

fn warmup(layer: &mut Layer, field: &Field<'_>, facts: &Facts) -> Result<String> {
    let deepspeed = facts.assume.deepspeed;
    if field.number()? > 0.0 {
        return Ok(field.positive()?.to_string());
    }
    if deepspeed >= NEEDS_WARMUP {
        return Err(field.bad("a whole number that is 1 or more, from DeepSpeed 0.19.6 on").hint(
            "leave the scheduler out for no warm-up; --assume deepspeed=0.14 reads the file as that release does",
        ));
    }
    layer.same(field, format!("DeepSpeed {deepspeed} takes it as {SHORTEST}, the shortest warm-up it has"));
    Ok(SHORTEST.to_string())
}

/// Where the schedule starts: at its beginning, which is -1.
fn start(layer: &mut Layer, params: &mut Section<'_>) -> Result<()> {
    let Some(field) = written(params, "last_batch_iteration") else { return Ok(()) };
    if field.number()? != -1.0 {
        return Err(field.refused("a run goes on from its checkpoint, schedule included", "-1, or leave it out"));
    }
    layer.same(&field, "it starts at the first step");
    Ok(())
}
