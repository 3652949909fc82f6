//! `--dump`: whole fp32 tensors in one safetensors file.

use crate::{Failure, Result};
use safetensors::tensor::{Dtype, SafeTensorError, View};
use std::borrow::Cow;
use std::path::Path;

struct Whole<'a> {
    shape: &'a [usize],
    values: &'a [f32],
}

impl View for Whole<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // The format is little-endian, as is every machine Umbra builds for (see the check in `weights`).
        Cow::Borrowed(bytemuck::cast_slice(self.values))
    }

    fn data_len(&self) -> usize {
        size_of_val(self.values)
    }
}

/// Writes `(name, row-major shape, values)` as F32 tensors to `path`, replacing a file that is there.
///
/// # Errors
/// Exit 7 when the file cannot be written; exit 1 when values and shape disagree.
pub fn dump_tensors(path: &Path, tensors: &[(String, Vec<usize>, Vec<f32>)]) -> Result<()> {
    for (name, shape, values) in tensors {
        if shape.iter().product::<usize>() != values.len() {
            let what = format!("tensor {name} of shape {shape:?} came with {} values", values.len());
            return Err(Failure::new(crate::Exit::Bug, what));
        }
    }
    let views = tensors.iter().map(|(name, shape, values)| (name.as_str(), Whole { shape, values }));
    safetensors::serialize_to_file(views, None, path).map_err(|e| match e {
        SafeTensorError::IoError(io) => super::save::disk_failure("the dump cannot be written", path, &io),
        other => Failure::new(crate::Exit::Bug, "the dump cannot be laid out").at(path.display()).found(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    #[test]
    fn what_is_dumped_reads_back_under_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("grads.safetensors");
        let values = vec![1.5, -0.0, f32::MAX, f32::MIN_POSITIVE, 3.0, -7.25];
        let tensors = vec![
            ("model.norm.weight".to_owned(), vec![2], vec![4.0, 5.0]),
            ("logits".to_owned(), vec![2, 3], values.clone()),
        ];
        dump_tensors(&path, &tensors).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let logits = file.tensor("logits").unwrap();
        assert_eq!((logits.dtype(), logits.shape()), (Dtype::F32, &[2, 3][..]));
        let expected: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(logits.data(), expected);
        assert_eq!(file.tensor("model.norm.weight").unwrap().shape(), [2]);
    }

    #[test]
    fn values_that_do_not_fill_the_shape_and_folders_that_are_not_there_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let short = [("x".to_owned(), vec![2, 2], vec![1.0; 3])];
        assert_eq!(dump_tensors(&dir.path().join("a"), &short).unwrap_err().exit, crate::Exit::Bug);
        let nowhere = dir.path().join("none/b");
        assert_eq!(dump_tensors(&nowhere, &[]).unwrap_err().exit, crate::Exit::Disk);
    }
}
