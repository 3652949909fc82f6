//! Schedules of other programs against values worked out from their formulas, and what is refused.

use super::*;
use crate::plan::tests::{plan, plan_of, refused};
use serde_json::{Value, json};
use std::path::Path;

fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[test]
fn two_hundred_steps_of_every_schedule() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/schedules");
    let mut kinds = Vec::new();
    for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = file.display();
        let case: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let plan = plan_of(case["flags"].as_str().unwrap(), case["lanes"].as_u64().unwrap() as usize);
        let schedule = plan.schedule(200).unwrap();
        let rates = numbers(&case["rates"]);
        assert_eq!(rates.len(), 200, "{name}");
        let close = |what: &str, step: usize, got: f64, expected: f64| {
            // The formulas are evaluated in two orders; next to their zeros what counts is the size of the terms.
            let bound = 1e-12 * expected.abs() + 1e-18;
            assert!((got - expected).abs() <= bound, "{name}: {what} of step {step} is {got:e}, not {expected:e}");
        };
        rates.iter().enumerate().for_each(|(k, rate)| close("rate", k, schedule.at(k as u64), *rate));
        match case["betas"].as_array() {
            None => assert_eq!(schedule.betas(100), None, "{name}"),
            Some(betas) => {
                for (k, expected) in betas.iter().map(numbers).enumerate() {
                    let [beta1, beta2] = schedule.betas(k as u64).unwrap();
                    close("β₁", k, beta1, expected[0]);
                    assert_eq!(beta2, expected[1], "{name}");
                }
            }
        }
        kinds.push(plan.schedule.name());
    }
    kinds.sort_unstable();
    kinds.dedup();
    let all = ["hf-constant", "hf-cosine", "hf-linear", "lr-range-test", "one-cycle"];
    assert_eq!(kinds, [&all[..], &["warmup-cosine-lr", "warmup-decay-lr", "warmup-lr"]].concat());
}

#[test]
fn the_first_updates_of_a_linear_warm_up() {
    let line = "--model m --steps 100 --lr 1e-3 --schedule warmup-lr --schedule-params warmup_num_steps=10 \
                warmup_type=linear";
    let first = |line: &str| [0, 1, 2, 3].map(|k| plan(line).schedule(100).unwrap().at(k));
    assert_eq!(first(line), [0.0, 0.0, 1e-4, 2e-4]);
    let old = |version: &str| first(&format!("{line} --assume deepspeed={version}"));
    assert_eq!(old("0.15.3"), [0.0, 0.0, 1e-4, 2e-4]);
    assert_eq!(old("0.15.2"), [1e-3, 0.0, 1e-4, 2e-4]);
    // The peak is the optimizer's rate from 0.17.2 on, and 0.001 before.
    let peak = |version: &str| {
        let line = line.replace("--lr 1e-3", "--lr 5");
        plan(&format!("{line} --assume deepspeed={version}")).schedule(100).unwrap().at(50)
    };
    assert_eq!((peak("0.17.1"), peak("0.17.2"), peak("0.19.6")), (1e-3, 5.0, 5.0));
}

#[test]
fn auto_takes_its_value_from_other_settings() {
    let line = "--model m --epochs 1 --lr 2 --warmup-ratio 0.1 --schedule warmup-decay-lr --schedule-params \
                total_num_steps=auto warmup_num_steps=auto warmup_max_lr=auto warmup_min_lr=auto warmup_type=linear";
    // The length is that of the data: 40 steps, four of them warm-up.
    let s = plan(line).schedule(40).unwrap();
    assert_eq!([1, 2, 5, 6, 23].map(|k| s.at(k)), [0.0, 0.5, 2.0, 2.0 * 35.0 / 36.0, 1.0]);
    let json = plan(line).to_json();
    let params = &json["settings"]["schedule_params"];
    assert_eq!(params["from"], "flag");
    assert_eq!(
        params["value"],
        json!({
            "total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_min_lr": "auto", "warmup_num_steps": "auto",
            "warmup_type": "linear",
        })
    );
    let text = params["value"].to_string();
    assert!(text.find("total").unwrap() < text.find("warmup_max").unwrap(), "sorted by name");
    // Without a warm-up it is the shortest there is.
    let s = plan("--model m --steps 9 --lr 2 --schedule warmup-lr --schedule-params warmup_num_steps=auto");
    assert_eq!([1, 2, 3].map(|k| s.schedule(9).unwrap().at(k)), [0.0, 2.0, 2.0]);
    // The preset's warm-up is no part of a schedule that has its own.
    assert_eq!(plan("--schedule lr-range-test").warmup, Warmup::Steps(0));
    assert_eq!(plan("--schedule hf-linear").warmup_steps(200).unwrap(), 10);
}

#[test]
fn versions_that_take_a_warm_up_of_nothing() {
    let line = "--model m --steps 9 --lr 2 --schedule warmup-lr --schedule-params warmup_num_steps=";
    let f = refused(&format!("{line}0"), 1);
    assert_eq!(f.place.as_deref(), Some("--schedule-params warmup_num_steps"));
    for n in [0, -3] {
        let s = plan(&format!("{line}{n} --assume deepspeed=0.19.5")).schedule(9).unwrap();
        assert_eq!([1, 2, 3].map(|k| s.at(k)), [0.0, 2.0, 2.0]);
    }
}

