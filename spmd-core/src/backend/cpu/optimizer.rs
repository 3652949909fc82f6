//! The optimizer's kernels: squares for the norm, and one step on a shard.
//!
//! A step works block by block, and within a block on tiles of [`TILE`] positions: a tile's elements are loaded as fp32
//! into arrays on the stack, stepped there, and stored. So one body serves every mix of dtypes, and its loops have a
//! constant length. Positions of a tile that a piece does not cover hold zeros, which step to zeros and count for
//! nothing.

mod step;

use super::threads::Threads;
use crate::dtype::Element;
use crate::ops::{BLOCK, BlockStats, OptimizerStep, Piece, SquaredNorm, StepScalars};
use crate::precision::Rounding;
use crate::rng::{Purpose, Stream, stochastic_bf16};
use crate::{Result, View, ViewMut, each_dtype};
use multiversion::multiversion;
use std::ops::Range;
use step::{Asked, Factors, TILE, Tile};

/// Squares of a block's half, the widest level of the tree that is kept.
const HALF: usize = BLOCK / 2;

pub(super) fn squared_norm(threads: &Threads, args: SquaredNorm<'_>) -> Result<()> {
    let SquaredNorm { x, sums } = args;
    each_dtype!(x, x => threads.chunks(sums, 1, |i, sum| {
        sum[0] = squares(&x[i * BLOCK..x.len().min((i + 1) * BLOCK)]);
    }));
    Ok(())
}

/// Σ x² of one block: of 4096 squares (an fp32 number's square is exact in f64; missing ones are zero), square `i` is
/// added to square `i + 2048`, and so on with half the distance until one number is left.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn squares<E: Element>(x: &[E]) -> f64 {
    let mut tree = [0.0f64; HALF];
    let (low, high) = x.split_at(x.len().min(HALF));
    for (sum, x) in tree.iter_mut().zip(low) {
        *sum = x.load() as f64 * x.load() as f64;
    }
    for (sum, x) in tree.iter_mut().zip(high) {
        *sum += x.load() as f64 * x.load() as f64;
    }
    let mut width = HALF / 2;
    while width > 0 {
        let (low, high) = tree[..2 * width].split_at_mut(width);
        for (a, b) in low.iter_mut().zip(high) {
            *a += *b;
        }
        width /= 2;
    }
    tree[0]
}

pub(super) fn optimizer_step(threads: &Threads, args: OptimizerStep<'_>) -> Result<()> {
    let OptimizerStep { shadow, exp_avg, exp_avg_sq, grad, pieces, scalars, rule, arithmetic, rounding, stats } = args;
    let factors = Factors::new(&scalars, rule, arithmetic);
    let data = (((shadow, BLOCK), (exp_avg, BLOCK)), ((exp_avg_sq, BLOCK), (&mut *stats, 1)));
    threads.parts(data.0.0.0.len().div_ceil(BLOCK), data, |block, data| {
        let (((shadow, _), (exp_avg, _)), ((exp_avg_sq, _), (stats, _))) = data;
        let range = block * BLOCK..block * BLOCK + shadow.len();
        // Pieces are in order and none crosses a block border, so those of a block are neighbours.
        let from = pieces.partition_point(|p| p.range.end <= range.start);
        let to = from + pieces[from..].partition_point(|p| p.range.start < range.end);
        let grad = grad.slice(range);
        let mut block = Block { start: block * BLOCK, shadow, exp_avg, exp_avg_sq, grad };
        stats[0] = block.step(&pieces[from..to], &factors, &scalars, rounding);
    });
    Ok(())
}

/// One block of the shard.
struct Block<'a> {
    /// Its first element's place in the shard.
    start: usize,
    shadow: ViewMut<'a>,
    exp_avg: ViewMut<'a>,
    exp_avg_sq: ViewMut<'a>,
    grad: View<'a>,
}

