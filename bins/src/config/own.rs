//! Umbra's own TOML: the names of the flags of `umbra train`, with `-` or `_`, and their values.

use super::Layer;
use super::node::{Entry, Malformed, Node, Place, Spot, Value};
use super::read::Dialect;
use super::section::Section;
use crate::cli::TrainArgs;
use crate::nearest::nearest;
use crate::{Failure, Result};
use std::path::PathBuf;
use std::sync::Arc;
use toml::de::{DeTable, DeValue};

/// Flags that say where and how a command runs, not what the run is.
const NOT_IN_A_FILE: [&str; 3] = ["config", "override", "resume"];

/// Reads a whole text.
///
/// # Errors
/// Where it leaves the grammar; a name that is there twice is one such place.
pub(super) fn parse(text: &str) -> Result<Node, Malformed> {
    let places = Lines::of(text);
    let table = DeTable::parse(text).map_err(|e| Malformed {
        spot: places.spot(e.span().map_or(0, |span| span.start)),
        expected: "TOML".to_owned(),
        found: e.message().to_owned(),
    })?;
    Ok(Node { value: places.table(table.get_ref()), spot: Spot { line: 1, column: 1 } })
}

/// The flags of the file.
///
/// # Errors
/// Exit 2: a name that is no flag, or a value that is none of a flag.
pub(super) fn layer(file: &Arc<PathBuf>, node: &Node) -> Result<Layer> {
    let mut layer = Layer::new(file.clone(), Dialect::Umbra);
    let mut section = Section::new(file, "", node)?;
    let flags = TrainArgs::flags();
    for field in section.rest() {
        let name = field.path.replace('_', "-");
        let place = || Place { file: file.clone(), spot: field.spot };
        let known = flags.iter().find(|flag| flag.spellings.contains(&name));
        let Some(flag) = known.filter(|flag| !NOT_IN_A_FILE.contains(&flag.name.as_str())) else {
            let names = || flags.iter().map(|flag| flag.name.as_str()).filter(|name| !NOT_IN_A_FILE.contains(name));
            let failure = Failure::usage(match known {
                Some(_) => format!("{:?} belongs on the command line", field.path),
                None => format!("there is no setting {:?}", field.path),
            });
            let failure = failure.at(place()).expected("a flag of umbra train, without its dashes").found(&field.path);
            return Err(match nearest(&name, names()) {
                Some(close) => failure.hint(format!("did you mean {close:?}?")),
                None => failure.hint("umbra train --help lists them"),
            });
        };
        // A flag without a value is on or not there.
        if !flag.takes_value {
            match field.bool()? {
                true => layer.set_all(&flag.name, Vec::new(), &field),
                false => layer.same(&field, "off unless it is set"),
            }
            continue;
        }
        let values = match &field.node.value {
            Value::List(_) => field.list()?.iter().map(written).collect::<Option<Vec<_>>>(),
            Value::Map(entries) => {
                entries.iter().map(|e| written(&e.node).map(|value| format!("{}={value}", e.key))).collect()
            }
            _ => written(field.node).map(|value| vec![value]),
        };
        layer.set_all(&flag.name, values.ok_or_else(|| field.bad("a value, or a list of values"))?, &field);
    }
    Ok(layer)
}

/// A value as it would be written after a flag.
fn written(node: &Node) -> Option<String> {
    match &node.value {
        Value::Bool(b) => Some(if *b { "on" } else { "off" }.to_owned()),
        Value::Number(text) | Value::Text(text) => Some(text.clone()),
        Value::Null | Value::List(_) | Value::Map(_) => None,
    }
}

/// Turns byte positions of a text into spots.
struct Lines<'t> {
    text: &'t str,
    /// Where each line starts.
    starts: Vec<usize>,
}

impl<'t> Lines<'t> {
    fn of(text: &'t str) -> Self {
        Lines { text, starts: std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect() }
    }

    fn spot(&self, at: usize) -> Spot {
        let at = at.min(self.text.len());
        let line = self.starts.partition_point(|start| *start <= at);
        let column =
            self.text[self.starts[line - 1]..].char_indices().take_while(|(i, _)| self.starts[line - 1] + i < at);
        Spot { line, column: column.count() + 1 }
    }

    fn table(&self, table: &DeTable<'_>) -> Value {
        let entry = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
            let name: &std::borrow::Cow<'_, str> = key.get_ref();
            Entry { key: name.to_string(), spot: self.spot(key.span().start), node: self.node(value) }
        };
        Value::Map(table.iter().map(entry).collect())
    }

    fn node(&self, value: &toml::Spanned<DeValue<'_>>) -> Node {
        let spot = self.spot(value.span().start);
        let value = match value.get_ref() {
            DeValue::String(text) => Value::Text(text.to_string()),
            DeValue::Integer(number) => Value::Number(number.to_string()),
            DeValue::Float(number) => Value::Number(number.to_string()),
            DeValue::Boolean(b) => Value::Bool(*b),
            DeValue::Datetime(time) => Value::Text(time.to_string()),
            DeValue::Array(items) => Value::List(items.iter().map(|item| self.node(item)).collect()),
            DeValue::Table(table) => self.table(table),
        };
        Node { value, spot }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(text: &str) -> Result<String> {
        let file = Arc::new(PathBuf::from("run.toml"));
        let node =
            parse(text).map_err(|e| Failure::usage(format!("{}:{}", e.spot.line, e.spot.column)).found(e.found))?;
        let settings = layer(&file, &node)?.settings;
        Ok(settings.iter().map(|s| format!("--{} {}", s.flag, s.values.join(" "))).collect::<Vec<_>>().join("; "))
    }

    #[test]
    fn names_are_those_of_the_flags() {
        let text = "lr = 1e-5\nlearning_rate = 1e-5\nweight-decay = 0.1\nno-shuffle = true\ntruncate = false\n\
                    data = [\"a\", \"b\"]\nreshard-after-forward = false\nschedule-params = { warmup_num_steps = 10 }\n";
        let expected = "--lr 1e-5; --lr 1e-5; --weight-decay 0.1; --no-shuffle ; --data a b; --reshard-after-forward off; \
                        --schedule-params warmup_num_steps=10";
        assert_eq!(flags(text).unwrap(), expected);
    }

    #[test]
    fn what_is_no_flag_is_refused_at_its_place() {
        let failure = flags("lr = 1\n  waight-decay = 0.1\n").unwrap_err();
        assert_eq!(failure.place.as_deref(), Some("run.toml:2:3"));
        assert!(failure.hint.unwrap().contains("\"weight-decay\""));
        assert!(flags("resume = \"never\"").unwrap_err().what.contains("command line"));
        assert_eq!(flags("lr = 1\nlr = 2\n").unwrap_err().what, "2:1");
        assert_eq!(flags("lr = \n").unwrap_err().what, "1:6");
        assert!(flags("lr = [[1]]").is_err());
    }
}
