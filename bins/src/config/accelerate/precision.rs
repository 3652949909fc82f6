//! `mixed_precision` and what it means for the weights, which depends on the engine, on Accelerate's release and on the
//! dtype in which the script loads them (`accelerate/accelerator.py: prepare_model`, `utils/fsdp_utils.py:
//! fsdp2_prepare_model`).

use super::keys::written;
use crate::config::assume::LoadDType;
use crate::config::node::Value;
use crate::config::section::{Field, Section, contradiction};
use crate::config::{Facts, Layer, Version};
use crate::{Failure, Result};
use spmd_core::Policy;

/// Whether mixed precision is on.
pub(super) struct Mixed<'a> {
    /// bf16, the only one there is here.
    pub(super) bf16: bool,
    /// The key, if it is written.
    pub(super) field: Option<Field<'a>>,
}

impl Mixed<'_> {
    pub(super) fn name(&self) -> &'static str {
        if self.bf16 { "bf16" } else { "no" }
    }
}

const BF16_INSTEAD: &str = "mixed_precision: bf16, which has fp32's range and needs no loss scaling";

/// Reads `mixed_precision`, or the `fp16` of older files.
///
/// # Errors
/// Exit 2: fp16 or fp8, both keys with different meanings, or another word.
pub(super) fn read<'a>(layer: &mut Layer, top: &mut Section<'a>) -> Result<Mixed<'a>> {
    let field = written(top, "mixed_precision");
    let old = written(top, "fp16");
    let bf16 = match &field {
        Some(field) => is_bf16(field)?,
        None => false,
    };
    if let Some(old) = &old {
        match (old.bool()?, &field) {
            (true, Some(field)) => return Err(contradiction(field, old)),
            (true, None) => return Err(old.refused("fp16 gradients need loss scaling", BF16_INSTEAD)),
            (false, _) => layer.same(old, "off; newer files say mixed_precision"),
        }
    }
    if let Some(field) = field.as_ref().filter(|_| !bf16) {
        let overridden =
            "TrainingArguments(bf16=True) of transformers overrides it; if the script has that, write bf16";
        layer.same(field, format!("nothing is upcast and there is no autocast. {overridden}"));
    }
    Ok(Mixed { bf16, field })
}

fn is_bf16(field: &Field<'_>) -> Result<bool> {
    // An unquoted `no` is false for older YAML readers.
    if field.node.value == Value::Bool(false) {
        return Ok(false);
    }
    match field.choice(&["no", "bf16", "fp16", "fp8"])? {
        "no" => Ok(false),
        "bf16" => Ok(true),
        "fp16" => Err(field.refused("fp16 gradients need loss scaling", BF16_INSTEAD)),
        _ => Err(field.refused("there are no fp8 products", "mixed_precision: bf16")),
    }
}

/// The first release whose FSDP 1 upcasts bf16 weights under mixed precision (pull request 2674).
const UPCAST_1: Version = Version(0, 30, 0);
/// The first release with FSDP 2.
const FSDP_2: Version = Version(1, 6, 0);
/// In this release and its patches the upcast of FSDP 2 did nothing (issue 3979).
const NO_UPCAST: Version = Version(1, 13, 0);
/// The first release after them.
const UPCAST_2: Version = Version(1, 14, 0);

