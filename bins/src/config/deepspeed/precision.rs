//! The precision sections: `bf16`, `fp16`, `torch_autocast`, `amp` (`deepspeed/runtime/precision_config.py`).

use super::Auto;
use super::keys::{Any, Bool, Count, Number, Quiet, must_be_off, quiet, switch, written};
use crate::config::section::{Field, Section};
use crate::config::{Facts, Layer, Version};
use crate::{Failure, Result};

/// In which dtype the model computes, and the key that says so, if one does.
pub(super) enum Mode<'a> {
    /// bf16 over an fp32 shadow.
    Bf16(Option<Field<'a>>),
    /// fp32 throughout.
    Fp32(Option<Field<'a>>),
}

impl<'a> Mode<'a> {
    /// The dtype's name in these files.
    pub(super) fn dtype(&self) -> &'static str {
        match self {
            Mode::Bf16(_) => "bf16",
            Mode::Fp32(_) => "fp32",
        }
    }

    /// The key that decides it.
    pub(super) fn field(&self) -> Option<&Field<'a>> {
        match self {
            Mode::Bf16(field) | Mode::Fp32(field) => field.as_ref(),
        }
    }
}

/// From here on DeepSpeed leaves the model's buffers in their own dtype.
const KEEPS_BUFFERS: Version = Version(0, 19, 2);

const UNSCALED: &str = "losses are scaled under fp16 only, which is off";
/// Keys of fp16; some files repeat them under bf16, where releases before 0.19 overlook them.
const SCALING: &[Quiet] = &[
    ("auto_cast", Bool, "inputs are token numbers"),
    ("loss_scale", Number, UNSCALED),
    ("initial_scale_power", Count, UNSCALED),
    ("loss_scale_window", Count, UNSCALED),
    ("hysteresis", Count, UNSCALED),
    ("consecutive_hysteresis", Bool, UNSCALED),
    ("min_loss_scale", Number, UNSCALED),
];

/// The mode as a policy.
///
/// # Errors
/// Exit 2: fp16, what trains in other ways, contradictions, wrong types and unknown keys.
pub(super) fn read<'a>(layer: &mut Layer, top: &mut Section<'a>, facts: &Facts, auto: Auto) -> Result<Mode<'a>> {
    let bf16 = bf16(layer, top, auto)?;
    let fp16 = fp16(layer, top)?;
    if let Some(fp16) = fp16 {
        return Err(half(&fp16, bf16.as_ref()));
    }
    other_modes(layer, top)?;
    let deepspeed = facts.assume.deepspeed;
    let mode = match bf16 {
        Some((true, field)) => {
            layer.set("policy", "deepspeed", &field);
            Mode::Bf16(Some(field))
        }
        Some((false, field)) => {
            layer.set("policy", "fp32", &field);
            Mode::Fp32(Some(field))
        }
        None if auto == (Auto::Accelerate { bf16: Some(true) }) => {
            layer.imply("policy", "deepspeed", "Accelerate's mixed_precision: bf16 adds bf16.enabled to the file");
            Mode::Bf16(None)
        }
        None => {
            layer.imply("policy", "fp32", "DeepSpeed with neither bf16 nor fp16 trains in fp32");
            Mode::Fp32(None)
        }
    };
    match &mode {
        Mode::Bf16(Some(field)) if deepspeed < KEEPS_BUFFERS => layer.differs(
            field,
            format!(
                "DeepSpeed {deepspeed} casts buffers to bf16 too, the frequencies of the rotary embedding among them; \
                 Umbra computes them in fp32, as DeepSpeed does from {KEEPS_BUFFERS} on"
            ),
        ),
        Mode::Bf16(_) => {}
        Mode::Fp32(_) => layer.imply("clip-form", "deepspeed", "DeepSpeed clips in this form in every mode"),
    }
    Ok(mode)
}

