//! Do these files hold this model? Everything that is wrong, at once, and why it may be so.

use super::{EMBEDDING, Entry, HEAD, WeightFiles};
use crate::hf::shortened;
use crate::{Failure, Result};
use spmd_core::{ParamSpec, UnitSpec};
use std::collections::HashSet;

/// What is wrong, by kind.
struct Faults<'a> {
    missing: Vec<&'a str>,
    extra: Vec<&'a str>,
    misshapen: Vec<(&'a ParamSpec, &'a Entry)>,
}

pub(super) fn check(files: &WeightFiles, units: &[UnitSpec], tied: bool) -> Result<()> {
    let wanted: Vec<&ParamSpec> = units.iter().flat_map(|unit| &unit.params).collect();
    let names: HashSet<&str> = wanted.iter().map(|p| p.name.as_str()).collect();
    let mut faults = Faults { missing: Vec::new(), extra: Vec::new(), misshapen: Vec::new() };
    for param in &wanted {
        match files.tensors.get(&param.name) {
            None => faults.missing.push(&param.name),
            Some(entry) if entry.shape != param.shape => faults.misshapen.push((param, entry)),
            Some(_) => {}
        }
    }
    let ignored = |name: &str| name.ends_with("rotary_emb.inv_freq") || (tied && name == HEAD);
    faults.extra = files.tensors.keys().map(String::as_str).filter(|n| !names.contains(n) && !ignored(n)).collect();
    if !(faults.missing.is_empty() && faults.extra.is_empty() && faults.misshapen.is_empty()) {
        return Err(report(files, &faults, tied));
    }
    for param in &wanted {
        files.readable(&param.name, files.entry(&param.name)?)?;
    }
    if tied && files.contains(HEAD) {
        same_bytes(files)?;
    }
    Ok(())
}

fn report(files: &WeightFiles, faults: &Faults<'_>, tied: bool) -> Failure {
    let misshapen: Vec<String> = faults
        .misshapen
        .iter()
        .map(|(param, entry)| format!("{} is {:?}, expected {:?}", param.name, entry.shape, param.shape))
        .collect();
    let mut found = Vec::new();
    for (kind, list) in [("missing", &faults.missing), ("extra", &faults.extra)] {
        if !list.is_empty() {
            found.push(format!("{} {kind}: {}", list.len(), shortened(list)));
        }
    }
    if !misshapen.is_empty() {
        found.push(format!("{} misshapen: {}", misshapen.len(), shortened(&misshapen)));
    }
    Failure::input("the weight files do not hold the model that config.json describes")
        .at(files.dir.display())
        .expected("exactly the tensors of config.json's architecture, in their shapes")
        .found(found.join("\n"))
        .hint(cause(files, faults, tied))
}

/// The likeliest cause, the most specific first.
fn cause(files: &WeightFiles, faults: &Faults<'_>, tied: bool) -> String {
    let extra = |test: &dyn Fn(&str) -> bool| faults.extra.iter().any(|name| test(name));
    let prefixed = |prefix: &str| faults.missing.iter().any(|m| files.contains(&format!("{prefix}{m}")));
    if extra(&|n| n.ends_with(".bias")) {
        return "this model has biases, which Umbra does not train".to_owned();
    }
    if extra(&|n| n.contains("lora_")) {
        return "these are adapters: merge them into the base model and save that".to_owned();
    }
    if extra(&|n| {
        [".qweight", ".qzeros", ".scales", "weight_scale", ".absmax", ".SCB"].iter().any(|end| n.ends_with(end))
    }) {
        return "these weights are quantized: use the model they were made from".to_owned();
    }
    if let Some(prefix) = ["module.", "_orig_mod.", "base_model.model."].into_iter().find(|p| prefixed(p)) {
        return format!("the names begin with `{prefix}`: save the unwrapped model");
    }
    let bare = |name: &&str| name.strip_prefix("model.").is_some_and(|bare| files.tensors.contains_key(bare));
    if faults.missing.iter().any(bare) {
        return "the names lack `model.`: save the model with its head (…ForCausalLM), not the bare one".to_owned();
    }
    if let Some(hint) = shape_cause(faults) {
        return hint;
    }
    if faults.missing == [HEAD] && !tied {
        let hint = "config.json says tie_word_embeddings false (or nothing), so the head needs its own weight";
        return format!("{hint}: if the model ties them, set it to true; if not, {HEAD} was lost in saving");
    }
    let layer = |name: &&str| name.starts_with("model.layers.");
    if faults.missing.is_empty() && faults.extra.iter().all(layer) {
        return "the files have more than config.json's num_hidden_layers: they belong to another configuration"
            .to_owned();
    }
    if faults.extra.is_empty() && faults.misshapen.is_empty() {
        return "the folder is incomplete, or config.json belongs to a larger model".to_owned();
    }
    "config.json and the weight files belong to different models".to_owned()
}

fn shape_cause(faults: &Faults<'_>) -> Option<String> {
    let rows = faults.misshapen.iter().find(|(param, entry)| {
        [EMBEDDING, HEAD].contains(&param.name.as_str()) && entry.shape.get(1) == param.shape.get(1)
    });
    if let Some((param, entry)) = rows {
        let (found, expected) = (entry.shape.first()?, param.shape.first()?);
        let hint = format!("{} has {found} rows and config.json says vocab_size {expected}", param.name);
        return Some(format!(
            "{hint}: the embeddings were resized without config.json, or belong to another tokenizer"
        ));
    }
    let any = |part: &str| faults.misshapen.iter().any(|(p, _)| p.name.contains(part));
    let only = |part: &str| any(part) && faults.misshapen.iter().all(|(p, _)| p.name.contains(part));
    if any(".k_proj.") && !any(".q_proj.") {
        return Some("check num_key_value_heads in config.json".to_owned());
    }
    if only(".self_attn.") {
        return Some("check num_attention_heads and head_dim in config.json".to_owned());
    }
    if only(".mlp.") {
        return Some("check intermediate_size in config.json".to_owned());
    }
    None
}

/// A stored head of a tied model must be the embedding table, byte for byte.
fn same_bytes(files: &WeightFiles) -> Result<()> {
    let (table, head) = (files.entry(EMBEDDING)?, files.entry(HEAD)?);
    let differ = |found: String| {
        Failure::input("a tied model stores a head that is not its embedding table")
            .at(files.place(HEAD, head))
            .expected(format!("the bytes of {EMBEDDING}, as tie_word_embeddings is true"))
            .found(found)
            .hint("if the head has its own weight, set tie_word_embeddings to false in config.json; if not, delete it")
    };
    if table.dtype != head.dtype || table.shape != head.shape {
        return Err(differ(format!("{} {:?} against {} {:?}", head.dtype, head.shape, table.dtype, table.shape)));
    }
    let chunk = super::SCRATCH.min(table.len as usize);
    let (mut a, mut b) = (vec![0; chunk], vec![0; chunk]);
    let mut at = 0;
    while at < table.len {
        let n = chunk.min((table.len - at) as usize);
        files.read_bytes(EMBEDDING, table, table.start + at, &mut a[..n])?;
        files.read_bytes(HEAD, head, head.start + at, &mut b[..n])?;
        if let Some(i) = a[..n].iter().zip(&b[..n]).position(|(a, b)| a != b) {
            return Err(differ(format!("the first difference at byte {} of the tensor", at + i as u64)));
        }
        at += n as u64;
    }
    Ok(())
}
