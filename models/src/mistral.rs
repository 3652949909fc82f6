//! The model as the training step sees it: which unit calls what.

use crate::Config;
use crate::acts::Acts;
use crate::block::{self, Call};
use crate::cache::KvCache;
use crate::head::{self, HeadGrads, HeadWeights, Loss};
use crate::params;
use crate::rope::RopeTable;
use spmd_core::ops::{EmbeddingBackward, EmbeddingForward};
use spmd_core::{Batch, DType, Device, Error, Result, Stage, UnitModel, UnitSpec, View, ViewMut};

/// A Mistral or Llama model on one device: its geometry and the activations of one micro-batch, but no weights.
#[derive(Debug)]
pub struct Mistral {
    config: Config,
    device: Device,
    units: Vec<UnitSpec>,
    stages: Vec<Stage>,
    rope: RopeTable,
    acts: Acts,
    max_tokens: usize,
    max_seq_len: usize,
    batch: Batch,
    inv_targets: f64,
    loss: f64,
    logits: Option<Vec<f32>>,
    first_position: usize,
}

/// What the blocks need to know of the micro-batch; a macro, because it borrows single fields.
macro_rules! call {
    ($model:ident) => {
        Call {
            device: &$model.device,
            config: &$model.config,
            rope: &$model.rope,
            batch: $model.batch.rows,
            seq_len: $model.batch.cols,
            first_position: $model.first_position,
        }
    };
}

