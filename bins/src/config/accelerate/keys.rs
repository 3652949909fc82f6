//! Keys that set nothing here, as tables: the type each must have and why it has no effect.

use crate::Result;
use crate::config::Layer;
use crate::config::node::Value;
use crate::config::section::{Field, Section};

/// The type of a value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// True or false.
    Bool,
    /// A whole number from 0.
    Count,
    /// Text.
    Text,
    /// Whatever the key takes.
    Any,
}
pub(super) use Kind::{Any, Bool, Count, Text};

/// A key, its type, and why it has no effect.
pub(super) type Quiet = (&'static str, Kind, &'static str);

/// A section, the keys it may have, and why none has an effect.
pub(super) type QuietSection = (&'static str, &'static [(&'static str, Kind)], &'static str);

impl Kind {
    pub(super) fn check(self, field: &Field<'_>) -> Result<()> {
        match self {
            Bool => field.bool().map(drop),
            Count => field.count().map(drop),
            Text => field.text().map(drop),
            Any => Ok(()),
        }
    }
}

/// The value of `key`, unless it is `null`, which is as if it were not written.
pub(super) fn written<'a>(section: &mut Section<'a>, key: &'static str) -> Option<Field<'a>> {
    section.take(key).filter(|field| !field.is_null())
}

/// Takes the keys of a table, each with its own reason. One without content, such as `tpu_env: []`, asks for nothing.
///
/// # Errors
/// Exit 2: a value of another type.
pub(super) fn quiet(layer: &mut Layer, section: &mut Section<'_>, table: &[Quiet]) -> Result<()> {
    for &(key, kind, why) in table {
        if let Some(field) = written(section, key) {
            kind.check(&field)?;
            if has_content(&field) {
                layer.no_effect(&field, why);
            }
        }
    }
    Ok(())
}

/// Takes a section of which no key has an effect, for one reason.
///
/// # Errors
/// Exit 2: a value of another type, or a key that the section does not have.
pub(super) fn quiet_section(layer: &mut Layer, top: &mut Section<'_>, &(key, table, why): &QuietSection) -> Result<()> {
    let Some(field) = written(top, key) else { return Ok(()) };
    let mut section = field.section()?;
    for &(key, kind) in table {
        if let Some(field) = written(&mut section, key) {
            kind.check(&field)?;
        }
    }
    section.finish()?;
    if has_content(&field) {
        layer.no_effect(&field, why);
    }
    Ok(())
}

/// The value of `key` under its full name or without `prefix`; `null` is as if it were not written.
///
/// # Errors
/// Exit 2: both are written, with different values.
pub(super) fn either<'a>(section: &mut Section<'a>, key: &'static str, prefix: &str) -> Result<Option<Field<'a>>> {
    let short = key.strip_prefix(prefix).unwrap_or(key);
    Ok(section.take_one(&[key, short])?.filter(|field| !field.is_null()))
}

/// Whether anything is in a list or a map, or it is neither.
pub(super) fn has_content(field: &Field<'_>) -> bool {
    match &field.node.value {
        Value::List(items) => !items.is_empty(),
        Value::Map(entries) => !entries.is_empty(),
        _ => true,
    }
}
