//! Ranks compare what they were started with: a script that gives one rank another flag, or a node that holds another copy
//! of a file, would otherwise train something nobody asked for.

use super::prepare::Prepared;
use crate::plan::RunPlan;
use crate::{Failure, Result};
use collectives::Comm;
use serde_json::{Map, Value, json};

/// Settings in which ranks may differ: they change no number.
const FREE: [&str; 1] = ["threads"];

/// Refuses ranks whose settings, model or rows differ from rank 0's.
///
/// # Errors
/// Exit 2, the same on every rank: what differs, and where.
pub(crate) fn agree(plan: &RunPlan, prepared: &Prepared, comm: &Comm) -> Result<()> {
    let mut own = settings(plan);
    own.insert("model configuration".to_owned(), prepared.source.config_json.clone());
    own.insert("data rows".to_owned(), json!(prepared.rows()));
    let text = Value::Object(own).to_string();
    let all = comm.gather_bytes(text.as_bytes()).map_err(Failure::from)?;
    match all.iter().enumerate().find(|(_, other)| **other != all[0]) {
        None => Ok(()),
        Some((rank, other)) => Err(differs(&all[0], other, rank)),
    }
}

fn settings(plan: &RunPlan) -> Map<String, Value> {
    let all = plan.to_json()["settings"].as_object().cloned().unwrap_or_default();
    let kept = all.into_iter().filter(|(name, _)| !FREE.contains(&name.as_str()));
    kept.map(|(name, setting)| (name, setting["value"].clone())).collect()
}

fn differs(first: &[u8], other: &[u8], rank: usize) -> Failure {
    // Both were written by `agree`, so they are JSON objects with the same keys.
    let read = |bytes: &[u8]| serde_json::from_slice::<Map<String, Value>>(bytes).unwrap_or_default();
    let (first, other) = (read(first), read(other));
    let changed: Vec<&String> = first.keys().filter(|k| first.get(*k) != other.get(*k)).collect();
    let list = |of: &Map<String, Value>| {
        let value = |k: &&String| of.get(*k).map_or(String::new(), Value::to_string);
        changed.iter().map(|k| format!("{k}: {}", value(k))).collect::<Vec<_>>().join("\n")
    };
    Failure::usage("the ranks were not started with the same settings, model and rows")
        .at(format!("rank {rank}"))
        .expected(format!("as rank 0 has it\n{}", list(&first)))
        .found(list(&other))
        .hint("the same command line on every rank, and the same files on every node")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named_with_both_values() {
        let failure = differs(br#"{"lr":1e-5,"seed":0}"#, br#"{"lr":2e-5,"seed":0}"#, 3).to_string();
        assert!(
            failure.contains("rank 3") && failure.contains("lr: 1e-5") || failure.contains("lr: 0.00001"),
            "{failure}"
        );
        assert!(failure.contains("2e-5") || failure.contains("0.00002"), "{failure}");
        assert!(!failure.contains("seed"), "{failure}");
    }
}
