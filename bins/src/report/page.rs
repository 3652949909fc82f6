//! The page: one HTML file that asks for nothing from outside.

use super::curves::{QUANTITIES, Quantity};
use super::read::{LAST, Run, names};
use super::settings::{Cell, Setting, settings};
use crate::svg::{COLUMNS, Chart, Point, escape, rounded, sample, thin, thousands};
use crate::table::number;
use serde_json::{Value, json};
use std::fmt::Write;

/// Names at the ends of more lines than this would not be beside them.
const NAMED_LINES: usize = 8;
/// Rows of a curve's table of values.
const TABLE_ROWS: usize = 12;

/// The page of these runs.
pub(super) fn page(runs: &[Run]) -> String {
    let names = names(runs);
    let charts: Vec<Chart> = QUANTITIES.iter().map(|quantity| quantity.chart(runs, &names)).collect();
    fill(include_str!("page.html"), |part| match part {
        "title" => title(&names),
        "style" => include_str!("page.css").to_owned(),
        "script" => include_str!("page.js").to_owned(),
        "summary" => summary(runs, &names),
        "legend" => legend(&charts, &names),
        "curves" => charts.iter().zip(&QUANTITIES).map(|(chart, quantity)| figure(chart, quantity, runs)).collect(),
        "settings" => settings_side_by_side(&settings(runs), &names),
        "data" => data(&charts, &names),
        _ => String::new(),
    })
}

/// `template` with every `{{part}}` replaced by what `part` gives, which is not looked into again.
fn fill(template: &str, part: impl Fn(&str) -> String) -> String {
    let mut pieces = template.split("{{");
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (name, rest) = piece.split_once("}}").unwrap_or((piece, ""));
        out += &part(name);
        out += rest;
    }
    out
}

fn title(names: &[String]) -> String {
    match names {
        [first, second, third, _, _, ..] => {
            escape(&format!("{first}, {second}, {third} and {} more runs", names.len() - 3))
        }
        _ => escape(&names.join(", ")),
    }
}

fn summary(runs: &[Run], names: &[String]) -> String {
    const HEAD: [&str; 9] =
        ["Policy", "Learning rate", "Steps", "Final loss", "Swallowed", "Arrived", "Tokens/s", "Peak memory", "State"];
    let heads = ["Run"].into_iter().chain(HEAD).map(|head| match head {
        "Run" | "Policy" | "State" => format!("<th scope=\"col\">{head}</th>"),
        _ => format!("<th scope=\"col\" class=\"number\">{head}</th>"),
    });
    let mut out = format!(
        "<div class=\"card scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Summary\"><table class=\"summary\">\n\
         <thead><tr>{}</tr></thead>\n<tbody>\n",
        heads.collect::<String>()
    );
    for (i, (run, name)) in runs.iter().zip(names).enumerate() {
        let _ = write!(out, "<tr><th scope=\"row\" class=\"name\" title=\"{}\">", escape(&run.name));
        let _ = write!(out, "{}{}</th>", sample(i), escape(name));
        for (head, value) in HEAD.iter().zip(cells(run)) {
            let class = if matches!(*head, "Policy" | "State") { "" } else { " class=\"number\"" };
            let _ = write!(out, "<td{class} data-label=\"{head}\">{}</td>", escape(&value));
        }
        out += "</tr>\n";
    }
    let _ = write!(
        out,
        "</tbody></table></div>\n<p class=\"fine below\">Final loss, swallowed and arrived are means of the last {LAST} \
         steps; tokens/s is the median; memory is the largest rank’s.</p>"
    );
    out
}

/// The cells of a run's row, after its name.
fn cells(run: &Run) -> [String; 9] {
    let summary = run.summary();
    let or_none = |x: Option<f64>, form: fn(f64) -> String| x.map_or("none".to_owned(), form);
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    [
        run.policy.clone(),
        number(run.lr),
        run.progress(),
        or_none(summary.final_loss, |x| format!("{x:.4}")),
        or_none(summary.swallowed, percent),
        or_none(summary.arrived, percent),
        or_none(summary.tps, thousands),
        or_none(summary.memory, |x| format!("{x:.3} GiB")),
        run.state(),
    ]
}

