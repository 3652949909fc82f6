//! Files in the style of `accelerate config`, Accelerate's examples, LLaMA-Factory and axolotl.

mod deepspeed;
mod fsdp;
mod plain;

use super::layer;
use crate::config::assume::LoadDType;
use crate::config::{Assume, Facts, Layer, Saying, Version, yaml};
use crate::{Failure, Result};
use std::path::PathBuf;
use std::sync::Arc;

/// Four ranks, weights loaded in bf16, the newest releases.
const FACTS: Facts = Facts {
    lanes: 4,
    lanes_written: false,
    batch_written: false,
    assume: Assume { deepspeed: Version(0, 19, 6), accelerate: Version(1, 15, 0), load: None },
    load: LoadDType::Bf16,
};

fn with(accelerate: Version, load: LoadDType) -> Facts {
    Facts { assume: Assume { accelerate, ..FACTS.assume }, load, ..FACTS }
}

fn read(text: &str, facts: &Facts) -> Result<Layer> {
    let node = yaml::parse(text).map_err(|e| Failure::usage(format!("{}:{}", e.spot.line, e.spot.column)))?;
    layer(&Arc::new(PathBuf::from("run.yaml")), &node, facts)
}

#[track_caller]
fn of(text: &str) -> Layer {
    match read(text, &FACTS) {
        Ok(layer) => layer,
        Err(failure) => panic!("{failure}"),
    }
}

/// The flags in their order.
fn flags(layer: &Layer) -> String {
    let flag = |s: &crate::config::Setting| format!("--{} {}", s.flag, s.values.join(" "));
    layer.settings.iter().map(flag).collect::<Vec<_>>().join(" ")
}

/// Where a flag comes from.
#[track_caller]
fn source(layer: &Layer, flag: &str) -> String {
    layer.settings.iter().find(|s| s.flag == flag).unwrap().source.to_string()
}

/// What is said of a key.
#[track_caller]
fn remark<'l>(layer: &'l Layer, key: &str) -> (Saying, &'l str) {
    let of_key = |says: &str| says.split(':').next() == Some(key);
    let found = layer.remarks.iter().find(|r| of_key(&r.source.says));
    let remark = found.unwrap_or_else(|| panic!("nothing is said of {key}: {:?}", layer.remarks));
    (remark.saying, &remark.why)
}

#[track_caller]
fn refused_with(text: &str, facts: &Facts) -> Failure {
    read(text, facts).expect_err("it should be refused")
}

#[track_caller]
fn refused(text: &str) -> Failure {
    refused_with(text, &FACTS)
}

/// Place, what, hint.
fn told(failure: &Failure) -> (&str, &str, &str) {
    (failure.place.as_deref().unwrap_or(""), &failure.what, failure.hint.as_deref().unwrap_or(""))
}
