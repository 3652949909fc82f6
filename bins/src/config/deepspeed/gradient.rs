//! What happens to a gradient between the backward pass and the optimizer: its dtypes on the way, the mean over ranks, and
//! clipping (`deepspeed/runtime/engine.py`, `deepspeed/runtime/zero/stage3.py`).

use super::keys::{Bool, Quiet, quiet, written};
use super::precision::Mode;
use super::zero::Zero;
use crate::config::section::{Field, Section};
use crate::config::{Facts, Layer, Version};
use crate::{Failure, Result};

/// From here on clipping is on without being asked for.
const CLIPS: Version = Version(0, 19, 3);
/// From here on the reduced sum goes to the accumulator in the accumulator's dtype, not through the model's.
const KEEPS_SUM: Version = Version(0, 19, 2);

const QUIET: &[Quiet] = &[("sparse_gradients", Bool, "the embedding's gradient is dense; the sum is the same")];

/// The keys as flags.
///
/// # Errors
/// Exit 2: fp16, what DeepSpeed refuses as well, contradictions and wrong types.
pub(super) fn read(
    layer: &mut Layer,
    top: &mut Section<'_>,
    facts: &Facts,
    mode: &Mode<'_>,
    zero: &Zero<'_>,
) -> Result<()> {
    let deepspeed = facts.assume.deepspeed;
    dtypes(layer, top, deepspeed, mode, zero)?;
    mean(layer, top, facts, zero)?;
    clip(layer, top, deepspeed)?;
    quiet(layer, top, QUIET)
}

/// `bf16` or `fp32`, in any of the spellings of `deepspeed/runtime/config_utils.py: DtypeEnum`.
fn dtype(field: &Field<'_>) -> Result<&'static str> {
    let words = ["bf16", "bfloat16", "torch.bfloat16", "fp32", "float32", "torch.float32"];
    let half = ["fp16", "float16", "torch.float16", "half"];
    if field.text().is_ok_and(|text| half.iter().any(|word| word.eq_ignore_ascii_case(&text))) {
        return Err(field.refused("fp16 has neither bf16's range nor fp32's precision", "\"bf16\" or \"fp32\""));
    }
    Ok(if field.choice(&words)?.contains('b') { "bf16" } else { "fp32" })
}

fn dtypes(
    layer: &mut Layer,
    top: &mut Section<'_>,
    deepspeed: Version,
    mode: &Mode<'_>,
    zero: &Zero<'_>,
) -> Result<()> {
    let model = mode.dtype();
    let mut wire = model;
    if let Some(field) = written(top, "communication_data_type") {
        wire = dtype(&field)?;
        layer.set("wire", wire, &field);
    }
    let accumulate = data_types(layer, top, mode, zero)?.unwrap_or(model);
    if let Some(field) = written(top, "seq_parallel_communication_data_type") {
        dtype(&field)?;
        layer.no_effect(&field, "there is no sequence parallelism");
    }
    // The sum is cast to the accumulator's dtype; what is bf16 on either side of the cast is rounded to bf16.
    let both = wire == "fp32" && accumulate == "fp32";
    match (model, both) {
        ("bf16", true) if deepspeed < KEEPS_SUM => {
            let why = format!("DeepSpeed {deepspeed} casts the sum back to bf16 first, fp32 on both sides or not");
            layer.imply("reduced", "bf16", why);
        }
        ("bf16", true) => layer.imply("reduced", "fp32", "DeepSpeed: the fp32 sum is added to the fp32 accumulator"),
        ("fp32", false) => layer.imply("reduced", "bf16", "DeepSpeed: the sum passes through bf16"),
        _ => {}
    }
    Ok(())
}

/// The section `data_types`: the accumulator's dtype, if it is written.
fn data_types(
    layer: &mut Layer,
    top: &mut Section<'_>,
    mode: &Mode<'_>,
    zero: &Zero<'_>,
) -> Result<Option<&'static str>> {
    let Some(field) = written(top, "data_types") else { return Ok(None) };
    let mut section = field.section()?;
    let mut accumulate = None;
    if let Some(field) = written(&mut section, "grad_accum_dtype") {
        let dtype = dtype(&field)?;
        if zero.stage == 0 && dtype != mode.dtype() {
            let why = format!("without ZeRO DeepSpeed accumulates in the model's {}", mode.dtype());
            return Err(field.refused(&why, "leave it out, or \"zero_optimization\": {\"stage\": 1} or more"));
        }
        layer.set("accumulate", dtype, &field);
        accumulate = Some(dtype);
    }
    if let Some(field) = written(&mut section, "param_dtype") {
        if dtype(&field)? != mode.dtype() {
            return Err(disagrees(&field, mode));
        }
        layer.same(&field, format!("the model computes in {}", mode.dtype()));
    }
    if let Some(field) = written(&mut section, "buffer_dtype") {
        match dtype(&field)? {
            "fp32" => layer.same(&field, "the frequencies of the rotary embedding are fp32"),
            _ => layer.differs(&field, "the only buffers, the frequencies of the rotary embedding, stay fp32"),
        }
    }
    section.finish()?;
    Ok(accumulate)
}