/// Boxes that turn runs on and off; there is nothing to tell apart in a single one.
fn legend(charts: &[Chart], names: &[String]) -> String {
    let several = names.len() > 1;
    let run = |(i, name): (usize, &String)| {
        let (sample, name) = (sample(i), escape(name));
        format!(
            "<label><input type=\"checkbox\" checked data-run=\"{i}\">{sample}<span class=\"name\">{name}</span></label>\n"
        )
    };
    let mut out = "<div class=\"legend\" role=\"group\" aria-label=\"What is shown\">\n".to_owned();
    out.extend(names.iter().enumerate().filter(|_| several).map(run));
    if charts.iter().any(|chart| chart.curves.iter().any(|curve| !curve.smoothed.is_empty())) {
        out += "<label class=\"smoothing\"><input type=\"checkbox\" checked id=\"smoothing\">Smooth noisy curves</label>\n";
    }
    out + "</div>"
}

fn figure(chart: &Chart, quantity: &Quantity, runs: &[Run]) -> String {
    let several = runs.len() > 1;
    let inline = chart.inline(several && runs.len() <= NAMED_LINES);
    let mut note = escape(quantity.note);
    if let Some(smoothing) = quantity.smoothing(runs) {
        let _ = write!(note, " <span class=\"smooth\">Bold: {smoothing}.</span>");
    }
    let longest = runs.iter().map(|run| run.steps.len()).max().unwrap_or(0);
    if longest > 2 * COLUMNS {
        let _ = write!(
            note,
            " Drawn from the lowest and highest of every {} steps.",
            thousands((longest / COLUMNS) as f64)
        );
    }
    format!(
        "<figure class=\"card\" data-curve=\"{file}\" style=\"--stretch:{stretch:.4}\">\n\
         <figcaption><h3>{title}</h3><p class=\"fine\">{note}</p></figcaption>\n<div class=\"plot\">{svg}</div>\n\
         <details><summary>Values as a table</summary>{values}</details>\n</figure>\n",
        file = quantity.file,
        stretch = inline.stretch,
        title = escape(&chart.title),
        svg = inline.svg,
        values = values(chart),
    )
}

/// Some evenly spaced steps of the longest run, and what every run says of them.
fn values(chart: &Chart) -> String {
    let Some(longest) = chart.curves.iter().max_by_key(|curve| curve.points.len()) else { return String::new() };
    let last = longest.points.len().saturating_sub(1);
    let rows = last.min(TABLE_ROWS - 1);
    let head = |name: &str| format!("<th scope=\"col\" class=\"number\">{}</th>", escape(name));
    let heads: String = chart.curves.iter().map(|curve| head(&curve.name)).collect();
    let mut out = format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}, values\"><table>\n\
         <thead><tr><th scope=\"col\">Step</th>{heads}</tr></thead>\n<tbody>\n",
        escape(&chart.title)
    );
    for row in 0..=rows {
        let Some((step, _)) = longest.points.get(row * last / rows.max(1)) else { continue };
        let _ = write!(out, "<tr><th scope=\"row\">{}</th>", thousands(*step));
        for curve in &chart.curves {
            let value = at_step(&curve.points, *step).map_or("–".to_owned(), |y| chart.unit.format(y));
            let _ = write!(out, "<td class=\"number\">{value}</td>");
        }
        out += "</tr>\n";
    }
    out + "</tbody></table></div>"
}

fn at_step(points: &[Point], step: f64) -> Option<f64> {
    points.binary_search_by(|(x, _)| x.total_cmp(&step)).ok().and_then(|i| points[i].1)
}

