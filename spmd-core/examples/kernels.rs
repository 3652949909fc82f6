//! How fast the matrix products, attention and the loss run on one thread, beside the BLAS library's own rate:
//! `cargo run --release -p spmd-core --example kernels`.

use spmd_core::gemm_log::{GemmShape, Scratch, replay};
use spmd_core::ops::{
    Attention, AttentionBackward, AttentionShape, CrossEntropy, LinearBackwardInput, LinearBackwardWeight,
    LinearForward,
};
use spmd_core::{Buffer, DType, Device, Result};
use std::time::Instant;

/// T, I, O of the products.
const SIZE: (usize, usize, usize) = (1024, 512, 2816);

fn main() -> Result<()> {
    let device = Device::cpu(1)?;
    println!("{}", device.name());
    let (m, k, n) = SIZE;
    let base =
        GemmShape { trans_a: false, trans_b: true, m, n, k, lda: k, ldb: k, ldc: n, beta: 0.0, at: [0, 1 << 20, 0] };
    let mut scratch = Scratch::new(&[base], 16 << 20);
    line("sgemm, one call", base.flops(), || {
        replay(&[base], &mut scratch);
        Ok(())
    })?;
    for dtype in [DType::F32, DType::Bf16] {
        linear(&device, dtype)?;
        attention(&device, dtype)?;
        loss(&device, dtype)?;
    }
    Ok(())
}

/// Runs `f` for a while and prints its best time and rate.
fn line(what: &str, flops: f64, mut f: impl FnMut() -> Result<()>) -> Result<()> {
    let mut best = f64::INFINITY;
    for _ in 0..12 {
        let start = Instant::now();
        f()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    println!("{what:<28} {:8.2} ms {:7.1} GFLOP/s", best * 1e3, flops / best / 1e9);
    Ok(())
}

fn random(dtype: DType, len: usize) -> Result<Buffer> {
    let values: Vec<f32> = (0..len).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
    Buffer::from_f32(dtype, &values, "random numbers")
}

fn linear(device: &Device, dtype: DType) -> Result<()> {
    let (rows, inputs, outputs) = SIZE;
    let flops = 2.0 * (rows * inputs * outputs) as f64;
    let (x, w, d_out) =
        (random(dtype, rows * inputs)?, random(dtype, outputs * inputs)?, random(dtype, rows * outputs)?);
    let mut out = device.zeros(dtype, rows * outputs, "out")?;
    let mut d_x = device.zeros(dtype, rows * inputs, "d_x")?;
    let mut d_w = device.zeros(DType::F32, outputs * inputs, "d_w")?;
    line(&format!("{dtype} linear forward"), flops, || {
        let args = LinearForward { x: x.view(), w: w.view(), out: out.view_mut(), rows, inputs, outputs };
        device.linear_forward(args)
    })?;
    line(&format!("{dtype} linear backward input"), flops, || {
        let (d_out, w, d_x) = (d_out.view(), w.view(), d_x.view_mut());
        device.linear_backward_input(LinearBackwardInput { d_out, w, d_x, rows, inputs, outputs })
    })?;
    line(&format!("{dtype} linear backward weight"), flops, || {
        let (x, d_out, d_w) = (x.view(), d_out.view(), d_w.view_mut().f32("kernels", "d_w")?);
        device.linear_backward_weight(LinearBackwardWeight { x, d_out, d_w, add: false, rows, inputs, outputs })
    })?;
    // One token: what generation does.
    line(&format!("{dtype} linear, one row"), 2.0 * (inputs * outputs) as f64, || {
        let (x, out) = (x.view().slice(0..inputs), out.view_mut().slice(0..outputs));
        device.linear_forward(LinearForward { x, w: w.view(), out, rows: 1, inputs, outputs })
    })
}

fn attention(device: &Device, dtype: DType) -> Result<()> {
    for (batch, seq_len) in [(2, 512), (1, 2048)] {
        let shape = AttentionShape { batch, seq_len, heads: 8, kv_heads: 4, head_dim: 64, window: None };
        let width = shape.heads * shape.head_dim;
        // What is visible: (S+1)/2 keys a query; q·k and p·v forward, five such products backward.
        let pairs = (shape.rows() * shape.heads * (seq_len + 1)) as f64 / 2.0;
        let product = 2.0 * pairs * shape.head_dim as f64;
        let (qkv, d_out) = (random(dtype, shape.rows() * shape.row_len())?, random(dtype, shape.rows() * width)?);
        let mut out = device.zeros(dtype, shape.rows() * width, "out")?;
        let mut d_qkv = device.zeros(dtype, shape.rows() * shape.row_len(), "d_qkv")?;
        let mut lse = vec![0.0; shape.rows() * shape.heads];
        line(&format!("{dtype} attention S={seq_len}"), 2.0 * product, || {
            device.attention_forward(Attention { shape, qkv: qkv.view(), out: out.view_mut(), lse: &mut lse })
        })?;
        line(&format!("{dtype} attention back S={seq_len}"), 5.0 * product, || {
            let (qkv, out, d_out, d_qkv) = (qkv.view(), out.view(), d_out.view(), d_qkv.view_mut());
            device.attention_backward(AttentionBackward { shape, qkv, out, lse: &lse, d_out, d_qkv })
        })?;
    }
    Ok(())
}

fn loss(device: &Device, dtype: DType) -> Result<()> {
    let (rows, vocab) = (256, 8192);
    let mut logits = random(dtype, rows * vocab)?;
    let targets: Vec<u32> = (0..rows as u32).collect();
    let mut loss = 0.0;
    line(&format!("{dtype} cross-entropy"), (rows * vocab) as f64, || {
        let logits = logits.view_mut();
        device.cross_entropy(CrossEntropy { logits, targets: &targets, scale: 1.0, gradient: true, loss: &mut loss })
    })
}
