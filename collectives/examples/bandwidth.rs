//! What the transport of this launch delivers: `mpirun -n 2 --bind-to none bandwidth [MiB]`. Best of eleven, buffers
//! reused.

use collectives::{Comm, Launch, connect};
use spmd_core::{Buffer, DType, Device};
use std::error::Error;
use std::time::Instant;

const ROUNDS: usize = 11;

fn main() -> Result<(), Box<dyn Error>> {
    let comm = connect(&Launch::from_vars(|name| std::env::var(name).ok()))?;
    let mib: usize = std::env::args().nth(1).map_or(Ok(64), |text| text.parse())?;
    for dtype in [DType::F32, DType::Bf16] {
        large(&comm, dtype, mib << 20)?;
    }
    let barrier = best(&comm, || (0..100).try_for_each(|_| comm.barrier()))?;
    let gather = best(&comm, || (0..100).try_for_each(|_| comm.gather_f64(&[1.0]).map(drop)))?;
    if comm.rank() == 0 {
        println!("barrier (headers alone) {:.1} us, gather_f64 of one {:.1} us", barrier * 10.0, gather * 10.0);
    }
    Ok(comm.finish()?)
}

/// Times the two operations of a sharded step on a tensor of `bytes` fp32 bytes (half of them in bf16).
fn large(comm: &Comm, dtype: DType, bytes: usize) -> Result<(), Box<dyn Error>> {
    let shard = bytes / 4 / comm.world();
    let (device, len) = (Device::cpu(1)?, shard * comm.world());
    let full = |what| Buffer::from_f32(dtype, &vec![1.0; len], what);
    let mut out = Buffer::from_f32(DType::F32, &vec![0.0; shard], "the sum")?;

    let mut buffers = Some((Buffer::from_f32(dtype, &vec![1.0; shard], "the shard")?, full("the tensor")?));
    let gather = best(comm, || {
        if let Some((send, recv)) = buffers.take() {
            buffers = Some(comm.all_gather(send, recv)?.wait()?);
        }
        Ok(())
    })?;
    let mut buffers = Some((full("the contribution")?, full("the slices")?));
    let reduce = best(comm, || {
        if let Some((send, recv)) = buffers.take() {
            buffers = Some(comm.reduce_scatter(&device, send, recv)?.wait(out.view_mut())?);
        }
        Ok(())
    })?;
    if comm.rank() == 0 {
        let rate = |ms: f64| bytes as f64 / 1e6 / ms;
        println!("{dtype}, {len} elements, {} ranks over {}:", comm.world(), comm.transport());
        println!("  all_gather      {gather:7.2} ms  {:5.2} GB/s of fp32", rate(gather));
        println!("  reduce_scatter  {reduce:7.2} ms  {:5.2} GB/s of fp32", rate(reduce));
    }
    Ok(())
}

/// Milliseconds of the fastest round.
fn best(comm: &Comm, mut round: impl FnMut() -> collectives::Result<()>) -> collectives::Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        comm.barrier()?;
        let begin = Instant::now();
        round()?;
        best = best.min(begin.elapsed().as_secs_f64() * 1e3);
    }
    Ok(best)
}
