//! Keys and values of the tokens so far, for generation. Under a sliding window it rolls: position `p` lies in slot
//! `p mod capacity`, and what falls out of the window is overwritten.

use crate::Config;
use spmd_core::ops::{AttentionCached, Cast};
use spmd_core::{Buffer, DType, Device, Result, View, ViewMut};

/// The cache of one sequence.
#[derive(Debug)]
pub struct KvCache {
    /// One pair a block, each `[capacity, K·d]`.
    layers: Vec<(Buffer, Buffer)>,
    capacity: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl KvCache {
    /// Room for `positions` tokens, or for the window if that is shorter.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(device: &Device, c: &Config, dtype: DType, positions: usize) -> Result<Self> {
        let capacity = c.sliding_window.unwrap_or(positions).min(positions).max(1);
        let zeros = || device.zeros(dtype, capacity * c.kv_heads * c.head_dim, "key/value cache");
        let layers = (0..c.layers).map(|_| Ok((zeros()?, zeros()?))).collect::<Result<_>>()?;
        Ok(KvCache { layers, capacity, heads: c.heads, kv_heads: c.kv_heads, head_dim: c.head_dim })
    }

    /// Keeps the keys and values of rows `[q | k | v]` that start at `first_position`. A single row is then attended here,
    /// against everything cached, and `true` says so; several rows (a prompt) are the caller's to attend.
    pub(crate) fn take(
        &mut self,
        device: &Device,
        layer: usize,
        qkv: View<'_>,
        first_position: usize,
        out: ViewMut<'_>,
    ) -> Result<bool> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let row_len = q + 2 * kv;
        let (keys, values) = &mut self.layers[layer];
        let rows = qkv.len() / row_len;
        for row in rows.saturating_sub(self.capacity)..rows {
            let slot = (first_position + row) % self.capacity * kv;
            let at = row * row_len + q;
            let keep = |from: usize, to: &mut Buffer| {
                let dst = to.view_mut().slice(slot..slot + kv);
                device.cast(Cast { src: qkv.slice(from..from + kv), through: DType::F32, dst })
            };
            keep(at, keys)?;
            keep(at + kv, values)?;
        }
        if rows != 1 {
            return Ok(false);
        }
        let len = (first_position + 1).min(self.capacity);
        let (kv_heads, head_dim) = (self.kv_heads, self.head_dim);
        let (q, keys, values) = (qkv.slice(0..q), keys.view(), values.view());
        device.attention_cached(AttentionCached { q, keys, values, out, len, kv_heads, head_dim })?;
        Ok(true)
    }
}
