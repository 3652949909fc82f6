//! Attention of one new row against a cache of keys and values.

use super::threads::Threads;
use crate::dtype::Element;
use crate::ops::AttentionCached;
use crate::{Result, ViewMut, each_dtype};

/// Each query head is one task: scores, softmax and the weighted sum run over the cache once, with an online maximum, so
/// no scores are stored.
pub(super) fn attention_cached(threads: &Threads, a: AttentionCached<'_>) -> Result<()> {
    let AttentionCached { q, keys, values, out, len, kv_heads, head_dim } = a;
    let group = q.len() / (kv_heads * head_dim);
    let query = q.to_f32();
    let row = kv_heads * head_dim;
    let head = |h: usize, out: &mut [f32]| {
        let at = h / group * head_dim;
        let query = &query[h * head_dim..(h + 1) * head_dim];
        each_dtype!(keys, k => each_dtype!(values, v => attend(query, &k[at..], &v[at..], row, len, out)));
    };
    match out {
        ViewMut::F32(out) => threads.chunks(out, head_dim, head),
        ViewMut::Bf16(out) => threads.chunks(out, head_dim, |h, out| {
            let mut wide = vec![0.0; head_dim];
            head(h, &mut wide);
            out.iter_mut().zip(wide).for_each(|(o, x)| *o = Element::store(x));
        }),
    }
    Ok(())
}

/// `out = Σ_j softmax_j(q·k_j/√d) v_j`, rows of keys and values `row` apart.
fn attend<K: Element, V: Element>(query: &[f32], keys: &[K], values: &[V], row: usize, len: usize, out: &mut [f32]) {
    let d = query.len();
    let scale = 1.0 / (d as f32).sqrt();
    out.fill(0.0);
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0f32);
    for j in 0..len {
        let key = &keys[j * row..j * row + d];
        let score = scale * query.iter().zip(key).map(|(q, k)| q * k.load()).sum::<f32>();
        if score > max {
            let shrink = (max - score).exp();
            out.iter_mut().for_each(|x| *x *= shrink);
            (sum, max) = (sum * shrink, score);
        }
        let p = (score - max).exp();
        sum += p;
        let value = &values[j * row..j * row + d];
        out.iter_mut().zip(value).for_each(|(o, v)| *o += p * v.load());
    }
    out.iter_mut().for_each(|x| *x /= sum);
}

#[cfg(test)]
mod tests {
    use crate::ops::AttentionCached;
    use crate::{Buffer, DType, Device};

    /// Against softmax in f64: every term is a few fp32 operations, so 1e-5 of the largest value is generous by ten.
    #[test]
    fn equals_softmax_in_f64_for_grouped_heads() {
        let (heads, kv_heads, d, len) = (6, 2, 10, 37);
        let wave = |i: usize, k: f32| (i as f32 * 0.37 + k).sin() * 1.5;
        let q: Vec<f32> = (0..heads * d).map(|i| wave(i, 0.1)).collect();
        let keys: Vec<f32> = (0..len * kv_heads * d).map(|i| wave(i * 3, 0.7)).collect();
        let values: Vec<f32> = (0..len * kv_heads * d).map(|i| wave(i * 7, 0.3)).collect();
        let buffer = |v: &[f32]| Buffer::from_f32(DType::F32, v, "test").unwrap();
        for threads in [1, 2] {
            let device = Device::cpu(threads).unwrap();
            let (qb, kb, vb) = (buffer(&q), buffer(&keys), buffer(&values));
            let mut out = Buffer::zeros(DType::F32, heads * d, "test").unwrap();
            let (q_view, k_view, v_view) = (qb.view(), kb.view(), vb.view());
            device
                .attention_cached(AttentionCached {
                    q: q_view,
                    keys: k_view,
                    values: v_view,
                    out: out.view_mut(),
                    len,
                    kv_heads,
                    head_dim: d,
                })
                .unwrap();
            for h in 0..heads {
                let at = |j: usize, e: usize| (j * kv_heads + h / 3) * d + e;
                let score = |j: usize| {
                    (0..d).map(|e| q[h * d + e] as f64 * keys[at(j, e)] as f64).sum::<f64>() / (d as f64).sqrt()
                };
                let weights: Vec<f64> = (0..len).map(|j| score(j).exp()).collect();
                let total: f64 = weights.iter().sum();
                for e in 0..d {
                    let want = (0..len).map(|j| weights[j] / total * values[at(j, e)] as f64).sum::<f64>();
                    assert!((out.view().get(h * d + e) as f64 - want).abs() < 1.5e-5, "head {h}, element {e}");
                }
            }
        }
    }
}
