//! Attention in f64 as its definition has it, with a bound of the fp32 kernel's error beside every number.
//!
//! u is one fp32 rounding, 2^-24. A sum of n products in any order is off by at most n·u·Σ|a||b| to first order. With
//! A = Σ|q||k|/√d the largest over a row's keys, a score is off by (d + 2)·u·A, the argument of exp by as much again for
//! the maximum or lse and by 2·u·A for its own rounding, exp by 2u, the row sum by n·u: a probability is off by
//! E = (2·(d + 4)·A + n + 8)·u, relatively, at most. What follows carries that on through each product.

use crate::backend::cpu::testing::U;
use crate::ops::AttentionShape;
use ndarray::{Array1, Array2, ArrayView2, s};

/// Numbers, and how far the kernel may be from each.
pub(super) struct Bounded {
    pub(super) value: Vec<f64>,
    pub(super) bound: Vec<f64>,
}

impl Bounded {
    fn zeros(n: usize) -> Self {
        Bounded { value: vec![0.0; n], bound: vec![0.0; n] }
    }

    /// Adds a row of (number, bound) pairs.
    fn add(&mut self, at: usize, value: &Array1<f64>, bound: &Array1<f64>) {
        for (i, (v, b)) in value.iter().zip(bound).enumerate() {
            self.value[at + i] += v;
            self.bound[at + i] += b;
        }
    }
}

pub(super) struct Reference {
    pub(super) out: Bounded,
    pub(super) lse: Bounded,
    pub(super) d_qkv: Bounded,
}

/// One head of one sequence: where its columns start in a row of `qkv`.
struct Head {
    first_row: usize,
    head: usize,
    columns: [usize; 3],
}

fn heads(shape: &AttentionShape) -> Vec<Head> {
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let of = |b: usize, h: usize| Head {
        first_row: b * shape.seq_len,
        head: h,
        columns: [h * d, (shape.heads + h / group) * d, (shape.heads + shape.kv_heads + h / group) * d],
    };
    (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))).map(|(b, h)| of(b, h)).collect()
}

/// Softmax of q·k/√d over the keys each query sees, zero elsewhere; and each row's log-sum-exp.
fn probabilities(shape: &AttentionShape, q: ArrayView2<'_, f64>, k: ArrayView2<'_, f64>) -> (Array2<f64>, Array1<f64>) {
    let mut p = q.dot(&k.t()) / (shape.head_dim as f64).sqrt();
    let mut lse = Array1::zeros(shape.seq_len);
    for i in 0..shape.seq_len {
        let sees = |j: usize| j <= i && shape.window.is_none_or(|w| i - j < w);
        let max = (0..shape.seq_len).filter(|j| sees(*j)).map(|j| p[[i, j]]).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = (0..shape.seq_len).filter(|j| sees(*j)).map(|j| (p[[i, j]] - max).exp()).sum();
        lse[i] = max + sum.ln();
        for j in 0..shape.seq_len {
            p[[i, j]] = if sees(j) { (p[[i, j]] - lse[i]).exp() } else { 0.0 };
        }
    }
    (p, lse)
}

/// Queries, keys and values of a head.
fn parts<'a>(shape: &AttentionShape, qkv: &'a Array2<f64>, head: &Head) -> [ArrayView2<'a, f64>; 3] {
    let rows = head.first_row..head.first_row + shape.seq_len;
    head.columns.map(|c| qkv.slice(s![rows.clone(), c..c + shape.head_dim]))
}

fn matrix(shape: &AttentionShape, values: &[f64], cols: usize) -> Array2<f64> {
    Array2::from_shape_vec((shape.rows(), cols), values.to_vec()).unwrap()
}

/// The output alone, `[B·S, H·d]`.
pub(super) fn forward_value(shape: &AttentionShape, qkv: &[f64]) -> Vec<f64> {
    let (qkv, d) = (matrix(shape, qkv, shape.row_len()), shape.head_dim);
    let mut out = Array2::zeros((shape.rows(), shape.heads * d));
    for head in heads(shape) {
        let [q, k, v] = parts(shape, &qkv, &head);
        let (p, _) = probabilities(shape, q, k);
        let (r, c) = (head.first_row, head.head * d);
        out.slice_mut(s![r..r + shape.seq_len, c..c + d]).assign(&p.dot(&v));
    }
    out.into_iter().collect()
}

