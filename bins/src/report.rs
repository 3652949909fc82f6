//! `umbra report`: runs side by side, as a table, as a page of curves and settings, and as pictures.

mod curves;
mod page;
mod read;
mod settings;

use crate::cli::ReportArgs;
use crate::host::{answer, note};
use crate::table::{Align, number, render};
use crate::{Failure, Result};
use curves::{QUANTITIES, Quantity};
use read::{LAST, Run, names};
use std::fs;
use std::path::{Path, PathBuf};

/// Prints the table of the runs, writes the page and, if asked, pictures of the curves.
///
/// # Errors
/// A bad run folder (exit 3), or a page, a picture or standard output that cannot be written (exit 7).
pub fn report(args: &ReportArgs) -> Result<()> {
    let runs = args.runs.iter().map(|dir| Run::read(dir)).collect::<Result<Vec<_>>>()?;
    answer(&table(&runs))?;
    let page = args.out.clone().unwrap_or_else(|| default_page(&args.runs));
    write(&page, &page::page(&runs), "--out FILE, in a folder that exists and may be written")?;
    note(format_args!("report: {}", page.display()));
    if let Some(path) = &args.svg {
        draw(&runs, path)?;
    }
    Ok(())
}

/// `report.html` in the folder of a single run, else in the folder that all runs lie in, else here.
fn default_page(runs: &[PathBuf]) -> PathBuf {
    let folder = match runs {
        [run] => Some(run.as_path()),
        [first, others @ ..] => first.parent().filter(|folder| others.iter().all(|run| run.parent() == Some(*folder))),
        [] => None,
    };
    folder.unwrap_or(Path::new("")).join("report.html")
}

/// The loss curves into a file, or every quantity's into a folder: one that exists, or whose name ends in a slash.
fn draw(runs: &[Run], path: &Path) -> Result<()> {
    const HINT: &str = "--svg FILE or --svg FOLDER/, where it may be written";
    let names = names(runs);
    if !(path.is_dir() || path.to_string_lossy().ends_with('/')) {
        write(path, &picture(&QUANTITIES[0], runs, &names), HINT)?;
        note(format_args!("loss curves: {}", path.display()));
        return Ok(());
    }
    fs::create_dir_all(path)
        .map_err(|e| Failure::disk("the folder of pictures cannot be made").at(path.display()).found(e).hint(HINT))?;
    for quantity in &QUANTITIES {
        write(&path.join(format!("{}.svg", quantity.file)), &picture(quantity, runs, &names), HINT)?;
    }
    note(format_args!("curves: {} pictures in {}", QUANTITIES.len(), path.display()));
    Ok(())
}

fn picture(quantity: &Quantity, runs: &[Run], names: &[String]) -> String {
    let mut chart = quantity.chart(runs, names);
    if let Some(smoothing) = quantity.smoothing(runs) {
        chart.title += &format!(", {smoothing}");
    }
    chart.alone()
}

fn write(path: &Path, text: &str, hint: &str) -> Result<()> {
    fs::write(path, text)
        .map_err(|e| Failure::disk("the report could not be written").at(path.display()).found(e).hint(hint))
}

fn table(runs: &[Run]) -> String {
    let head = ["run", "policy", "lr", "steps", "first loss", "final loss", "swallowed", "arrived", "tokens/s"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(runs.iter().map(row));
    let aligns = [&[Align::Left; 2][..], &[Align::Right; 7]].concat();
    render(&aligns, &rows)
        + &format!("Final loss, swallowed and arrived are means of the last {LAST} steps, tokens/s is the median.\n")
}

fn row(run: &Run) -> Vec<String> {
    let or_none = |x: Option<f64>, form: fn(f64) -> String| x.map_or("none".to_owned(), form);
    let summary = run.summary();
    vec![
        run.name.clone(),
        run.policy.clone(),
        number(run.lr),
        run.progress(),
        or_none(summary.first_loss, |x| format!("{x:.4}")),
        or_none(summary.final_loss, |x| format!("{x:.4}")),
        or_none(summary.swallowed, |x| format!("{:.1}%", x * 100.0)),
        or_none(summary.arrived, |x| format!("{x:.3}")),
        or_none(summary.tps, |x| format!("{x:.0}")),
    ]
}

#[cfg(test)]
mod tests;
