//! A Mistral in plain f64: one sequence at a time, whole S×S matrices, textbook formulas, no code of the product's but the
//! configuration.

use models::{Config, RopeScaling};
use ndarray::{Array1, Array2, Axis, s};
use spmd_core::Batch;
use std::f64::consts::TAU;

/// The parameters (or gradients) of one block.
struct Block {
    norm_att: Array1<f64>,
    q: Array2<f64>,
    k: Array2<f64>,
    v: Array2<f64>,
    o: Array2<f64>,
    norm_mlp: Array1<f64>,
    gate: Array2<f64>,
    up: Array2<f64>,
    down: Array2<f64>,
}

/// What the backward of one block needs.
struct Kept {
    x: Array2<f64>,
    norm_att: Array2<f64>,
    q: Array2<f64>,
    k: Array2<f64>,
    v: Array2<f64>,
    /// Per head `[S,S]`.
    probabilities: Vec<Array2<f64>>,
    attended: Array2<f64>,
    mid: Array2<f64>,
    norm_mlp: Array2<f64>,
    gate: Array2<f64>,
    up: Array2<f64>,
}

/// The loss sum, the logits of every position, and the gradient of `inv_targets`·loss, one flat list a unit.
pub(crate) struct Answer {
    pub(crate) loss: f64,
    pub(crate) logits: Vec<f64>,
    pub(crate) grads: Vec<Vec<f64>>,
}

/// Runs forward and backward of a batch on flat units. A tied table's two gradients are added.
pub(crate) fn run(c: &Config, units: &[Vec<f64>], batch: &Batch, inv_targets: f64) -> Answer {
    let grads = units.iter().map(|u| vec![0.0; u.len()]).collect();
    let mut answer = Answer { loss: 0.0, logits: Vec::new(), grads };
    for row in 0..batch.rows {
        let tokens = row * batch.cols..(row + 1) * batch.cols;
        sequence(c, units, &batch.ids[tokens.clone()], &batch.targets[tokens], inv_targets, &mut answer);
    }
    answer
}

fn sequence(c: &Config, units: &[Vec<f64>], ids: &[u32], targets: &[u32], inv: f64, answer: &mut Answer) {
    let (d, head) = (c.hidden_size, c.layers + 1);
    let table = matrix(&units[0], c.vocab_size, d);
    let blocks: Vec<Block> = (1..head).map(|u| Block::cut(c, &units[u])).collect();
    let gain = Array1::from(units[head][..d].to_vec());
    let output = if c.tied { table.clone() } else { matrix(&units[head][d..], c.vocab_size, d) };

    let mut x = Array2::from_shape_fn((ids.len(), d), |(t, j)| table[[ids[t] as usize, j]]);
    let mut kept = Vec::new();
    for block in &blocks {
        let (out, keep) = forward(c, block, x);
        kept.push(keep);
        x = out;
    }
    let norm = rms_norm(c, &x, &gain);
    let logits = norm.dot(&output.t());
    answer.logits.extend(&logits);

    let mut d_logits = Array2::zeros(logits.dim());
    for (t, target) in targets.iter().enumerate().filter(|(_, target)| **target != Batch::NO_TARGET) {
        let row = logits.row(t);
        let max = row.fold(f64::NEG_INFINITY, |a, b| a.max(*b));
        let total = row.mapv(|z| (z - max).exp()).sum();
        answer.loss += max + total.ln() - row[*target as usize];
        let mut d_row = row.mapv(|z| (z - max).exp() / total);
        d_row[*target as usize] -= 1.0;
        d_logits.row_mut(t).assign(&(d_row * inv));
    }
    add(&mut answer.grads[if c.tied { 0 } else { head }][if c.tied { 0 } else { d }..], &d_logits.t().dot(&norm));
    let (mut d_x, d_gain) = rms_norm_backward(c, &x, &gain, &d_logits.dot(&output));
    add(&mut answer.grads[head][..d], &d_gain);
    for (i, block) in blocks.iter().enumerate().rev() {
        let (below, grads) = backward(c, block, &kept[i], d_x);
        answer.grads[i + 1].iter_mut().zip(grads.flat()).for_each(|(g, x)| *g += x);
        d_x = below;
    }
    for (t, id) in ids.iter().enumerate() {
        let at = *id as usize * d;
        answer.grads[0][at..at + d].iter_mut().zip(d_x.row(t)).for_each(|(g, x)| *g += x);
    }
}

