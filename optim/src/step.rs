//! The ZeRO-3 training step. START HERE.

use crate::clip::{clip_factor, fold_blocks};
use crate::weights::Context;
use crate::{Clock, Error, Grads, Layout, Result, Role, Sharding, State, UnitLayout, Weights};
use collectives::Comm;
use spmd_core::ops::{BlockStats, OptimizerStep, Rule, SquaredNorm, StateHash, StepScalars};
use spmd_core::{Batch, Device, Precision, Stage, UnitModel};

/// Everything one rank trains with: the model and its activations, this rank's shards, and the buffers in between.
#[derive(Debug)]
pub struct Trainer<M> {
    /// The model: units, forward, backward.
    pub model: M,
    /// This rank's shards of weights and moments.
    pub state: State,
    /// How units are cut.
    pub layout: Layout,
    /// Kernels.
    pub device: Device,
    /// Ranks.
    pub comm: Comm,
    /// How state and gradients are spread over the ranks.
    pub sharding: Sharding,
    /// The ranks that share a copy of the state with this one.
    shard: Comm,
    /// The ranks that hold the same shard as this one.
    replicas: Comm,
    pub(crate) precision: Precision,
    pub(crate) stages: Vec<Stage>,
    pub(crate) weights: Weights,
    pub(crate) grads: Grads,
    clock: Clock,
    sums: Vec<f64>,
    stats: Vec<BlockStats>,
}

/// What gathers and exchanges need to know; a macro, because it borrows single fields.
macro_rules! context {
    ($t:expr) => {
        Context {
            device: &$t.device,
            shard: &$t.shard,
            replicas: &$t.replicas,
            layout: &$t.layout,
            state: &$t.state,
            clock: $t.clock,
        }
    };
}
/// What the optimizer does with a gradient, for one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// What becomes of it.
    pub rule: Rule,
    /// Learning rate of this step.
    pub lr: f64,
    /// β₁ of this step; its bias is corrected as if it had always been this.
    pub beta1: f64,
    /// β₂ of this step.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay, decoupled or L2 as the rule says.
    pub weight_decay: f64,
    /// Momentum of [`Rule::Sgd`].
    pub momentum: f64,
    /// Largest gradient norm; 0 is off.
    pub max_norm: f64,
    /// Seed of stochastic rounding.
    pub seed: u64,
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepReport {
    /// Mean loss of the global batch's targets before the step.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// The factor gradients were multiplied by.
    pub clip_coef: f64,
    /// Of the weights whose fp32 update is not zero, the share a bf16 weight would have lost; `None` if all are zero.
    pub swallowed: Option<f64>,
    /// Σ(applied·Δ)/ΣΔ²: 1 when the movement asked for is the movement made; `None` if all are zero.
    pub arrived: Option<f64>,
    /// Seconds this rank waited for other ranks' data.
    pub comm_seconds: f64,
    /// Seconds of norm, clipping and optimizer.
    pub optim_seconds: f64,
}

/// One optimizer step over this rank's lanes; `targets` counts the whole global batch's. `batches` holds one batch for each
/// pass of each micro-batch: of micro-batch 0 lanes `rank`, `world + rank`, …, then those of micro-batch 1.
///
/// Every unit is gathered before it is used and let go of after it; its gradient is summed over the lanes in a fixed order
/// and only this rank's slice of it is kept. `inspect` sees the accumulated gradients before they are clipped.
///
/// # Errors
/// [`Error::NotFinite`], on every rank and before any weight has changed; ranks that do not agree or are gone.
pub fn train_step<M: UnitModel>(
    t: &mut Trainer<M>,
    batches: &[Batch],
    targets: u64,
    hyper: &Hyper,
    inspect: &mut dyn FnMut(&M, &Grads),
) -> Result<StepReport> {
    let (stages, head) = (&t.stages, t.stages.len() - 1);
    t.grads.reset();
    t.sums.clear();
    let ctx = context!(t);
    for batch in batches {
        t.model.begin(batch, 1.0 / targets as f64)?;
        for s in 0..head {
            let weights = t.weights.gather(&ctx, &stages[s], Some(&stages[s + 1]))?;
            t.model.forward(s, &weights)?;
        }
        for s in (0..=head).rev() {
            let weights = t.weights.gather(&ctx, &stages[s], s.checked_sub(1).map(|below| &stages[below]))?;
            let mut full = t.grads.full(&t.layout, s)?;
            t.model.backward(s, &weights, &mut full[..stages[s].units.len()])?;
            t.grads.reduce_scatter(&ctx, s)?;
        }
        t.grads.end_pass(&ctx)?;
        t.sums.push(t.model.loss());
    }
    t.grads.finish(&ctx)?;
    inspect(&t.model, &t.grads);

    let before = (t.clock)();
    let (loss, grad_norm) = t.agree_on_loss_and_norm(batches.len(), targets)?;
    let clip_coef = clip_factor(grad_norm, hyper.max_norm, t.precision.clip);
    t.step_on_shadow(hyper, clip_coef)?;
    let (swallowed, arrived) = t.movement()?;
    t.weights.invalidate()?;
    let comm_seconds = std::mem::take(&mut t.weights.waited) + std::mem::take(&mut t.grads.waited);
    let optim_seconds = (t.clock)() - before;
    let clip_coef = clip_coef as f64;
    Ok(StepReport { loss, grad_norm, clip_coef, swallowed, arrived, comm_seconds, optim_seconds })
}