fn disagrees(field: &Field<'_>, mode: &Mode<'_>) -> Failure {
    let by = match mode.field() {
        Some(by) => format!("{} at {} ({})", mode.dtype(), by.place(), by.path),
        None => format!("{}: no bf16 section is on", mode.dtype()),
    };
    Failure::usage("data_types.param_dtype disagrees with the mode")
        .at(field.place())
        .expected(by)
        .found(field.node)
        .hint("leave param_dtype out: the mode decides it")
}

/// The mean over ranks, and where it is divided.
fn mean(layer: &mut Layer, top: &mut Section<'_>, facts: &Facts, zero: &Zero<'_>) -> Result<()> {
    let scattered = zero.stage > 0 && zero.reduce_scatter;
    let refusal = "DeepSpeed refuses it under ZeRO with reduce_scatter";
    let exact = "the mean over ranks is the same in exact arithmetic; Umbra adds in fp32, in the order of the lanes, and \
                 divides once";
    let mut prescaled = false;
    if let Some(field) = written(top, "prescale_gradients") {
        prescaled = field.bool()?;
        match prescaled {
            true if scattered => return Err(field.refused(refusal, "leave it out: the mean is the same")),
            true => layer.differs(&field, exact),
            false => layer.same(&field, "the mean over lanes"),
        }
    }
    if let Some(field) = written(top, "gradient_predivide_factor") {
        let factor = field.number()?;
        if factor <= 0.0 {
            return Err(field.bad("a number above 0"));
        }
        if factor == 1.0 {
            layer.same(&field, "the mean over lanes");
        } else if scattered {
            return Err(field.refused(refusal, "1.0, or leave it out"));
        } else if prescaled {
            layer.no_effect(&field, "prescale_gradients divides by the number of ranks in its place");
        } else if zero.stage == 3 && factor == facts.lanes as f64 {
            let why = "with a factor equal to the number of ranks DeepSpeed divides by that number twice";
            return Err(field.refused(why, "1.0, or leave it out: the mean over ranks"));
        } else {
            layer.differs(&field, exact);
        }
    }
    if let Some(field) = written(top, "gradient_allreduce_op") {
        match field.choice(&["mean", "sum"])? {
            "sum" => {
                return Err(field.refused("gradients are averaged over lanes", "\"mean\", with a larger lr if need be"));
            }
            _ => layer.same(&field, "the mean over lanes"),
        }
    }
    Ok(())
}

fn clip(layer: &mut Layer, top: &mut Section<'_>, deepspeed: Version) -> Result<()> {
    let Some(field) = top.take("gradient_clipping") else {
        let norm = if deepspeed >= CLIPS { 1 } else { 0 };
        layer.imply("clip", norm, format!("DeepSpeed {deepspeed} without gradient_clipping"));
        return Ok(());
    };
    if field.is_null() {
        layer.set("clip", 0, &field);
    } else if field.is_auto() {
        layer.set("clip", 1, &field);
        layer.same(
            &field,
            "Accelerate puts 1.0 in its place, and transformers' Trainer its max_grad_norm, which is 1.0",
        );
    } else {
        if field.number()? < 0.0 {
            return Err(field.bad("a number that is 0 (off) or more"));
        }
        layer.set("clip", field.text()?, &field);
    }
    Ok(())
}
