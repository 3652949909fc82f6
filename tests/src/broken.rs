//! Model folders that are copies of a fixture, and what can be wrong with their files.

use crate::{folder, model};
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A copy of a fixture's model folder, for a test to spoil.
#[derive(Debug)]
pub struct Copy(TempDir);

impl Copy {
    /// Copies every file but the reference values.
    pub fn of(name: &str) -> Self {
        let to = folder();
        for entry in fs::read_dir(model(name)).expect("a fixture") {
            let path = entry.expect("an entry").path();
            let file = path.file_name().expect("a file").to_string_lossy().into_owned();
            if !file.starts_with("reference.") && file != "batch.json" {
                fs::copy(&path, to.path().join(file)).expect("a file to be copied");
            }
        }
        Copy(to)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Changes config.json.
    pub fn edit_config(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.file("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("config.json")).expect("JSON");
        change(config.as_object_mut().expect("an object"));
        fs::write(path, config.to_string()).expect("config.json to be written");
    }

    /// Changes header and data of a safetensors file.
    pub fn edit_weights(&self, name: &str, change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
        let path = self.file(name);
        let (mut header, mut data) = split(&fs::read(&path).expect("weights"));
        change(&mut header, &mut data);
        fs::write(path, join(&header, &data)).expect("weights to be written");
    }
}

/// Header and data of a safetensors file, unchecked.
pub fn split(file: &[u8]) -> (Map<String, Value>, Vec<u8>) {
    let (len, rest) = file.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    (serde_json::from_slice(header).expect("a header"), data.to_vec())
}

/// A safetensors file of these, unchecked.
pub fn join(header: &Map<String, Value>, data: &[u8]) -> Vec<u8> {
    let mut header = serde_json::to_string(header).expect("JSON");
    // Data begins at a multiple of eight, as every writer of the format pads it.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// Where a tensor's data begins and ends, by its header.
pub fn span(header: &Map<String, Value>, name: &str) -> std::ops::Range<usize> {
    let offset = |i: usize| header[name]["data_offsets"][i].as_u64().expect("an offset") as usize;
    offset(0)..offset(1)
}
