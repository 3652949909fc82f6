//! Initial weights as a pure function of seed, parameter name and index: no world size, no order of calls.

use spmd_core::dtype::round_bf16;
use spmd_core::rng::{Purpose, Stream, tensor_key};
use spmd_core::{ParamKind, ParamSpec};

/// Fills `out` with elements `start..start + out.len()` of `param`: N(0, `std`²) for a matrix, one for a gain, rounded to
/// bf16 in every policy so that all policies start from the same weights.
pub fn fill(param: &ParamSpec, std: f64, seed: u64, start: usize, out: &mut [f32]) {
    match param.kind {
        ParamKind::Gain => out.fill(1.0),
        ParamKind::Matrix => {
            let stream = Stream::new(seed, Purpose::Init, tensor_key(&param.name), 0);
            for (i, x) in out.iter_mut().enumerate() {
                *x = round_bf16((stream.normal((start + i) as u64) * std) as f32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_a_tensor_equals_that_part_of_the_whole() {
        let p = ParamSpec { name: "w".to_owned(), shape: vec![10, 10], kind: ParamKind::Matrix };
        let mut whole = [0.0; 100];
        fill(&p, 0.02, 5, 0, &mut whole);
        let mut part = [0.0; 33];
        fill(&p, 0.02, 5, 41, &mut part);
        assert_eq!(part, whole[41..74]);
        assert!(whole.iter().all(|x| round_bf16(*x) == *x && x.abs() < 0.2));
    }
}