impl<M: UnitModel> Trainer<M> {
    /// A trainer with zero weights: fill them with [`State::load`].
    ///
    /// # Errors
    /// A group that does not divide the ranks; memory that could not be had.
    pub fn new(
        model: M,
        device: Device,
        comm: Comm,
        precision: Precision,
        sharding: Sharding,
        decay_norms: bool,
        clock: Clock,
    ) -> Result<Self> {
        let grid = sharding.grid(comm.rank(), comm.world())?;
        let layout = Layout::new(model.units(), grid, decay_norms);
        let blocks = layout.units.iter().map(UnitLayout::shard_blocks).sum::<usize>();
        let (units, stages) = (model.units().len(), model.stages());
        Ok(Trainer {
            state: State::new(&device, &layout, &precision)?,
            weights: Weights::new(precision.compute, units, stages, sharding.keeps_weights()),
            grads: Grads::new(&device, &layout, stages, precision, &sharding)?,
            sums: Vec::with_capacity(2 * blocks),
            shard: comm.contiguous(grid.shard)?,
            replicas: comm.strided(grid.shard)?,
            sharding,
            stats: vec![BlockStats::default(); blocks],
            stages: model.stages().to_vec(),
            model,
            layout,
            device,
            comm,
            precision,
            clock,
        })
    }

    /// The global mean loss and the gradient norm, the same numbers on every rank; an error on every rank if either is not
    /// finite. `sums` holds this rank's loss of each of its `batches`.
    fn agree_on_loss_and_norm(&mut self, batches: usize, targets: u64) -> Result<(f64, f64)> {
        for (u, unit) in self.layout.units.iter().enumerate() {
            let at = self.sums.len();
            self.sums.resize(at + unit.slice_blocks(), 0.0);
            self.device.squared_norm(SquaredNorm { x: self.grads.slice(u), sums: &mut self.sums[at..] })?;
        }
        let gathered = self.comm.gather_f64(&self.sums)?;
        let (world, passes) = (self.comm.world(), self.sharding.passes(self.comm.world()));
        let (mut losses, mut blocks) = (Vec::new(), Vec::new());
        for rank in gathered.chunks(self.sums.len()) {
            losses.extend_from_slice(&rank[..batches]);
            blocks.extend_from_slice(&rank[batches..]);
        }
        // Added in micro-batch, then lane order.
        let mut loss = 0.0;
        for j in 0..batches / passes {
            for lane in 0..self.sharding.lanes {
                let (pass, rank) = (lane / world, lane % world);
                let value = losses[rank * batches + j * passes + pass];
                if !value.is_finite() {
                    return Err(Error::NotFinite { what: format!("the loss of micro-batch {j}"), value, rank });
                }
                loss += value;
            }
        }
        let (mut squares, mut bad) = (0.0, None);
        let grid = self.layout.grid;
        let owner = |slice| grid.owner(slice);
        fold_blocks(&self.layout, &blocks, world, UnitLayout::slice_blocks, owner, |unit, rank, x| {
            squares += x;
            if !x.is_finite() && bad.is_none() {
                bad = Some((unit, rank, x));
            }
        });
        match bad {
            Some((unit, rank, value)) => {
                let what = format!("the gradient of {}", self.model.units()[unit].name);
                Err(Error::NotFinite { what, value, rank })
            }
            None => Ok((loss / targets as f64, squares.sqrt())),
        }
    }

