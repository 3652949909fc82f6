//! `umbra config`: are two files the same run, and one file in another format.

use super::convert;
use super::meaning::{Difference, Verdict, Weight, differences, left_out, verdict};
use super::merge;
use crate::cli::{ConfigArgs, ConfigCommand, ConfigDiffArgs, ConvertArgs, TrainArgs};
use crate::host::{answer, note};
use crate::plan::{Origin, RunPlan};
use crate::table::{Align, render};
use crate::{Exit, Failure, Result};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Canonical ranks where nobody says how many.
const LANES: usize = 4;

/// Runs `umbra config`.
///
/// # Errors
/// Exit 2: files that cannot be honoured; exit 3: two files that are different runs.
pub fn run(args: &ConfigArgs) -> Result<()> {
    match &args.what {
        ConfigCommand::Diff(args) => diff(args),
        ConfigCommand::Convert(args) => convert_file(args),
    }
}

/// What a plan is made from.
struct Given<'a> {
    files: &'a [PathBuf],
    lanes: Option<usize>,
    model: Option<&'a Path>,
    assume: &'a [String],
}

impl Given<'_> {
    fn args(&self, lanes: Option<usize>) -> Result<TrainArgs> {
        let mut line = vec!["--config".to_owned()];
        line.extend(self.files.iter().map(|file| file.display().to_string()));
        let mut flag = |name: &str, value: String| line.extend([name.to_owned(), value]);
        if let Some(lanes) = lanes {
            flag("--lanes", lanes.to_string());
        }
        if let Some(model) = self.model {
            flag("--model", model.display().to_string());
        }
        for assumed in self.assume {
            flag("--assume", assumed.clone());
        }
        let mut args = TrainArgs::from_line(line.iter().map(String::as_str))?;
        // With a model named, what nobody sets has the defaults of `--help` and not those of the preset.
        if self.model.is_none() && merge(&args, None)?.model.is_none() {
            args.later.push("--model=tiny".to_owned());
        }
        Ok(args)
    }

    /// The plan with these flags given too.
    fn with(&self, flags: &[String], lanes: usize) -> Result<RunPlan> {
        let mut args = self.args(self.lanes)?;
        args.later.extend(flags.iter().flat_map(|flag| flag.split(' ')).map(str::to_owned));
        let merged = merge(&args, Some(lanes))?;
        RunPlan::resolve(&merged, merged.lanes.unwrap_or(lanes), 1, None)
    }

    /// The plan, on as many ranks as it has lanes, and whether the files say how many.
    fn plan(&self, otherwise: usize) -> Result<(RunPlan, bool)> {
        let merged = merge(&self.args(self.lanes)?, Some(otherwise))?;
        let told = merged.lanes.is_some();
        let world = merged.lanes.unwrap_or(otherwise);
        Ok((RunPlan::resolve(&merged, world, 1, None)?, told))
    }
}

fn diff(args: &ConfigDiffArgs) -> Result<()> {
    if args.prove && args.steps == 0 {
        return Err(crate::cli::bad_value("--steps", "a whole number that is 1 or more", 0));
    }
    let (file_a, file_b) = ([args.a.clone()], [args.b.clone()]);
    let given = |files, assume| Given { files, lanes: args.lanes, model: args.model.as_deref(), assume };
    let assume_b = if args.assume_b.is_empty() { &args.assume } else { &args.assume_b };
    let (a, b) = (given(&file_a, &args.assume), given(&file_b, assume_b));
    // A file that does not say how many ranks there are is run on as many as the other says.
    let told = |given: &Given<'_>| given.plan(LANES).ok().filter(|(_, told)| *told).map(|(plan, _)| plan.lanes);
    let (lanes_a, lanes_b) = (told(&a), told(&b));
    let plan_a = a.plan(lanes_a.or(lanes_b).unwrap_or(LANES))?.0;
    let plan_b = b.plan(lanes_b.or(lanes_a).unwrap_or(LANES))?.0;
    // What one file leaves to the command line, the command line is taken to say as the other file does.
    let left = [left_out(&plan_a, &plan_b), left_out(&plan_b, &plan_a)];
    // Where that does not go together, the two are compared as they are.
    let given = a.with(&left[0], plan_a.lanes).and_then(|a| Ok((a, b.with(&left[1], plan_b.lanes)?)));
    let (plan_a, plan_b, left) = match given {
        Ok((plan_a, plan_b)) => (plan_a, plan_b, left),
        Err(_) => (plan_a, plan_b, [Vec::new(), Vec::new()]),
    };
    let found = differences(&plan_a, &plan_b);
    let verdict = verdict(&found);
    let proof = match args.prove {
        true => Some(super::prove::prove((&plan_a, &left[0]), (&plan_b, &left[1]), args.steps)?),
        false => None,
    };
    if args.json {
        answer(&format!("{:#}\n", as_json(args, &left, &found, verdict, proof.as_ref())))?;
    } else {
        let mut text = as_text(args, [&plan_a, &plan_b], &left, &found, verdict);
        if let Some(proof) = &proof {
            let same = matches!(verdict, Verdict::SameRun | Verdict::SameBits);
            text += &format!("\n{}\n", proof.text(same));
        }
        answer(&text)?;
    }
    let same = matches!(verdict, Verdict::SameRun | Verdict::SameBits);
    if let Some(proof) = proof.filter(|proof| same && !proof.same()) {
        return Err(Failure::new(Exit::Bug, "two files that should be the same run are not")
            .expected("equal hashes after every step")
            .found(proof.text(true)));
    }
    if same {
        return Ok(());
    }
    Err(Failure::new(Exit::Input, format!("the two files are not the same run: {verdict}")).at(format!(
        "{} and {}",
        args.a.display(),
        args.b.display()
    )))
}

