//! Memory kernels need beside their arguments: grown once per thread and kept, so that no call allocates in its loops.

use super::{attention, gemm};
use crate::ops::AttentionShape;
use crate::{Buffer, DType, Result};
use std::cell::Cell;

thread_local! {
    static TASK: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static CALL: Cell<Option<Buffer>> = const { Cell::new(None) };
    static ROWS: Cell<Vec<f64>> = const { Cell::new(Vec::new()) };
}

/// Runs `f` on `len` fp32 elements of this thread, contents unspecified. For the inside of one task.
pub(super) fn with_task<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut memory = TASK.take();
    if memory.len() < len {
        memory.resize(len, 0.0);
    }
    let result = f(&mut memory[..len]);
    TASK.set(memory);
    result
}

/// Runs `f` on `len` fp32 elements of the calling thread, contents unspecified. For what all tasks of a call read; apart
/// from [`with_task`]'s memory, because with one thread the tasks run on the calling thread.
pub(super) fn with_call<R>(len: usize, what: &'static str, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    let mut memory = match CALL.take() {
        Some(buffer) => buffer,
        None => Buffer::zeros(DType::F32, len, what)?,
    };
    memory.resize(DType::F32, len, what)?;
    let result = f(memory.view_mut().f32(what, "scratch")?);
    CALL.set(Some(memory));
    Ok(result)
}

/// Runs `f` on one f64 a row, contents unspecified.
pub(super) fn with_rows<R>(rows: usize, f: impl FnOnce(&mut [f64]) -> R) -> R {
    let mut memory = ROWS.take();
    if memory.len() < rows {
        memory.resize(rows, 0.0);
    }
    let result = f(&mut memory[..rows]);
    ROWS.set(memory);
    result
}

/// Splits the first `n` elements off `rest`.
pub(super) fn carve<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (head, tail) = std::mem::take(rest).split_at_mut(n);
    *rest = tail;
    head
}

/// Bytes the CPU kernels of a rank keep as scratch with `threads` threads: for attention of up to this shape on `compute`
/// elements, for matrix products of any size, and for a loss over at most as many rows. The BLAS library's own packing
/// buffers come on top.
pub fn scratch_bytes(threads: usize, shape: &AttentionShape, compute: DType) -> usize {
    let panels = if compute == DType::F32 { 0 } else { gemm::TASK_SCRATCH };
    let task = attention::task_scratch(shape).max(panels);
    let call = attention::call_scratch(shape, compute);
    (threads.max(1) * task + call) * DType::F32.size() + shape.rows() * size_of::<f64>()
}
