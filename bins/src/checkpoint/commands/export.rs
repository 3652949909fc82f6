//! `umbra checkpoint export`: the shadow as a Hugging Face folder, a block at a time.

use super::meter::Meter;
use crate::checkpoint::format::{CHUNK, DAMAGED};
use crate::checkpoint::read::read_state;
use crate::checkpoint::{CheckpointState, free_bytes};
use crate::cli::ExportDType;
use crate::hf::save::{COMPANIONS, MAX_SHARD_BYTES, ModelWriter};
use crate::plan::ModelSource;
use crate::source::Source;
use crate::table::{bytes, count};
use crate::{Failure, Result};
use spmd_core::ParamSpec;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// Writes the weights of the checkpoint in `dir` into the new folder `out`, each tensor in the dtype that `dtype` gives
/// it, and returns a line that says so. Two blocks of numbers and the tokenizer are all that is ever in memory.
///
/// # Errors
/// Exit 2: `out` lies in the checkpoint. Exit 3: a damaged checkpoint, or a weight that is not finite. Exit 6: one that
/// the dtype cannot hold. Exit 7: `out` is there and not empty, or the disk refuses.
pub(super) fn export(dir: &Path, out: &Path, dtype: ExportDType) -> Result<String> {
    check_out(dir, out)?;
    let source = Source::open(&ModelSource::Folder(dir.to_owned()), 0)?;
    let state = read_state(dir)?;
    check_companions(dir, &state)?;
    let stored = |name: &str| dtype.of(source.dtype_of(name));
    let writer = ModelWriter::plan(out, source.units(), stored, source.stores_tied_head(), MAX_SHARD_BYTES);
    check_room(out, writer.bytes())?;
    writer.create()?;
    let kept = source.facts(true)?;
    let written = copy(&source, &writer, out).and_then(|()| writer.finish(&kept.config_json, &kept.companions));
    if let Err(failure) = written {
        writer.discard();
        return Err(failure);
    }
    let dtype = match dtype {
        ExportDType::Bf16 => "in bf16",
        ExportDType::Fp32 => "in fp32",
        ExportDType::Source => "as the source stores them",
    };
    let weights: usize = params(&source).map(ParamSpec::len).sum();
    let (weights, size) = (count(weights as u64), bytes(writer.bytes()));
    Ok(format!("{}: step {}, {weights} weights {dtype}, {size}", dir.display(), state.step))
}

fn params(source: &Source) -> impl Iterator<Item = &ParamSpec> {
    source.units().iter().flat_map(|unit| &unit.params)
}

fn copy(source: &Source, writer: &ModelWriter, out: &Path) -> Result<()> {
    let total: usize = params(source).map(ParamSpec::len).sum();
    let (mut meter, mut done) = (Meter::new(format!("writing {}", out.display())), 0);
    let mut block = Vec::with_capacity(CHUNK.min(total));
    for param in params(source) {
        for start in (0..param.len()).step_by(CHUNK) {
            block.resize(CHUNK.min(param.len() - start), 0.0);
            source.fill(param, start, &mut block)?;
            writer.write(&param.name, start, &block)?;
            done += block.len();
            let share = done as f64 / total as f64;
            meter.at((writer.bytes() as f64 * share) as u64, writer.bytes());
        }
    }
    writer.sync()
}

/// The folder must be new or empty, so that nothing of value is replaced, and outside the checkpoint, whose files are all
/// listed.
fn check_out(dir: &Path, out: &Path) -> Result<()> {
    let place = out.ancestors().find_map(|path| match path.as_os_str().is_empty() {
        true => Path::new(".").canonicalize().ok(),
        false => path.canonicalize().ok(),
    });
    let inside = dir.canonicalize().ok().zip(place).is_some_and(|(dir, place)| place.starts_with(dir));
    if inside {
        return Err(Failure::usage("the model folder would lie in the checkpoint")
            .at(out.display())
            .expected("a folder outside the checkpoint, which holds only its own files")
            .hint("another --out"));
    }
    let mut names = match std::fs::read_dir(out) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(crate::hf::save::disk_failure("the model folder cannot be used", out, &e)),
        Ok(entries) => entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>(),
    };
    if names.is_empty() {
        return Ok(());
    }
    names.sort();
    Err(Failure::disk("the folder to export into is not empty")
        .at(out.display())
        .expected("a new folder, or an empty one")
        .found(crate::hf::shortened(&names))
        .hint("choose another folder with --out, or remove this one"))
}

/// Better no folder than half a one.
fn check_room(out: &Path, needed: u64) -> Result<()> {
    // A file system that does not say how much it has left is written to all the same.
    match free_bytes(out) {
        Ok(free) if free < needed => Err(Failure::disk("there is no room for the model folder")
            .at(out.display())
            .expected(format!("{} free", bytes(needed)))
            .found(format!("{} free", bytes(free)))
            .hint("free space, or choose another place with --out")),
        _ => Ok(()),
    }
}

/// The tokenizer and generation files are copied whole, so they are checked whole.
fn check_companions(dir: &Path, state: &CheckpointState) -> Result<()> {
    for plain in &state.plain {
        let name = &state.files[plain.file as usize].name;
        if !COMPANIONS.contains(&name.as_str()) {
            continue;
        }
        let path = dir.join(name);
        let fault = |what: &str| Failure::input(what.to_owned()).at(path.display()).hint(DAMAGED);
        let mut content = vec![0; plain.len as usize];
        File::open(&path)
            .and_then(|file| file.read_exact_at(&mut content, plain.offset))
            .map_err(|e| fault("a file of the checkpoint cannot be read").found(e))?;
        let found = xxh3_64(&content);
        if found != plain.xxh3 {
            return Err(fault("a file of the checkpoint is not as it was written")
                .expected(format!("xxh3 {:016x}", plain.xxh3))
                .found(format!("xxh3 {found:016x}")));
        }
    }
    Ok(())
}