/// What the script needs: the drawn steps of every curve and their values, to six digits.
fn data(charts: &[Chart], names: &[String]) -> String {
    let run = |points: &[Point]| {
        let points = thin(points);
        let steps: Vec<u64> = points.iter().map(|(x, _)| *x as u64).collect();
        let values: Vec<Option<f64>> = points.iter().map(|(_, y)| y.map(|y| rounded(y, 6))).collect();
        json!({ "s": steps, "v": values })
    };
    let curve = |chart: &Chart| {
        let runs: Vec<Value> = chart.curves.iter().map(|curve| run(&curve.points)).collect();
        json!({ "unit": chart.unit.name(), "runs": runs })
    };
    let data = json!({ "names": names, "curves": charts.iter().map(curve).collect::<Vec<_>>() });
    // So that no name can end the script element.
    data.to_string().replace('<', "\\u003c")
}

/// What differs first, every run beside the others; then what does not.
fn settings_side_by_side(settings: &[Setting], names: &[String]) -> String {
    let (differ, same): (Vec<&Setting>, Vec<&Setting>) = settings.iter().partition(|setting| setting.differs());
    let mut out = "<div class=\"settings\">\n".to_owned();
    if names.len() == 1 {
        out += &format!("<div class=\"card\">{}</div>", same_table(&same));
    } else {
        if differ.is_empty() {
            out += "<p>The runs have the same settings.</p>\n";
        } else {
            out += &differing_table(&differ, names);
        }
        let _ = write!(
            out,
            "<details class=\"card\"><summary>{} settings are the same in all runs</summary>{}</details>",
            same.len(),
            same_table(&same)
        );
    }
    out + "</div>"
}

fn differing_table(settings: &[&Setting], names: &[String]) -> String {
    let head =
        |(i, name): (usize, &String)| format!("<th scope=\"col\" class=\"name\">{}{}</th>", sample(i), escape(name));
    let heads: String = names.iter().enumerate().map(head).collect();
    let mut out = format!(
        "<div class=\"card scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Settings that differ\"><table>\n\
         <thead><tr><th scope=\"col\">Setting</th>{heads}</tr></thead>\n<tbody>\n"
    );
    for setting in settings {
        let _ = write!(out, "<tr><th scope=\"row\">{}</th>", escape(&setting.name));
        let value = |cell: &Option<Cell>| cell.as_ref().map(|cell| cell.value.clone());
        let first = setting.cells.first().and_then(value);
        for cell in &setting.cells {
            let (class, mark) = match value(cell) == first {
                true => ("", ""),
                false => (" class=\"changed\"", "<span class=\"mark\">≠</span>"),
            };
            let _ = write!(out, "<td{class}>{mark}{}</td>", cell_words(cell.as_ref()));
        }
        out += "</tr>\n";
    }
    out + "</tbody></table></div>\n<p class=\"fine below\">≠ marks what is not as in the first run. Under each value: where it came \
           from.</p>\n"
}

fn cell_words(cell: Option<&Cell>) -> String {
    match cell {
        None => "–".to_owned(),
        Some(Cell { value, from }) if from.is_empty() => escape(value),
        Some(Cell { value, from }) => format!("{}<span class=\"fine\">{}</span>", escape(value), escape(from)),
    }
}

/// Settings with one value for all runs.
fn same_table(settings: &[&Setting]) -> String {
    let mut out =
        "<div class=\"scroll\"><table>\n<thead><tr><th scope=\"col\">Setting</th><th scope=\"col\">Value</th>\
                   <th scope=\"col\">From</th></tr></thead>\n<tbody>\n"
            .to_owned();
    for setting in settings {
        let mut origins: Vec<&str> = setting.cells.iter().flatten().map(|cell| cell.from.as_str()).collect();
        origins.dedup();
        let value = setting.cells.iter().flatten().next().map_or("–", |cell| cell.value.as_str());
        let _ = writeln!(
            out,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td class=\"fine\">{}</td></tr>",
            escape(&setting.name),
            escape(value),
            escape(&origins.join(", "))
        );
    }
    out + "</tbody></table></div>"
}
