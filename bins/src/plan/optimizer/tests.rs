//! What decides the arithmetic, and what is refused.

use super::*;
use crate::plan::tests::{plan, plan_of, refused};
use crate::plan::{Origin, defaults};
use DType::{Bf16, F32};
use serde_json::json;

#[test]
fn without_flags_the_roles_are_the_policys() {
    for policy in Policy::ALL {
        let p = plan(&format!("--model m --policy {policy}"));
        assert_eq!(p.precision(), policy.precision(), "{policy}");
        let form = if policy == Policy::DeepSpeed { OptimizerForm::Fused } else { OptimizerForm::Torch };
        assert_eq!((p.optimizer, p.optimizer_form, p.momentum), (OptimizerKind::AdamW, form, defaults::MOMENTUM));
        for name in ["wire", "reduced", "accumulate", "clip_form", "optimizer", "optimizer_form", "momentum"] {
            assert_eq!(p.origin(name), Some(Origin::Default), "{policy} {name}");
        }
    }
}

#[test]
fn flags_change_one_role_each() {
    let p = plan("--model m --policy deepspeed --wire fp32 --accumulate fp32 --clip-form torch --optimizer-form cpu");
    let expected = Precision {
        wire: F32,
        accumulate: F32,
        clip: ClipForm::Torch,
        arithmetic: Arithmetic::Fp32Cpu,
        ..Policy::DeepSpeed.precision()
    };
    assert_eq!((p.precision(), p.precision().reduced), (expected, Bf16));
    assert_eq!(plan("--model m --reduced bf16").precision(), Precision { reduced: Bf16, ..Policy::Shadow.precision() });
    let p = plan("--model m --policy fp32 --optimizer-form fused --clip-form deepspeed").precision();
    assert_eq!((p.arithmetic, p.clip, p.round_loaded), (Arithmetic::Fp32Fused, ClipForm::DeepSpeed, false));
    // torch's form of bf16 tensors is the one that rounds every operation; low-sr computes in fp32.
    let arithmetic = |line: &str| plan(line).precision().arithmetic;
    assert_eq!(arithmetic("--model m --policy fsdp-low --optimizer-form torch"), Arithmetic::Bf16PerOp);
    assert_eq!(arithmetic("--model m --policy low-sr --optimizer-form cpu"), Arithmetic::Fp32Cpu);
    assert_eq!(arithmetic("--model m --policy deepspeed --optimizer-form torch"), Arithmetic::Fp32Torch);
    assert_eq!(arithmetic("--model m --policy deepspeed --optimizer sgd"), Arithmetic::Fp32Torch);
    assert_eq!(arithmetic("--model m --policy fsdp-low --optimizer sgd"), Arithmetic::Bf16PerOp);
}

#[test]
fn a_step_has_the_rule_and_the_schedules_betas() {
    let line = "--model m --steps 9 --lr 0.5 --optimizer sgd --momentum 0.8 --weight-decay 0.1 --clip 3 --seed 4";
    let p = plan(line);
    let hyper = p.hyper(&p.schedule(9).unwrap(), 2);
    assert_eq!((hyper.rule, hyper.lr, hyper.momentum, hyper.weight_decay), (Rule::Sgd, 0.5, 0.8, 0.1));
    assert_eq!((hyper.beta1, hyper.beta2, hyper.max_norm, hyper.seed), (0.9, 0.999, 3.0, 4));
    assert_eq!(p.optimizer_in_words(), "sgd, momentum 0.8, torch's arithmetic");

    let p = plan(
        "--model m --steps 9 --optimizer adam --beta1 0.5 --beta2 0.6 --schedule one-cycle \
         --schedule-params cycle_min_lr=1 cycle_max_lr=3 cycle_first_step_size=2",
    );
    let schedule = p.schedule(9).unwrap();
    let at = |step| {
        let h = p.hyper(&schedule, step);
        (h.rule, h.lr, h.beta1, h.beta2)
    };
    assert_eq!(at(0), (Rule::Adam, 1.0, 0.8, 0.99));
    assert_eq!(at(2), (Rule::Adam, 3.0, 0.8, 0.99));
    assert_eq!(at(4), (Rule::Adam, 1.0, 0.9, 0.99));
    assert_eq!(p.optimizer_in_words(), "adam, torch's arithmetic");
    assert!(plan("--policy fsdp-low").optimizer_in_words().contains("after every operation"));
}

#[test]
fn run_json_has_them() {
    let json = plan_of("--model m --policy deepspeed --wire fp32 --optimizer-form cpu", 2).to_json();
    let settings = &json["settings"];
    for (name, value, from) in [
        ("wire", json!("fp32"), "flag"),
        ("reduced", json!("bf16"), "default"),
        ("accumulate", json!("bf16"), "default"),
        ("optimizer", json!("adamw"), "default"),
        ("optimizer_form", json!("cpu"), "flag"),
        ("momentum", json!(0.0), "default"),
        ("clip_form", json!("deepspeed"), "default"),
        ("schedule_params", json!({}), "default"),
        ("schedule_stepping", json!("once"), "default"),
        ("assume", json!(["deepspeed=0.19.6", "accelerate=1.15.0"]), "default"),
    ] {
        assert_eq!(settings[name], json!({ "value": value, "from": from }), "{name}");
    }
    let json = plan("--model m --assume deepspeed=0.14 load=bf16").to_json();
    let words = json!(["deepspeed=0.14.0", "accelerate=1.15.0", "load=bf16"]);
    assert_eq!(json["settings"]["assume"], json!({ "value": words, "from": "flag" }));
}

#[test]
fn settings_of_another_optimizer_are_refused_by_name() {
    let cases = [
        ("--momentum 0.9", "--momentum", "--optimizer adamw"),
        ("--optimizer adam --momentum 0", "--momentum", "--optimizer adam"),
        ("--optimizer sgd --beta1 0.9", "--beta1", "--optimizer sgd"),
        ("--optimizer sgd --beta2 0.9", "--beta2", "--optimizer sgd"),
        ("--optimizer sgd --eps 1e-8", "--eps", "--optimizer sgd"),
        ("--optimizer sgd --optimizer-form fused", "--optimizer-form", "fused"),
        ("--policy fsdp-low --optimizer-form fused", "--optimizer-form", "fused"),
        ("--policy fsdp-low --optimizer-form cpu", "--optimizer-form", "cpu"),
        ("--optimizer sgd --momentum 1", "--momentum", "1"),
        ("--optimizer sgd --momentum -0.1", "--momentum", "-0.1"),
        ("--assume deepspeed=new", "--assume", "deepspeed=new"),
    ];
    for (line, place, found) in cases {
        let f = refused(&format!("--model m {line}"), 1);
        assert_eq!((f.place.as_deref(), f.found.as_deref()), (Some(place), Some(found)), "{line}");
        assert!(f.expected.is_some(), "{line}");
    }
    let f = refused("--model m --policy fsdp-low --optimizer-form cpu", 1);
    assert!(f.what.contains("fsdp-low") && f.hint.unwrap().contains("low-sr"));
}
