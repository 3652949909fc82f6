//! Cross-entropy: a row of logits at a time.

use super::math::exp_f32;
use super::scratch::with_rows;
use super::threads::Threads;
use crate::dtype::{Element, from_bf16, to_bf16};
use crate::ops::CrossEntropy;
use crate::{Batch, Result, ViewMut};
use half::bf16;
use multiversion::multiversion;

/// Rows of a task.
const ROWS: usize = 8;
/// Partial sums that run side by side: element j goes to sum j mod LANES on every instruction set.
const LANES: usize = 16;
/// Elements after which the fp32 partial sums are moved into the row's f64 sum, so that their error does not grow with V.
const SPAN: usize = 1024;

pub(super) fn cross_entropy(threads: &Threads, args: CrossEntropy<'_>) -> Result<()> {
    let CrossEntropy { logits, targets, scale, gradient, loss } = args;
    if logits.is_empty() {
        return Ok(());
    }
    with_rows(targets.len(), |losses| {
        match logits {
            ViewMut::F32(z) => rows(threads, z, targets, losses, |z, t| row_f32(z, t, scale, gradient)),
            ViewMut::Bf16(z) => rows(threads, z, targets, losses, |z, t| row_bf16(z, t, scale, gradient)),
        }
        // In row order, whichever thread had the row.
        *loss += losses.iter().sum::<f64>();
    });
    Ok(())
}

/// Runs `row` on every row that has a target; the others lose nothing and get no gradient.
fn rows<E: Element>(
    threads: &Threads,
    logits: &mut [E],
    targets: &[u32],
    losses: &mut [f64],
    row: impl Fn(&mut [E], Option<usize>) -> f64 + Sync + Send,
) {
    let vocab = logits.len() / targets.len();
    threads.chunks2((logits, ROWS * vocab), (losses, ROWS), |i, logits, losses| {
        let targets = &targets[i * ROWS..];
        for ((z, loss), target) in logits.chunks_exact_mut(vocab).zip(losses).zip(targets) {
            *loss = row(z, (*target != Batch::NO_TARGET).then_some(*target as usize));
        }
    });
}

/// `multiversion` needs a function that is not generic: one row per dtype, with the same text.
macro_rules! row {
    ($name:ident, $element:ty, $load:expr, $store:expr) => {
        /// The loss of a row, ln Σ e^{z−max} + max − z_target, in f64 from the fp32 exponentials; the row becomes its
        /// gradient when that is wanted.
        #[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
        fn $name(z: &mut [$element], target: Option<usize>, scale: f32, gradient: bool) -> f64 {
            let Some(target) = target else {
                if gradient {
                    z.fill($store(0.0));
                }
                return 0.0;
            };
            let mut lanes = [f32::NEG_INFINITY; LANES];
            let (groups, rest) = z.as_chunks::<LANES>();
            let larger = |lane: &mut f32, x: &$element| *lane = if $load(*x) > *lane { $load(*x) } else { *lane };
            groups.iter().for_each(|group| lanes.iter_mut().zip(group).for_each(|(lane, x)| larger(lane, x)));
            lanes.iter_mut().zip(rest).for_each(|(lane, x)| larger(lane, x));
            let max = lanes.iter().fold(f32::NEG_INFINITY, |max, x| if *x > max { *x } else { max });

            let mut sum = 0.0f64;
            for span in z.chunks(SPAN) {
                let mut lanes = [0.0f32; LANES];
                let (groups, rest) = span.as_chunks::<LANES>();
                for group in groups {
                    for (lane, x) in lanes.iter_mut().zip(group) {
                        *lane += exp_f32($load(*x) - max);
                    }
                }
                for (lane, x) in lanes.iter_mut().zip(rest) {
                    *lane += exp_f32($load(*x) - max);
                }
                sum += lanes.iter().map(|x| f64::from(*x)).sum::<f64>();
            }
            let at_target = $load(z[target]);
            if gradient {
                let inverse = (1.0 / sum) as f32;
                for x in z.iter_mut() {
                    *x = $store(exp_f32($load(*x) - max) * inverse * scale);
                }
                z[target] = $store((exp_f32(at_target - max) * inverse - 1.0) * scale);
            }
            sum.ln() + (f64::from(max) - f64::from(at_target))
        }
    };
}
row!(row_f32, f32, std::convert::identity, std::convert::identity);
row!(row_bf16, bf16, from_bf16, to_bf16);

#[cfg(test)]
mod tests;