fn forward(c: &Config, w: &Block, x: Array2<f64>) -> (Array2<f64>, Kept) {
    let norm_att = rms_norm(c, &x, &w.norm_att);
    let q = rotate(c, norm_att.dot(&w.q.t()), 1.0);
    let k = rotate(c, norm_att.dot(&w.k.t()), 1.0);
    let v = norm_att.dot(&w.v.t());
    let (len, d) = (x.nrows(), c.head_dim);
    let mut attended = Array2::zeros((len, c.heads * d));
    let mut probabilities = Vec::new();
    for h in 0..c.heads {
        let (own, shared) = heads(c, h);
        let (q, k, v) = (q.slice(s![.., own.clone()]), k.slice(s![.., shared.clone()]), v.slice(s![.., shared]));
        let mut p = q.dot(&k.t()) / (d as f64).sqrt();
        for ((i, j), score) in p.indexed_iter_mut() {
            let seen = j <= i && c.sliding_window.is_none_or(|w| j + w > i);
            *score = if seen { score.exp() } else { 0.0 };
        }
        let totals = p.sum_axis(Axis(1)).insert_axis(Axis(1));
        p /= &totals;
        attended.slice_mut(s![.., own]).assign(&p.dot(&v));
        probabilities.push(p);
    }
    let mid = &x + &attended.dot(&w.o.t());
    let norm_mlp = rms_norm(c, &mid, &w.norm_mlp);
    let (gate, up) = (norm_mlp.dot(&w.gate.t()), norm_mlp.dot(&w.up.t()));
    let out = &mid + &(gate.mapv(|g| g * sigmoid(g)) * &up).dot(&w.down.t());
    (out, Kept { x, norm_att, q, k, v, probabilities, attended, mid, norm_mlp, gate, up })
}

fn backward(c: &Config, w: &Block, kept: &Kept, d_out: Array2<f64>) -> (Array2<f64>, Block) {
    let (silu, slope) = (|g: f64| g * sigmoid(g), |g: f64| sigmoid(g) * (1.0 + g * (1.0 - sigmoid(g))));
    let d_act = d_out.dot(&w.down);
    let down = d_out.t().dot(&(kept.gate.mapv(silu) * &kept.up));
    let d_up = kept.gate.mapv(silu) * &d_act;
    let d_gate = kept.gate.mapv(slope) * &kept.up * &d_act;
    let (gate, up) = (d_gate.t().dot(&kept.norm_mlp), d_up.t().dot(&kept.norm_mlp));
    let (d_x, norm_mlp) = rms_norm_backward(c, &kept.mid, &w.norm_mlp, &(d_gate.dot(&w.gate) + d_up.dot(&w.up)));
    let d_mid = d_out + d_x;

    let d_att = d_mid.dot(&w.o);
    let o = d_mid.t().dot(&kept.attended);
    let [mut d_q, mut d_k, mut d_v] = [&kept.q, &kept.k, &kept.v].map(|x| Array2::<f64>::zeros(x.dim()));
    for (h, p) in kept.probabilities.iter().enumerate() {
        let (own, shared) = heads(c, h);
        let d_att = d_att.slice(s![.., own.clone()]);
        let d_p = d_att.dot(&kept.v.slice(s![.., shared.clone()]).t());
        let along = (&d_p * p).sum_axis(Axis(1)).insert_axis(Axis(1));
        let d_scores = p * &(d_p - along) / (c.head_dim as f64).sqrt();
        d_q.slice_mut(s![.., own.clone()]).assign(&d_scores.dot(&kept.k.slice(s![.., shared.clone()])));
        let mut d_keys = d_k.slice_mut(s![.., shared.clone()]);
        d_keys += &d_scores.t().dot(&kept.q.slice(s![.., own]));
        let mut d_values = d_v.slice_mut(s![.., shared]);
        d_values += &p.t().dot(&d_att);
    }
    let (d_q, d_k) = (rotate(c, d_q, -1.0), rotate(c, d_k, -1.0));
    let d_norm = d_q.dot(&w.q) + d_k.dot(&w.k) + d_v.dot(&w.v);
    let [q, k, v] = [d_q, d_k, d_v].map(|d| d.t().dot(&kept.norm_att));
    let (d_x, norm_att) = rms_norm_backward(c, &kept.x, &w.norm_att, &d_norm);
    (d_mid + d_x, Block { norm_att, q, k, v, o, norm_mlp, gate, up, down })
}

