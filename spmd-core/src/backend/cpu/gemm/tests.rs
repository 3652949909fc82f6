//! Matrix products against a plain reference.

use super::*;
use crate::backend::cpu::bounds::{assert_within, exact, random, zeros};
use crate::backend::cpu::testing::U;
use crate::{Buffer, DType};
use ndarray::{Array2, ArrayView2};

const BOTH: [DType; 2] = [DType::F32, DType::Bf16];
/// T, I, O: single elements, odd sizes, several tiles and panels, and nothing at all.
const SIZES: [(usize, usize, usize); 8] =
    [(1, 1, 1), (1, 300, 7), (7, 65, 33), (65, 6, 129), (129, 513, 257), (600, 17, 530), (3, 0, 4), (0, 3, 4)];

fn matrix(buffer: &Buffer, rows: usize, cols: usize) -> Array2<f64> {
    Array2::from_shape_vec((rows, cols), exact(buffer)).unwrap()
}

/// The f64 product and the bound of its fp32 error: k products and sums in any order are off by at most k·u·Σ|a||b| to
/// first order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1); two more for beta and second order.
fn reference(a: ArrayView2<'_, f64>, b: ArrayView2<'_, f64>) -> (Vec<f64>, Vec<f64>) {
    let size = a.abs().dot(&b.abs()) * (a.ncols() + 2) as f64 * U;
    (a.dot(&b).into_iter().collect(), size.into_iter().collect())
}

#[test]
fn every_mix_of_dtypes_is_within_its_rounding_of_f64() {
    let threads = Threads::new(1).unwrap();
    for (rows, inputs, outputs) in SIZES {
        for (x_dtype, w_dtype, out_dtype) in
            BOTH.into_iter().flat_map(|a| BOTH.map(|b| BOTH.map(|c| (a, b, c)))).flatten()
        {
            let (x, w) = (random(x_dtype, 1, rows * inputs), random(w_dtype, 2, outputs * inputs));
            let (mx, mw) = (matrix(&x, rows, inputs), matrix(&w, outputs, inputs));
            let mut out = random(out_dtype, 3, rows * outputs);
            let args = LinearForward { x: x.view(), w: w.view(), out: out.view_mut(), rows, inputs, outputs };
            linear_forward(&threads, args).unwrap();
            let (expected, bound) = reference(mx.view(), mw.t());
            assert_within("forward", &out, &expected, &bound);

            let d_out = random(x_dtype, 4, rows * outputs);
            let md = matrix(&d_out, rows, outputs);
            let mut d_x = random(out_dtype, 5, rows * inputs);
            let args =
                LinearBackwardInput { d_out: d_out.view(), w: w.view(), d_x: d_x.view_mut(), rows, inputs, outputs };
            linear_backward_input(&threads, args).unwrap();
            let (expected, bound) = reference(md.view(), mw.view());
            assert_within("backward input", &d_x, &expected, &bound);

            for add in [false, true] {
                let mut d_w = random(DType::F32, 6, outputs * inputs);
                let before = exact(&d_w);
                let args = LinearBackwardWeight {
                    x: x.view(),
                    d_out: d_out.view(),
                    d_w: d_w.view_mut().f32("test", "d_w").unwrap(),
                    add,
                    rows,
                    inputs,
                    outputs,
                };
                linear_backward_weight(&threads, args).unwrap();
                let (mut expected, mut bound) = reference(md.t(), mx.view());
                if add {
                    for ((e, b), old) in expected.iter_mut().zip(&mut bound).zip(before) {
                        (*e, *b) = (*e + old, *b + (rows + 2) as f64 * U * old.abs());
                    }
                }
                assert_within("backward weight", &d_w, &expected, &bound);
            }
        }
    }
}

