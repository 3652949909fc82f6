//! What the transport of this launch delivers: `mpirun -n 2 --bind-to none bandwidth [MiB ...]`, by default for 1, 16 and
//! 64 MiB of fp32 numbers and half of that in bf16. Buffers are reused.
//!
//! The ordered reduce-scatter (exchange and sum) stands beside MPI's own on the same fp32 numbers
//! (`MPI_Reduce_scatter_block`, `MPI_SUM`): a ratio below 1 says that it takes less time.

use ::mpi::collective::SystemOperation;
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::CommunicatorCollectives;
use collectives::{Comm, Launch, Result, connect};
use spmd_core::{Buffer, DType, Device};
use std::error::Error;
use std::time::Instant;

/// Rounds of a large size; small ones, which a busy machine disturbs more, have up to ten times as many.
const ROUNDS: usize = 11;

/// Something to time.
type Round<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let comm = connect(&Launch::from_vars(|name| std::env::var(name).ok()))?;
    let mut sizes = Vec::new();
    for text in std::env::args().skip(1) {
        sizes.push(text.parse()?);
    }
    if comm.rank() == 0 {
        println!(
            "{} ranks over {}, milliseconds of the slowest rank, best of {ROUNDS} or more",
            comm.world(),
            comm.transport()
        );
    }
    for mib in if sizes.is_empty() { vec![1, 16, 64] } else { sizes } {
        size(&comm, mib)?;
    }
    let barrier: Round = Box::new(|| (0..100).try_for_each(|_| comm.barrier()));
    let gather: Round = Box::new(|| (0..100).try_for_each(|_| comm.gather_f64(&[1.0]).map(drop)));
    let times = best(&comm, ROUNDS, vec![barrier, gather])?;
    if comm.rank() == 0 {
        println!("barrier (headers alone) {:.1} us, gather_f64 of one {:.1} us", times[0] * 10.0, times[1] * 10.0);
    }
    Ok(comm.finish()?)
}

/// Prints the line of one size.
fn size(comm: &Comm, mib: usize) -> Result<()> {
    let len = (mib << 20) / 4 / comm.world() * comm.world();
    let mut rounds = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        rounds.push(reduce_scatter(comm, dtype, len)?);
        rounds.push(all_gather(comm, dtype, len)?);
    }
    if comm.transport() == "mpi" {
        rounds.push(mpi_reduce_scatter(comm.world(), len));
    }
    let times = best(comm, (256 / mib.max(1)).clamp(ROUNDS, 10 * ROUNDS), rounds)?;
    if comm.rank() == 0 {
        let own = times.get(4).map(|own| format!(", MPI's own {own:.2}, ratio {:.2}", times[0] / own));
        println!(
            "{mib:4} MiB: ordered reduce_scatter {:.2}{}; all_gather {:.2}; in bf16 {:.2} and {:.2}",
            times[0],
            own.unwrap_or_default(),
            times[1],
            times[2],
            times[3],
        );
    }
    Ok(())
}

fn ones(dtype: DType, len: usize) -> Result<Buffer> {
    Ok(Buffer::from_f32(dtype, &vec![1.0; len], "a buffer to measure with")?)
}

fn all_gather(comm: &Comm, dtype: DType, len: usize) -> Result<Round<'_>> {
    let mut buffers = Some((ones(dtype, len / comm.world())?, ones(dtype, len)?));
    Ok(Box::new(move || {
        if let Some((send, recv)) = buffers.take() {
            buffers = Some(comm.all_gather(send, recv)?.wait()?);
        }
        Ok(())
    }))
}

/// The exchange and the ordered sum, which is in fp32.
fn reduce_scatter(comm: &Comm, dtype: DType, len: usize) -> Result<Round<'_>> {
    let (device, mut out) = (Device::cpu(1)?, ones(DType::F32, len / comm.world())?);
    let mut buffers = Some((ones(dtype, len)?, ones(dtype, len)?));
    Ok(Box::new(move || {
        if let Some((send, recv)) = buffers.take() {
            buffers = Some(comm.reduce_scatter(&device, send, recv)?.wait(out.view_mut())?);
        }
        Ok(())
    }))
}

/// MPI's own reduce-scatter of fp32 numbers. [`connect`] has asked for `MPI_THREAD_MULTIPLE`, and the thread that makes
/// the calls of a [`Comm`] has nothing to do meanwhile: every round starts after a call that was waited for.
fn mpi_reduce_scatter<'a>(ranks: usize, len: usize) -> Round<'a> {
    let (world, send, mut recv) = (SimpleCommunicator::world(), vec![1.0f32; len], vec![0.0f32; len / ranks]);
    Box::new(move || {
        world.reduce_scatter_block_into(&send[..], &mut recv[..], SystemOperation::sum());
        Ok(())
    })
}

/// Milliseconds that the slowest rank took, in the best round of each. The rounds take turns, so that what else happens
/// on the machine meets them all alike.
fn best(comm: &Comm, count: usize, mut rounds: Vec<Round<'_>>) -> Result<Vec<f64>> {
    let mut best = vec![f64::INFINITY; rounds.len()];
    for _ in 0..count {
        for (round, best) in rounds.iter_mut().zip(&mut best) {
            comm.barrier()?;
            let begin = Instant::now();
            round()?;
            let times = comm.gather_f64(&[begin.elapsed().as_secs_f64() * 1e3])?;
            *best = best.min(times.into_iter().fold(0.0, f64::max));
        }
    }
    Ok(best)
}
