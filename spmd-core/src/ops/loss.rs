//! Cross-entropy over a chunk of rows of logits.

use crate::error::expect_len;
use crate::{Batch, Error, Result, ViewMut};

/// For each row with a target: `loss += ln Σ_v e^{z_v} − z_target` (fp32 inside a row, f64 across rows, in row order for
/// any number of threads). With `gradient`, `logits` become `R((softmax(z) − onehot)·scale)`, zero where there is no target.
#[derive(Debug)]
pub struct CrossEntropy<'a> {
    /// `[T,V]`; overwritten with dlogits when `gradient` is set.
    pub logits: ViewMut<'a>,
    /// `[T]`, [`Batch::NO_TARGET`] where there is no loss.
    pub targets: &'a [u32],
    /// 1/N.
    pub scale: f32,
    /// Whether dlogits are wanted.
    pub gradient: bool,
    /// The sum is added here.
    pub loss: &'a mut f64,
}

impl CrossEntropy<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "cross_entropy";
        let vocab = self.logits.len() / self.targets.len().max(1);
        expect_len(op, "logits", vocab * self.targets.len(), self.logits.len())?;
        match self.targets.iter().position(|t| *t != Batch::NO_TARGET && *t as usize >= vocab) {
            Some(position) => Err(Error::TokenId { op, id: self.targets[position], position, vocab }),
            None => Ok(()),
        }
    }
}
