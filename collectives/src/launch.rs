//! How this process was started, and the one place where a transport is chosen.

use crate::comm::DEFAULT_TIMEOUT;
use crate::solo::Solo;
use crate::{Comm, Result};

/// What the launcher's variables say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Number of ranks the process was started as one of, where a launcher says so.
    pub size_hint: Option<usize>,
    /// Where that is from, for messages: a variable and its value, or "no launcher".
    pub source: String,
}

/// Variables that hold the number of ranks, the more specific first: a process that mpirun started inside a Slurm job
/// also sees Slurm's, which describe mpirun's daemons.
///
/// Open MPI's mpirun; MPICH's and Intel MPI's mpirun, and srun with PMI; srun (a job's batch script lacks the last, so
/// one that calls the program without srun is not taken for a rank).
const SIZE_VARIABLES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

impl Launch {
    /// Reads the launcher's variables through `var` (the binary passes its environment).
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let found = SIZE_VARIABLES.iter().find_map(|name| {
            let value = var(name)?;
            Some(Launch { size_hint: Some(value.trim().parse().ok()?), source: format!("{name}={value}") })
        });
        found.unwrap_or_else(|| Launch { size_hint: None, source: "no launcher".to_owned() })
    }

    fn several(&self) -> Option<usize> {
        self.size_hint.filter(|size| *size > 1)
    }
}

/// Connects this process with the other ranks of its launch: through MPI if it was started as one of several, otherwise
/// it is a world of its own and MPI is not touched. Installs the panic hook for a rank of several
/// ([`crate::install_panic_hook`]). MPI can be connected once in a process.
///
/// # Errors
/// [`crate::Error::Launch`] when this build has no MPI although the launcher started several, and when MPI and the
/// launcher do not know each other (each process would train alone, with the same output folder).
pub fn connect(launch: &Launch) -> Result<Comm> {
    match launch.several() {
        None => Ok(Comm::new(Box::new(Solo), DEFAULT_TIMEOUT)),
        Some(size) => connect_several(launch, size),
    }
}

#[cfg(feature = "mpi")]
fn connect_several(launch: &Launch, size: usize) -> Result<Comm> {
    use crate::Error;
    use crate::transport::Transport;

    let mpi = crate::mpi::connect()?;
    if mpi.world() == 1 {
        return Err(Error::Launch {
            what: format!("{} says {size} ranks, but MPI sees this process alone", launch.source),
            hint: "start it with the mpirun of the MPI it was built with, or under Slurm with `srun --mpi=pmix` \
                   (Open MPI) or `srun --mpi=pmi2` (MPICH)"
                .to_owned(),
        });
    }
    crate::panics::set_rank(mpi.rank());
    crate::install_panic_hook();
    Ok(Comm::new(Box::new(mpi), DEFAULT_TIMEOUT))
}

#[cfg(not(feature = "mpi"))]
fn connect_several(launch: &Launch, size: usize) -> Result<Comm> {
    Err(crate::Error::Launch {
        what: format!("{} says {size} ranks, but this build has no MPI", launch.source),
        hint: "build with the default features (cargo build --release --features mpi), or start one process".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Launch {
        Launch::from_vars(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn the_launchers_size_is_found() {
        assert_eq!(from(&[]), Launch { size_hint: None, source: "no launcher".to_owned() });
        let open_mpi = Launch { size_hint: Some(4), source: "OMPI_COMM_WORLD_SIZE=4".to_owned() };
        assert_eq!(from(&[("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "1")]), open_mpi);
        assert_eq!(from(&[("PMI_SIZE", "3"), ("PMI_RANK", "0")]).size_hint, Some(3));
        assert_eq!(from(&[("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")]).size_hint, Some(2));
    }

    #[test]
    fn mpirun_inside_slurm_goes_by_mpirun() {
        let inside = [("SLURM_STEP_NUM_TASKS", "2"), ("OMPI_COMM_WORLD_SIZE", "1")];
        assert_eq!(from(&inside).size_hint, Some(1));
    }

    #[test]
    fn a_batch_script_without_srun_is_no_rank() {
        assert_eq!(from(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]).size_hint, None);
    }

    #[test]
    fn a_value_that_is_no_number_is_no_size() {
        assert_eq!(from(&[("OMPI_COMM_WORLD_SIZE", "many")]).size_hint, None);
    }

    #[test]
    fn one_process_connects_to_itself() {
        for size_hint in [None, Some(0), Some(1)] {
            let comm = connect(&Launch { size_hint, source: String::new() }).expect("a world of one needs nothing");
            assert_eq!((comm.rank(), comm.world(), comm.transport()), (0, 1, "solo"));
        }
    }

    #[cfg(not(feature = "mpi"))]
    #[test]
    fn a_build_without_mpi_refuses_to_be_one_of_several() {
        let error = connect(&from(&[("OMPI_COMM_WORLD_SIZE", "4")])).expect_err("must refuse");
        assert!(
            error.to_string().contains("OMPI_COMM_WORLD_SIZE=4 says 4 ranks, but this build has no MPI"),
            "{error}"
        );
    }
}
