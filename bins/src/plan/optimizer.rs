//! What steps the weights, and in which arithmetic: the policy's roles with what was set beside it.

use super::RunPlan;
use crate::cli::{ClipFormArg, DTypeArg, OptimizerForm, OptimizerKind, TrainArgs};
use crate::{Failure, Result};
use optim::{Hyper, Schedule};
use spmd_core::ops::Rule;
use spmd_core::precision::{Arithmetic, ClipForm};
use spmd_core::{DType, Policy, Precision};

impl From<DType> for DTypeArg {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::Bf16 => DTypeArg::Bf16,
            DType::F32 => DTypeArg::Fp32,
        }
    }
}

impl From<DTypeArg> for DType {
    fn from(written: DTypeArg) -> Self {
        match written {
            DTypeArg::Bf16 => DType::Bf16,
            DTypeArg::Fp32 => DType::F32,
        }
    }
}

impl From<ClipForm> for ClipFormArg {
    fn from(form: ClipForm) -> Self {
        match form {
            ClipForm::Torch => ClipFormArg::Torch,
            ClipForm::DeepSpeed => ClipFormArg::DeepSpeed,
        }
    }
}

impl From<ClipFormArg> for ClipForm {
    fn from(written: ClipFormArg) -> Self {
        match written {
            ClipFormArg::Torch => ClipForm::Torch,
            ClipFormArg::DeepSpeed => ClipForm::DeepSpeed,
        }
    }
}

impl OptimizerKind {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            OptimizerKind::AdamW => "adamw",
            OptimizerKind::Adam => "adam",
            OptimizerKind::Sgd => "sgd",
        }
    }

    const fn rule(self) -> Rule {
        match self {
            OptimizerKind::AdamW => Rule::AdamW,
            OptimizerKind::Adam => Rule::Adam,
            OptimizerKind::Sgd => Rule::Sgd,
        }
    }
}

impl OptimizerForm {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            OptimizerForm::Torch => "torch",
            OptimizerForm::Fused => "fused",
            OptimizerForm::Cpu => "cpu",
        }
    }
}

/// The form an optimizer has where none is set. DeepSpeed has gradient descent from torch.
pub(super) fn default_form(policy: Policy, optimizer: OptimizerKind) -> OptimizerForm {
    match policy.precision().arithmetic {
        _ if optimizer == OptimizerKind::Sgd => OptimizerForm::Torch,
        Arithmetic::Fp32Fused => OptimizerForm::Fused,
        Arithmetic::Fp32Cpu => OptimizerForm::Cpu,
        Arithmetic::Fp32Torch | Arithmetic::Bf16PerOp => OptimizerForm::Torch,
    }
}

/// Refuses settings of an optimizer that is not the one, and forms it does not have.
pub(super) fn written(args: &TrainArgs) -> Result<()> {
    let optimizer = args.optimizer.unwrap_or(super::defaults::OPTIMIZER);
    let sgd = optimizer == OptimizerKind::Sgd;
    let foreign = [
        ("--momentum", args.momentum.filter(|_| !sgd), "--optimizer sgd"),
        ("--beta1", args.beta1.filter(|_| sgd), "--optimizer adamw or adam"),
        ("--beta2", args.beta2.filter(|_| sgd), "--optimizer adamw or adam"),
        ("--eps", args.eps.filter(|_| sgd), "--optimizer adamw or adam"),
    ];
    for (flag, value, expected) in foreign {
        if let Some(value) = value {
            let name = optimizer.name();
            return Err(Failure::usage(format!("{flag} {value} has no meaning under --optimizer {name}"))
                .at(flag)
                .expected(expected)
                .found(format!("--optimizer {name}"))
                .hint(format!("leave {flag} out, or choose the optimizer that has it")));
        }
    }
    let Some(form) = args.optimizer_form.filter(|form| *form != OptimizerForm::Torch) else { return Ok(()) };
    let policy = args.policy.unwrap_or(super::defaults::POLICY);
    let refused = |why: String, expected: &str, hint: &str| {
        Err(Failure::usage(format!("--optimizer-form {} {why}", form.name()))
            .at("--optimizer-form")
            .expected(expected)
            .found(form.name())
            .hint(hint))
    };
    if sgd {
        let why = "has no meaning under --optimizer sgd, of which DeepSpeed has torch's".to_owned();
        return refused(why, "torch", "leave --optimizer-form out");
    }
    if policy.precision().arithmetic == Arithmetic::Bf16PerOp {
        let why = format!("computes in fp32, and --policy {policy} rounds to bf16 after every operation");
        let hint = "leave --optimizer-form out, or --policy low-sr: bf16 weights and moments with fp32 arithmetic";
        return refused(why, "torch, whose operations are", hint);
    }
    Ok(())
}

impl RunPlan {
    /// The dtype of every role and the arithmetic: the policy's, but for what is set beside it. Whatever a run allocates,
    /// sends or computes is decided by this.
    pub fn precision(&self) -> Precision {
        let policy = self.policy.precision();
        let arithmetic = match (policy.arithmetic, self.optimizer_form) {
            (Arithmetic::Bf16PerOp, _) => Arithmetic::Bf16PerOp,
            (_, OptimizerForm::Torch) => Arithmetic::Fp32Torch,
            (_, OptimizerForm::Fused) => Arithmetic::Fp32Fused,
            (_, OptimizerForm::Cpu) => Arithmetic::Fp32Cpu,
        };
        Precision {
            wire: self.wire.into(),
            reduced: self.reduced.into(),
            accumulate: self.accumulate.into(),
            arithmetic,
            clip: self.clip_form.into(),
            ..policy
        }
    }

    /// The same run under another policy, with that policy's own roles.
    pub(crate) fn with_policy(&self, policy: Policy) -> RunPlan {
        let p = policy.precision();
        RunPlan {
            policy,
            wire: p.wire.into(),
            reduced: p.reduced.into(),
            accumulate: p.accumulate.into(),
            clip_form: p.clip.into(),
            optimizer_form: default_form(policy, self.optimizer),
            ..self.clone()
        }
    }

    /// What the optimizer does in step `step`.
    pub fn hyper(&self, schedule: &Schedule, step: u64) -> Hyper {
        let [beta1, beta2] = schedule.betas(step).unwrap_or([self.beta1, self.beta2]);
        Hyper {
            rule: self.optimizer.rule(),
            lr: schedule.at(step),
            beta1,
            beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            momentum: self.momentum,
            max_norm: self.clip,
            seed: self.seed,
        }
    }

    /// The optimizer in a few words, for people: `adamw, torch's arithmetic`.
    pub fn optimizer_in_words(&self) -> String {
        let momentum = match self.optimizer {
            OptimizerKind::Sgd => format!(", momentum {}", crate::table::number(self.momentum)),
            OptimizerKind::AdamW | OptimizerKind::Adam => String::new(),
        };
        let form = match self.precision().arithmetic {
            Arithmetic::Fp32Torch => "torch's arithmetic",
            Arithmetic::Fp32Fused => "FusedAdam's arithmetic",
            Arithmetic::Fp32Cpu => "CPUAdam's arithmetic",
            Arithmetic::Bf16PerOp => "torch's arithmetic, bf16 after every operation",
        };
        format!("{}{momentum}, {form}", self.optimizer.name())
    }
}

#[cfg(test)]
mod tests;
