//! `umbra checkpoint inspect`: what `state.rkyv` says, as text or JSON. No numbers are read.

use super::plain;
use crate::checkpoint::read::read_state;
use crate::checkpoint::{CheckpointState, Role, STATE_FILE};
use crate::source::Source;
use crate::table::{Align, bytes, count, render};
use crate::{Result, hf};
use serde_json::{Value, json};
use spmd_core::Policy;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Everything there is to say.
#[derive(Debug)]
pub(super) struct Inspected {
    dir: PathBuf,
    state: CheckpointState,
    /// Name to `value` and `from`.
    settings: Value,
    /// The architecture in words.
    shape: String,
    files: Vec<FileRow>,
}

#[derive(Debug)]
struct FileRow {
    name: String,
    bytes: u64,
    tensors: usize,
    /// The names of the roles in it.
    holds: Vec<&'static str>,
    /// What is wrong with it at first sight.
    fault: Option<String>,
}

impl Inspected {
    /// Reads the state of the checkpoint in `dir`, and the lengths of its files.
    ///
    /// # Errors
    /// Exit 3: no state, a damaged one, or a model that is not described.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let state = read_state(dir)?;
        let (config, _) = hf::parse_config(dir.join(STATE_FILE), &state.config_json)?;
        // What this version cannot take apart is still shown, as the text it is.
        let settings = serde_json::from_str(&state.run.settings_json)
            .unwrap_or_else(|_| Value::String(state.run.settings_json.clone()));
        let (shape, files) = (Source::drawn(config, 0).shape(), files(dir, &state));
        Ok(Inspected { dir: dir.to_owned(), state, settings, shape, files })
    }

    fn parameters(&self) -> u64 {
        self.state.tensors.iter().filter_map(|t| t.elements()).sum()
    }

    fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    fn checksums(&self) -> usize {
        // The state file has its own.
        self.state.chunks.len() + self.state.plain.len() + 1
    }

    /// One JSON object.
    pub(super) fn json(&self) -> String {
        let (state, run) = (&self.state, &self.state.run);
        let stored: Vec<Role> = Role::STATE.into_iter().chain(state.stores_model().then_some(Role::Model)).collect();
        let dtype = |role: &Role| (role.name().to_owned(), json!(state.dtypes.of(*role).header_name()));
        let dtypes: serde_json::Map<String, Value> = stored.iter().map(dtype).collect();
        let tensor = |t: &crate::checkpoint::TensorEntry| {
            json!({
                "name": t.name, "shape": t.shape, "elements": t.elements(), "dtypes": dtypes,
                "source_dtype": t.source_dtype.header_name(),
            })
        };
        let file = |f: &FileRow| json!({ "name": f.name, "bytes": f.bytes, "tensors": f.tensors, "holds": f.holds, "fault": f.fault });
        let all = json!({
            "checkpoint": self.dir.display().to_string(),
            "umbra": state.umbra,
            "step": state.step,
            "tokens": run.tokens,
            "epoch": run.epoch,
            "row_in_epoch": run.row_in_epoch,
            "state_hash": run.state_hash.map(|hash| format!("{hash:016x}")),
            "policy": run.policy,
            "lanes": run.lanes,
            "world": state.world,
            "stage": run.stage,
            "shard_group": run.shard_group,
            "model": {
                "shape": self.shape, "parameters": self.parameters(), "stores_tied_head": state.stores_tied_head,
            },
            "dtypes": dtypes,
            "settings": self.settings,
            "files": self.files.iter().map(file).collect::<Vec<_>>(),
            "bytes": self.bytes(),
            "checksums": self.checksums(),
            "tensors": state.tensors.iter().map(tensor).collect::<Vec<_>>(),
        });
        hf::save::json_text(&all)
    }

    /// Tables for people; with `tensors` one more.
    pub(super) fn text(&self, tensors: bool) -> String {
        let mut parts = vec![self.facts(), self.setting_rows(), self.file_rows()];
        if tensors {
            parts.push(self.tensor_rows());
        }
        parts.join("\n")
    }

    fn facts(&self) -> String {
        let (state, run) = (&self.state, &self.state.run);
        let about = run.policy.parse::<Policy>().map_or(String::new(), |policy| format!(": {}", policy.about()));
        let dtype = |role: Role| format!("{role} {}", state.dtypes.of(role).header_name());
        let roles = Role::STATE.map(dtype).join(", ");
        let model = if state.stores_model() {
            format!("; {}, which loads as a Hugging Face folder", dtype(Role::Model))
        } else {
            "; one file a rank, no model files (`umbra checkpoint export` makes them)".to_owned()
        };
        let ranks = if state.world == 1 { "1 rank".to_owned() } else { format!("{} ranks", state.world) };
        let hash = run.state_hash.map_or("none (--hash-every was off)".to_owned(), |hash| format!("{hash:016x}"));
        let rows = [
            ("checkpoint", self.dir.display().to_string()),
            ("step", format!("{} completed, {} tokens", state.step, run.tokens)),
            ("data", format!("{} whole passes, then {} rows of the next", run.epoch, run.row_in_epoch)),
            ("state hash", hash),
            (
                "written by",
                format!("Umbra {} on {ranks}: stage {}, shard groups of {}", state.umbra, run.stage, run.shard_group),
            ),
            ("lanes", run.lanes.to_string()),
            ("policy", format!("{}{about}", run.policy)),
            ("model", format!("{} parameters in {} tensors", count(self.parameters()), state.tensors.len())),
            ("", self.shape.clone()),
            ("dtypes", format!("{roles}{model}")),
        ];
        render(&[Align::Left], &rows.map(|(name, value)| vec![name.to_owned(), value]))
    }

    fn setting_rows(&self) -> String {
        let mut rows = vec![["setting", "value", "from"].map(str::to_owned).to_vec()];
        match self.settings.as_object() {
            Some(settings) => rows.extend(settings.iter().map(|(name, setting)| {
                let part = |key: &str| setting.get(key).map_or(String::new(), plain);
                vec![name.clone(), part("value"), part("from")]
            })),
            None => rows.push(vec!["(as text)".to_owned(), plain(&self.settings)]),
        }
        render(&[Align::Left; 3], &rows)
    }

    fn file_rows(&self) -> String {
        let mut rows = vec![["file", "size", "tensors", "holds"].map(str::to_owned).to_vec()];
        rows.extend(self.files.iter().map(|file| {
            let holds = file.fault.clone().unwrap_or_else(|| file.holds.join(", "));
            let tensors = if file.tensors == 0 { String::new() } else { file.tensors.to_string() };
            vec![file.name.clone(), bytes(file.bytes), tensors, holds]
        }));
        let total = format!("{} files, {} checksums", self.files.len(), self.checksums());
        rows.push(vec!["total".to_owned(), bytes(self.bytes()), String::new(), total]);
        render(&[Align::Left, Align::Right, Align::Right], &rows)
    }

    fn tensor_rows(&self) -> String {
        let stores_model = self.state.stores_model();
        let model = stores_model.then_some("model");
        let columns = ["tensor", "shape", "shadow", "exp_avg", "exp_avg_sq"].into_iter().chain(model).chain(["source"]);
        let mut rows = vec![columns.map(str::to_owned).collect::<Vec<_>>()];
        let roles: Vec<Role> = Role::STATE.into_iter().chain(stores_model.then_some(Role::Model)).collect();
        for tensor in &self.state.tensors {
            let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
            let mut row = vec![tensor.name.clone(), shape];
            row.extend(roles.iter().map(|role| self.state.dtypes.of(*role).header_name().to_owned()));
            row.push(tensor.source_dtype.header_name().to_owned());
            if tensor.elements() == Some(0) {
                row.push("HAS NO ELEMENTS".to_owned());
            }
            rows.push(row);
        }
        render(&[Align::Left], &rows)
    }
}

