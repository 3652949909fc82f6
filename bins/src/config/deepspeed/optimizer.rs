//! `optimizer`: which one, whose arithmetic, and its parameters (`deepspeed/runtime/engine.py:
//! _configure_basic_optimizer`, `deepspeed/ops/adam/fused_adam.py`, `cpu_adam.py`, `torch/optim/adam.py`, `sgd.py`).

use super::keys::{Bool, Quiet, must_be_off, quiet, switch, written};
use super::zero::Zero;
use crate::config::Layer;
use crate::config::section::{Field, Section};
use crate::nearest::nearest;
use crate::{Failure, Result};

const KNOWN: [&str; 3] = ["AdamW", "Adam", "SGD"];

const REFUSALS: &str = "it decides what DeepSpeed refuses, not what is computed";
const KERNELS: &str = "how a kernel is launched, not what it computes";
const ADAM: &[Quiet] = &[
    ("fused", Bool, KERNELS),
    ("foreach", Bool, KERNELS),
    ("capturable", Bool, KERNELS),
    ("differentiable", Bool, "nothing is differentiated through a step"),
    ("set_grad_none", Bool, "gradients are overwritten by the next step"),
];
const SGD: &[Quiet] = &[
    ("fused", Bool, KERNELS),
    ("foreach", Bool, KERNELS),
    ("differentiable", Bool, "nothing is differentiated through a step"),
];

/// The section as flags.
///
/// # Errors
/// Exit 2: an optimizer or a parameter that Umbra does not have, wrong types and unknown keys.
pub(super) fn read(layer: &mut Layer, top: &mut Section<'_>, zero: &Zero<'_>) -> Result<()> {
    let untested = written(top, "zero_allow_untested_optimizer");
    let forced = written(top, "zero_force_ds_cpu_optimizer");
    for field in [&untested, &forced].into_iter().flatten() {
        field.bool()?;
    }
    if let Some(field) = &untested {
        layer.no_effect(field, REFUSALS);
    }
    let untested = untested.map_or(Ok(false), |field| field.bool())?;
    let Some(field) = written(top, "optimizer") else {
        return no_section(layer, zero, forced.as_ref());
    };
    if let Some(field) = &forced {
        layer.no_effect(field, REFUSALS);
    }
    let mut section = field.section()?;
    quiet(layer, &mut section, &[("legacy_fusion", Bool, "it belongs to fp16 without ZeRO")])?;
    let kind = written(&mut section, "type");
    let params = written(&mut section, "params");
    section.finish()?;
    let Some(kind) = kind else {
        return Err(Failure::usage("optimizer has no type")
            .at(field.place())
            .expected("\"type\": \"AdamW\", \"Adam\" or \"SGD\"")
            .found(field.node)
            .hint("leave the whole section out to set the optimizer by flags"));
    };
    let name = kind.text()?;
    let known = KNOWN.into_iter().find(|known| known.eq_ignore_ascii_case(&name));
    let Some(name) = known else { return Err(unknown(&kind, &name)) };
    let mut params = params.as_ref().map(Field::section).transpose()?;
    match name {
        "SGD" => sgd(layer, &kind, params.as_mut(), zero, untested)?,
        name => adam(layer, &kind, name, params.as_mut(), zero)?,
    }
    params.map_or(Ok(()), Section::finish)
}

/// The script makes the optimizer; what the file decides of it is its arithmetic.
fn no_section(layer: &mut Layer, zero: &Zero<'_>, forced: Option<&Field<'_>>) -> Result<()> {
    const SCRIPT: &str = "the file has no optimizer, so the script makes it: as a rule torch.optim.AdamW";
    match forced {
        Some(field) if zero.offload.is_some() && !field.bool()? => {
            layer.set("optimizer-form", "torch", field);
            return Ok(());
        }
        Some(field) => layer.no_effect(field, REFUSALS),
        None => {}
    }
    match zero.offload {
        Some(_) => {
            layer.imply("optimizer-form", "cpu", "DeepSpeed with offload_optimizer takes no optimizer but its CPUAdam");
        }
        None => layer.imply("optimizer-form", "torch", SCRIPT),
    }
    Ok(())
}

fn unknown(kind: &Field<'_>, name: &str) -> Failure {
    let failure = kind.refused("Umbra steps with AdamW, Adam or SGD", "\"AdamW\"");
    match nearest(name, KNOWN) {
        Some(known) => failure.hint(format!("did you mean {known:?}?")),
        None => failure,
    }
    .expected("\"AdamW\", \"Adam\" or \"SGD\"")
    .found(kind.node)
}

