//! The batch: `train_batch_size` = micro-batch × accumulation × data-parallel ranks
//! (`deepspeed/runtime/config.py: _set_batch_related_parameters`).

use super::Auto;
use super::keys::written;
use crate::config::section::{Field, Section};
use crate::config::{Facts, Layer};
use crate::{Failure, Result};

const TRAIN: &str = "train_batch_size";
const MICRO: &str = "train_micro_batch_size_per_gpu";
const ACCUM: &str = "gradient_accumulation_steps";

/// One of the three.
enum Size<'a> {
    Missing,
    Auto,
    Number(u64, Field<'a>),
}

impl Size<'_> {
    fn number(&self) -> Option<u64> {
        match self {
            Size::Number(n, _) => Some(*n),
            Size::Missing | Size::Auto => None,
        }
    }

    /// `name 8 (file:line:column)`.
    fn shown(&self, name: &str) -> String {
        match self {
            Size::Number(n, field) => format!("{name} {n} ({})", field.place()),
            Size::Missing | Size::Auto => format!("{name} 1"),
        }
    }
}

/// The three sizes as flags.
///
/// # Errors
/// Exit 2: none is there, or they do not fit each other and the lanes.
pub(super) fn read(layer: &mut Layer, top: &mut Section<'_>, facts: &Facts, auto: Auto) -> Result<()> {
    let train = size(layer, top, TRAIN, "global-batch")?;
    let micro = size(layer, top, MICRO, "micro-batch")?;
    let accum = size(layer, top, ACCUM, "accum")?;
    if facts.batch_written {
        // Flags beat files, and the plan checks what the two come to.
        return Ok(());
    }
    let lanes = (facts.lanes as u64).max(1);
    // Accelerate writes 1 before DeepSpeed sees the file; with one other size DeepSpeed takes 1 itself.
    let accum_is_1 = matches!(accum, Size::Missing) && auto.is_accelerate();
    let steps = accum.number().or(accum_is_1.then_some(1));
    match (&train, micro.number(), steps) {
        (Size::Number(rows, field), Some(m), Some(a)) => {
            let made = m.checked_mul(a).and_then(|n| n.checked_mul(lanes));
            if made != Some(*rows) {
                return Err(unequal(*rows, field, made, (&micro, m), (&accum, a), lanes));
            }
        }
        (Size::Number(rows, field), Some(m), None) => divided(*rows, field, &micro, MICRO, m, lanes).map(drop)?,
        (Size::Number(rows, field), None, steps) => {
            let each = divided(*rows, field, &accum, ACCUM, steps.unwrap_or(1), lanes)?;
            // An automatic size alone is left to the flags; with the other two it follows from them.
            if matches!(micro, Size::Missing) || steps.is_some() {
                let of = steps.map_or(String::new(), |a| format!("{a} × "));
                layer.imply("micro-batch", each, format!("DeepSpeed: {TRAIN} {rows} / ({of}{lanes} lanes)"));
            }
        }
        (Size::Missing, None, _) if matches!(micro, Size::Missing) => return Err(neither(layer, &accum)),
        (_, _, None) if matches!((&train, &accum), (Size::Missing, Size::Missing)) => {
            layer.imply("accum", 1, format!("DeepSpeed without {TRAIN} and {ACCUM}"));
        }
        _ => {}
    }
    if accum_is_1 {
        layer.imply("accum", 1, format!("Accelerate without {ACCUM} in DeepSpeed's file"));
    }
    Ok(())
}

/// Reads one size and sets its flag.
fn size<'a>(layer: &mut Layer, top: &mut Section<'a>, key: &'static str, flag: &str) -> Result<Size<'a>> {
    let Some(field) = written(top, key) else { return Ok(Size::Missing) };
    if field.is_auto() {
        layer.no_effect(&field, format!("whoever starts the run fills it in: --{flag}, or what follows without it"));
        return Ok(Size::Auto);
    }
    let n = field.positive()?;
    layer.set(flag, n, &field);
    Ok(Size::Number(n, field))
}

/// Rows left for the third size.
fn divided(rows: u64, field: &Field<'_>, by: &Size<'_>, name: &str, n: u64, lanes: u64) -> Result<u64> {
    let parts = n.checked_mul(lanes).filter(|parts| rows.is_multiple_of(*parts));
    parts.map(|parts| rows / parts).ok_or_else(|| {
        let of = if by.number().is_some() { format!("{} × ", by.shown(name)) } else { String::new() };
        Failure::usage(format!("{TRAIN} {rows} cannot be split evenly"))
            .at(field.place())
            .expected(format!("a multiple of {of}{lanes} lanes"))
            .found(rows)
            .hint("another train_batch_size, or the --lanes that the file was written for")
    })
}

fn unequal(
    rows: u64,
    field: &Field<'_>,
    made: Option<u64>,
    (micro, m): (&Size<'_>, u64),
    (accum, a): (&Size<'_>, u64),
    lanes: u64,
) -> Failure {
    let made = made.map_or("more than can be counted".to_owned(), |n| n.to_string());
    let failure = Failure::usage(format!("{TRAIN} {rows} is not {m} × {a} × {lanes}"))
        .at(field.place())
        .expected(format!("{made} = {} × {} × {lanes} lanes", micro.shown(MICRO), accum.shown(ACCUM)))
        .found(rows);
    match m.checked_mul(a).filter(|each| rows.is_multiple_of(*each)) {
        Some(each) => {
            failure.hint(format!("--lanes {}, on any number of ranks, or leave one of the three out", rows / each))
        }
        None => failure.hint("leave one of the three out: it follows from the other two"),
    }
}

fn neither(layer: &Layer, accum: &Size<'_>) -> Failure {
    let failure = Failure::usage(format!("the file has neither {TRAIN} nor {MICRO}"));
    let failure = match accum {
        Size::Number(_, field) => failure.at(field.place()),
        Size::Missing | Size::Auto => failure.at(layer.file.display()),
    };
    let found = if accum.number().is_some() { format!("{ACCUM} alone") } else { "neither".to_owned() };
    failure
        .expected("one of them, as DeepSpeed has it")
        .found(found)
        .hint(format!("add \"{MICRO}\": 1, or \"auto\" to leave it to --micro-batch"))
}
