//! Reports of folders written by hand.

use super::*;
use crate::Exit;
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

#[test]
fn a_row_has_the_ends_of_a_run_and_its_speed() {
    let dir = folder(RUN, Some(&twelve()));
    let mut run = Run::read(dir.path()).unwrap();
    run.name = "a".to_owned();
    // The last ten losses are 10 … 1; the middle of 0, 100 … 1100 is 550.
    assert_eq!(run.row(), ["a", "fsdp-low", "1e-5", "12", "12.0000", "5.5000", "25.0%", "0.500", "550"]);
    let text = table(&[run]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "run  policy      lr  steps  first loss  final loss  swallowed  arrived  tokens/s");
    assert_eq!(lines[1], "a    fsdp-low  1e-5     12     12.0000      5.5000      25.0%    0.500       550");
}

#[test]
fn what_a_run_does_not_say_is_none_and_one_that_goes_on_says_how_far_it_is() {
    let dir = folder(RUN, Some(&(line(0, "3", "null") + &line(1, "null", "null"))));
    let row = Run::read(dir.path()).unwrap().row();
    assert_eq!(row[3..7], ["2/12", "3.0000", "3.0000", "none"]);
}

#[test]
fn bad_folders_are_bad_input_with_place_and_hint() {
    let nothing = tempfile::tempdir().unwrap();
    let cases = [
        (folder("{", Some("")), "run.json", "damaged"),
        (folder("{}", Some("")), "run.json", "damaged"),
        (folder(RUN, None), "metrics.jsonl", "holds no run"),
        (folder(RUN, Some("")), "metrics.jsonl", "no metrics yet"),
        (folder(RUN, Some(&(line(0, "3", "0") + "{\"step\":1,\"lo"))), "metrics.jsonl:2", "broken"),
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
fn smoothing_keeps_the_beginning_and_the_gaps() {
    let step = |step: u64, loss: Option<f64>| Step { step, loss, swallowed: None, arrived: None, tps: None };
    let losses = [Some(9.0), Some(3.0), Some(6.0), None, Some(2.0), Some(1.0)];
    let steps: Vec<Step> = losses.iter().zip(0..).map(|(loss, i)| step(i, *loss)).collect();
    let smoothed: Vec<f64> = smooth(&steps, 1).into_iter().map(|(_, y)| y).collect();
    // (9+3+6)/3 = 6, (3+6)/2 = 4.5, (2+1)/2 = 1.5.
    assert_eq!(smoothed[..3], [9.0, 6.0, 4.5]);
    assert!(smoothed[3].is_nan());
    assert_eq!(smoothed[4..], [1.5, 1.5]);
    assert_eq!(smooth(&steps, 0)[2], (2.0, 6.0));
}

#[test]
fn curves_are_named_by_their_own_folder_unless_two_have_the_same() {
    let dir = folder(RUN, Some(&twelve()));
    let run = |name: &str| Run { name: name.to_owned(), ..Run::read(dir.path()).unwrap() };
    let (title, drawn) = curves(&[run("out/shadow"), run("a/low/"), run("b/low")]);
    assert_eq!(title, "Training loss", "twelve steps are not smoothed");
    assert_eq!(drawn.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["shadow", "a/low/", "b/low"]);
    let mut long = run("long");
    long.steps = (0..90).map(|step| Step { step, ..long.steps[0] }).collect();
    assert_eq!(curves(&[long]).0, "Training loss, running mean over 3 steps");
}

#[test]
fn a_picture_is_written_where_it_was_asked_for() {
    let dir = folder(RUN, Some(&twelve()));
    let runs = [Run::read(dir.path()).unwrap()];
    let path = dir.path().join("loss.svg");
    draw(&runs, &path).unwrap();
    assert!(fs::read_to_string(&path).unwrap().contains("Training loss"));
    assert_eq!(draw(&runs, &dir.path().join("no/loss.svg")).unwrap_err().exit, Exit::Disk);
}