/// The files as listed, `state.rkyv` last.
fn files(dir: &Path, state: &CheckpointState) -> Vec<FileRow> {
    let on_disk = |name: &str| std::fs::metadata(dir.join(name)).ok().map(|m| m.len());
    let mut held: Vec<BTreeSet<(Role, u32)>> = vec![BTreeSet::new(); state.files.len()];
    for chunk in &state.chunks {
        held[chunk.file as usize].insert((chunk.role, chunk.tensor));
    }
    let row = |(file, held): (&crate::checkpoint::format::FileEntry, &BTreeSet<(Role, u32)>)| {
        let mut holds: Vec<&'static str> = held.iter().map(|(role, _)| role.name()).collect();
        holds.dedup();
        let fault = match on_disk(&file.name) {
            Some(len) if len == file.len => None,
            Some(len) => Some(format!("DAMAGED: {len} bytes, {} expected", file.len)),
            None => Some("MISSING".to_owned()),
        };
        FileRow { name: file.name.clone(), bytes: file.len, tensors: held.len(), holds, fault }
    };
    let mut rows: Vec<FileRow> = state.files.iter().zip(&held).map(row).collect();
    let bytes = on_disk(STATE_FILE).unwrap_or(0);
    rows.push(FileRow { name: STATE_FILE.to_owned(), bytes, tensors: 0, holds: Vec::new(), fault: None });
    rows
}
