//! The contract at the centre: a model is an ordered list of *units* (embedding, each block, head). A unit is what is
//! gathered, computed, reduced and released together.

use crate::{Result, View, ViewMut};
use std::ops::Range;

/// What a parameter is, as far as the optimizer and initialisation care.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// A matrix (embedding, projection): weight decay applies, drawn from N(0, std²).
    Matrix,
    /// A norm gain: exempt from decay unless asked for, starts at one.
    Gain,
}

/// One parameter: its Hugging Face name, its shape and what it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ParamSpec {
    /// The name in the model's files, which is also its identity for randomness.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Matrix or gain.
    pub kind: ParamKind,
}

impl ParamSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One unit: its parameters lie one after another, without gaps, in one flat buffer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct UnitSpec {
    /// A short name for tables: `embed`, `block 3`, `head`.
    pub name: String,
    /// Its parameters in flat order.
    pub params: Vec<ParamSpec>,
}

impl UnitSpec {
    /// Number of elements without padding.
    pub fn len(&self) -> usize {
        self.params.iter().map(ParamSpec::len).sum()
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where each parameter lies in the flat buffer, in order.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let mut at = 0;
        self.params
            .iter()
            .map(|p| {
                let start = at;
                at += p.len();
                start..at
            })
            .collect()
    }
}

/// One stop of the walk: the units it needs gathered at once. Mostly one; a head with a tied weight needs the embedding
/// unit too. Gradients come back per listed unit, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stage {
    /// Indices into [`UnitModel::units`].
    pub units: Vec<usize>,
}

/// One micro-batch: `rows` sequences padded on the right to `cols` tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Number of sequences; may be zero (a lane without rows still takes part).
    pub rows: usize,
    /// Tokens a sequence, padding included.
    pub cols: usize,
    /// Token ids, row-major, `rows * cols`.
    pub ids: Vec<u32>,
    /// The token each position should predict, already shifted; [`Batch::NO_TARGET`] where there is no loss.
    pub targets: Vec<u32>,
    /// Tokens that are not padding.
    pub tokens: usize,
}

impl Batch {
    /// No loss at this position.
    pub const NO_TARGET: u32 = u32::MAX;

    /// Positions that have a target.
    pub fn supervised(&self) -> usize {
        self.targets.iter().filter(|t| **t != Batch::NO_TARGET).count()
    }
}

/// A model as the training step sees it. Single-device code: it never sees a rank, a shard or a dtype decision.
///
/// One micro-batch is `begin`, then `forward` for every stage but the last in order, then `backward` for every stage from
/// the last to the first. The last stage's backward computes logits, loss and their gradients chunk by chunk, so logits
/// never exist for the whole micro-batch.
pub trait UnitModel {
    /// The units in order.
    fn units(&self) -> &[UnitSpec];

    /// The stages in forward order; the last one holds the head.
    fn stages(&self) -> &[Stage];

    /// Takes a micro-batch. `inv_targets` is 1/N with N the targets of the whole global batch, and enters at dlogits.
    ///
    /// # Errors
    /// A batch larger than the model was made for, or a token id outside the vocabulary.
    fn begin(&mut self, batch: &Batch, inv_targets: f64) -> Result<()>;

    /// Runs stage `stage` (not the last) on gathered weights, one flat compute-dtype view per unit of the stage.
    ///
    /// # Errors
    /// A shape that does not fit.
    fn forward(&mut self, stage: usize, weights: &[View<'_>]) -> Result<()>;

    /// Runs the backward of stage `stage`, overwriting `grads` (fp32, one flat view per unit of the stage, unpadded) with
    /// this micro-batch's gradient.
    ///
    /// # Errors
    /// A shape that does not fit.
    fn backward(&mut self, stage: usize, weights: &[View<'_>], grads: &mut [ViewMut<'_>]) -> Result<()>;

    /// Runs the last stage for the loss alone: evaluation without gradients.
    ///
    /// # Errors
    /// A shape that does not fit.
    fn evaluate(&mut self, weights: &[View<'_>]) -> Result<()>;

    /// Sum of the targets' losses of this micro-batch (natural log, not divided), in f64.
    fn loss(&self) -> f64;
}
