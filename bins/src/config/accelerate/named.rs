//! What `deepspeed_config_file` names: a file, or the settings themselves as JSON, as base64 of that
//! (`accelerate/utils/deepspeed.py: HfDeepSpeedConfig`), or as a table.

use crate::config::hjson;
use crate::config::node::{Node, Place, Value};
use crate::config::section::Field;
use crate::{Failure, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The settings, and the file that messages about them name.
///
/// # Errors
/// Exit 2: no such file, one that cannot be read, one that is no JSON, or settings without `zero_optimization`.
pub(super) fn settings(yaml: &Arc<PathBuf>, field: &Field<'_>) -> Result<(Arc<PathBuf>, Node)> {
    let (file, node) = match &field.node.value {
        Value::Map(_) => (yaml.clone(), field.node.clone()),
        _ => {
            let text = field.text()?;
            let (file, json) = json(yaml, field, &text)?;
            let node = parsed(&file, &json)?;
            (file, node)
        }
    };
    if !node.entries().is_some_and(|entries| entries.iter().any(|e| e.key == "zero_optimization")) {
        return Err(Failure::usage("Accelerate needs zero_optimization in DeepSpeed's settings")
            .at(file.display())
            .expected("a section zero_optimization")
            .found(format!("none, in what {} names", field.place()))
            .hint("add \"zero_optimization\": {\"stage\": 0}, or the stage that is meant"));
    }
    Ok((file, node))
}

/// The JSON that `text` is or names. A relative path is relative to the working folder, as it is for Accelerate.
fn json(yaml: &Arc<PathBuf>, field: &Field<'_>, text: &str) -> Result<(Arc<PathBuf>, String)> {
    // Lines and columns within text of the YAML count from its beginning.
    let within = || Arc::new(PathBuf::from(format!("{}[{}]", yaml.display(), field.path)));
    if text.trim_start().starts_with('{') {
        return Ok((within(), text.to_owned()));
    }
    let path = Path::new(text);
    match std::fs::read_to_string(path) {
        Ok(json) => Ok((Arc::new(path.to_owned()), json)),
        Err(e) => match base64(text).filter(|json| json.trim_start().starts_with('{')) {
            Some(json) => Ok((within(), json)),
            None => Err(unreadable(yaml, field, path, &e)),
        },
    }
}

fn unreadable(yaml: &Path, field: &Field<'_>, path: &Path, e: &std::io::Error) -> Failure {
    let failure = Failure::usage(format!("the DeepSpeed file {} cannot be read", path.display()))
        .at(field.place())
        .expected("a path from the working folder, JSON, or base64 of JSON")
        .found(e);
    let beside = yaml.parent().map(|folder| folder.join(path)).filter(|beside| beside != path && beside.is_file());
    match beside {
        Some(beside) => failure.hint(format!(
            "it is beside the YAML, but the path counts from the working folder: write {}, or start there",
            beside.display()
        )),
        None => failure.hint("correct the path, or write the settings into deepspeed_config"),
    }
}

fn parsed(file: &Arc<PathBuf>, json: &str) -> Result<Node> {
    hjson::parse(json).map_err(|wrong| {
        Failure::usage("the DeepSpeed settings are not well-formed JSON")
            .at(Place { file: file.clone(), spot: wrong.spot })
            .expected(wrong.expected)
            .found(wrong.found)
    })
}

/// The text that `code` encodes, in either of the two alphabets (RFC 4648); none if it is no such thing.
fn base64(code: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let (mut bits, mut held) = (0u32, 0);
    for c in code.trim().trim_end_matches('=').bytes() {
        let six = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        bits = (bits << 6 | u32::from(six)) & 0xFFFF;
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held & 0xFF) as u8);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_decoded() {
        for (code, text) in
            [("", ""), ("eyJhIjogMX0=", "{\"a\": 1}"), ("eyI_IjogMX0", "{\"?\": 1}"), ("eyI/IjogMX0=", "{\"?\": 1}")]
        {
            assert_eq!(base64(code).as_deref(), Some(text));
        }
        assert_eq!(base64("ds_config.json"), None, "a dot is in no alphabet");
        assert_eq!(base64("/w=="), None, "0xFF is no text");
    }
}
