//! The same state or not, and where two part.

use super::super::diff::{Compared, Tally, compare};
use super::*;
use crate::Exit;
use collectives::Launch;
use models::Mistral;
use optim::{Sharding, Trainer};
use spmd_core::{Device, Policy};

const NORM: &str = "model.norm.weight";

fn compared(a: &Save, b: &Save) -> Compared {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    compare(&a.make(one.path()), &b.make(two.path()), 1).unwrap()
}

/// The hash that a trainer computes of the same numbers.
fn hash_of_trainer(save: &Save) -> u64 {
    let device = Device::cpu(1).unwrap();
    let comm = collectives::connect(&Launch::from_vars(|_| None)).unwrap();
    let precision = Policy::Shadow.precision();
    let model = Mistral::new(device.clone(), source().config, precision.compute, 1, 8, false).unwrap();
    let mut trainer = Trainer::new(model, device, comm, precision, Sharding::zero3(1), false, || 0.0).unwrap();
    let Trainer { state, layout, .. } = &mut trainer;
    let filled = state.restore(&save.units, layout, |role, param, start, mut out| {
        let unit = save.units.iter().find(|unit| unit.params.contains(param)).unwrap();
        let at = unit.ranges()[unit.params.iter().position(|p| p == param).unwrap()].start + start;
        out.copy_from_f32(&save.numbers(unit, Role::STATE[role as usize])[at..at + out.len()]);
        Ok::<(), ()>(())
    });
    filled.unwrap();
    trainer.state_hash().unwrap()
}

#[test]
fn the_layout_of_files_and_ranks_does_not_count_and_the_hash_is_the_trainers() {
    let hash = hash_of_trainer(&Save::default());
    let one = Save { state_hash: Some(hash), ..Save::default() };
    let three = Save { files: Files::PerRank, world: 3, ..Save::default() };
    let found = compared(&one, &three);
    assert!(found.same());
    found.verdict().unwrap();
    assert_eq!((found.a.hash, found.b.hash), (hash, hash));
    let weights: usize = one.units.iter().map(UnitSpec::len).sum();
    let text = found.text();
    assert!(text.starts_with(&format!("same state (step 4, {weights} weights, hash {hash:016x})\n")), "{text}");
    // The layout is listed, for information.
    let names: Vec<&str> = found.settings.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["shard_group", "world"]);
}

#[test]
fn the_first_difference_is_named_and_all_are_counted() {
    let changes = vec![
        (Role::ExpAvg, NORM, 3, 100.0),
        (Role::ExpAvg, NORM, 7, f32::from_bits(value(Role::ExpAvg, NORM, 7).to_bits() ^ 1)),
        (Role::ExpAvgSq, "lm_head.weight", 0, -5.0),
        (Role::ExpAvgSq, NORM, 0, -5.0),
    ];
    let found = compared(&Save::default(), &Save { changes, ..Save::default() });
    assert!(!found.same() && found.a.hash != found.b.hash);
    let failure = found.verdict().unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    assert_eq!(failure.found.as_deref(), Some("first in exp_avg of model.norm.weight"));
    let first = found.first.as_ref().unwrap();
    assert_eq!((first.role, first.tensor.as_str(), first.elements), (Role::ExpAvg, NORM, 12));
    let before = value(Role::ExpAvg, NORM, 3);
    // 100 and a multiple of 1/64 below 4 are exact, and so is their distance.
    let tally = Tally { differ: 2, first: Some((3, before, 100.0)), largest: 100.0 - f64::from(before) };
    assert_eq!(first.tally, tally);
    let counts: Vec<(usize, u64)> = found.roles.iter().map(|r| (r.tensors_differ, r.elements_differ)).collect();
    assert_eq!(counts, [(0, 0), (1, 2), (2, 2)]);
    let text = found.text();
    let line = "first tensor that differs: exp_avg of model.norm.weight, 2 of 12 elements";
    assert!(text.starts_with("not the same state\n") && text.contains(line), "{text}");
}

#[test]
fn bits_are_compared_and_not_numbers() {
    let nan = f32::from_bits(0x7fc0_1234);
    let with = |x: f32| Save { changes: vec![(Role::Shadow, NORM, 2, x)], ..Save::default() };
    assert!(compared(&with(nan), &with(nan)).same());
    let other = compared(&with(nan), &with(f32::from_bits(0x7fc0_1235)));
    assert!(other.first.unwrap().tally.largest.is_nan());
    let zeros = compared(&with(0.0), &with(-0.0)).first.unwrap().tally;
    assert_eq!((zeros.differ, zeros.largest), (1, 0.0));
}

#[test]
fn another_dtype_of_the_same_numbers_is_the_same_state_and_said() {
    let found = compared(&Save::default(), &Save { dtype: DType::Bf16, ..Save::default() });
    assert!(found.same());
    assert!(found.text().contains("exp_avg is stored in F32 in A and in BF16 in B"));
    assert_eq!(found.a.hash, found.b.hash);
}

#[test]
fn another_step_is_another_state() {
    let found = compared(&Save::default(), &Save { step: 5, ..Save::default() });
    assert!(!found.same() && found.first.is_none());
    assert_eq!(found.verdict().unwrap_err().found.as_deref(), Some("step 4 and step 5"));
    assert!(found.text().contains("every number of the tensors that both have is the same"));
}

#[test]
fn other_tensors_are_another_state() {
    let mut other = Save::default();
    other.units[0].params.push(matrix("extra", &[2, 2]));
    let last = other.units.len() - 1;
    other.units[last].params.last_mut().unwrap().shape = vec![132];
    let found = compared(&Save::default(), &other);
    assert_eq!(found.unpaired, ["lm_head.weight is [11, 12] in A and [132] in B", "extra is only in B"]);
    assert!(!found.same() && found.first.is_none());
    assert_eq!(found.verdict().unwrap_err().exit, Exit::Input);
}

#[test]
fn settings_that_differ_are_listed() {
    let other = r#"{"lr": {"value": 2e-5, "from": "flag"}, "data": {"value": ["a", "b"], "from": "default"}, "new": {"value": 1, "from": "flag"}}"#;
    let found = compared(&Save::default(), &Save { settings_json: other, ..Save::default() });
    assert!(found.same());
    let rows = [("lr", "1e-5", "2e-5"), ("new", "\"(not there)\"", "1")];
    let rows = rows.map(|(name, a, b)| (name.to_owned(), json(a), json(b)));
    assert_eq!(found.settings, rows);
}

#[test]
fn numbers_that_are_not_those_the_run_hashed_are_damage() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save { state_hash: Some(1), ..Save::default() }.make(top.path());
    let failure = compare(&dir, &dir, 1).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    assert!(failure.found.unwrap().contains(&format!("{:016x}", hash_of_trainer(&Save::default()))));
}

#[test]
fn a_damaged_block_is_no_difference_but_a_failure() {
    let top = tempfile::tempdir().unwrap();
    let a = Save { step: 1, ..Save::default() }.make(top.path());
    let b = Save { step: 2, ..Save::default() }.make(top.path());
    damage(&b.join("exp_avg_sq.safetensors"));
    let failure = compare(&a, &b, 1).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    assert!(failure.place.unwrap().contains("exp_avg_sq of tensor lm_head.weight"));
}