impl Block<'_> {
    /// Steps the pieces in order. The statistics' sums run over [`step::LANES`] lanes by position in the block.
    fn step(&mut self, pieces: &[Piece], factors: &Factors, scalars: &StepScalars, rounding: Rounding) -> BlockStats {
        let mut asked = Asked::default();
        for piece in pieces {
            let streams = match rounding {
                Rounding::Nearest => None,
                Rounding::Stochastic => Some(Streams::new(scalars, piece.tensor)),
            };
            let (mut at, end) = (piece.range.start - self.start, piece.range.end - self.start);
            while at < end {
                let stop = end.min((at / TILE + 1) * TILE);
                let index = piece.first_index + (self.start + at - piece.range.start) as u64;
                self.step_tile(at..stop, piece.decay, factors, streams.as_ref().map(|s| (s, index)), &mut asked);
                at = stop;
            }
        }
        asked.total()
    }

    /// Steps `range` of the block, which lies inside one tile and one piece. `random`: the streams and the index within
    /// the parameter of the range's first element.
    fn step_tile(
        &mut self,
        range: Range<usize>,
        decay: bool,
        factors: &Factors,
        random: Option<(&Streams, u64)>,
        asked: &mut Asked,
    ) {
        let inside = range.start % TILE..range.start % TILE + range.len();
        let mut tile = Tile::zeros();
        load(self.shadow.as_view(), &range, &mut tile.p[inside.clone()]);
        load(self.exp_avg.as_view(), &range, &mut tile.m[inside.clone()]);
        load(self.exp_avg_sq.as_view(), &range, &mut tile.v[inside.clone()]);
        load(self.grad, &range, &mut tile.g[inside.clone()]);
        let before = tile.p;
        tile.step(factors, decay);
        let shadow = random.map(|(s, index)| (&s.shadow, index));
        store(&mut self.shadow, &range, &mut tile.p[inside.clone()], shadow);
        store(&mut self.exp_avg, &range, &mut tile.m[inside.clone()], random.map(|(s, index)| (&s.exp_avg, index)));
        store(&mut self.exp_avg_sq, &range, &mut tile.v[inside], random.map(|(s, index)| (&s.exp_avg_sq, index)));
        asked.count(&before, &tile);
    }
}

/// The randomness of one parameter's three stored numbers at one step.
struct Streams {
    shadow: Stream,
    exp_avg: Stream,
    exp_avg_sq: Stream,
}

impl Streams {
    fn new(scalars: &StepScalars, tensor: u64) -> Self {
        let stream = |purpose| Stream::new(scalars.seed, purpose, tensor, scalars.t);
        Streams {
            shadow: stream(Purpose::RoundShadow),
            exp_avg: stream(Purpose::RoundExpAvg),
            exp_avg_sq: stream(Purpose::RoundExpAvgSq),
        }
    }
}

fn load(from: View<'_>, range: &Range<usize>, to: &mut [f32]) {
    each_dtype!(from, from => super::elementwise::cast_run(&from[range.clone()], crate::DType::F32, to));
}

/// Rounds `from` to the view's dtype, leaves it rounded, and writes it.
fn store(to: &mut ViewMut<'_>, range: &Range<usize>, from: &mut [f32], random: Option<(&Stream, u64)>) {
    match (to, random) {
        (ViewMut::Bf16(to), Some((stream, index))) => {
            round_randomly(from, stream, index);
            super::elementwise::cast_run(from, crate::DType::F32, &mut to[range.clone()]);
        }
        (ViewMut::Bf16(to), None) => {
            super::elementwise::cast_run(from, crate::DType::F32, &mut to[range.clone()]);
            super::elementwise::cast_run(&to[range.clone()], crate::DType::F32, from);
        }
        (ViewMut::F32(to), _) => to[range.clone()].copy_from_slice(from),
    }
}

/// Element `i` is rounded with word `index + i` of the stream. At most a tile.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn round_randomly(x: &mut [f32], stream: &Stream, index: u64) {
    let skip = (index % 4) as usize;
    let mut blocks = [[0u32; 4]; TILE / 4 + 1];
    let used = (skip + x.len()).div_ceil(4);
    stream.fill(index / 4, &mut blocks[..used]);
    for (x, word) in x.iter_mut().zip(&blocks.as_flattened()[skip..]) {
        *x = stochastic_bf16(*x, *word);
    }
}

#[cfg(test)]
mod tests;
