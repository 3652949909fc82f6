//! The machine a run is planned for, and how long a step takes on it: a prediction, from data sheets and counts.

use crate::cli::PlanArgs;
use crate::plan::RunPlan;
use crate::{Failure, Result, host};
use models::{Config, params};
use spmd_core::{DType, Device};

/// Share of the data sheet's peak that matrix products of a whole training step are taken to reach. Well-tuned trainers
/// report 40 to 60 % of it on such GPUs.
const REACHED: f64 = 0.5;

/// Share of measured matrix products that a step reaches on a processor (`umbra bench step` measures it).
const REACHED_CPU: f64 = 0.85;

/// Dense bf16 and fp32 (TF32 off) operations a second, and memory in bytes, from NVIDIA's data sheets.
const GPUS: [(&str, f64, f64, u64); 7] = [
    ("a100", 312e12, 19.5e12, 80 << 30),
    ("h100", 989e12, 67e12, 80 << 30),
    ("h200", 989e12, 67e12, 141_000_000_000),
    ("b200", 2250e12, 75e12, 180_000_000_000),
    ("l40s", 362e12, 91.6e12, 48 << 30),
    ("rtx4090", 165e12, 82.6e12, 24 << 30),
    ("v100", 0.0, 15.7e12, 32 << 30),
];

/// What each rank has.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Machine {
    /// In words.
    pub(super) name: String,
    /// Operations a second at the peak, for this run's matrix products.
    pub(super) peak: f64,
    /// Of those, the share that is expected.
    pub(super) reached: f64,
    /// Bytes a rank may have, if that is known.
    pub(super) memory: Option<u64>,
    /// Bytes a second a rank can send; none: not told, and traffic takes no time.
    pub(super) network: Option<f64>,
}

/// How long it takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Prediction {
    /// Operations of a step, all ranks.
    pub(super) flops: f64,
    /// Seconds of arithmetic of a rank.
    pub(super) compute: f64,
    /// Seconds on the wire of a rank.
    pub(super) wire: f64,
    /// Seconds of a step: the longer of the two, and what cannot be hidden.
    pub(super) step: f64,
    /// Share of the peak that is used.
    pub(super) mfu: f64,
}

impl Machine {
    /// Reads `--gpu`, `--network` and `--memory`.
    ///
    /// # Errors
    /// Exit 2: an unknown GPU, or what is no speed or size.
    pub(super) fn read(args: &PlanArgs, plan: &RunPlan) -> Result<Self> {
        let network =
            args.network.as_deref().map(|text| rate(text).ok_or_else(|| not_a(text, "--network"))).transpose()?;
        let memory =
            args.memory.as_deref().map(|text| size(text).ok_or_else(|| not_a(text, "--memory"))).transpose()?;
        let bf16 = plan.precision().compute == DType::Bf16;
        let Some(wanted) = &args.gpu else {
            let device = Device::cpu(plan.threads).map_err(Failure::from)?;
            let peak = host::sgemm_rate(&device, 512).map_err(Failure::from)?;
            let name = format!("this processor, {} thread(s) a rank", plan.threads);
            return Ok(Machine { name, peak, reached: REACHED_CPU, memory: memory.or_else(super::available), network });
        };
        let known = GPUS.iter().find(|(name, ..)| name.eq_ignore_ascii_case(wanted));
        let Some((name, half, single, bytes)) = known else {
            let names: Vec<&str> = GPUS.iter().map(|(name, ..)| *name).collect();
            return Err(Failure::usage(format!("no data sheet of a GPU called {wanted} is known"))
                .at("--gpu")
                .expected(names.join(", "))
                .found(wanted)
                .hint("the nearest of these, with --memory for its size"));
        };
        if bf16 && *half == 0.0 {
            return Err(Failure::usage(format!("a {name} has no bf16"))
                .at("--gpu, --policy")
                .expected("--policy fp32, or a GPU from the A100 on")
                .found(plan.policy.name()));
        }
        let peak = if bf16 { *half } else { *single };
        Ok(Machine { name: (*name).to_owned(), peak, reached: REACHED, memory: memory.or(Some(*bytes)), network })
    }

    /// Time of a step.
    pub(super) fn predict(
        &self,
        plan: &RunPlan,
        config: &Config,
        seq_len: usize,
        sent: [u64; 2],
    ) -> Result<Prediction> {
        let rows = plan.global_batch as f64;
        let weights = 6.0 * params::matmul_weights(config) as f64 * seq_len as f64;
        let attention = (12 * config.head_dim * config.heads * config.layers) as f64;
        let flops = rows * (weights + attention * params::attended_pairs(config, seq_len) as f64);
        // A block computed again is a second forward pass: a third of the rest.
        let again = if plan.recompute { 4.0 / 3.0 } else { 1.0 };
        let busy = plan.world.min(plan.lanes) as f64;
        let compute = flops * again / busy / (self.peak * self.reached);
        let wire = self.network.map_or(0.0, |speed| sent.iter().sum::<u64>() as f64 / speed);
        // The first unit's gather of each pass has nothing to hide behind.
        let first = wire / (2.0 * (config.layers + 2) as f64);
        let step = compute.max(wire) + first;
        Ok(Prediction { flops, compute, wire, step, mfu: flops / busy / step / self.peak })
    }
}

fn not_a(text: &str, flag: &str) -> Failure {
    let (expected, example) = match flag {
        "--network" => ("a speed: a number and Gb, Mb (bits), GB or MB (bytes) a second", "--network 400Gb"),
        _ => ("a size: a number and GB, GiB, MB or MiB", "--memory 80GB"),
    };
    Failure::usage(format!("{flag} cannot be {text}")).at(flag).expected(expected).found(text).hint(example)
}

/// Number and unit of a text such as `400Gb`.
fn split(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok().filter(|n: &f64| n.is_finite() && *n > 0.0)?;
    Some((number, text[end..].trim()))
}

/// Bytes a second of `400Gb`, `25GB/s`: a small b is bits.
fn rate(text: &str) -> Option<f64> {
    let (number, unit) = split(text)?;
    let unit = unit.trim_end_matches("/s").trim_end_matches("ps");
    let scale = match unit {
        "Gb" | "Gbit" => 1e9 / 8.0,
        "Mb" | "Mbit" => 1e6 / 8.0,
        "GB" => 1e9,
        "MB" => 1e6,
        "GiB" => f64::from(1 << 30),
        _ => return None,
    };
    Some(number * scale)
}

/// Bytes of `80GB`, `24GiB`.
fn size(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    let scale = match unit {
        "GB" => 1e9,
        "MB" => 1e6,
        "GiB" => f64::from(1 << 30),
        "MiB" => f64::from(1 << 20),
        _ => return None,
    };
    Some((number * scale) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_and_sizes_have_units() {
        assert_eq!((rate("400Gb"), rate("400Gbps"), rate("50GB/s")), (Some(50e9), Some(50e9), Some(50e9)));
        assert_eq!((size("80GB"), size("24GiB")), (Some(80_000_000_000), Some(24 << 30)));
        for text in ["", "Gb", "400", "-4Gb", "0Gb", "4Xb"] {
            assert_eq!((rate(text), size(text)), (None, None), "{text}");
        }
    }
}
