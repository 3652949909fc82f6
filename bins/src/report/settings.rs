//! Settings of several runs side by side.

use super::read::Run;
use serde_json::Value;

/// A setting of every run.
#[derive(Debug, PartialEq)]
pub(super) struct Setting {
    pub(super) name: String,
    /// A cell a run; none where the run's version did not have it.
    pub(super) cells: Vec<Option<Cell>>,
}

/// A setting of one run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    /// Its value in words.
    pub(super) value: String,
    /// Where it came from: empty for what the run found out itself.
    pub(super) from: String,
}

impl Setting {
    /// Whether the runs do not all have the same value.
    pub(super) fn differs(&self) -> bool {
        let value = |cell: &Option<Cell>| cell.as_ref().map(|cell| cell.value.clone());
        self.cells.windows(2).any(|pair| value(&pair[0]) != value(&pair[1]))
    }
}

/// Every setting of the runs in the order of `run.json`; those that only later runs have come last.
pub(super) fn settings(runs: &[Run]) -> Vec<Setting> {
    let all: Vec<Vec<(String, Cell)>> = runs.iter().map(of).collect();
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in all.iter().flatten() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let cell = |run: &Vec<(String, Cell)>, name: &String| {
        run.iter().find(|(other, _)| other == name).map(|(_, cell)| cell.clone())
    };
    names
        .iter()
        .map(|name| Setting { name: (*name).clone(), cells: all.iter().map(|run| cell(run, name)).collect() })
        .collect()
}

fn of(run: &Run) -> Vec<(String, Cell)> {
    let plain = |name: &str| {
        let value = run.facts.get(name).filter(|value| !value.is_null())?;
        Some((name.to_owned(), Cell { value: words(value), from: String::new() }))
    };
    let written = run.facts["settings"].as_object().into_iter().flatten();
    let settings = written
        .map(|(name, setting)| (name.clone(), Cell { value: words(&setting["value"]), from: words(&setting["from"]) }));
    settings.chain(["data_rows", "umbra"].into_iter().filter_map(plain)).collect()
}

/// A value as a reader would write it: what has one name and one value, like `{"steps": 300}`, without its braces.
fn words(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(x) => crate::table::number(x),
            None => number.to_string(),
        },
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(words).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| format!("{name} {}", words(value))).collect::<Vec<_>>().join(", ")
        }
    }
}
