//! The command line and the files it names become one: flags beat files, what is written beats what is implied, and two files
//! that contradict each other are an error that shows both places.

use super::assume::{Assume, LoadDType};
use super::layer::{Layer, Saying, Setting, Source};
use super::read::{Dialect, Document, Facts};
use crate::cli::TrainArgs;
use crate::plan::setting_of;
use crate::{Failure, Result};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What files have set, beside the settings themselves.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Files {
    /// By setting, as run.json names it: the key that set it.
    pub sources: BTreeMap<String, Source>,
    /// Every file, in the order of `--config`.
    pub layers: Vec<Layer>,
    /// Settings of files that gave way, and to what.
    pub given_way: Vec<(Setting, String)>,
}

/// A setting that means something only beside another one: if the command line sets the second, a file's first goes with
/// the file's second.
const GOES_WITH: [(&str, &str); 11] = [
    ("schedule_params", "schedule"),
    ("schedule_stepping", "schedule"),
    ("wire", "policy"),
    ("reduced", "policy"),
    ("accumulate", "policy"),
    ("clip_form", "policy"),
    ("optimizer_form", "policy"),
    ("optimizer_form", "optimizer"),
    ("momentum", "optimizer"),
    ("shard_group", "stage"),
    ("reshard_after_forward", "stage"),
];

/// Reads the files that `--config` names and puts their settings below the flags. `lanes` is what the run has unless
/// something written says otherwise: the checkpoint's, or the world; without it only Umbra's own files are read, which do
/// not depend on it.
///
/// # Errors
/// Exit 2: a file that cannot be honoured, a value that is none, or files that contradict each other.
pub fn merge(args: &TrainArgs, lanes: Option<usize>) -> Result<TrainArgs> {
    let lines = lines(args)?;
    let args = &with_later(args, &lines)?;
    if args.config.is_empty() {
        return Ok(args.clone());
    }
    let documents = args.config.iter().map(|path| Document::open(path)).collect::<Result<Vec<_>>>()?;
    let own: Vec<&Document> = documents.iter().filter(|d| d.dialect == Dialect::Umbra).collect();
    let own = own.into_iter().map(|d| d.layer(None)).collect::<Result<Vec<_>>>()?;
    // What the others mean depends on what is said here of the model and the lanes.
    let first = combined(args, &lines, own)?;
    let Some(lanes) = lanes else { return Ok(first) };
    let assume = Assume::read(&first.assume)?;
    let load = assume.load.unwrap_or_else(|| loaded_in(first.model.as_deref()));
    let batch_written =
        written(&lines).iter().any(|name| ["micro_batch", "accum", "global_batch"].contains(&name.as_str()));
    let lanes_written = first.lanes.is_some();
    let facts = Facts { lanes: first.lanes.unwrap_or(lanes), lanes_written, batch_written, assume, load };
    combined(args, &lines, documents.iter().map(|d| d.layer(Some(&facts))).collect::<Result<Vec<_>>>()?)
}

/// The dtype that the model's config.json names. The embedded model's weights are rounded to bf16; a folder that cannot be
/// read is somebody else's to refuse.
pub(super) fn loaded_in(model: Option<&Path>) -> LoadDType {
    let dtype = || {
        let text = std::fs::read_to_string(model?.join("config.json")).ok()?;
        let config: serde_json::Value = serde_json::from_str(&text).ok()?;
        let name = ["dtype", "torch_dtype"].iter().find_map(|key| config.get(*key)?.as_str().map(str::to_owned));
        Some(if name.as_deref() == Some("float32") { LoadDType::Fp32 } else { LoadDType::Bf16 })
    };
    dtype().unwrap_or(LoadDType::Bf16)
}

/// One group of settings a layer makes, by the name run.json has for it.
type Named = (String, Setting);