impl Mistral {
    /// A model for micro-batches of up to `max_rows` sequences of up to `max_seq_len` tokens, computing in `compute`.
    /// Allocates every activation now. With `recompute` each block keeps its input alone, and its backward computes the
    /// rest of its activations once more: less memory, more time, the same bits.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(
        device: Device,
        config: Config,
        compute: DType,
        max_rows: usize,
        max_seq_len: usize,
        recompute: bool,
    ) -> Result<Self> {
        let max_tokens = max_rows * max_seq_len;
        let acts = Acts::new(&device, &config, compute, max_tokens, recompute)?;
        Ok(Mistral {
            units: params::units(&config),
            stages: params::stages(&config),
            rope: RopeTable::new(&config, max_seq_len),
            acts,
            config,
            device,
            max_tokens,
            max_seq_len,
            batch: Batch::default(),
            inv_targets: 0.0,
            loss: 0.0,
            logits: None,
            first_position: 0,
        })
    }

    /// Its architecture.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// From the next micro-batch on, collects the logits of every position (`rows · cols · V` fp32 values): for dumps.
    pub fn collect_logits(&mut self) {
        self.logits = Some(Vec::new());
    }

    /// The logits collected since [`Mistral::collect_logits`], which ends the collection.
    pub fn take_logits(&mut self) -> Option<Vec<f32>> {
        self.logits.take()
    }

    fn run_head(&mut self, weights: &[View<'_>], grads: Option<&mut [ViewMut<'_>]>) -> Result<()> {
        let d = self.config.hidden_size;
        let own = weights[0];
        let matrix = if self.config.tied { weights[1] } else { own.slice(d..own.len()) };
        let grads = match grads {
            None => None,
            Some([own]) => {
                let (gain, matrix) = own.reborrow().f32("head", "grads")?.split_at_mut(d);
                Some(HeadGrads { gain, matrix })
            }
            Some([own, table]) => Some(HeadGrads {
                gain: own.reborrow().f32("head", "grads")?,
                matrix: table.reborrow().f32("head", "grads")?,
            }),
            Some(other) => {
                return Err(wrong_count("grads", self.stages.last().map_or(1, |s| s.units.len()), other.len()));
            }
        };
        let call = call!(self);
        let loss = Loss {
            targets: &self.batch.targets,
            scale: self.inv_targets as f32,
            sum: &mut self.loss,
            sink: self.logits.as_mut(),
        };
        head::run(&call, HeadWeights { gain: own.slice(0..d), matrix }, &mut self.acts, loss, grads)
    }

    /// Makes the rotary table long enough for `positions` positions: generation goes beyond the prompt.
    pub fn reserve_positions(&mut self, positions: usize) {
        self.rope = RopeTable::new(&self.config, positions);
    }

    /// Takes the next tokens of a sequence whose first `first_position` tokens are in a cache already: the whole prompt at
    /// position 0, or one token.
    ///
    /// # Errors
    /// More tokens than the model was made for, or a token id outside the vocabulary.
    pub fn begin_decode(&mut self, ids: &[u32], first_position: usize) -> Result<()> {
        let targets = vec![Batch::NO_TARGET; ids.len()];
        let batch = Batch { rows: 1, cols: ids.len(), ids: ids.to_vec(), targets, tokens: ids.len() };
        self.begin(&batch, 0.0)?;
        self.first_position = first_position;
        Ok(())
    }

    /// Runs stage `stage` of a decoding step; the last stage returns the logits that follow the last token.
    ///
    /// # Errors
    /// A shape that does not fit.
    pub fn decode(&mut self, stage: usize, weights: &[View<'_>], cache: &mut KvCache) -> Result<Option<Vec<f32>>> {
        self.check_weights(stage, weights)?;
        if stage + 1 < self.stages.len() {
            self.run_stage(stage, weights, Some(cache))?;
            return Ok(None);
        }
        // Only the last row's logits are wanted: it takes the place of the first.
        let (d, last) = (self.config.hidden_size, self.batch.ids.len() - 1);
        let hidden = &mut self.acts.hidden[self.config.layers];
        let row = hidden.view().slice(last * d..(last + 1) * d).to_f32();
        hidden.view_mut().slice(0..d).copy_from_f32(&row);
        self.batch.targets.truncate(1);
        self.collect_logits();
        self.run_head(weights, None)?;
        Ok(self.take_logits())
    }

    fn run_stage(&mut self, stage: usize, weights: &[View<'_>], cache: Option<&mut KvCache>) -> Result<()> {
        if stage == 0 {
            let (ids, dim) = (&self.batch.ids[..], self.config.hidden_size);
            let out = self.acts.hidden[0].view_mut().slice(0..ids.len() * dim);
            return self.device.embedding_forward(EmbeddingForward { ids, table: weights[0], out, dim });
        }
        let call = call!(self);
        block::forward(&call, stage - 1, weights[0], &mut self.acts, cache)
    }

    fn is_empty(&self) -> bool {
        self.batch.ids.is_empty()
    }

    fn check_weights(&self, stage: usize, weights: &[View<'_>]) -> Result<()> {
        let units = &self.stages[stage].units;
        if weights.len() != units.len() {
            return Err(wrong_count("weights", units.len(), weights.len()));
        }
        for (w, u) in weights.iter().zip(units) {
            if w.len() != self.units[*u].len() {
                return Err(wrong_count("weights", self.units[*u].len(), w.len()));
            }
        }
        Ok(())
    }
}

fn wrong_count(what: &'static str, expected: usize, found: usize) -> Error {
    Error::Shape { op: "stage", what, expected: expected.to_string(), found: found.to_string() }
}

impl UnitModel for Mistral {
    fn units(&self) -> &[UnitSpec] {
        &self.units
    }

    fn stages(&self) -> &[Stage] {
        &self.stages
    }

    fn begin(&mut self, batch: &Batch, inv_targets: f64) -> Result<()> {
        let tokens = batch.rows * batch.cols;
        if tokens > self.max_tokens || batch.cols > self.max_seq_len {
            return Err(Error::Shape {
                op: "begin",
                what: "batch",
                expected: format!("at most {} tokens in rows of at most {}", self.max_tokens, self.max_seq_len),
                found: format!("{} rows of {}", batch.rows, batch.cols),
            });
        }
        if batch.ids.len() != tokens || batch.targets.len() != tokens {
            return Err(wrong_count("batch", tokens, batch.ids.len().min(batch.targets.len())));
        }
        self.batch.clone_from(batch);
        self.inv_targets = inv_targets;
        self.loss = 0.0;
        self.first_position = 0;
        Ok(())
    }

    fn forward(&mut self, stage: usize, weights: &[View<'_>]) -> Result<()> {
        self.check_weights(stage, weights)?;
        if self.is_empty() {
            return Ok(());
        }
        self.run_stage(stage, weights, None)
    }

    fn backward(&mut self, stage: usize, weights: &[View<'_>], grads: &mut [ViewMut<'_>]) -> Result<()> {
        self.check_weights(stage, weights)?;
        if grads.len() != weights.len() {
            return Err(wrong_count("grads", weights.len(), grads.len()));
        }
        if self.is_empty() {
            // A lane without rows still takes part in every sum, with zeros.
            grads.iter_mut().for_each(ViewMut::zero);
            return Ok(());
        }
        if stage + 1 == self.stages.len() {
            return self.run_head(weights, Some(grads));
        }
        if stage == 0 {
            let (ids, dim) = (&self.batch.ids[..], self.config.hidden_size);
            let d_out = self.acts.d_hidden.view().slice(0..ids.len() * dim);
            let d_table = grads[0].reborrow().f32("embedding", "grads")?;
            return self.device.embedding_backward(EmbeddingBackward { ids, d_out, d_table, dim });
        }
        let call = call!(self);
        block::backward(&call, stage - 1, weights[0], &mut self.acts, grads[0].reborrow())
    }

    fn evaluate(&mut self, weights: &[View<'_>]) -> Result<()> {
        self.check_weights(self.stages.len() - 1, weights)?;
        if self.is_empty() {
            return Ok(());
        }
        self.run_head(weights, None)
    }

    fn loss(&self) -> f64 {
        self.loss
    }
}
