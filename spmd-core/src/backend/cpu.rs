//! The CPU backend, and the reference for every other. One file a subject; the work of each operation is cut by its
//! shape alone, so the number of threads changes no bit.

mod attention;
#[cfg(test)]
mod bounds;
mod cached;
mod elementwise;
mod embedding;
mod gemm;
mod hash;
mod loss;
mod math;
mod matrix;
mod norm;
mod optimizer;
mod reduce;
mod rope;
mod scratch;
mod swiglu;
#[cfg(test)]
mod testing;
mod threads;

pub(crate) use gemm::sgemm;
pub(crate) use matrix::{MatMut, Operand};
pub use scratch::scratch_bytes;

use crate::Result;
use crate::ops::*;
use threads::Threads;

/// CPU kernels and the threads they run on.
pub(crate) struct Cpu {
    threads: Threads,
}

impl Cpu {
    pub(crate) fn new(threads: usize) -> Result<Self> {
        Ok(Cpu { threads: Threads::new(threads)? })
    }

    /// The instruction set the kernels were dispatched to, for the start-up table.
    pub(crate) fn isa(&self) -> &'static str {
        threads::isa()
    }
}

/// Every operation is a function `subject::op(threads, args)`.
macro_rules! delegate {
    ($($subject:ident: $($op:ident($args:ident)),*;)*) => {
        impl Kernels for Cpu {
            $($(
                fn $op(&self, args: $args<'_>) -> Result<()> {
                    $subject::$op(&self.threads, args)
                }
            )*)*
        }
    };
}

delegate! {
    embedding: embedding_forward(EmbeddingForward), embedding_backward(EmbeddingBackward);
    gemm: linear_forward(LinearForward), linear_backward_input(LinearBackwardInput),
        linear_backward_weight(LinearBackwardWeight);
    norm: rms_norm_forward(RmsNormForward), rms_norm_backward(RmsNormBackward);
    rope: rope(Rope);
    attention: attention_forward(Attention), attention_backward(AttentionBackward);
    cached: attention_cached(AttentionCached);
    swiglu: swiglu_forward(SwiGluForward), swiglu_backward(SwiGluBackward);
    elementwise: add(Add), accumulate(Accumulate), cast(Cast);
    loss: cross_entropy(CrossEntropy);
    reduce: ordered_sum(OrderedSum);
    optimizer: squared_norm(SquaredNorm), optimizer_step(OptimizerStep);
    hash: state_hash(StateHash);
}
