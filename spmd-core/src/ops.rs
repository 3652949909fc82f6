//! Every operation a backend owes: one argument struct each, with the mathematics and the rounding points in its doc.
//!
//! Shape letters: `T` rows (tokens of the micro-batch), `B` sequences, `S` tokens a sequence (`T = B·S`), `D` hidden,
//! `H` query heads, `K` key/value heads, `d` head size, `F` MLP width, `V` vocabulary, `I`/`O` in and out of a linear.
//! R(x) is rounding to the dtype of the output view (nearest even); arithmetic is fp32 unless said otherwise.
//! A `_backward` argument named `d_x` is the gradient of the loss with respect to `x`.

mod attention;
mod elementwise;
mod embedding;
mod hash;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod reduce;
mod rope;
mod swiglu;

pub use attention::{Attention, AttentionBackward, AttentionCached, AttentionShape};
pub use elementwise::{Accumulate, Add, Cast};
pub use embedding::{EmbeddingBackward, EmbeddingForward};
pub use hash::StateHash;
pub use linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
pub use loss::CrossEntropy;
pub use norm::{RmsNormBackward, RmsNormForward};
pub use optimizer::{BlockStats, OptimizerStep, Piece, Rule, SquaredNorm, StepScalars};
pub use reduce::OrderedSum;
pub use rope::Rope;
pub use swiglu::{SwiGluBackward, SwiGluForward};

use crate::Result;

/// Elements of a norm block: the unit in which squares are summed and shard borders are laid.
pub const BLOCK: usize = 4096;

/// The one list of operations. `Kernels`, the checked fronts of `Device` and the CPU backend are all written from it.
macro_rules! every_op {
    ($then:ident) => {
        $then! {
            embedding_forward(EmbeddingForward),
            embedding_backward(EmbeddingBackward),
            linear_forward(LinearForward),
            linear_backward_input(LinearBackwardInput),
            linear_backward_weight(LinearBackwardWeight),
            rms_norm_forward(RmsNormForward),
            rms_norm_backward(RmsNormBackward),
            rope(Rope),
            attention_forward(Attention),
            attention_backward(AttentionBackward),
            attention_cached(AttentionCached),
            swiglu_forward(SwiGluForward),
            swiglu_backward(SwiGluBackward),
            add(Add),
            accumulate(Accumulate),
            cast(Cast),
            cross_entropy(CrossEntropy),
            ordered_sum(OrderedSum),
            squared_norm(SquaredNorm),
            optimizer_step(OptimizerStep),
            state_hash(StateHash),
        }
    };
}
pub(crate) use every_op;

macro_rules! kernels {
    ($($op:ident($args:ident)),* $(,)?) => {
        /// What a backend owes. Arguments were checked by the `Device` front; a backend need not check again.
        /// The result must not depend on the number of threads.
        pub trait Kernels: Send + Sync {
            $(
                #[doc = concat!("See [`", stringify!($args), "`].")]
                ///
                /// # Errors
                /// What the device itself reports.
                fn $op(&self, args: $args<'_>) -> Result<()>;
            )*
        }
    };
}
every_op!(kernels);