fn combined(args: &TrainArgs, lines: &[ArgMatches], layers: Vec<Layer>) -> Result<TrainArgs> {
    let mut files = Files::default();
    let named = |setting: &Setting| (setting_of(&setting.flag), setting.clone());
    let all: Vec<Named> = layers.iter().flat_map(|layer| &layer.settings).map(named).collect();
    let written = written(lines);
    let all_settings = all.clone();
    let has_rows = all.iter().any(|(name, _)| name == "global_batch");
    let mut kept: BTreeMap<String, Vec<Setting>> = BTreeMap::new();
    for (name, setting) in all {
        let beaten = |other: &str| written.contains(other);
        // The command line may say the same as the file: then what goes with it stays.
        let changed = |other: &str| beaten(other) && !said_alike(other, &all_settings, lines);
        let with = GOES_WITH.iter().find(|(one, other)| *one == name && changed(other)).map(|(_, other)| *other);
        let rows = match name.as_str() {
            // The rows of a step, or the micro-batches that make them: one follows from the other.
            "accum" if beaten("global_batch") => Some("global_batch"),
            "accum" if beaten("micro_batch") && has_rows => Some("micro_batch"),
            "global_batch" if beaten("accum") => Some("accum"),
            _ => None,
        };
        match beaten(&name).then_some(name.as_str()).or(with).or(rows) {
            Some(by) => files.given_way.push((setting, spelled(by))),
            None => kept.entry(name).or_default().push(setting),
        }
    }
    let mut flags = vec!["train".to_owned()];
    for (name, settings) in kept {
        let setting = agreed(settings)?;
        flags.extend(checked(&setting)?);
        files.sources.insert(name, setting.source);
    }
    files.layers = layers;
    let mut merged = File::try_parse_from(flags).map_err(|e| Failure::usage(first_line(&e)))?.args;
    for line in lines {
        put_over(&mut merged, line)?;
    }
    // A line of `umbra compare` names one file, its command line the others.
    merged.config.clone_from(&args.config);
    merged.matches = args.matches.clone();
    merged.files = files;
    Ok(merged)
}

/// The command line, and the flags that come after it.
fn lines(args: &TrainArgs) -> Result<Vec<ArgMatches>> {
    let mut lines = vec![args.matches.clone()];
    if !args.later.is_empty() {
        let words = std::iter::once("train".to_owned()).chain(args.later.iter().cloned());
        lines.push(File::command().try_get_matches_from(words).map_err(|e| Failure::usage(first_line(&e)))?);
    }
    Ok(lines)
}

/// The arguments with the flags that come after them; files are added to files.
fn with_later(args: &TrainArgs, lines: &[ArgMatches]) -> Result<TrainArgs> {
    let mut all = args.clone();
    for later in &lines[1..] {
        put_over(&mut all, later)?;
        if all.config != args.config {
            all.config.splice(0..0, args.config.iter().cloned());
        }
    }
    Ok(all)
}

/// Puts the flags of a line over what is there.
fn put_over(args: &mut TrainArgs, line: &ArgMatches) -> Result<()> {
    let before = [args.no_shuffle, args.truncate, args.decay_norms, args.allow_different_bits, args.tensorboard];
    args.update_from_arg_matches(line).map_err(|e| Failure::usage(first_line(&e)))?;
    // A flag without a value counts as written `false` where it is not written.
    args.no_shuffle |= before[0];
    args.truncate |= before[1];
    args.decay_norms |= before[2];
    args.allow_different_bits |= before[3];
    args.tensorboard |= before[4];
    Ok(())
}

/// The flags that make a setting.
fn spelled(name: &str) -> String {
    match name {
        "length" => "--steps or --epochs".to_owned(),
        "warmup" => "--warmup-steps or --warmup-ratio".to_owned(),
        name => format!("--{}", name.replace('_', "-")),
    }
}

/// The settings that these lines make, as run.json names them.
fn written(lines: &[ArgMatches]) -> BTreeSet<String> {
    let on_line = |line: &ArgMatches, id: &str| line.value_source(id) == Some(ValueSource::CommandLine);
    let ids = |line: &ArgMatches| {
        line.ids().map(clap::Id::as_str).filter(|id| on_line(line, id)).map(setting_of).collect::<Vec<_>>()
    };
    lines.iter().flat_map(ids).collect()
}

/// Whether the command line gives a setting the value that the files give it, or that it has anyway.
fn said_alike(name: &str, all: &[Named], lines: &[ArgMatches]) -> bool {
    let raw =
        |line: &ArgMatches| Some(line.try_get_raw(name).ok()??.map(|v| v.to_string_lossy().into_owned()).collect());
    let Some(written) = lines.iter().rev().find_map(raw) else { return false };
    let written: Vec<String> = written;
    match all.iter().find(|(of, _)| of == name) {
        Some((_, setting)) => setting.values == written,
        None => name == "optimizer" && written == ["adamw"],
    }
}