/// The policy under FSDP.
///
/// # Errors
/// Exit 2: a release that has no FSDP 2.
pub(super) fn fsdp(
    layer: &mut Layer,
    mixed: &Mixed<'_>,
    version: u64,
    field: Option<&Field<'_>>,
    facts: &Facts,
) -> Result<()> {
    let release = facts.assume.accelerate;
    if let Some(field) = field.filter(|_| version == 2 && release < FSDP_2) {
        return Err(Failure::usage(format!("Accelerate {release} has no FSDP 2"))
            .at(field.place())
            .expected(format!("fsdp_version: 1, or Accelerate {FSDP_2} or newer"))
            .found(format!("{}: {} and --assume accelerate={release}", field.path, field.node))
            .hint("leave --assume accelerate out, or write the release that the file was made for"));
    }
    let (policy, why) = match (mixed.bf16, facts.load, version) {
        (false, LoadDType::Bf16, _) => {
            (Policy::FsdpLow, "nothing is upcast, so weights, gradients and AdamW are bf16 (memory-constrained mode)")
        }
        (false, LoadDType::Fp32, _) => (Policy::Fp32, "everything stays fp32"),
        (true, LoadDType::Fp32, _) => {
            (Policy::FsdpMixed, "weights and AdamW stay fp32, products and reduction are bf16")
        }
        (true, LoadDType::Bf16, 1) if release < UPCAST_1 => (
            Policy::FsdpLow,
            "the flat parameters stay as loaded and AdamW steps them in bf16; 0.30.0 began to upcast them",
        ),
        (true, LoadDType::Bf16, 1) => (
            Policy::FsdpMixed,
            "flat parameters are upcast to fp32 after wrapping, products and reduction are bf16, AdamW is fp32",
        ),
        (true, LoadDType::Bf16, _) if (NO_UPCAST..UPCAST_2).contains(&release) => (
            Policy::FsdpLow,
            "this release says that it upcasts and does not (issue 3979), so AdamW steps bf16 weights",
        ),
        (true, LoadDType::Bf16, _) if release < NO_UPCAST => (
            Policy::FsdpMixed,
            "the whole model is upcast to fp32 after sharding, products and reduction are bf16, AdamW is fp32",
        ),
        (true, LoadDType::Bf16, _) => (
            Policy::FsdpMixed,
            "weights are upcast to fp32 before sharding, products and reduction are bf16, AdamW is fp32",
        ),
    };
    imply(layer, mixed, policy, &format!("FSDP {version}"), why, facts);
    if let Some(field) = mixed.field.as_ref().filter(|_| version == 2 && mixed.bf16 && release < NO_UPCAST)
        && facts.load == LoadDType::Bf16
    {
        layer.differs(
            field,
            "these releases are reported to fail in the first optimizer step on weights loaded in bf16",
        );
    }
    if let Some(field) = mixed.field.as_ref().filter(|_| policy == Policy::FsdpMixed) {
        layer.differs(
            field,
            "with accumulation FSDP adds a rank's gradients in bf16 and reduces once; here each micro-batch is reduced and added in fp32",
        );
    }
    Ok(())
}

/// The policy under DistributedDataParallel or in one process: autocast, and weights and gradients as they are loaded.
pub(super) fn data_parallel(layer: &mut Layer, mixed: &Mixed<'_>, facts: &Facts) {
    let (policy, why) = match (mixed.bf16, facts.load) {
        (true, LoadDType::Fp32) => {
            (Policy::FsdpMixed, "autocast computes in bf16, weights, reduction and AdamW are fp32")
        }
        (true, LoadDType::Bf16) => {
            (Policy::FsdpLow, "autocast does not upcast weights, so weights, gradients and AdamW are bf16")
        }
        (false, LoadDType::Bf16) => (Policy::FsdpLow, "weights, gradients and AdamW are bf16"),
        (false, LoadDType::Fp32) => (Policy::Fp32, "everything is fp32"),
    };
    imply(layer, mixed, policy, "no sharding", why, facts);
    if policy == Policy::FsdpMixed {
        // FSDP's policy reduces in bf16. Here gradients are products in bf16 that are kept and all-reduced as fp32.
        let why = "gradients of fp32 weights are fp32 tensors, and are all-reduced as they are";
        layer.imply("wire", "fp32", why);
        layer.imply("reduced", "fp32", why);
    }
}

/// Sets the policy, and says so where mixed precision is asked for and the weights are bf16 all the same.
fn imply(layer: &mut Layer, mixed: &Mixed<'_>, policy: Policy, engine: &str, why: &str, facts: &Facts) {
    let load = match facts.load {
        LoadDType::Bf16 => "bf16",
        LoadDType::Fp32 => "fp32",
    };
    let release = facts.assume.accelerate;
    let name = mixed.name();
    let reason = format!("Accelerate {release}, {engine}, mixed_precision {name}, weights loaded in {load}: {why}");
    layer.imply("policy", policy, reason);
    if let Some(field) = mixed.field.as_ref().filter(|_| mixed.bf16 && policy == Policy::FsdpLow) {
        let lost = "updates below half a bf16 step are lost (`swallowed` shows the share)";
        layer.differs(field, format!("{why}; {lost}; --policy fsdp-mixed keeps fp32 weights"));
    }
}
