//! One struct names the dtype of every role; nothing else in the program decides a dtype.

use crate::DType;
use DType::{Bf16, F32};

/// How the optimizer's own arithmetic rounds. The fp32 forms differ for Adam alone; gradient descent has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// torch's in fp32: decay the weight first, then step; one rounding to storage at the end.
    Fp32Torch,
    /// DeepSpeed's FusedAdam in fp32: decay folded into the update, one subtraction.
    Fp32Fused,
    /// DeepSpeed's CPUAdam in fp32: powers of β as running fp32 products, the square root times a reciprocal.
    Fp32Cpu,
    /// torch's on bf16 tensors: every operation reads bf16, computes in fp32 and writes bf16.
    Bf16PerOp,
}

/// How a value is rounded when the optimizer stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Nearest, ties to even.
    Nearest,
    /// Up or down with the probability of its distance, keyed by seed, step, tensor and global index.
    Stochastic,
}

/// The form of the clipping factor. Equal in exact arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ClipForm {
    /// torch: min(1, c / (n + 1e-6)).
    Torch,
    /// DeepSpeed: 1 / max(1, (n + 1e-6) / c).
    DeepSpeed,
}

/// The dtype of every role a number can play in a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Precision {
    /// The weights the optimizer reads and writes, sharded over ranks.
    pub shadow: DType,
    /// Gathered weights, activations, operands of matrix products (accumulation is always fp32).
    pub compute: DType,
    /// A micro-batch's weight gradient as it leaves the backward pass.
    pub grad: DType,
    /// A contribution is rounded to this before it is summed, a rank's own too.
    pub wire: DType,
    /// The finished sum over lanes, rounded once.
    pub reduced: DType,
    /// The gradient shard over micro-batches.
    pub accumulate: DType,
    /// exp_avg and exp_avg_sq.
    pub moments: DType,
    /// The optimizer's own arithmetic.
    pub arithmetic: Arithmetic,
    /// How shadow and moments are rounded when stored.
    pub rounding: Rounding,
    /// The form of the clipping factor.
    pub clip: ClipForm,
    /// Loaded weights are rounded to bf16 before the shadow is made, even if the file holds fp32.
    pub round_loaded: bool,
}

/// A named set of roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Policy {
    /// fp32 shadow, bf16 compute, fp32 everywhere else: nothing rounded that need not be.
    Shadow,
    /// DeepSpeed ZeRO-3 with bf16.enabled and defaults.
    DeepSpeed,
    /// Accelerate's aligned FSDP mode.
    FsdpMixed,
    /// FSDP's low-precision mode: bf16 weights and moments, torch's rounding per operation.
    FsdpLow,
    /// bf16 weights and moments that still learn: fp32 arithmetic, stochastic rounding.
    LowSr,
    /// Everything fp32: the reference.
    Fp32,
}

impl Policy {
    /// Every policy, in the order help and tables list them.
    pub const ALL: [Policy; 6] =
        [Policy::Shadow, Policy::DeepSpeed, Policy::FsdpMixed, Policy::FsdpLow, Policy::LowSr, Policy::Fp32];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Policy::Shadow => "shadow",
            Policy::DeepSpeed => "deepspeed",
            Policy::FsdpMixed => "fsdp-mixed",
            Policy::FsdpLow => "fsdp-low",
            Policy::LowSr => "low-sr",
            Policy::Fp32 => "fp32",
        }
    }

    /// One line of what it is.
    pub const fn about(self) -> &'static str {
        match self {
            Policy::Shadow => "fp32 shadow, bf16 compute, fp32 gradients: nothing rounded that need not be",
            Policy::DeepSpeed => "DeepSpeed ZeRO-3 with bf16.enabled: fp32 shadow, bf16 gradients and accumulation",
            Policy::FsdpMixed => "Accelerate's aligned FSDP: fp32 shadow, bf16 gradients, fp32 accumulation",
            Policy::FsdpLow => "FSDP low precision: bf16 weights and moments, bf16 rounding after every operation",
            Policy::LowSr => "bf16 weights and moments with stochastic rounding: low memory that still learns",
            Policy::Fp32 => "fp32 everywhere: the reference",
        }
    }

    /// The roles of this policy.
    pub const fn precision(self) -> Precision {
        let base = Precision {
            shadow: F32,
            compute: Bf16,
            grad: F32,
            wire: F32,
            reduced: F32,
            accumulate: F32,
            moments: F32,
            arithmetic: Arithmetic::Fp32Torch,
            rounding: Rounding::Nearest,
            clip: ClipForm::Torch,
            round_loaded: false,
        };
        match self {
            Policy::Shadow => base,
            Policy::Fp32 => Precision { compute: F32, ..base },
            Policy::DeepSpeed => Precision {
                grad: Bf16,
                wire: Bf16,
                reduced: Bf16,
                accumulate: Bf16,
                arithmetic: Arithmetic::Fp32Fused,
                clip: ClipForm::DeepSpeed,
                round_loaded: true,
                ..base
            },
            Policy::FsdpMixed => Precision { grad: Bf16, wire: Bf16, reduced: Bf16, ..base },
            Policy::FsdpLow => Precision {
                shadow: Bf16,
                grad: Bf16,
                wire: Bf16,
                reduced: Bf16,
                accumulate: Bf16,
                moments: Bf16,
                arithmetic: Arithmetic::Bf16PerOp,
                ..base
            },
            Policy::LowSr => Precision {
                shadow: Bf16,
                grad: Bf16,
                wire: Bf16,
                moments: Bf16,
                rounding: Rounding::Stochastic,
                ..base
            },
        }
    }
}

impl std::fmt::Display for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Policy {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Policy::ALL
            .into_iter()
            .find(|p| p.name() == s)
            .ok_or_else(|| format!("no policy is called `{s}`; there are {}", Policy::ALL.map(Policy::name).join(", ")))
    }
}