    /// The optimizer on this rank's shards.
    fn step_on_shadow(&mut self, hyper: &Hyper, clip_coef: f32) -> Result<()> {
        self.state.step += 1;
        let scalars = StepScalars {
            lr: hyper.lr,
            beta1: hyper.beta1,
            beta2: hyper.beta2,
            eps: hyper.eps,
            weight_decay: hyper.weight_decay,
            momentum: hyper.momentum,
            t: self.state.step,
            clip_coef,
            seed: hyper.seed,
        };
        let mut at = 0;
        for (u, layout) in self.layout.units.iter().enumerate() {
            let stats = &mut self.stats[at..at + layout.shard_blocks()];
            at += stats.len();
            let grad = self.grads.shard(&context!(self), u)?;
            let unit = &mut self.state.units[u];
            self.device.optimizer_step(OptimizerStep {
                shadow: unit.shadow.view_mut(),
                exp_avg: unit.exp_avg.view_mut(),
                exp_avg_sq: unit.exp_avg_sq.view_mut(),
                grad,
                pieces: &self.layout.pieces[u],
                scalars,
                rule: hyper.rule,
                arithmetic: self.precision.arithmetic,
                rounding: self.precision.rounding,
                stats,
            })?;
        }
        Ok(())
    }

    /// `swallowed` and `arrived` of the step just made, over all weights: every copy of the state made the same step.
    fn movement(&mut self) -> Result<(Option<f64>, Option<f64>)> {
        let asked: u64 = self.stats.iter().map(|s| s.asked).sum();
        let swallowed: u64 = self.stats.iter().map(|s| s.swallowed).sum();
        self.sums.clear();
        // Counts are exact in f64 up to 2^53 weights.
        self.sums.extend([asked as f64, swallowed as f64]);
        self.sums.extend(self.stats.iter().map(|s| s.applied_dot));
        self.sums.extend(self.stats.iter().map(|s| s.asked_sq));
        let gathered = self.shard.gather_f64(&self.sums)?;
        let (mut asked, mut swallowed) = (0.0, 0.0);
        let (mut dots, mut squares) = (Vec::new(), Vec::new());
        for rank in gathered.chunks(self.sums.len()) {
            asked += rank[0];
            swallowed += rank[1];
            let (dot, sq) = rank[2..].split_at((rank.len() - 2) / 2);
            dots.extend_from_slice(dot);
            squares.extend_from_slice(sq);
        }
        let total = |blocks: &[f64]| {
            let mut sum = 0.0;
            let parts = self.shard.world();
            fold_blocks(&self.layout, blocks, parts, UnitLayout::shard_blocks, |part| part, |_, _, x| sum += x);
            sum
        };
        let (applied_dot, asked_sq) = (total(&dots), total(&squares));
        Ok(((asked > 0.0).then(|| swallowed / asked), (asked_sq > 0.0).then(|| applied_dot / asked_sq)))
    }

    /// A hash of every weight and both its moments, the same for every world, group and number of threads (see
    /// [`StateHash`]). Every copy of the state is hashed.
    ///
    /// # Errors
    /// [`Error::Drift`] on every rank if two copies differ; ranks that do not agree or are gone.
    pub fn state_hash(&self) -> Result<u64> {
        let mut own = 0;
        for (unit, pieces) in self.state.units.iter().zip(&self.layout.pieces) {
            for role in Role::ALL {
                let (x, salt) = (unit.role(role), role as u64);
                self.device.state_hash(StateHash { x, pieces, salt, sum: &mut own })?;
            }
        }
        let all = self.comm.gather_u64(&[own])?;
        let add = |copy: &[u64]| copy.iter().fold(0, |sum: u64, hash| sum.wrapping_add(*hash));
        let hashes: Vec<u64> = all.chunks(self.layout.grid.shard).map(add).collect();
        match hashes.iter().all(|hash| *hash == hashes[0]) {
            true => Ok(hashes[0]),
            false => Err(Error::Drift { hashes }),
        }
    }
}
