//! The machine this rank runs on: its clock and its share of the cores.

use std::sync::OnceLock;
use std::time::Instant;

/// Seconds since the first call in this process.
pub fn clock() -> f64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
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
