//! Which row goes where. The order belongs to the run (seed, epoch, lanes), never to the number of ranks.
//!
//! Step s of an epoch, micro-batch j, lane g, row i reads row `((s·accum + j)·lanes + g)·micro_batch + i` of the epoch's
//! order. The last step of an epoch takes what is left: its micro-batches may have lanes with fewer rows or none, those
//! that would be empty on every lane do not exist, and nothing is taken from the next epoch.

use super::rows::Dataset;
use crate::{Failure, Result};
use spmd_core::Batch;
use spmd_core::rng::{Purpose, Stream};
use std::ops::Range;

#[cfg(test)]
mod tests;

/// How rows are dealt to steps, micro-batches and lanes.
#[derive(Debug, Clone)]
pub struct Sampler {
    data: Dataset,
    micro_batch: usize,
    accum: usize,
    lanes: usize,
    /// Seed of the shuffle; `None` keeps the order of the files.
    shuffle: Option<u64>,
    /// The epoch whose order `order` is, under a shuffle.
    epoch: Option<u64>,
    order: Vec<u32>,
}

impl Sampler {
    /// Deals the rows of `data`: `micro_batch` rows a lane and micro-batch, `accum` micro-batches a step, over `lanes`.
    ///
    /// # Errors
    /// Exit 3 when there are fewer rows than one step needs; exit 2 when one of the three is zero.
    pub fn new(
        data: Dataset,
        micro_batch: usize,
        accum: usize,
        lanes: usize,
        shuffle: bool,
        seed: u64,
    ) -> Result<Self> {
        for (name, value) in [("--micro-batch", micro_batch), ("--accum", accum), ("--lanes", lanes)] {
            if value == 0 {
                return Err(Failure::usage(format!("{name} is 0")).at(name).expected("at least 1").found(0));
            }
        }
        let global = micro_batch.checked_mul(accum).and_then(|n| n.checked_mul(lanes));
        if global.is_none_or(|global| data.len() < global) {
            let needed = global.map_or("more than can be counted".to_owned(), |n| n.to_string());
            return Err(Failure::input("the data has fewer rows than one step needs")
                .expected(format!("{needed} rows: micro-batch {micro_batch} × accum {accum} × lanes {lanes}"))
                .found(format!("{} rows", data.len()))
                .hint("lower --micro-batch or --accum, use fewer ranks, or give more rows (a shorter --seq-len cuts plain text into more)"));
        }
        u32::try_from(data.len()).map_err(|_| Failure::input("more rows than 32 bits count").found(data.len()))?;
        let shuffle = shuffle.then_some(seed);
        Ok(Sampler { data, micro_batch, accum, lanes, shuffle, epoch: None, order: Vec::new() })
    }

    /// The rows.
    pub fn data(&self) -> &Dataset {
        &self.data
    }

    /// Steps of an epoch, the short last one included.
    pub fn steps_per_epoch(&self) -> u64 {
        (self.data.len() as u64).div_ceil(self.global_rows() as u64)
    }

    /// The epoch of step `step` of the run, and the step within it.
    pub fn epoch(&self, step: u64) -> (u64, u64) {
        (step / self.steps_per_epoch(), step % self.steps_per_epoch())
    }

    /// Micro-batches of step `step` of the run: `accum`, fewer in an epoch's last step.
    pub fn micro_batches(&self, step: u64) -> usize {
        self.span(step).len().div_ceil(self.lanes * self.micro_batch)
    }

    /// What lane `lane` computes in micro-batch `micro` of step `step`: its rows padded on the right with id 0 to the
    /// longest of them, targets shifted. Without rows it is the empty batch.
    pub fn batch(&mut self, step: u64, micro: usize, lane: usize) -> Batch {
        let span = self.span(step);
        let first = span.start + (micro * self.lanes + lane) * self.micro_batch;
        let rows: Vec<usize> =
            (first..(first + self.micro_batch).min(span.end)).map(|at| self.row_at(step, at)).collect();
        self.padded(&rows)
    }

    /// Targets of the whole global batch of step `step`, over all lanes and micro-batches.
    pub fn supervised(&mut self, step: u64) -> u64 {
        self.rows_of(step).into_iter().map(|row| self.data.supervised(row) as u64).sum()
    }

    /// [`Sampler::supervised`], for a step that must have one.
    ///
    /// # Errors
    /// Exit 3 naming the step's rows when there is none.
    pub fn targets(&mut self, step: u64) -> Result<u64> {
        match self.supervised(step) {
            0 => {
                let places: Vec<String> = self.rows_of(step).into_iter().map(|row| self.data.place(row)).collect();
                Err(Failure::input(format!("step {step} has nothing to predict"))
                    .at(crate::hf::shortened(&places))
                    .expected("a label that is not -100 after the first position, in some row of the step")
                    .found(format!("{} rows without a target", places.len()))
                    .hint("remove these rows or correct their labels, or raise --accum so that a step holds more rows"))
            }
            targets => Ok(targets),
        }
    }

    /// Rows of the whole global batch of step `step`, as indices into [`Sampler::data`].
    pub fn rows_of(&mut self, step: u64) -> Vec<usize> {
        self.span(step).map(|at| self.row_at(step, at)).collect()
    }

    /// Rows of a full step, over all lanes and micro-batches.
    pub fn global_rows(&self) -> usize {
        self.micro_batch * self.accum * self.lanes
    }

    /// Positions in the epoch's order that belong to step `step` of the run.
    fn span(&self, step: u64) -> Range<usize> {
        let start = self.epoch(step).1 as usize * self.global_rows();
        start..(start + self.global_rows()).min(self.data.len())
    }

    fn row_at(&mut self, step: u64, at: usize) -> usize {
        let Some(seed) = self.shuffle else { return at };
        let (epoch, _) = self.epoch(step);
        if self.epoch != Some(epoch) {
            shuffled(&mut self.order, self.data.len(), seed, epoch);
            self.epoch = Some(epoch);
        }
        self.order[at] as usize
    }

    fn padded(&self, rows: &[usize]) -> Batch {
        let cols = rows.iter().map(|row| self.data.row(*row).ids.len()).max().unwrap_or(0);
        let mut batch = Batch {
            rows: rows.len(),
            cols,
            ids: vec![0; rows.len() * cols],
            targets: vec![Batch::NO_TARGET; rows.len() * cols],
            tokens: 0,
        };
        for (i, row) in rows.iter().enumerate() {
            let row = self.data.row(*row);
            let (start, len) = (i * cols, row.ids.len());
            batch.ids[start..start + len].copy_from_slice(row.ids);
            batch.targets[start..start + len - 1].copy_from_slice(&row.labels[1..]);
            batch.tokens += len;
        }
        batch
    }
}

/// The permutation of epoch `epoch`: Fisher-Yates, draw i below i + 1 from counter i. A function of (seed, epoch, n) alone.
fn shuffled(order: &mut Vec<u32>, n: usize, seed: u64, epoch: u64) {
    let stream = Stream::new(seed, Purpose::Shuffle, 0, epoch);
    order.clear();
    order.extend((0..n).map(|i| i as u32));
    for i in (1..n).rev() {
        order.swap(i, stream.below(i as u64, i as u64 + 1) as usize);
    }
}
