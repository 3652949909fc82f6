//! Reports of folders written by hand.

use super::*;
use crate::Exit;
use crate::svg::Point;
use serde_json::{Value, json};
use settings::settings;
use tempfile::TempDir;

fn folder(run: &str, metrics: Option<&str>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("run.json"), run).unwrap();
    if let Some(metrics) = metrics {
        fs::write(dir.path().join("metrics.jsonl"), metrics).unwrap();
    }
    dir
}

const RUN: &str = r#"{"settings": {"policy": {"value": "fsdp-low"}, "lr": {"value": 1e-5}}, "steps": 12}"#;

fn line(step: u64, loss: &str, swallowed: &str) -> String {
    format!(r#"{{"step":{step},"loss":{loss},"swallowed":{swallowed},"arrived":0.5,"tps":{}}}"#, 100 * step) + "\n"
}

/// Twelve steps whose losses are 12, 11, … 1.
fn twelve() -> String {
    (0..12).map(|i| line(i, &(12 - i).to_string(), "0.25")).collect()
}

fn run(name: &str, facts: &Value, metrics: &str) -> Run {
    let dir = folder(&facts.to_string(), Some(metrics));
    Run { name: name.to_owned(), ..Run::read(dir.path()).unwrap() }
}

fn facts(policy: &str, lr: f64) -> Value {
    let setting = |value: Value, from: &str| json!({ "value": value, "from": from });
    json!({
        "umbra": "0.1.0", "steps": 12, "finished": true, "resumed": [{"step": 4}], "data_rows": "abc",
        "settings": {
            "policy": setting(json!(policy), "flag"), "lr": setting(json!(lr), "default"),
            "length": setting(json!({"steps": 12}), "flag"), "data": setting(json!([]), "default"),
        }
    })
}

#[test]
fn a_row_has_the_ends_of_a_run_and_its_speed() {
    let dir = folder(RUN, Some(&twelve()));
    let mut run = Run::read(dir.path()).unwrap();
    run.name = "a".to_owned();
    // The last ten losses are 10 … 1; the middle of 0, 100 … 1100 is 550.
    assert_eq!(row(&run), ["a", "fsdp-low", "1e-5", "12", "12.0000", "5.5000", "25.0%", "0.500", "550"]);
    let text = table(&[run]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "run  policy      lr  steps  first loss  final loss  swallowed  arrived  tokens/s");
    assert_eq!(lines[1], "a    fsdp-low  1e-5     12     12.0000      5.5000      25.0%    0.500       550");
}

#[test]
fn what_a_run_does_not_say_is_none_and_one_that_goes_on_says_how_far_it_is() {
    // The third line is being written.
    let metrics = line(0, "3", "null") + &line(1, "null", "null") + "{\"step\":2,\"lo";
    let dir = folder(RUN, Some(&metrics));
    let run = Run::read(dir.path()).unwrap();
    assert_eq!(row(&run)[3..7], ["2/12", "3.0000", "3.0000", "none"]);
    assert_eq!(run.state(), "unfinished");
    assert_eq!(self::run("a", &facts("shadow", 1e-5), &twelve()).state(), "finished, resumed at 4");
}

#[test]
fn bad_folders_are_bad_input_with_place_and_hint() {
    let nothing = tempfile::tempdir().unwrap();
    let cases = [
        (folder("{", Some("")), "run.json", "damaged"),
        (folder("{}", Some("")), "run.json", "damaged"),
        (folder(RUN, None), "metrics.jsonl", "holds no run"),
        (folder(RUN, Some("")), "metrics.jsonl", "no metrics yet"),
        (folder(RUN, Some("{\"step\":0,\"lo")), "metrics.jsonl", "no metrics yet"),
        (folder(RUN, Some(&(line(0, "3", "0") + "{\"step\":1,\"lo\n"))), "metrics.jsonl:2", "broken"),
        (folder(RUN, Some("{\"step\":0}\n")), "metrics.jsonl:1", "broken"),
        (nothing, "run.json", "holds no run"),
    ];
    for (dir, place, what) in cases {
        let failure = Run::read(dir.path()).unwrap_err();
        assert_eq!(failure.exit, Exit::Input, "{failure}");
        assert!(failure.what.contains(what) && failure.hint.is_some(), "{failure}");
        assert!(failure.place.as_ref().is_some_and(|p| p.ends_with(place)), "{failure}");
    }
    let dir = folder(RUN, Some(&twelve()));
    for missing in ["not-there", "run.json"] {
        let failure = Run::read(&dir.path().join(missing)).unwrap_err();
        assert_eq!((failure.exit, failure.what.as_str()), (Exit::Input, "there is no such run folder"));
    }
}

#[test]
fn curves_have_every_step_and_noisy_ones_of_long_runs_are_smoothed() {
    let loss = &QUANTITIES[0];
    let short = [run("a", &facts("shadow", 1e-5), &twelve())];
    let chart = loss.chart(&short, &["a".to_owned()]);
    assert_eq!(chart.curves[0].points[..2], [(0.0, Some(12.0)), (1.0, Some(11.0))]);
    assert!(chart.curves[0].smoothed.is_empty() && loss.smoothing(&short).is_none());
    let long: String = (0..90).map(|i| line(i, if i == 50 { "null" } else { "2" }, "0.5")).collect();
    let long = [run("b", &facts("shadow", 1e-5), &long)];
    assert_eq!(loss.smoothing(&long).as_deref(), Some("running mean over 3 steps"));
    let smoothed: &[Point] = &loss.chart(&long, &["b".to_owned()]).curves[0].smoothed;
    assert_eq!((smoothed[49], smoothed[50]), ((49.0, Some(2.0)), (50.0, None)));
    let swallowed = &QUANTITIES[2];
    assert!(swallowed.smoothing(&long).is_none());
    assert_eq!(swallowed.chart(&long, &["b".to_owned()]).curves[0].points[89], (89.0, Some(0.5)));
}

#[test]
fn runs_are_named_by_their_own_folder_unless_two_have_the_same() {
    let dir = folder(RUN, Some(&twelve()));
    let run = |name: &str| Run { name: name.to_owned(), ..Run::read(dir.path()).unwrap() };
    assert_eq!(names(&[run("out/shadow"), run("a/low/"), run("b/low")]), ["shadow", "a/low/", "b/low"]);
}

#[test]
fn settings_that_differ_are_marked_and_say_where_they_came_from() {
    let mut newer = facts("low-sr", 1e-5);
    newer["settings"]["wire"] = json!({"value": null, "from": {"file": "ds.json:3:5"}});
    let runs = [run("a", &facts("shadow", 1e-5), &twelve()), run("b", &newer, &twelve())];
    let settings = settings(&runs);
    let differing: Vec<&str> = settings.iter().filter(|s| s.differs()).map(|s| s.name.as_str()).collect();
    assert_eq!(differing, ["policy", "wire"]);
    let cells = |name: &str| -> Vec<Option<(String, String)>> {
        let setting = settings.iter().find(|s| s.name == name).unwrap();
        setting.cells.iter().map(|cell| cell.as_ref().map(|c| (c.value.clone(), c.from.clone()))).collect()
    };
    let pair = |value: &str, from: &str| Some((value.to_owned(), from.to_owned()));
    assert_eq!(cells("policy"), [pair("shadow", "flag"), pair("low-sr", "flag")]);
    assert_eq!(cells("wire"), [None, pair("none", "file ds.json:3:5")]);
    assert_eq!(cells("length")[0], pair("steps 12", "flag"));
    assert_eq!(cells("lr")[0], pair("1e-5", "default"));
    assert_eq!(cells("data")[0], pair("none", "default"));
    assert_eq!(cells("data_rows")[0], pair("abc", ""));
    let page = page::page(&runs);
    assert!(
        page.contains("<td class=\"changed\"><span class=\"mark\">≠</span>low-sr<span class=\"fine\">flag</span></td>")
    );
    // lr, length, data, data_rows and umbra.
    assert!(page.contains("<summary>5 settings are the same in all runs</summary>"));
}

#[test]
fn a_page_is_whole_and_escapes_what_comes_from_files() {
    let name = "<script>alert(1)<!--&\"'{{data}}";
    let metrics = line(0, "3", "null") + &line(1, "null", "0.5") + &line(2, "2", "0.5");
    let page =
        page::page(&[run(name, &facts("</style>", 1e-5), &metrics), run("b", &facts("shadow", 2e-5), &twelve())]);
    assert!(!page.contains("<script>alert") && !page.contains("policy\">}</style>"), "escaped");
    assert!(page.contains("&lt;script&gt;alert(1)&lt;!--&amp;&quot;&#39;{{data}}"), "kept as text");
    assert_eq!((page.matches("<script").count(), page.matches("</style>").count()), (2, 1));
    for outside in ["http:", "https:", "src=", "@import", "url("] {
        let found = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(outside), "{outside}");
    }
    assert!(!page.contains("NaN") && !page.contains("inf "));
    assert_eq!(page.matches("<figure").count(), QUANTITIES.len());
    // What the script reads is JSON, with null for what is not there.
    let data = page.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["names"][0], name);
    assert_eq!(data["curves"][0]["runs"][0], json!({"s": [0, 1, 2], "v": [3.0, null, 2.0]}));
}

