//! Activations of one micro-batch: what each block keeps for its backward, and scratch that every block shares.
//! Norm outputs and the MLP's product are recomputed in the backward: they cost a pass over memory, not a product.

use crate::Config;
use spmd_core::{Buffer, DType, Device, Result};

/// What a block keeps. `T` is the largest number of tokens a micro-batch may have.
#[derive(Debug)]
pub(crate) struct BlockActs {
    /// After rotation: `[T, (H+2K)·d]`.
    pub(crate) qkv: Buffer,
    /// Attention's output `[T, H·d]`.
    pub(crate) att: Buffer,
    /// log-sum-exp of each row and head `[T, H]`, fp32.
    pub(crate) lse: Buffer,
    /// After the attention's residual `[T, D]`.
    pub(crate) mid: Buffer,
    /// `[T, 2F]`.
    pub(crate) gate_up: Buffer,
}

/// Every activation buffer, allocated once.
#[derive(Debug)]
pub(crate) struct Acts {
    /// Input of each block, and of the head at the end: `layers + 1` times `[T, D]`.
    pub(crate) hidden: Vec<Buffer>,
    /// One entry a block.
    pub(crate) blocks: Vec<BlockActs>,
    /// Output of a norm `[T, D]`.
    pub(crate) norm: Buffer,
    /// 1/rms of each row `[T]`, fp32.
    pub(crate) rstd: Buffer,
    /// MLP product, and its gradient beside it `[T, F]`.
    pub(crate) act: Buffer,
    pub(crate) d_act: Buffer,
    /// The gradient that flows down `[T, D]`.
    pub(crate) d_hidden: Buffer,
    /// Gradient of a norm's output `[T, D]`.
    pub(crate) d_norm: Buffer,
    pub(crate) d_qkv: Buffer,
    pub(crate) d_att: Buffer,
    pub(crate) d_gate_up: Buffer,
    /// Logits of one chunk of rows, in the compute dtype.
    pub(crate) logits: Buffer,
}

/// Rows of logits that exist at once: about 16 MiB of fp32, at least 128 so that the products stay efficient.
pub(crate) fn head_chunk(vocab: usize, tokens: usize) -> usize {
    ((4 << 20) / vocab.max(1)).clamp(128, 1024).min(tokens.max(1))
}

impl Acts {
    pub(crate) fn new(device: &Device, c: &Config, compute: DType, tokens: usize) -> Result<Self> {
        let (t, d, f) = (tokens, c.hidden_size, c.intermediate_size);
        let (qkv, att) = (c.qkv_len(), c.heads * c.head_dim);
        let zeros = |len: usize| device.zeros(compute, len, "activations");
        let zeros_f32 = |len: usize| device.zeros(DType::F32, len, "activations");
        let block = || -> Result<BlockActs> {
            Ok(BlockActs {
                qkv: zeros(t * qkv)?,
                att: zeros(t * att)?,
                lse: zeros_f32(t * c.heads)?,
                mid: zeros(t * d)?,
                gate_up: zeros(t * 2 * f)?,
            })
        };
        Ok(Acts {
            hidden: (0..=c.layers).map(|_| zeros(t * d)).collect::<Result<_>>()?,
            blocks: (0..c.layers).map(|_| block()).collect::<Result<_>>()?,
            norm: zeros(t * d)?,
            rstd: zeros_f32(t)?,
            act: zeros(t * f)?,
            d_act: zeros(t * f)?,
            d_hidden: zeros(t * d)?,
            d_norm: zeros(t * d)?,
            d_qkv: zeros(t * qkv)?,
            d_att: zeros(t * att)?,
            d_gate_up: zeros(t * 2 * f)?,
            logits: zeros(head_chunk(c.vocab_size, t) * c.vocab_size)?,
        })
    }
}

/// Bytes that [`Acts`] takes for micro-batches of up to `tokens` tokens.
pub fn activation_bytes(c: &Config, compute: DType, tokens: usize) -> usize {
    let (d, f, qkv, att) = (c.hidden_size, c.intermediate_size, c.qkv_len(), c.heads * c.head_dim);
    let kept = (c.layers + 1) * d + c.layers * (qkv + att + d + 2 * f);
    let shared = 3 * d + 2 * f + qkv + att + 2 * f;
    let logits = head_chunk(c.vocab_size, tokens) * c.vocab_size;
    ((kept + shared) * tokens + logits) * compute.size() + (c.layers * c.heads + 1) * tokens * DType::F32.size()
}