#[test]
fn parameters_are_checked_by_name() {
    let cycle = "--schedule one-cycle --schedule-params cycle_min_lr=1e-5 cycle_max_lr=1e-3";
    let cases = [
        ("--schedule-params warmup_num_steps=5", "--schedule-params", "no parameters"),
        ("--schedule cosine --schedule-params a=5", "--schedule-params", "cosine has no parameters"),
        ("--schedule warmup-lr --schedule-params warmup_num_steps", "--schedule-params", "cannot be read"),
        ("--schedule warmup-lr --schedule-params total_num_steps=9", "--schedule-params", "total_num_steps"),
        ("--schedule warmup-decay-lr", "--schedule-params", "needs total_num_steps"),
        ("--schedule warmup-cosine-lr --schedule-params warmup_num_steps=4", "--schedule-params", "total_num_steps"),
        ("--schedule one-cycle --schedule-params cycle_max_lr=1", "--schedule-params", "needs cycle_min_lr"),
        ("--schedule warmup-lr --schedule-params warmup_num_steps=1.5", "--schedule-params warmup_num_steps", "1.5"),
        ("--schedule warmup-lr --schedule-params warmup_min_lr=-1", "--schedule-params warmup_min_lr", "-1"),
        ("--schedule warmup-lr --schedule-params warmup_min_lr=nan", "--schedule-params warmup_min_lr", "nan"),
        ("--schedule warmup-lr --schedule-params warmup_type=cubic", "--schedule-params warmup_type", "cubic"),
        ("--schedule warmup-lr --schedule-params warmup_type=auto", "--schedule-params warmup_type", "auto"),
        ("--schedule lr-range-test --schedule-params lr_range_test_step_size=0", "size", "0"),
        (&format!("{cycle} cycle_max_mom=1"), "--schedule-params cycle_max_mom", "1"),
        (&format!("{cycle} cycle_momentum=2"), "--schedule-params cycle_momentum", "2"),
        (&format!("{cycle} cycle_min_lr=2"), "--schedule-params cycle_min_lr", "twice"),
        (
            &format!("{cycle} cycle_first_step_size=5 decay_step_size=1 decay_mom_rate=0.2"),
            "--schedule-params decay_mom_rate",
            "momentum grows",
        ),
    ];
    for (line, place, what) in cases {
        let f = refused(&format!("--model m --steps 100 {line}"), 1);
        assert!(f.place.as_deref().unwrap().contains(place), "{line}: {f}");
        assert!(f.what.contains(what) && f.expected.is_some(), "{line}: {f}");
    }
    let f = refused("--model m --schedule warmup-lr --schedule-params warmup_num_step=5", 1);
    assert_eq!(f.hint.as_deref(), Some("did you mean warmup_num_steps?"));
    let f = refused("--model m --schedule warmup-decay-lr", 1);
    assert_eq!(f.hint.as_deref(), Some("--schedule-params total_num_steps=auto"));
    plan(&format!("--model m --steps 100 {cycle} cycle_momentum=False decay_mom_rate=9"));
}

#[test]
fn flags_a_schedule_does_not_have_are_refused() {
    let cases = [
        ("--schedule hf-linear --min-lr 1e-6", "--min-lr", "hf-linear"),
        ("--schedule warmup-lr --min-lr 0", "--min-lr", "warmup-lr"),
        ("--schedule warmup-lr --warmup-steps 5", "--warmup-steps", "warmup-lr"),
        ("--schedule lr-range-test --warmup-ratio 0.1", "--warmup-ratio", "lr-range-test"),
        (
            "--schedule warmup-decay-lr --warmup-steps 5 --schedule-params total_num_steps=9 warmup_num_steps=5",
            "--warmup-steps",
            "warmup-decay-lr",
        ),
        ("--schedule cosine --schedule-stepping per-lane", "--schedule-stepping", "cosine"),
        ("--schedule-stepping per-lane", "--schedule-stepping", "constant"),
        ("--schedule hf-linear --decay-steps 5", "--decay-steps", "hf-linear"),
    ];
    for (line, place, schedule) in cases {
        let f = refused(&format!("--model m {line}"), 1);
        assert_eq!(f.place.as_deref(), Some(place), "{line}");
        assert_eq!(f.found, Some(format!("--schedule {schedule}")), "{line}");
        assert!(f.expected.is_some() && f.hint.is_some(), "{line}");
    }
    let p = plan_of("--model m --schedule hf-linear --schedule-stepping per-lane --warmup-steps 3", 4);
    let Shape::Transformers { stride, .. } = p.schedule(9).unwrap().shape else { panic!("transformers' shape") };
    assert_eq!(stride, 4);
    plan("--model m --schedule cosine --schedule-stepping once");
}

#[test]
fn schedules_in_words() {
    let words = |line: &str| {
        let p = plan_of(&format!("--model m --lr 1e-4 {line}"), 2);
        p.schedule_in_words(&p.schedule(100).unwrap())
    };
    assert_eq!(words("--schedule cosine --min-lr 1e-6 --warmup-steps 5"), "1e-4, cosine to 1e-6, 5 steps of warm-up");
    assert_eq!(words("--schedule hf-linear --schedule-stepping per-lane"), "1e-4, hf-linear, 2 steps of it a step");
    assert_eq!(
        words("--schedule warmup-lr --schedule-params warmup_num_steps=5 warmup_type=log"),
        "warmup-lr of DeepSpeed 0.19.6: warmup_num_steps 5, warmup_type log"
    );
    assert_eq!(words("--schedule lr-range-test"), "lr-range-test of DeepSpeed 0.19.6: defaults");
}