#[test]
fn a_run_of_one_step_has_a_page() {
    let page = page::page(&[run("a", &facts("shadow", 1e-5), &line(0, "3", "null"))]);
    assert!(page.contains("class=\"line dot\"") && !page.contains("NaN"));
    assert!(page.contains("<title>a – Umbra</title>"));
}

#[test]
fn a_hundred_thousand_steps_make_a_page_below_a_megabyte() {
    let metrics = |i: u64| {
        let x = 0.1234567890123 + 1.0 / (i + 1) as f64;
        let noisy = x + (i * 7919 % 1000) as f64 / 7919.0;
        let values =
            format!("\"loss\":{noisy},\"grad_norm\":{noisy},\"lr\":{x},\"swallowed\":{noisy},\"arrived\":{noisy}");
        format!("{{\"step\":{i},{values},\"tps\":{},\"mem_gib\":{noisy},\"mem_plan_gib\":{x}}}\n", 9000.0 * noisy)
    };
    let metrics: String = (0..100_000).map(metrics).collect();
    let page = page::page(&[run("long", &facts("shadow", 1e-5), &metrics)]);
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
    assert!(page.contains("lowest and highest of every 156 steps"));
}

#[test]
fn pages_and_pictures_are_written_where_they_were_asked_for() {
    let paths = |runs: &[&str]| default_page(&runs.iter().map(PathBuf::from).collect::<Vec<_>>());
    assert_eq!(paths(&["out/a"]), Path::new("out/a/report.html"));
    assert_eq!(paths(&["out/a", "out/b/"]), Path::new("out/report.html"));
    assert_eq!(paths(&["a", "b"]), Path::new("report.html"));
    assert_eq!(paths(&["out/a", "b"]), Path::new("report.html"));

    let dir = folder(RUN, Some(&twelve()));
    let runs = [Run::read(dir.path()).unwrap()];
    let path = dir.path().join("loss.svg");
    draw(&runs, &path).unwrap();
    assert!(fs::read_to_string(&path).unwrap().contains("Training loss"));
    assert_eq!(draw(&runs, &dir.path().join("no/loss.svg")).unwrap_err().exit, Exit::Disk);
    let pictures = dir.path().join("pictures/");
    draw(&runs, &pictures).unwrap();
    let mut found: Vec<String> =
        fs::read_dir(&pictures).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    let expected = ["arrived", "grad_norm", "loss", "lr", "memory", "swallowed", "tokens_per_s"];
    assert_eq!(found, expected.map(|name| format!("{name}.svg")));

    let args = |out: &str| ReportArgs { runs: vec![dir.path().into()], out: Some(dir.path().join(out)), svg: None };
    report(&args("page.html")).unwrap();
    assert!(fs::read_to_string(dir.path().join("page.html")).unwrap().starts_with("<!doctype html>"));
    let failure = report(&args("no/page.html")).unwrap_err();
    assert_eq!((failure.exit, failure.hint.is_some()), (Exit::Disk, true));
}
