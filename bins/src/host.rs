//! The machine this rank runs on: its clock, its share of the cores, how fast they multiply, and the two streams it
//! speaks to.

use crate::{Failure, Result};
use spmd_core::ops::LinearForward;
use spmd_core::{Buffer, DType, Device};
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;
use std::time::Instant;

/// Seconds since the first call in this process.
pub fn clock() -> f64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

/// A line on standard error, in one write, so that lines of other ranks do not get between. That nobody reads it is no
/// reason to stop a run.
pub fn note(line: impl std::fmt::Display) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Writes `text` to standard output at once; `false` if nobody reads it any more, which is the reader's choice.
///
/// # Errors
/// A disk failure (exit 7) for anything else that cannot be written.
pub fn answer(text: &str) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Failure::disk("standard output cannot be written").found(e)),
    }
}

/// Cores this rank may compute on: those it is bound to, or an equal part of the machine's if its neighbours are bound
/// to the same ones.
pub fn cores(var: impl Fn(&str) -> Option<String>) -> usize {
    let number = |name| var(name).and_then(|v| v.parse::<usize>().ok());
    let neighbours = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"];
    let local = neighbours.into_iter().find_map(number).unwrap_or(1).max(1);
    let bound = std::thread::available_parallelism().map_or(1, usize::from);
    let online = online_cores().unwrap_or(bound);
    share(bound, online, local)
}

fn share(bound: usize, online: usize, local: usize) -> usize {
    if bound * local <= online { bound } else { (bound / local).max(1) }
}

/// Operations a second of an n³ fp32 product on this rank: the best of three.
///
/// # Errors
/// No memory for it.
pub fn sgemm_rate(device: &Device, n: usize) -> spmd_core::Result<f64> {
    let ones = Buffer::from_f32(DType::F32, &vec![1.0; n * n], "sgemm probe")?;
    let mut out = Buffer::zeros(DType::F32, n * n, "sgemm probe")?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let started = clock();
        let (x, w) = (ones.view(), ones.view());
        device.linear_forward(LinearForward { x, w, out: out.view_mut(), rows: n, inputs: n, outputs: n })?;
        best = best.min(clock() - started);
    }
    Ok(2.0 * (n * n * n) as f64 / best)
}

/// Cores of the machine, whatever this process is bound to.
fn online_cores() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    Some(text.lines().filter(|l| l.starts_with("processor")).count()).filter(|n| *n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_ranks_use_their_cores_and_unbound_ones_share() {
        assert_eq!(share(1, 2, 2), 1, "mpirun -n 2 binds each rank to a core");
        assert_eq!(share(2, 2, 4), 1, "oversubscribed and unbound");
        assert_eq!(share(16, 16, 4), 4, "unbound");
        assert_eq!(share(4, 16, 4), 4, "bound to four each");
        assert_eq!(share(8, 8, 1), 8, "alone");
    }

    #[test]
    fn the_clock_moves_forward() {
        let a = clock();
        assert!(clock() >= a);
    }
}
