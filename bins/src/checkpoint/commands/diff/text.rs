//! What a comparison says.

use super::super::plain;
use super::{Compared, Facts, First};
use crate::table::{Align, render};
use crate::{Failure, Result};
use serde_json::Value;

/// The most settings and unpaired tensors that are listed; the rest is counted.
const LISTED: usize = 40;

impl Compared {
    /// The result in one line, and what is worth saying beside it.
    pub(crate) fn text(&self) -> String {
        let mut out = if self.same() {
            let Facts { step, weights, hash, .. } = &self.a;
            format!("same state (step {step}, {weights} weights, hash {hash:016x})\n")
        } else {
            self.differences()
        };
        for count in self.roles.iter().filter(|count| count.dtypes[0] != count.dtypes[1]) {
            let [a, b] = count.dtypes;
            out += &format!("{} is stored in {a} in A and in {b} in B; both were widened to fp32\n", count.role);
        }
        if !self.settings.is_empty() {
            out += "\nsettings that differ, which is not part of the state:\n";
            let mut rows = vec![["setting", "A", "B"].map(str::to_owned).to_vec()];
            let row = |(name, a, b): &(String, Value, Value)| vec![name.clone(), plain(a), plain(b)];
            rows.extend(self.settings.iter().take(LISTED).map(row));
            out += &render(&[Align::Left; 3], &rows);
            out += &more(self.settings.len());
        }
        out
    }

    /// Nothing if the states are the same.
    ///
    /// # Errors
    /// Exit 3 if they are not.
    pub(crate) fn verdict(&self) -> Result<()> {
        if self.same() {
            return Ok(());
        }
        let (a, b) = (&self.a, &self.b);
        let found = match (&self.first, self.unpaired.first()) {
            _ if a.step != b.step => format!("step {} and step {}", a.step, b.step),
            (_, Some(tensor)) => format!("other tensors: {tensor}"),
            (Some(first), None) => format!("first in {} of {}", first.role, first.tensor),
            (None, None) => "no difference".to_owned(),
        };
        Err(Failure::input("the checkpoints are not the same state")
            .at(format!("{}\n{}", a.dir.display(), b.dir.display()))
            .expected("the same step, and the same bits of every weight and both its moments")
            .found(found))
    }

    fn differences(&self) -> String {
        let mut out = "not the same state\n".to_owned();
        for (name, side) in [("A", &self.a), ("B", &self.b)] {
            let Facts { dir, step, weights, hash, .. } = side;
            out += &format!("{name}  {}: step {step}, {weights} weights, hash {hash:016x}\n", dir.display());
        }
        for tensor in self.unpaired.iter().take(LISTED) {
            out += &format!("tensor {tensor}\n");
        }
        out += &more(self.unpaired.len());
        match &self.first {
            Some(first) => out += &first_text(first),
            None => out += "every number of the tensors that both have is the same\n",
        }
        if self.first.is_some() {
            let mut rows = vec![["role", "tensors that differ", "elements that differ"].map(str::to_owned).to_vec()];
            rows.extend(self.roles.iter().map(|count| {
                vec![count.role.to_string(), count.tensors_differ.to_string(), count.elements_differ.to_string()]
            }));
            out += &render(&[Align::Left, Align::Right, Align::Right], &rows);
        }
        out
    }
}

fn more(len: usize) -> String {
    len.checked_sub(LISTED).filter(|n| *n > 0).map_or(String::new(), |n| format!("and {n} more\n"))
}

fn first_text(first: &First) -> String {
    let First { role, tensor, elements, tally } = first;
    let mut out = format!(
        "first tensor that differs: {role} of {tensor}, {} of {elements} elements, by {:e} at most\n",
        tally.differ, tally.largest
    );
    if let Some((index, a, b)) = tally.first {
        let (x, y) = (a.to_bits(), b.to_bits());
        out += &format!("  from index {index}: {a:e} ({x:08x}) in A, {b:e} ({y:08x}) in B\n");
    }
    out
}
