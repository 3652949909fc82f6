//! Keys that set nothing here, as tables: the type each must have and why it has no effect.

use crate::config::Layer;
use crate::config::node::Value;
use crate::config::section::{Field, Section};
use crate::{Failure, Result};

/// The type of a value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// True or false.
    Bool,
    /// A whole number from 0.
    Count,
    /// A number.
    Number,
    /// Text.
    Text,
    /// A list.
    List,
    /// A map, or whatever else the key takes.
    Any,
}
pub(super) use Kind::{Any, Bool, Count, List, Number, Text};

/// A key, its type, and why it has no effect.
pub(super) type Quiet = (&'static str, Kind, &'static str);

impl Kind {
    /// DeepSpeed reads `null` and `"auto"` as if the key were not there (`deepspeed/runtime/config_utils.py`).
    pub(super) fn check(self, field: &Field<'_>) -> Result<()> {
        if field.is_null() || field.is_auto() {
            return Ok(());
        }
        match self {
            Bool => field.bool().map(drop),
            Count => field.count().map(drop),
            Number => field.number().map(drop),
            Text => field.text().map(drop),
            List => field.list().map(drop),
            Any => Ok(()),
        }
    }
}

/// Takes the keys of a table, each with its own reason.
///
/// # Errors
/// Exit 2: a value of another type.
pub(super) fn quiet(layer: &mut Layer, section: &mut Section<'_>, table: &[Quiet]) -> Result<()> {
    for &(key, kind, why) in table {
        if let Some(field) = section.take(key) {
            kind.check(&field)?;
            layer.no_effect(&field, why);
        }
    }
    Ok(())
}

/// Takes a whole section that has no effect, for one reason.
///
/// # Errors
/// Exit 2: a value of another type, or a key that the section does not have.
pub(super) fn quiet_section(
    layer: &mut Layer,
    top: &mut Section<'_>,
    key: &'static str,
    table: &[(&'static str, Kind)],
    why: &str,
) -> Result<()> {
    let Some(field) = written(top, key) else { return Ok(()) };
    let mut section = field.section()?;
    for &(key, kind) in table {
        if let Some(field) = section.take(key) {
            kind.check(&field)?;
        }
    }
    section.finish()?;
    layer.no_effect(&field, why);
    Ok(())
}

/// The value of `key`, unless it is `null`, which DeepSpeed reads as not written.
pub(super) fn written<'a>(section: &mut Section<'a>, key: &'static str) -> Option<Field<'a>> {
    section.take(key).filter(|field| !field.is_null())
}

/// A truth value; none for `"auto"`.
///
/// # Errors
/// Exit 2 for anything else.
pub(super) fn switch(field: &Field<'_>) -> Result<Option<bool>> {
    if field.is_auto() { Ok(None) } else { field.bool().map(Some) }
}

/// Takes a key that must not be on; off, it has no effect.
///
/// # Errors
/// Exit 2: it is on, or no truth value.
pub(super) fn must_be_off(
    layer: &mut Layer,
    section: &mut Section<'_>,
    key: &'static str,
    why: &str,
    instead: &str,
) -> Result<()> {
    let Some(field) = written(section, key) else { return Ok(()) };
    if switch(&field)? == Some(true) {
        return Err(field.refused(why, instead));
    }
    layer.same(&field, "off");
    Ok(())
}

/// Whether a map is not empty, or a value that is no map is on.
pub(super) fn has_content(field: &Field<'_>) -> bool {
    match &field.node.value {
        Value::Null | Value::Bool(false) => false,
        Value::Map(entries) => !entries.is_empty(),
        _ => !field.is_auto(),
    }
}

/// Refuses a section, without repeating all of it.
pub(super) fn refused(field: &Field<'_>, why: &str, instead: &str) -> Failure {
    Failure::usage(format!("{} is not supported: {why}", field.path)).at(field.place()).hint(instead)
}