/// The columns of query head `h` and of the key/value head it shares.
fn heads(c: &Config, h: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
    let (d, shared) = (c.head_dim, h / (c.heads / c.kv_heads));
    (h * d..(h + 1) * d, shared * d..(shared + 1) * d)
}

fn rms_norm(c: &Config, x: &Array2<f64>, gain: &Array1<f64>) -> Array2<f64> {
    scale(c, x) * gain
}

/// x/rms(x), row by row.
fn scale(c: &Config, x: &Array2<f64>) -> Array2<f64> {
    x / &rms(c, x)
}

fn rms(c: &Config, x: &Array2<f64>) -> Array2<f64> {
    let mean = x.mapv(|x| x * x).sum_axis(Axis(1)) / x.ncols() as f64;
    mean.mapv(|m| (m + c.rms_norm_eps).sqrt()).insert_axis(Axis(1))
}

fn rms_norm_backward(
    c: &Config,
    x: &Array2<f64>,
    gain: &Array1<f64>,
    d_out: &Array2<f64>,
) -> (Array2<f64>, Array1<f64>) {
    let (y, g) = (scale(c, x), d_out * gain);
    let mean = ((&g * &y).sum_axis(Axis(1)) / x.ncols() as f64).insert_axis(Axis(1));
    ((&g - &(&y * &mean)) / &rms(c, x), (d_out * &y).sum_axis(Axis(0)))
}

/// Rotates every head of every row by its position's angles, or back.
fn rotate(c: &Config, mut x: Array2<f64>, direction: f64) -> Array2<f64> {
    let (d, half) = (c.head_dim, c.head_dim / 2);
    for t in 0..x.nrows() {
        for head in 0..x.ncols() / d {
            for j in 0..half {
                let (sin, cos) = (direction * t as f64 * frequency(c, j)).sin_cos();
                let (a, b) = (x[[t, head * d + j]], x[[t, head * d + half + j]]);
                x[[t, head * d + j]] = a * cos - b * sin;
                x[[t, head * d + half + j]] = b * cos + a * sin;
            }
        }
    }
    x
}

/// Frequency of pair `j`, stretched as transformers' modeling_rope_utils does.
fn frequency(c: &Config, j: usize) -> f64 {
    let plain = c.rope_theta.powf(-2.0 * j as f64 / c.head_dim as f64);
    match c.rope_scaling {
        RopeScaling::Default => plain,
        RopeScaling::Linear { factor } => plain / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let turns = original_max_position_embeddings * plain / TAU;
            let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            plain * (kept + (1.0 - kept) / factor)
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn matrix(flat: &[f64], rows: usize, cols: usize) -> Array2<f64> {
    Array2::from_shape_fn((rows, cols), |(i, j)| flat[i * cols + j])
}

fn add<D: ndarray::Dimension>(to: &mut [f64], x: &ndarray::Array<f64, D>) {
    assert_eq!(to.len(), x.len());
    to.iter_mut().zip(x).for_each(|(a, b)| *a += b);
}

impl Block {
    fn cut(c: &Config, flat: &[f64]) -> Self {
        let (d, f, q, kv) = (c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let mut at = 0;
        let mut take = |rows: usize, cols: usize| {
            at += rows * cols;
            matrix(&flat[at - rows * cols..at], rows, cols)
        };
        Block {
            norm_att: take(1, d).row(0).to_owned(),
            q: take(q, d),
            k: take(kv, d),
            v: take(kv, d),
            o: take(d, q),
            norm_mlp: take(1, d).row(0).to_owned(),
            gate: take(f, d),
            up: take(f, d),
            down: take(d, f),
        }
    }

    fn flat(&self) -> Vec<f64> {
        let attention = self.norm_att.iter().chain(&self.q).chain(&self.k).chain(&self.v).chain(&self.o);
        attention.chain(&self.norm_mlp).chain(&self.gate).chain(&self.up).chain(&self.down).copied().collect()
    }
}