fn as_text(
    args: &ConfigDiffArgs,
    [a, b]: [&RunPlan; 2],
    left: &[Vec<String>; 2],
    found: &[Difference],
    verdict: Verdict,
) -> String {
    let borrowed = left.iter().any(|flags| !flags.is_empty());
    let mut out =
        format!("{verdict}{}\n", if borrowed { ", the command line giving what one file leaves to it" } else { "" });
    out += &format!("A: {} on {} lane(s)\nB: {} on {} lane(s)\n", args.a.display(), a.lanes, args.b.display(), b.lanes);
    let kinds = [
        (Weight::Mathematics, "the mathematics"),
        (Weight::Rounding, "rounding (equal in exact arithmetic)"),
        (Weight::Cost, "speed or memory alone"),
    ];
    for (weight, what) in kinds {
        let differs = found.iter().filter(|d| d.weight == weight);
        let rows: Vec<Vec<String>> = differs.flat_map(rows).collect();
        if !rows.is_empty() {
            out += &format!("\nwhat changes {what}:\n{}", render(&[Align::Left; 4], &rows));
        }
    }
    for (name, flags) in [("A", &left[0]), ("B", &left[1])] {
        if !flags.is_empty() {
            let flags = flags.join(" ");
            out += &format!(
                "\n{name} leaves to the command line what the other file says; it is taken to be given\n  {flags}\n"
            );
        }
    }
    out
}

fn rows(d: &Difference) -> [Vec<String>; 2] {
    let row = |name: &str, side: &str, (value, origin): &(String, String)| {
        vec![format!("  {name}"), side.to_owned(), value.clone(), origin.clone()]
    };
    [row(&d.name, "A", &d.a), row("", "B", &d.b)]
}

fn as_json(
    args: &ConfigDiffArgs,
    left: &[Vec<String>; 2],
    found: &[Difference],
    verdict: Verdict,
    proof: Option<&super::prove::Proof>,
) -> serde_json::Value {
    let side = |(value, origin): &(String, String)| json!({ "value": value, "from": origin });
    let difference = |d: &Difference| {
        let changes = match d.weight {
            Weight::Cost => "cost",
            Weight::Rounding => "rounding",
            Weight::Mathematics => "mathematics",
        };
        json!({ "name": d.name, "changes": changes, "a": side(&d.a), "b": side(&d.b) })
    };
    let word = match verdict {
        Verdict::SameRun => "same-run",
        Verdict::SameBits => "same-bits",
        Verdict::RoundingOnly => "rounding",
        Verdict::Different => "different",
    };
    json!({
        "a": args.a,
        "b": args.b,
        "verdict": word,
        "left_to_the_command_line": { "a": left[0], "b": left[1] },
        "differences": found.iter().map(difference).collect::<Vec<_>>(),
        "proof": proof.map(super::prove::Proof::to_json),
    })
}

fn convert_file(args: &ConvertArgs) -> Result<()> {
    let given = Given { files: &args.files, lanes: args.lanes, model: args.model.as_deref(), assume: &args.assume };
    let (plan, _) = given.plan(args.lanes.unwrap_or(LANES))?;
    if let Some(out) = args.out.as_ref().filter(|out| args.files.iter().any(|file| same_file(file, out))) {
        return Err(Failure::usage("the converted file would replace the one it is made from")
            .at("--out")
            .expected("another file")
            .found(out.display()));
    }
    let text = convert::write(&plan, args.to);
    let lost = lost(&given, &plan, &text, args)?;
    match &args.out {
        Some(path) => std::fs::write(path, &text).map_err(|e| {
            Failure::disk("the converted file cannot be written").at(path.display()).found(e).hint("another --out")
        })?,
        None => answer(&text).map(|_| ())?,
    }
    for sentence in lost {
        note(sentence);
    }
    Ok(())
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// What the new file does not say: it is read back and compared.
fn lost(given: &Given<'_>, plan: &RunPlan, text: &str, args: &ConvertArgs) -> Result<Vec<String>> {
    let folder = tempfile::tempdir().map_err(|e| Failure::disk("no temporary folder can be made").found(e))?;
    let path = folder.path().join("converted");
    std::fs::write(&path, text).map_err(|e| Failure::disk("a temporary file cannot be written").found(e))?;
    let again = Given { files: &[path], lanes: Some(plan.lanes), ..*given };
    let (read, _) = again.plan(plan.lanes).map_err(|inner| {
        Failure::usage("this run cannot be written in that format")
            .at(args.files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", "))
            .expected("a file that can be read back")
            .found(inner.what)
            .hint("--to umbra, which can say everything")
    })?;
    let format = match args.to {
        crate::cli::Target::DeepSpeed => "DeepSpeed JSON",
        crate::cli::Target::Accelerate => "Accelerate YAML",
        crate::cli::Target::Umbra => "Umbra TOML",
    };
    let said = |d: &&Difference| convert::says(plan, &d.name) || plan.origin(&d.name).is_none();
    let mut lost: Vec<String> = differences(plan, &read)
        .iter()
        .filter(said)
        .map(|d| format!("{format} cannot say: {} {} (from {}); read back it is {}", d.name, d.a.0, d.a.1, d.b.0))
        .collect();
    let place_only =
        ["model", "data", "out", "seq_len", "save_every", "keep", "log_every", "seed", "length", "shuffle"];
    if args.to != crate::cli::Target::Umbra {
        let unsaid = place_only.iter().filter(|name| plan.origin(name) == Some(Origin::Config));
        let more = unsaid.filter(|name| !lost.iter().any(|text| text.contains(&format!(": {name} "))));
        let more: Vec<String> =
            more.map(|name| format!("{format} cannot say: {name} (a flag of umbra train)")).collect();
        lost.extend(more);
    }
    Ok(lost)
}
