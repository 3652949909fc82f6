//! Rotary tables: angles, cosines and sines in fp32, whatever the policy.

use crate::{Config, RopeScaling};

/// Cosine and sine of every position's angles, each `[positions, head_dim/2]`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// cos(position · frequency).
    pub cos: Vec<f32>,
    /// sin(position · frequency).
    pub sin: Vec<f32>,
}

impl RopeTable {
    /// The table of the first `positions` positions. The angle is an fp32 product, as transformers computes it.
    pub fn new(c: &Config, positions: usize) -> Self {
        let frequencies = frequencies(c);
        let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| (p as f32 * f) as f64));
        let (cos, sin) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
        RopeTable { cos, sin }
    }
}

/// θ^(−2j/d) for j < d/2, scaled. Source: transformers' modeling_rope_utils (default, linear, llama3), in fp32.
pub fn frequencies(c: &Config) -> Vec<f32> {
    let d = c.head_dim as f32;
    let default = (0..c.head_dim / 2).map(|j| {
        let exponent = (2 * j) as f32 / d;
        (1.0 / c.rope_theta.powf(exponent as f64)) as f32
    });
    default.map(|f| scaled(f, c.rope_scaling)).collect()
}

fn scaled(frequency: f32, scaling: RopeScaling) -> f32 {
    match scaling {
        RopeScaling::Default => frequency,
        RopeScaling::Linear { factor } => frequency / factor as f32,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let original = original_max_position_embeddings;
            let wavelength = std::f64::consts::TAU / frequency as f64;
            if wavelength < original / high_freq_factor {
                return frequency;
            }
            if wavelength > original / low_freq_factor {
                return frequency / factor as f32;
            }
            let ramp = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
            ((1.0 - ramp) * frequency as f64 / factor + ramp * frequency as f64) as f32
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_stretches_long_and_ramps_between() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64.0,
        };
        let tau = std::f32::consts::TAU;
        assert_eq!(scaled(tau / 8.0, scaling), tau / 8.0); // wavelength 8 < 64/4
        assert_eq!(scaled(tau / 128.0, scaling), tau / 128.0 / 8.0); // wavelength 128 > 64/1
        let middle = tau / 32.0; // 64/32 = 2: ramp 1/3
        let expected = middle as f64 * (2.0 / 3.0 / 8.0 + 1.0 / 3.0);
        assert!((scaled(middle, scaling) as f64 - expected).abs() < 1e-8);
    }
}
