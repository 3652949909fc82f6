//! Casts and sums, element by element.

use super::threads::{Threads, rows_per_task};
use crate::dtype::{Element, round_bf16};
use crate::ops::{Accumulate, Add, Cast};
use crate::{DType, Result, each_dtype};
use multiversion::multiversion;

pub(super) fn add(threads: &Threads, args: Add<'_>) -> Result<()> {
    each_dtype!(mut args.x, x => each_dtype!(args.y, y => add_slices(threads, x, y)));
    Ok(())
}

pub(super) fn accumulate(threads: &Threads, args: Accumulate<'_>) -> Result<()> {
    let Accumulate { acc, x, first } = args;
    each_dtype!(mut acc, acc => each_dtype!(x, x => match first {
        true => cast_slices(threads, x, DType::F32, acc),
        false => add_slices(threads, acc, x),
    }));
    Ok(())
}

pub(super) fn cast(threads: &Threads, args: Cast<'_>) -> Result<()> {
    each_dtype!(args.src, src => each_dtype!(mut args.dst, dst => cast_slices(threads, src, args.through, dst)));
    Ok(())
}

fn add_slices<X: Element, Y: Element>(threads: &Threads, x: &mut [X], y: &[Y]) {
    let task = rows_per_task(1);
    threads.chunks(x, task, |i, x| add_run(x, &y[i * task..][..x.len()]));
}

fn cast_slices<S: Element, D: Element>(threads: &Threads, src: &[S], through: DType, dst: &mut [D]) {
    let task = rows_per_task(1);
    threads.chunks(dst, task, |i, dst| cast_run(&src[i * task..][..dst.len()], through, dst));
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn add_run<X: Element, Y: Element>(x: &mut [X], y: &[Y]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x = X::store(x.load() + y.load());
    }
}

/// `dst = R(R_through(src))` on one run of elements.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn cast_run<S: Element, D: Element>(src: &[S], through: DType, dst: &mut [D]) {
    match through {
        DType::F32 => {
            for (d, s) in dst.iter_mut().zip(src) {
                *d = D::store(s.load());
            }
        }
        DType::Bf16 => {
            for (d, s) in dst.iter_mut().zip(src) {
                *d = D::store(round_bf16(s.load()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType::{Bf16, F32};
    use crate::backend::cpu::testing::{buffer, normal, same_on_threads};

    const PAIRS: [(DType, DType); 4] = [(F32, F32), (F32, Bf16), (Bf16, F32), (Bf16, Bf16)];
    /// The last two make more than one task.
    const SIZES: [usize; 6] = [0, 1, 17, 48, 32_769, 100_000];

    #[test]
    fn add_and_accumulate_round_once() {
        for (a, b) in PAIRS {
            for n in SIZES {
                let (x, y) = (buffer(a, &normal("x", n)), buffer(b, &normal("y", n)));
                let run = |op: &(dyn Fn(&Threads, Add<'_>) -> Result<()> + Sync)| {
                    same_on_threads(|threads| {
                        let mut x = buffer(a, &x.view().to_f32());
                        op(threads, Add { x: x.view_mut(), y: y.view() }).unwrap();
                        x.view().to_f32()
                    })
                };
                let sums = run(&add);
                let again = run(&|t, args| accumulate(t, Accumulate { acc: args.x, x: args.y, first: false }));
                let first = run(&|t, args| accumulate(t, Accumulate { acc: args.x, x: args.y, first: true }));
                for i in 0..n {
                    let (x, y) = (x.view().get(i), y.view().get(i));
                    assert_eq!(sums[i].to_bits(), a.round(x + y).to_bits());
                    assert_eq!(again[i].to_bits(), sums[i].to_bits());
                    assert_eq!(first[i].to_bits(), a.round(y).to_bits());
                }
            }
        }
    }

    #[test]
    fn cast_rounds_on_the_way_and_at_the_end() {
        for (from, to) in PAIRS {
            for through in [F32, Bf16] {
                for n in SIZES {
                    let src = buffer(from, &normal("src", n));
                    let got = same_on_threads(|threads| {
                        let mut dst = buffer(to, &vec![9.0; n]);
                        cast(threads, Cast { src: src.view(), through, dst: dst.view_mut() }).unwrap();
                        dst.view().to_f32()
                    });
                    for (i, x) in got.iter().enumerate() {
                        assert_eq!(x.to_bits(), to.round(through.round(src.view().get(i))).to_bits());
                    }
                }
            }
        }
    }
}
