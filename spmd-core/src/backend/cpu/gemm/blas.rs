//! The one door to the BLAS library: every matrix product of this crate is a call of [`sgemm`].

use crate::backend::cpu::matrix::{MatMut, Operand};
use crate::gemm_log::{self, GemmShape};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Once;

const ROW_MAJOR: c_int = 101;
const NO_TRANS: c_int = 111;
const TRANS: c_int = 112;

// CBLAS as Netlib defines it (cblas.h): enumerations are C ints, 32-bit integers (LP64).
unsafe extern "C" {
    fn cblas_sgemm(
        layout: c_int,
        trans_a: c_int,
        trans_b: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        alpha: f32,
        a: *const f32,
        lda: c_int,
        b: *const f32,
        ldb: c_int,
        beta: f32,
        c: *mut f32,
        ldc: c_int,
    );
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
}

/// `c = alpha · a·b + beta · c` with fp32 accumulation over `k`, on the calling thread alone. The shape of `c` gives m and
/// n. With `beta` 0, `c` is not read.
pub(crate) fn sgemm(k: usize, alpha: f32, a: Operand<'_>, b: Operand<'_>, beta: f32, c: &mut MatMut<'_, f32>) {
    let (m, n) = (c.rows(), c.cols());
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        return scale(c, beta);
    }
    check(a, m, k);
    check(b, k, n);
    if gemm_log::is_on() {
        gemm_log::record(GemmShape::of(m, n, k, a, b, beta, c));
    }
    one_thread();
    let trans = |operand: Operand<'_>| if operand.transposed { TRANS } else { NO_TRANS };
    let (ta, tb, lda, ldb, ldc) = (trans(a), trans(b), int(a.ld), int(b.ld), int(c.ld()));
    let (a, b, to) = (a.data.as_ptr(), b.data.as_ptr(), c.as_mut_ptr());
    // SAFETY: `check` made sure that both operands hold every element the call reads, given their leading dimensions; `c`
    // is a rectangle of m rows, n elements each, ldc ≥ n apart, that nobody else can reach meanwhile (`MatMut`). All
    // dimensions are positive and fit an int.
    unsafe { cblas_sgemm(ROW_MAJOR, ta, tb, int(m), int(n), int(k), alpha, a, lda, b, ldb, beta, to, ldc) }
}

/// A product over nothing.
fn scale(c: &mut MatMut<'_, f32>, beta: f32) {
    for i in 0..c.rows() {
        if beta == 0.0 {
            c.row(i).fill(0.0);
        } else {
            c.row(i).iter_mut().for_each(|x| *x *= beta);
        }
    }
}

/// Refuses an operand that does not hold the `rows × cols` elements (as the product takes it) its call would read. A
/// mistake of a kernel, not of its caller: a panic.
fn check(operand: Operand<'_>, rows: usize, cols: usize) {
    let (rows, cols) = if operand.transposed { (cols, rows) } else { (rows, cols) };
    let needed = (rows - 1).checked_mul(operand.ld).and_then(|n| n.checked_add(cols));
    let fits = operand.ld >= cols && needed.is_some_and(|n| n <= operand.data.len());
    assert!(fits, "sgemm: {rows}x{cols}, {} apart, in {} elements", operand.ld, operand.data.len());
}

/// CBLAS counts in C ints. Tiles are small; a leading dimension is a matrix width, far below 2^31.
fn int(n: usize) -> c_int {
    c_int::try_from(n).expect("a matrix dimension below 2^31")
}

/// Tells the library to stay on the thread that calls it: parallelism is our tiles'. OpenBLAS and MKL have their own call
/// for it, looked up by name so that any other CBLAS links too (those either have no threads, like Netlib's, or start none
/// unless told to, like BLIS). Linked statically, the names cannot be found; OPENBLAS_NUM_THREADS=1 does it then.
fn one_thread() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for name in [c"openblas_set_num_threads", c"MKL_Set_Num_Threads"] {
            if let Some(set_num_threads) = find(name) {
                // SAFETY: both libraries declare it as `void f(int)`.
                unsafe { set_num_threads(1) }
            }
        }
    });
}

fn find(name: &CStr) -> Option<unsafe extern "C" fn(c_int)> {
    // RTLD_DEFAULT: everything this process has loaded. Its value is part of the platform's ABI.
    let everywhere = if cfg!(target_os = "macos") { -2isize } else { 0 } as *mut c_void;
    // SAFETY: dlsym of POSIX with a NUL-terminated name; it answers null when there is no such symbol.
    let symbol = unsafe { dlsym(everywhere, name.as_ptr()) };
    // SAFETY: null is None, and only the two functions named in `one_thread` are looked up, which have this signature.
    unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(c_int)>>(symbol) }
}