fn adam(
    layer: &mut Layer,
    kind: &Field<'_>,
    name: &str,
    mut params: Option<&mut Section<'_>>,
    zero: &Zero<'_>,
) -> Result<()> {
    let mut flag = |key| params.as_mut().and_then(|params| written(params, key));
    let (torch, decoupled) = (flag("torch_adam"), flag("adam_w_mode"));
    let is_torch = torch.as_ref().map_or(Ok(None), switch)?.unwrap_or(false);
    let is_decoupled = decoupled.as_ref().map_or(Ok(None), switch)?.unwrap_or(true);
    match (name, &decoupled) {
        ("Adam", Some(field)) if !is_decoupled => layer.set("optimizer", "adam", field),
        ("Adam", _) => {
            layer.set("optimizer", "adamw", kind);
            layer.same(kind, "DeepSpeed's Adam decays as AdamW does unless adam_w_mode is false");
        }
        (_, field) => {
            layer.set("optimizer", "adamw", kind);
            if let Some(field) = field.as_ref().filter(|_| !is_decoupled) {
                layer.no_effect(
                    field,
                    "DeepSpeed's AdamW is AdamW whatever it says; \"type\": \"Adam\" would follow it",
                );
            }
        }
    }
    match (&torch, &zero.offload) {
        (Some(field), _) if is_torch => layer.set("optimizer-form", "torch", field),
        (_, Some(field)) => layer.set("optimizer-form", "cpu", field),
        _ => layer.imply("optimizer-form", "fused", format!("DeepSpeed steps {name} with FusedAdam")),
    }
    let (decay, whose) = if is_torch { ("0.01", "torch's AdamW") } else { ("0", "DeepSpeed's Adam") };
    let decay = if is_torch && !is_decoupled && name == "Adam" { "0" } else { decay };
    common(layer, params.as_deref_mut(), decay, whose)?;
    let Some(params) = params else { return Ok(()) };
    if let Some(field) = written(params, "betas") {
        if field.is_auto() {
            layer.no_effect(&field, "left to --beta1 and --beta2");
        } else {
            betas(layer, &field)?;
        }
    }
    number(layer, params, "eps", "eps")?;
    if let Some(field) = written(params, "bias_correction") {
        if switch(&field)? == Some(false) {
            return Err(field.refused("Umbra's Adam corrects the bias of its means", "true, with a warm-up if need be"));
        }
        layer.same(&field, "the means are corrected");
    }
    must_be_off(layer, params, "amsgrad", "DeepSpeed's Adam has no AMSGrad either", "leave it out")?;
    must_be_off(layer, params, "maximize", "a loss is minimised", "leave it out")?;
    if let Some(field) = written(params, "fp32_optimizer_states") {
        if switch(&field)? == Some(false) {
            return Err(field.refused("it keeps moments in bf16", "leave it out, or --policy low-sr"));
        }
        layer.same(&field, "moments are fp32");
    }
    quiet(layer, params, ADAM)
}

fn betas(layer: &mut Layer, field: &Field<'_>) -> Result<()> {
    let [first, second] = field.list()? else { return Err(field.bad("two numbers")) };
    for (flag, item) in [("beta1", first), ("beta2", second)] {
        let mut one = field.clone();
        one.node = item;
        if !one.number().is_ok_and(|beta| (0.0..1.0).contains(&beta)) {
            return Err(field.bad("two numbers from 0 up to, but not including, 1"));
        }
        layer.set(flag, one.text()?, field);
    }
    Ok(())
}

fn sgd(
    layer: &mut Layer,
    kind: &Field<'_>,
    mut params: Option<&mut Section<'_>>,
    zero: &Zero<'_>,
    untested: bool,
) -> Result<()> {
    layer.set("optimizer", "sgd", kind);
    layer.imply("optimizer-form", "torch", "DeepSpeed takes SGD from torch.optim");
    if zero.stage > 0 && !untested {
        layer.differs(
            kind,
            "DeepSpeed asks for \"zero_allow_untested_optimizer\": true with SGD under ZeRO; Umbra does not",
        );
    }
    common(layer, params.as_deref_mut(), "0", "torch's SGD")?;
    let Some(params) = params else { return Ok(()) };
    number(layer, params, "momentum", "momentum")?;
    if let Some(field) = written(params, "dampening") {
        if field.number()? != 0.0 {
            return Err(field.refused("Umbra's SGD does not damp its momentum", "0"));
        }
        layer.same(&field, "momentum is not damped");
    }
    must_be_off(layer, params, "nesterov", "Umbra's SGD has plain momentum", "leave it out")?;
    must_be_off(layer, params, "maximize", "a loss is minimised", "leave it out")?;
    quiet(layer, params, SGD)
}

/// What every optimizer has: the rate and the decay, with the engine's defaults where the file does not say.
fn common(layer: &mut Layer, params: Option<&mut Section<'_>>, decay: &str, whose: &str) -> Result<()> {
    let (mut rate, mut decayed) = (false, false);
    if let Some(params) = params {
        if let Some(field) = params.take("max_grad_norm") {
            return Err(field.refused(
                "DeepSpeed takes no max_grad_norm from an optimizer",
                "\"gradient_clipping\" at the top of the file",
            ));
        }
        rate = number(layer, params, "lr", "lr")?;
        decayed = number(layer, params, "weight_decay", "weight-decay")?;
    }
    if !rate {
        layer.imply("lr", "0.001", format!("{whose} without lr"));
    }
    if !decayed {
        layer.imply("weight-decay", decay, format!("{whose} without weight_decay"));
    }
    Ok(())
}

/// A number from 0 as a flag. Whether the key is written.
fn number(layer: &mut Layer, params: &mut Section<'_>, key: &'static str, flag: &str) -> Result<bool> {
    let Some(field) = written(params, key) else { return Ok(false) };
    if field.is_auto() {
        layer.no_effect(&field, format!("left to --{flag}, or its default"));
        return Ok(true);
    }
    let value = field.number()?;
    if value < 0.0 {
        return Err(field.bad("a number that is 0 or more"));
    }
    layer.set(flag, field.text()?, &field);
    if key == "weight_decay" && value > 0.0 {
        layer.differs(
            &field,
            "DeepSpeed decays every weight that it is handed; transformers' Trainer hands it the gains of the norms apart, \
             without decay, and so it is here. For a script that hands over model.parameters(), add --decay-norms",
        );
    }
    Ok(true)
}
