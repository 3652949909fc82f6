//! `umbra compare`: the same data under several policies, learning rates and configuration files, one run after the other,
//! and one report.

use crate::cli::{CompareArgs, ReportArgs, TrainArgs};
use crate::host::note;
use crate::launch::meet;
use crate::plan::defaults;
use crate::{Exit, Failure, Result, config, memory, report, run};
use collectives::Comm;
use std::path::{Path, PathBuf};

/// One cell of the grid.
#[derive(Debug, Clone, PartialEq)]
struct Cell {
    /// The name of its folder.
    name: String,
    /// The flags that are its own.
    flags: Vec<String>,
}

/// Runs the grid, then reports. Every rank calls it.
///
/// # Errors
/// The failure of a run that could not be made; one whose loss is no longer finite counts as a result.
pub fn compare(args: &CompareArgs, cores: usize, comm: &Comm) -> Result<()> {
    let cells = meet(comm, cells(args))?;
    let early = meet(comm, config::merge(&args.train, None))?;
    let root = early.out.unwrap_or_else(|| PathBuf::from(defaults::COMPARE_OUT));
    let mut diverged = Vec::new();
    for (i, cell) in cells.iter().enumerate() {
        let out = root.join(&cell.name);
        if comm.rank() == 0 {
            note(format_args!("\nrun {} of {}: {}", i + 1, cells.len(), cell.name));
        }
        memory::reset_peak();
        match run::train(&of_cell(&args.train, cell, &out), cores, comm) {
            Err(failure) if failure.exit == Exit::NotFinite => {
                if comm.rank() == 0 {
                    note(failure.as_reason());
                }
                diverged.push(cell.name.clone());
            }
            made => made?,
        }
    }
    let reported = if comm.rank() == 0 { summary(&root, &cells) } else { Ok(()) };
    meet(comm, reported)?;
    if diverged.is_empty() {
        return Ok(());
    }
    Err(Failure::new(Exit::NotFinite, "some runs ended with a loss or gradient that is not finite")
        .at(root.display())
        .found(diverged.join(", "))
        .hint("a smaller learning rate; the report shows how far they came"))
}

fn summary(root: &Path, cells: &[Cell]) -> Result<()> {
    let runs = cells.iter().map(|cell| root.join(&cell.name)).filter(|run| run.join("run.json").exists()).collect();
    report::report(&ReportArgs { runs, out: Some(root.join("report.html")), svg: Some(root.join("")) })
}

fn of_cell(args: &TrainArgs, cell: &Cell, out: &Path) -> TrainArgs {
    let mut args = args.clone();
    args.later.extend(cell.flags.iter().cloned());
    args.later.push(format!("--out={}", out.display()));
    args
}

/// The values of what is varied: a name for the folder, and the flags.
type Axis = Vec<(String, Vec<String>)>;

/// Every combination of what is varied.
///
/// # Errors
/// Exit 2: nothing is varied, or what is varied is also set.
fn cells(args: &CompareArgs) -> Result<Vec<Cell>> {
    let axes: [(&str, Axis); 3] = [
        (
            "--configs",
            args.configs.iter().map(|file| (stem(file), vec![format!("--config={}", file.display())])).collect(),
        ),
        ("--policies", args.policies.iter().map(|p| (p.to_string(), vec![format!("--policy={p}")])).collect()),
        ("--lrs", args.lrs.iter().map(|lr| (format!("lr{lr:e}"), vec![format!("--lr={lr}")])).collect()),
    ];
    for (flag, set, one) in
        [("--policies", args.train.policy.is_some(), "--policy"), ("--lrs", args.train.lr.is_some(), "--lr")]
    {
        let varied = axes.iter().any(|(name, values)| *name == flag && !values.is_empty());
        if varied && set {
            return Err(Failure::usage(format!("{flag} and {one} both set it"))
                .expected("one of them")
                .hint(format!("leave out {one}")));
        }
    }
    let mut cells = vec![Cell { name: String::new(), flags: Vec::new() }];
    for (flag, values) in axes.into_iter().filter(|(_, values)| !values.is_empty()) {
        if let Some((i, (name, _))) = values.iter().enumerate().find(|(i, v)| values[..*i].iter().any(|w| w.0 == v.0)) {
            let found = format!("{name} twice, the second at place {}", i + 1);
            return Err(Failure::usage(format!("{flag} names the same twice")).at(flag).found(found));
        }
        let with = |cell: &Cell| {
            let join = |(name, flags): &(String, Vec<String>)| Cell {
                name: if cell.name.is_empty() { name.clone() } else { format!("{}-{name}", cell.name) },
                flags: cell.flags.iter().chain(flags).cloned().collect(),
            };
            values.iter().map(join).collect::<Vec<_>>()
        };
        cells = cells.iter().flat_map(with).collect();
    }
    if cells.len() == 1 && cells[0].flags.is_empty() {
        return Err(Failure::usage("nothing is varied")
            .at("umbra compare")
            .expected("--policies, --lrs or --configs")
            .hint("umbra compare --policies shadow,fsdp-low --lrs 1e-6,4e-6"));
    }
    Ok(cells)
}

fn stem(file: &Path) -> String {
    file.file_stem().map_or_else(|| "config".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Command, parse};

    fn of(line: &str) -> Result<Vec<Cell>> {
        let line = format!("umbra compare {line}");
        let Ok(cli) = parse(line.split_whitespace()) else { panic!("{line}") };
        match cli.command {
            Command::Compare(args) => cells(&args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_grid_is_every_combination() {
        let cells = of("--policies shadow,low-sr --lrs 1e-6,4e-6 --configs a/x.json b.yaml").unwrap();
        assert_eq!(cells.len(), 8);
        assert_eq!(cells[0].name, "x-shadow-lr1e-6");
        assert_eq!(cells[7].name, "b-low-sr-lr4e-6");
        assert_eq!(cells[7].flags, ["--config=b.yaml", "--policy=low-sr", "--lr=0.000004"]);
    }

    #[test]
    fn what_makes_no_grid_is_refused() {
        assert!(of("--steps 3").unwrap_err().what.contains("nothing is varied"));
        assert!(of("--policies shadow --policy fp32").unwrap_err().what.contains("--policy"));
        assert!(of("--lrs 1,1").unwrap_err().what.contains("twice"));
        assert!(of("--configs a/x.json b/x.json").unwrap_err().what.contains("twice"));
    }
}