impl Reference {
    pub(super) fn of(shape: &AttentionShape, qkv: &[f64], d_out: &[f64]) -> Self {
        let (row_len, width) = (shape.row_len(), shape.heads * shape.head_dim);
        let (qkv, d_out) = (matrix(shape, qkv, row_len), matrix(shape, d_out, width));
        let mut result = Reference {
            out: Bounded::zeros(shape.rows() * width),
            lse: Bounded::zeros(shape.rows() * shape.heads),
            d_qkv: Bounded::zeros(shape.rows() * row_len),
        };
        for head in heads(shape) {
            result.add_head(shape, &qkv, &d_out, &head);
        }
        result
    }

    fn add_head(&mut self, shape: &AttentionShape, qkv: &Array2<f64>, d_out: &Array2<f64>, head: &Head) {
        let (n, d) = (shape.seq_len, shape.head_dim);
        let (nf, df, scale) = (n as f64, d as f64, 1.0 / (d as f64).sqrt());
        let [q, k, v] = parts(shape, qkv, head);
        let (r, c) = (head.first_row, head.head * d);
        let g = d_out.slice(s![r..r + n, c..c + d]);
        let (p, lse) = probabilities(shape, q, k);

        // E of each row, as the module text derives it.
        let sizes = q.abs().dot(&k.abs().t()) * scale;
        let a = Array1::from_iter((0..n).map(|i| (0..=i).map(|j| sizes[[i, j]]).fold(0.0, f64::max)));
        let e = a.mapv(|a| (2.0 * (df + 4.0) * a + nf + 8.0) * U);

        let (out, out_size) = (p.dot(&v), p.dot(&v.abs()));
        let (d_p, d_p_size) = (g.dot(&v.t()), g.abs().dot(&v.abs().t()));
        let delta = (&p * &d_p).sum_axis(ndarray::Axis(1));
        let delta_size = (&p * &d_p_size).sum_axis(ndarray::Axis(1));
        let (mut d_s, mut d_s_error) = (p.clone(), p.clone());
        for ((i, j), p) in p.indexed_iter() {
            d_s[[i, j]] = p * (d_p[[i, j]] - delta[i]) * scale;
            let size = p * (d_p_size[[i, j]] + delta_size[i]) * scale;
            // p and delta carry E each; d_p and delta are sums over d and over n; two products follow.
            d_s_error[[i, j]] = (2.0 * e[i] + (nf + df + 8.0) * U) * size;
        }
        // A sum over the rows of all heads of the group.
        let group = (shape.heads / shape.kv_heads) as f64;
        let (d_q, d_k, d_v) = (d_s.dot(&k), d_s.t().dot(&q), p.t().dot(&g));
        let sum_error = |terms: f64, x: &Array2<f64>| x.mapv(|x| x.abs() * (terms + 2.0) * U);
        let d_q_error = (&d_s_error + &sum_error(nf, &d_s)).dot(&k.abs());
        let d_k_error = (&d_s_error + &sum_error(group * nf, &d_s)).t().dot(&q.abs());
        let mut p_error = sum_error(group * nf, &p);
        for ((i, j), error) in p_error.indexed_iter_mut() {
            *error += p[[i, j]] * e[i];
        }
        let d_v_error = p_error.t().dot(&g.abs());

        for i in 0..n {
            let (row, width) = ((r + i) * shape.row_len(), shape.heads * d);
            let out_error = out_size.row(i).mapv(|x| x * (e[i] + (nf + 3.0) * U));
            self.out.add((r + i) * width + c, &out.row(i).to_owned(), &out_error);
            let lse_error = e[i] + (lse[i].abs() + a[i]) * 2.0 * U;
            let at = (r + i) * shape.heads + head.head;
            (self.lse.value[at], self.lse.bound[at]) = (lse[i], lse_error);
            for (part, (value, error)) in
                [(&d_q, &d_q_error), (&d_k, &d_k_error), (&d_v, &d_v_error)].into_iter().enumerate()
            {
                self.d_qkv.add(row + head.columns[part], &value.row(i).to_owned(), &error.row(i).to_owned());
            }
        }
    }
}
