//! Activations of one micro-batch: what each block keeps for its backward, and scratch that every block shares.
//! Norm outputs and the MLP's product are recomputed in the backward: they cost a pass over memory, not a product.
//! With recompute a block keeps its input alone, and its backward computes the rest once more.

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
    /// One entry a block, or with recompute a single one that all blocks share.
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
    pub(crate) fn new(device: &Device, c: &Config, compute: DType, tokens: usize, recompute: bool) -> Result<Self> {
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
            blocks: (0..entries(c, recompute)).map(|_| block()).collect::<Result<_>>()?,
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

    /// Which entry of `blocks` block `i` writes.
    pub(crate) fn slot(&self, i: usize) -> usize {
        if self.blocks.len() == 1 { 0 } else { i }
    }

    /// Whether a later block's forward has overwritten what block `i` kept. The last block's is still there.
    pub(crate) fn is_overwritten(&self, i: usize) -> bool {
        self.blocks.len() == 1 && i + 2 < self.hidden.len()
    }
}

/// Entries of [`Acts::blocks`].
fn entries(c: &Config, recompute: bool) -> usize {
    if recompute { c.layers.min(1) } else { c.layers }
}

/// Bytes that a model's activations take for micro-batches of up to `tokens` tokens.
pub fn activation_bytes(c: &Config, compute: DType, tokens: usize, recompute: bool) -> usize {
    let (d, f, qkv, att) = (c.hidden_size, c.intermediate_size, c.qkv_len(), c.heads * c.head_dim);
    let entries = entries(c, recompute);
    let kept = (c.layers + 1) * d + entries * (qkv + att + d + 2 * f);
    let shared = 3 * d + 2 * f + qkv + att + 2 * f;
    let logits = head_chunk(c.vocab_size, tokens) * c.vocab_size;
    ((kept + shared) * tokens + logits) * compute.size() + (entries * c.heads + 1) * tokens * DType::F32.size()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Family, RopeScaling};

    /// The bytes of every buffer; a field added to either struct does not compile here until it is counted.
    fn size(acts: &Acts) -> usize {
        let Acts { hidden, blocks, norm, rstd, act, d_act, d_hidden, d_norm, d_qkv, d_att, d_gate_up, logits } = acts;
        let block = |BlockActs { qkv, att, lse, mid, gate_up }: &BlockActs| {
            [qkv, att, lse, mid, gate_up].map(Buffer::size).iter().sum::<usize>()
        };
        let shared = [norm, rstd, act, d_act, d_hidden, d_norm, d_qkv, d_att, d_gate_up, logits];
        hidden.iter().chain(shared).map(Buffer::size).sum::<usize>() + blocks.iter().map(block).sum::<usize>()
    }

    #[test]
    fn the_bytes_foretold_are_the_buffers_bytes() {
        let c = Config {
            family: Family::Mistral,
            vocab_size: 37,
            hidden_size: 24,
            intermediate_size: 40,
            layers: 3,
            heads: 5,
            kv_heads: 1,
            head_dim: 8,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            sliding_window: None,
            tied: false,
            max_positions: 64,
            initializer_range: 0.02,
        };
        let device = Device::cpu(1).unwrap();
        for layers in [0, 1, 2, 3] {
            let c = Config { layers, ..c.clone() };
            for tokens in [0, 1, 100, 3000] {
                for compute in [DType::F32, DType::Bf16] {
                    let bytes = [false, true].map(|recompute| {
                        let acts = Acts::new(&device, &c, compute, tokens, recompute).unwrap();
                        assert_eq!(size(&acts), activation_bytes(&c, compute, tokens, recompute), "{layers} {tokens}");
                        size(&acts)
                    });
                    // A token of a block: qkv 56, att 40, mid 24 and gate_up 80 numbers, and 5 log-sums in fp32.
                    let block = tokens * (200 * compute.size() + 5 * 4);
                    assert_eq!(bytes[0] - bytes[1], layers.saturating_sub(1) * block);
                }
            }
        }
    }
}