/// Whether bf16 is on, with its key.
fn bf16<'a>(layer: &mut Layer, top: &mut Section<'a>, auto: Auto) -> Result<Option<(bool, Field<'a>)>> {
    let Some(field) = top.take_one(&["bf16", "bfloat16"])?.filter(|field| !field.is_null()) else { return Ok(None) };
    let mut section = field.section()?;
    let enabled = written(&mut section, "enabled");
    let on = match &enabled {
        None => {
            layer.no_effect(&field, "without \"enabled\": true the section is off");
            None
        }
        Some(field) => Some(match switch(field)? {
            Some(on) => on,
            None => resolved(layer, field, auto),
        }),
    };
    let low = "it keeps the weights that the optimizer steps in bf16, where small updates round away";
    let instead = "leave it out for an fp32 shadow; to save its memory, --policy low-sr has bf16 weights that still learn, \
                   and --policy fsdp-low bf16 weights as torch rounds them";
    must_be_off(layer, &mut section, "bf16_master_weights_and_grads", low, instead)?;
    must_be_off(layer, &mut section, "bf16_optimizer_states", "it keeps the optimizer's state in bf16", instead)?;
    for key in ["check_grad_overflow", "check_overflow"] {
        if let Some(field) = written(&mut section, key) {
            switch(&field)?;
            layer.differs(
                &field,
                "a loss or gradient that is not finite ends the run with exit code 6 before any weight changes; DeepSpeed \
                 skips the step at stages 1 and 2 and applies it at stage 3",
            );
        }
    }
    quiet(layer, &mut section, &[("immediate_grad_update", Bool, "gradients are added up as they arrive")])?;
    quiet(layer, &mut section, SCALING)?;
    section.finish()?;
    Ok(on.zip(enabled))
}

/// What becomes of `"auto"`.
fn resolved(layer: &mut Layer, field: &Field<'_>, auto: Auto) -> bool {
    match auto {
        Auto::Accelerate { bf16: Some(on) } => {
            let word = if on { "bf16" } else { "no" };
            layer.same(field, format!("Accelerate's mixed_precision: {word} fills it in"));
            on
        }
        _ => {
            layer.same(field, "taken as on: of bf16 and fp16, bf16 is what Umbra trains in; false means fp32");
            true
        }
    }
}

/// The key that turns fp16 on, if one does.
fn fp16<'a>(layer: &mut Layer, top: &mut Section<'a>) -> Result<Option<Field<'a>>> {
    let Some(field) = written(top, "fp16") else { return Ok(None) };
    let mut section = field.section()?;
    match written(&mut section, "enabled") {
        None => layer.same(&field, "without \"enabled\": true the section is off"),
        Some(field) => match switch(&field)? {
            Some(true) => return Ok(Some(field)),
            Some(false) => layer.same(&field, "off"),
            None => layer.no_effect(&field, "taken as off: Umbra trains in bf16 or fp32"),
        },
    }
    quiet(layer, &mut section, SCALING)?;
    quiet(layer, &mut section, &[("fp16_master_weights_and_grads", Bool, "fp16 is off")])?;
    section.finish()?;
    Ok(None)
}

/// Why fp16 is not trained in.
fn half(fp16: &Field<'_>, bf16: Option<&(bool, Field<'_>)>) -> Failure {
    match bf16 {
        Some((true, bf16)) => Failure::usage("bf16 and fp16 are both enabled")
            .at(fp16.place())
            .expected(format!("one of them; {} is at {}", bf16.path, bf16.place()))
            .found(format!("{}: {}", fp16.path, fp16.node))
            .hint("write \"fp16\": {\"enabled\": false}"),
        _ => fp16.refused(
            "fp16 overflows without a loss scale that follows it, and bf16 does not",
            "write \"bf16\": {\"enabled\": true} in place of the fp16 section",
        ),
    }
}

/// Other ways to compute in low precision.
fn other_modes(layer: &mut Layer, top: &mut Section<'_>) -> Result<()> {
    let instead = "write \"bf16\": {\"enabled\": true}";
    if let Some(field) = written(top, "torch_autocast") {
        let mut section = field.section()?;
        let why = "it casts operation by operation and sends each gradient in its module's dtype";
        must_be_off(layer, &mut section, "enabled", why, instead)?;
        let off = "autocast is off";
        quiet(layer, &mut section, &[("dtype", Any, off), ("lower_precision_safe_modules", Any, off)])?;
        section.finish()?;
    }
    if let Some(field) = written(top, "amp") {
        let mut section = field.section()?;
        must_be_off(layer, &mut section, "enabled", "Apex's mixed precision is fp16", instead)?;
        // The rest is handed to Apex as it is (`deepspeed/runtime/config.py: get_amp_params`).
        for field in section.rest() {
            layer.no_effect(&field, "amp is off");
        }
    }
    Ok(())
}