/// The one setting that several of a name come to.
fn agreed(settings: Vec<Setting>) -> Result<Setting> {
    let is_written = |s: &Setting| s.source.place.is_some();
    // Two engines' files each mean a precision of their own, whether they write it or not.
    let whole = |s: &Setting| s.flag == "policy" && settings.iter().any(|other| other.source.file != s.source.file);
    let any = settings.iter().any(is_written) && !settings.iter().any(whole);
    let mut standing = settings.into_iter().filter(|s| !any || is_written(s));
    let Some(first) = standing.next() else { return Err(Failure::new(crate::Exit::Bug, "a setting without a value")) };
    match standing.find(|other| (&other.flag, &other.values) != (&first.flag, &first.values)) {
        None => Ok(first),
        Some(other) if other.source.file == first.source.file => {
            Err(Failure::usage(format!("--{} is set twice in one file", first.flag))
                .at(format!("{}\n{}", first.source, other.source))
                .expected("one of the two")
                .found(format!(
                    "--{} {} and --{} {}",
                    first.flag,
                    first.values.join(" "),
                    other.flag,
                    other.values.join(" ")
                )))
        }
        Some(other) => Err(Failure::usage(format!("two files contradict each other about --{}", first.flag))
            .at(format!("{}\n{}", first.source, other.source))
            .expected(format!("one value, for instance --{} {}", first.flag, first.values.join(" ")))
            .found(format!("also --{} {}", other.flag, other.values.join(" ")))
            .hint("remove one of the two, or decide it by a flag: flags beat files")),
    }
}

/// A setting as it would be written on the command line.
///
/// # Errors
/// The flag does not take its value.
fn checked(setting: &Setting) -> Result<Vec<String>> {
    let flag = format!("--{}", setting.flag);
    let words = match setting.values.as_slice() {
        [] => vec![flag],
        [value] => vec![format!("{flag}={value}")],
        values => std::iter::once(flag).chain(values.iter().cloned()).collect(),
    };
    let alone = std::iter::once("train".to_owned()).chain(words.iter().cloned());
    match File::try_parse_from(alone) {
        Ok(_) => Ok(words),
        Err(error) => Err(Failure::usage(first_line(&error)).at(&setting.source).found(setting.values.join(" "))),
    }
}

/// A command that has the flags of `umbra train` and nothing else.
#[derive(Debug, Parser)]
#[command(no_binary_name = false, disable_help_flag = true)]
struct File {
    #[command(flatten)]
    args: TrainArgs,
}

/// clap's first sentence, without its "error: ".
fn first_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    text.split("\n\nUsage").next().unwrap_or(text).split("\n\nFor more").next().unwrap_or(text).trim().to_owned()
}

impl Files {
    /// What a run says of its files before it begins: how much of each is honoured, and all that is done differently.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for layer in &self.layers {
            let count = |saying| layer.remarks.iter().filter(|remark| remark.saying == saying).count();
            let (differs, idle) = (count(Saying::Differs), count(Saying::NoEffect));
            notes.push(format!(
                "{} ({}): {} setting(s); {idle} key(s) without effect here, {differs} done differently (umbra plan --config lists all)",
                layer.file.display(),
                layer.dialect,
                layer.settings.len(),
            ));
            let told = layer.remarks.iter().filter(|remark| remark.saying == Saying::Differs);
            notes.extend(told.map(|remark| format!("  {}: {}", remark.source, remark.why)));
        }
        notes.extend(self.given_way.iter().map(|(setting, by)| format!("  {} gives way to {by}", setting.source)));
        notes
    }

    /// Takes back what a file sets, as if it were not written: it gives way to `by`.
    pub fn give_way(&mut self, name: &str, by: String) {
        let Some(source) = self.sources.remove(name) else { return };
        let setting = self.layers.iter().flat_map(|layer| &layer.settings).find(|setting| setting.source == source);
        self.given_way.extend(setting.map(|setting| (setting.clone(), by)));
    }

    /// The failure with the place of every flag it names that a file has set.
    #[must_use]
    pub fn locate(&self, mut failure: Failure) -> Failure {
        let Some(place) = &failure.place else { return failure };
        let flags = place.split([',', ' ']).filter_map(|word| word.strip_prefix("--"));
        let sources = flags.filter_map(|flag| Some(format!("--{flag} is {}", self.sources.get(&setting_of(flag))?)));
        let sources: Vec<String> = sources.collect();
        if !sources.is_empty() {
            failure.place = Some(format!("{place}\n{}", sources.join("\n")));
        }
        failure
    }
}

impl TrainArgs {
    /// The flags of a command line without a program's name, as `umbra train` would read them.
    ///
    /// # Errors
    /// clap's sentence (exit 2).
    pub fn from_line<'w>(words: impl IntoIterator<Item = &'w str>) -> Result<TrainArgs> {
        let line = std::iter::once("train").chain(words);
        let matches = File::command().try_get_matches_from(line).map_err(|e| Failure::usage(first_line(&e)))?;
        let mut args = TrainArgs::from_arg_matches(&matches).map_err(|e| Failure::usage(first_line(&e)))?;
        args.matches = matches;
        Ok(args)
    }
}

#[cfg(test)]
mod tests;
