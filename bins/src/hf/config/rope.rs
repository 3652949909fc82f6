//! The rotary settings: `rope_theta` beside `rope_scaling` (transformers 4), or `rope_parameters` (transformers 5).

use super::{Reader, RopeScaling};
use crate::{Failure, Result};
use serde_json::{Map, Value, json};

/// Keys whose meaning Umbra knows for the rope types it has; anything else that is not null could change the result.
const KNOWN: [&str; 8] = [
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
];

/// `rope_scaling` as config.json spells it; null where nothing is scaled.
pub(super) fn spell(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::Default => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            // transformers expects a whole number here.
            "original_max_position_embeddings": original_max_position_embeddings as u64,
        }),
    }
}

impl<'a> Reader<'a> {
    /// θ from either spelling; both at once must agree. 10,000 where neither is there.
    pub(super) fn rope_theta(&self) -> Result<f64> {
        let old = self.number("rope_theta")?;
        let new = match self.rope()? {
            Some((key, table)) => self.within(key, table, "rope_theta")?,
            None => None,
        };
        match (old, new) {
            (Some(a), Some(b)) if a != b => {
                let expected = format!("one value: rope_theta says {a}");
                Err(self.unsupported("rope_parameters.rope_theta", expected, b))
            }
            (Some(theta), _) | (None, Some(theta)) => Ok(theta),
            (None, None) => Ok(10_000.0),
        }
    }

    pub(super) fn rope_scaling(&self) -> Result<RopeScaling> {
        let Some((key, table)) = self.rope()? else { return Ok(RopeScaling::Default) };
        self.check_rope_keys(key, table)?;
        let number = |name: &'static str| -> Result<f64> {
            let place = format!("{key}.{name}");
            let value = self.within(key, table, name)?.ok_or_else(|| self.missing(&place, "a number"))?;
            if value.is_finite() && value > 0.0 {
                return Ok(value);
            }
            Err(Failure::input("the rotary scaling cannot work")
                .at(self.place(&place))
                .expected("a positive number")
                .found(value))
        };
        match self.rope_type(key, table)? {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear { factor: number("factor")? }),
            "llama3" => {
                let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
                if high <= low {
                    return Err(Failure::input("the rotary scaling cannot work")
                        .at(self.place(&format!("{key}.high_freq_factor")))
                        .expected(format!("more than low_freq_factor ({low})"))
                        .found(high));
                }
                Ok(RopeScaling::Llama3 {
                    factor: number("factor")?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_max_position_embeddings: number("original_max_position_embeddings")?,
                })
            }
            other => {
                let place = format!("{key}.rope_type");
                Err(self.unsupported(&place, "\"default\", \"linear\" or \"llama3\"", format!("\"{other}\"")))
            }
        }
    }

    /// The table of rotary settings and the key it stands under.
    fn rope(&self) -> Result<Option<(&'static str, &'a Map<String, Value>)>> {
        let mut found: Option<(&'static str, &'a Map<String, Value>)> = None;
        for key in ["rope_parameters", "rope_scaling"] {
            let table = match self.keys.get(key) {
                None | Some(Value::Null) => continue,
                Some(Value::Object(table)) => table,
                Some(other) => return Err(self.wrong_type(key, "an object or null", other)),
            };
            if found.is_some_and(|(_, other)| other != table) {
                return Err(self.unsupported(
                    key,
                    "the same as rope_parameters, or absent",
                    Value::Object(table.clone()),
                ));
            }
            found = Some((key, table));
        }
        Ok(found)
    }

    /// `rope_type`, or `type` as old files spell it; absent means `default`.
    fn rope_type(&self, key: &str, table: &'a Map<String, Value>) -> Result<&'a str> {
        for name in ["rope_type", "type"] {
            match table.get(name) {
                None | Some(Value::Null) => {}
                Some(Value::String(text)) => return Ok(text),
                Some(other) => return Err(self.wrong_type(&format!("{key}.{name}"), "a string", other)),
            }
        }
        Ok("default")
    }

    fn check_rope_keys(&self, key: &str, table: &'a Map<String, Value>) -> Result<()> {
        // The type comes first: what is wrong with a yarn file is that it is yarn, not one of its keys.
        let rope_type = self.rope_type(key, table)?;
        if !["default", "linear", "llama3"].contains(&rope_type) {
            return Ok(());
        }
        if let Some(part) = self.within(key, table, "partial_rotary_factor")?.filter(|part| *part != 1.0) {
            let place = format!("{key}.partial_rotary_factor");
            return Err(self.unsupported(&place, "1: rotary embedding over the whole head", part));
        }
        match table.iter().find(|(name, value)| !KNOWN.contains(&name.as_str()) && !value.is_null()) {
            None => Ok(()),
            Some((name, value)) => {
                let place = format!("{key}.{name}");
                Err(self.unsupported(&place, format!("no such key under rope type \"{rope_type}\""), value))
            }
        }
    }

    fn within(&self, key: &str, table: &Map<String, Value>, name: &str) -> Result<Option<f64>> {
        match table.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong_type(&format!("{key}.{name}"), "a number", value)),
            },
        }
    }
}