/// The three products are each other's derivatives: with L = Σ G∘out, dL/dx and dL/dw by central differences of the f64
/// product (exact for a bilinear function but for f64 rounding, h = 1) equal what the kernels give.
#[test]
fn gradients_agree_with_central_differences() {
    let threads = Threads::new(1).unwrap();
    let (rows, inputs, outputs) = (3, 5, 4);
    let (x, w, g) = (random(DType::F32, 1, 15), random(DType::F32, 2, 20), random(DType::F32, 3, 12));
    let (mx, mw, mg) = (matrix(&x, rows, inputs), matrix(&w, outputs, inputs), matrix(&g, rows, outputs));
    let loss = |x: &Array2<f64>, w: &Array2<f64>| (&mg * &x.dot(&w.t())).sum();
    let difference = |i: usize, of_x: bool| {
        let at = |h: f64| {
            let (mut x, mut w) = (mx.clone(), mw.clone());
            let moved = if of_x { &mut x } else { &mut w };
            moved.as_slice_mut().unwrap()[i] += h;
            loss(&x, &w)
        };
        (at(1.0) - at(-1.0)) / 2.0
    };
    let mut d_x = zeros(DType::F32, 15);
    let args = LinearBackwardInput { d_out: g.view(), w: w.view(), d_x: d_x.view_mut(), rows, inputs, outputs };
    linear_backward_input(&threads, args).unwrap();
    let (_, bound) = reference(mg.view(), mw.view());
    assert_within("d_x", &d_x, &(0..15).map(|i| difference(i, true)).collect::<Vec<_>>(), &bound);

    let mut d_w = zeros(DType::F32, 20);
    let args = LinearBackwardWeight {
        x: x.view(),
        d_out: g.view(),
        d_w: d_w.view_mut().f32("test", "d_w").unwrap(),
        add: false,
        rows,
        inputs,
        outputs,
    };
    linear_backward_weight(&threads, args).unwrap();
    let (_, bound) = reference(mg.t(), mx.view());
    assert_within("d_w", &d_w, &(0..20).map(|i| difference(i, false)).collect::<Vec<_>>(), &bound);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for (dtype, (rows, inputs, outputs)) in BOTH.into_iter().flat_map(|d| [(d, (130, 300, 700)), (d, (1025, 40, 300))])
    {
        let (x, w) = (random(dtype, 1, rows * inputs), random(dtype, 2, outputs * inputs));
        let run = |n: usize| {
            let mut out = zeros(dtype, rows * outputs);
            let args = LinearForward { x: x.view(), w: w.view(), out: out.view_mut(), rows, inputs, outputs };
            linear_forward(&Threads::new(n).unwrap(), args).unwrap();
            out.bytes().to_vec()
        };
        let one = run(1);
        assert!(one == run(2) && one == run(3));
    }
}

#[test]
fn tiles_cover_every_element_once() {
    for (m, n) in [(1, 1), (7, 2000), (128, 128), (129, 700), (1024, 512), (1024, 2816), (4096, 14336), (513, 17)] {
        let tiling = Tiling::of(m, n);
        let mut area = 0;
        for i in 0..tiling.tiles() {
            let (rows, cols) = tiling.tile(i);
            assert!(rows.end <= m && cols.end <= n && rows.len() <= TILE && cols.len() <= TILE);
            area += rows.len() * cols.len();
            for j in 0..i {
                let (r, c) = tiling.tile(j);
                let apart = rows.start >= r.end || r.start >= rows.end || cols.start >= c.end || c.start >= cols.end;
                assert!(apart || rows.is_empty() || cols.is_empty(), "tiles {i} and {j} of {m}x{n} overlap");
            }
        }
        assert_eq!(area, m * n);
        assert!(m * n < 8 * SMALLEST * SMALLEST * 4 || tiling.tiles() >= TASKS, "{m}x{n}: {} tiles", tiling.tiles());
    }
}

#[test]
fn the_record_holds_the_products_made_and_replays_them() {
    use crate::gemm_log;
    // A size no other test uses: the record is the process's, and other tests run meanwhile.
    let (rows, inputs, outputs) = (11, 1234, 13);
    let (x, w) = (random(DType::F32, 1, rows * inputs), random(DType::F32, 2, outputs * inputs));
    let mut out = zeros(DType::F32, rows * outputs);
    gemm_log::start();
    let args = LinearForward { x: x.view(), w: w.view(), out: out.view_mut(), rows, inputs, outputs };
    linear_forward(&Threads::new(1).unwrap(), args).unwrap();
    let log = gemm_log::take();
    let ours: Vec<_> = log.into_iter().filter(|s| s.k == inputs).collect();
    assert_eq!(ours.len(), 1);
    let s = ours[0];
    assert_eq!((s.trans_a, s.trans_b, s.m, s.n, s.beta), (false, true, rows, outputs, 0.0));
    assert_eq!((s.lda, s.ldb, s.ldc), (inputs, inputs, outputs));
    assert_eq!(s.flops(), 2.0 * 11.0 * 1234.0 * 13.0);
    let mut scratch = gemm_log::Scratch::new(&ours, 0);
    gemm_log::replay(&ours, &mut scratch);
}
