//! Nothing missing, nothing twice: the blocks of a checkpoint are every element of every tensor and every byte of every
//! file, each once. It is checked before a checkpoint is committed and before one is read.

use super::format::{CHUNK, CheckpointState, Role, STATE_FILE};
use std::collections::HashSet;
use std::path::Path;

const ROLES: [Role; 5] = [Role::Model, Role::TiedHead, Role::Shadow, Role::ExpAvg, Role::ExpAvgSq];

/// The first contradiction, as text.
pub(super) fn check(state: &CheckpointState) -> Result<(), String> {
    names(state)?;
    indices(state)?;
    if let Some(pair) = state.chunks.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(format!("block {:?} is listed after {:?}", pair[1], pair[0]));
    }
    for role in ROLES {
        for tensor in 0..state.tensors.len() {
            elements(state, role, tensor)?;
        }
    }
    bytes(state)
}

/// Files are named as plain files of the folder, so that no list of names leads out of it, and once each.
fn names(state: &CheckpointState) -> Result<(), String> {
    let mut files = HashSet::new();
    for file in &state.files {
        let plain = Path::new(&file.name).file_name().is_some_and(|name| name == file.name.as_str());
        if !plain || file.name == STATE_FILE || !files.insert(&file.name) {
            return Err(format!("`{}` is no name for a file of it, or is listed twice", file.name));
        }
    }
    let mut tensors = HashSet::new();
    match state.tensors.iter().find(|t| !tensors.insert(&t.name)) {
        Some(twice) => Err(format!("tensor {} is listed twice", twice.name)),
        None => Ok(()),
    }
}

fn indices(state: &CheckpointState) -> Result<(), String> {
    let (files, tensors) = (state.files.len(), state.tensors.len());
    let chunk = state.chunks.iter().find(|c| {
        let sized = (1..=CHUNK as u64).contains(&c.elements);
        c.file as usize >= files || c.tensor as usize >= tensors || !sized
    });
    if let Some(chunk) = chunk {
        return Err(format!("block {chunk:?} is of a file or tensor that is not listed, or of no sound size"));
    }
    match state.plain.iter().find(|p| p.file as usize >= files) {
        Some(plain) => Err(format!("range {plain:?} is of a file that is not listed")),
        None => Ok(()),
    }
}

fn elements(state: &CheckpointState, role: Role, tensor: usize) -> Result<(), String> {
    let name = &state.tensors[tensor].name;
    let len = state.elements_in(role, tensor).ok_or_else(|| format!("tensor {name} has an impossible shape"))?;
    let mut at = 0;
    for chunk in state.chunks_of(role, tensor) {
        if chunk.start != at {
            return Err(format!("{role} of {name}: a block begins at element {}, expected {at}", chunk.start));
        }
        at += chunk.elements;
    }
    if at == len { Ok(()) } else { Err(format!("{role} of {name}: blocks hold {at} elements, expected {len}")) }
}

fn bytes(state: &CheckpointState) -> Result<(), String> {
    let chunks = state.chunks.iter().map(|c| (c.file, c.offset, state.bytes_of(c)));
    let plain = state.plain.iter().map(|p| (p.file, p.offset, p.len));
    let mut ranges: Vec<(u32, u64, u64)> = chunks.chain(plain).collect();
    ranges.sort_unstable();
    let mut ranges = ranges.into_iter().peekable();
    for (index, file) in state.files.iter().enumerate() {
        let mut at = 0u64;
        while let Some((_, offset, len)) = ranges.next_if(|(of, ..)| *of as usize == index) {
            if offset != at {
                return Err(format!("{}: a block begins at byte {offset}, expected {at}", file.name));
            }
            at = at.checked_add(len).ok_or_else(|| format!("{}: a block of {len} bytes", file.name))?;
        }
        if at != file.len {
            return Err(format!("{}: blocks end at byte {at}, its length is {}", file.name, file.len));
        }
    }
    Ok(())
}
