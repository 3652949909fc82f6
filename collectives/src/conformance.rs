//! The suite every transport has to pass: it is run over a world of one, threads and MPI, and because it returns what it
//! received, the transports can also be held against each other byte by byte. It needs nothing but a [`Comm`], so it can
//! be run where the program is installed, too. What it does with the world it does with groups of ranks as well.

use crate::{Comm, Error, Ticket};
use spmd_core::{Buffer, DType, Device};
use std::time::{Duration, Instant};

/// A failed check, in words.
pub type Failed = Box<dyn std::error::Error + Send + Sync>;

type Checked<T = ()> = Result<T, Failed>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+).into());
        }
    };
}

// After the macro that it uses, too.
mod groups;

const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// A communicator and the numbers that its ranks have in the world. They go into the values, so that data from another
/// group shows.
struct Part {
    comm: Comm,
    ranks: Vec<usize>,
}

impl Part {
    /// This rank's number in the world.
    fn own(&self) -> usize {
        self.ranks[self.comm.rank()]
    }
}

/// Runs every check on this rank; all ranks of the world run it together, on the world's communicator. Returns all bytes
/// received, in order: ranks of equal number in worlds of equal size receive the same on every transport.
///
/// # Errors
/// The first check that failed.
pub fn run(comm: &Comm) -> Checked<Vec<u8>> {
    let mut received = Vec::new();
    let world = Part { comm: comm.clone(), ranks: (0..comm.world()).collect() };
    data(&world, &mut received)?;
    different_calls(comm)?;
    groups::run(comm, &mut received)?;
    comm.barrier()?;
    Ok(received)
}

/// What holds of every communicator.
fn data(part: &Part, received: &mut Vec<u8>) -> Checked {
    moved_values(part, received)?;
    gathered_values(part, received)?;
    split_messages(part, received)?;
    tickets(part)?;
    progress(part)?;
    wrong_arguments(&part.comm)?;
    sums(part, received)
}

/// Element `i` of what `from` sends to `to`: exact in bf16, different for neighbours in every argument.
fn value(from: usize, to: usize, i: usize) -> f32 {
    ((from * 89 + to * 31 + i * 7) % 251) as f32
}

fn filled(dtype: DType, len: usize, at: impl Fn(usize) -> f32) -> Checked<Buffer> {
    Ok(Buffer::from_f32(dtype, &(0..len).map(at).collect::<Vec<f32>>(), "a conformance buffer")?)
}

/// Starts with garbage in the receive buffer, so that a slice that is not written shows.
fn start_all_gather(part: &Part, dtype: DType, len: usize) -> Checked<Ticket> {
    let send = filled(dtype, len, |i| value(part.own(), 0, i))?;
    Ok(part.comm.all_gather(send, filled(dtype, len * part.ranks.len(), |_| -1.0)?)?)
}

fn check_all_gather(part: &Part, len: usize, (send, recv): &(Buffer, Buffer)) -> Checked {
    ensure!(send.len() == len, "all_gather handed back a send buffer of {} elements", send.len());
    let (send, recv) = (send.view(), recv.view());
    for i in 0..recv.len() {
        let expected = value(part.ranks[i / len], 0, i % len);
        ensure!(recv.get(i) == expected, "all_gather of {len}: element {i} is {}, not {expected}", recv.get(i));
    }
    for i in 0..len {
        ensure!(send.get(i) == value(part.own(), 0, i), "all_gather of {len} changed element {i} of the send buffer");
    }
    Ok(())
}

fn start_exchange(part: &Part, dtype: DType, len: usize) -> Checked<Ticket> {
    let (own, all) = (part.own(), len * part.ranks.len());
    let send = filled(dtype, all, |i| value(own, part.ranks[i / len], i % len))?;
    Ok(part.comm.exchange(send, filled(dtype, all, |_| -1.0)?)?)
}

fn exchange(part: &Part, dtype: DType, len: usize) -> Checked<Buffer> {
    let (_, recv) = start_exchange(part, dtype, len)?.wait()?;
    for i in 0..recv.len() {
        let (found, expected) = (recv.view().get(i), value(part.ranks[i / len], part.own(), i % len));
        ensure!(found == expected, "exchange of {len} a rank: element {i} is {found}, not {expected}");
    }
    Ok(recv)
}

fn moved_values(part: &Part, received: &mut Vec<u8>) -> Checked {
    for dtype in DTYPES {
        for len in [0, 1, 5, 64, 1000, 70_001] {
            let buffers = start_all_gather(part, dtype, len)?.wait()?;
            check_all_gather(part, len, &buffers)?;
            received.extend_from_slice(buffers.1.bytes());
            received.extend_from_slice(exchange(part, dtype, len)?.bytes());
        }
    }
    Ok(())
}

fn gathered_values(part: &Part, received: &mut Vec<u8>) -> Checked {
    let (comm, own) = (&part.comm, part.own());
    let ranks = || part.ranks.iter().copied();
    for len in [0, 1, 17] {
        let real = |r: usize| (0..len).map(move |i| (r as f64 + 0.1) * 1e-300 - i as f64);
        let found = comm.gather_f64(&real(own).collect::<Vec<_>>())?;
        ensure!(found == ranks().flat_map(real).collect::<Vec<_>>(), "gather_f64 of {len} gave {found:?}");
        let whole = |r: usize| (0..len).map(move |i| u64::MAX - (r * 100 + i) as u64);
        let found = comm.gather_u64(&whole(own).collect::<Vec<_>>())?;
        ensure!(found == ranks().flat_map(whole).collect::<Vec<_>>(), "gather_u64 of {len} gave {found:?}");
        received.extend(found.iter().flat_map(|v| v.to_le_bytes()));
    }
    // Uneven lengths, an empty one among them; then nothing at all.
    for step in [0, 3, 1001] {
        let text = |r: usize| (0..r * step).map(|i| (r * 7 + i) as u8).collect::<Vec<u8>>();
        let found = comm.gather_bytes(&text(own))?;
        ensure!(found == ranks().map(text).collect::<Vec<_>>(), "gather_bytes of {step} bytes a rank");
        received.extend(found.concat());
    }
    for (root, from) in ranks().enumerate() {
        for len in [0, 1, 999] {
            let text = |r: usize| (0..len).map(|i| (r + i) as u8).collect::<Vec<u8>>();
            let found = comm.broadcast_bytes(root, text(own))?;
            ensure!(found == text(from), "broadcast_bytes of {len} bytes from rank {root}");
            received.extend(found);
        }
    }
    Ok(())
}

/// Messages cut into pieces of 13 elements arrive as if they were whole; so do those cut to one element a rank.
fn split_messages(part: &Part, received: &mut Vec<u8>) -> Checked {
    let comm = &part.comm;
    for limit in [13, 1] {
        let (mut whole, mut cut) = (Vec::new(), Vec::new());
        let moved = |into: &mut Vec<u8>| -> Checked {
            for dtype in DTYPES {
                let buffers = start_all_gather(part, dtype, 100)?.wait()?;
                check_all_gather(part, 100, &buffers)?;
                into.extend_from_slice(buffers.1.bytes());
                into.extend_from_slice(exchange(part, dtype, 50)?.bytes());
            }
            gathered_values(part, into)
        };
        moved(&mut whole)?;
        comm.set_split_limit(limit);
        moved(&mut cut)?;
        comm.set_split_limit(crate::comm::DEFAULT_SPLIT_LIMIT);
        ensure!(whole == cut, "messages of at most {limit} elements gave other bytes than whole ones");
        received.extend(cut);
    }
    Ok(())
}

/// Several operations at once, waited for in any order or not at all.
fn tickets(part: &Part) -> Checked {
    let lens = [300, 20, 4000];
    let mut started = Vec::new();
    for len in lens {
        started.push((len, start_all_gather(part, DType::F32, len)?));
        drop(start_all_gather(part, DType::Bf16, len)?);
    }
    for (len, ticket) in started.into_iter().rev() {
        check_all_gather(part, len, &ticket.wait()?)?;
    }
    Ok(())
}

/// A started operation completes although no rank waits for it: each only looks, and makes no other call until it is
/// done.
fn progress(part: &Part) -> Checked {
    let ticket = start_all_gather(part, DType::F32, 100_000)?;
    let begin = Instant::now();
    while !ticket.is_done() {
        ensure!(begin.elapsed() < Duration::from_secs(60), "an operation makes no progress unless somebody waits");
        std::thread::yield_now();
    }
    check_all_gather(part, 100_000, &ticket.wait()?)
}

/// Refused on this rank alone, before anything is sent: the next call still meets the other ranks.
fn wrong_arguments(comm: &Comm) -> Checked {
    let world = comm.world();
    let zeros = |dtype, len| Buffer::zeros(dtype, len, "a conformance buffer");
    let (f32, bf16) = (DType::F32, DType::Bf16);
    if comm.rank() == world - 1 {
        let short = comm.all_gather(zeros(f32, 3)?, zeros(f32, 3 * world + 1)?);
        ensure!(matches!(short, Err(Error::Shape { .. })), "all_gather into a wrong length: {short:?}");
        let mixed = comm.all_gather(zeros(f32, 3)?, zeros(bf16, 3 * world)?);
        ensure!(matches!(mixed, Err(Error::DType { .. })), "all_gather into another dtype: {mixed:?}");
        let short = comm.exchange(zeros(bf16, world)?, zeros(bf16, 2 * world)?);
        ensure!(matches!(short, Err(Error::Shape { .. })), "exchange into a wrong length: {short:?}");
        let mixed = comm.exchange(zeros(bf16, world)?, zeros(f32, world)?);
        ensure!(matches!(mixed, Err(Error::DType { .. })), "exchange into another dtype: {mixed:?}");
        if world > 1 {
            let uneven = comm.exchange(zeros(f32, world + 1)?, zeros(f32, world + 1)?);
            ensure!(matches!(uneven, Err(Error::Shape { .. })), "exchange of uneven slices: {uneven:?}");
        }
        let root = comm.broadcast_bytes(world, Vec::new());
        ensure!(matches!(root, Err(Error::Shape { .. })), "broadcast from outside the world: {root:?}");
    }
    Ok(comm.barrier()?)
}

/// Ranks in different calls are told so, every one of them, and can go on.
fn different_calls(comm: &Comm) -> Checked {
    if comm.world() == 1 {
        return Ok(());
    }
    let odd = comm.rank() == 1;
    let gather = |dtype, len: usize| -> crate::Result<()> {
        let zeros = |len| Buffer::zeros(dtype, len, "a conformance buffer");
        comm.all_gather(zeros(len)?, zeros(len * comm.world())?)?.wait().map(drop)
    };
    let failures = [
        ("operation", if odd { comm.barrier() } else { comm.gather_f64(&[]).map(drop) }),
        ("length", comm.gather_u64(if odd { &[1, 2] } else { &[1] }).map(drop)),
        ("root", comm.broadcast_bytes(usize::from(odd), Vec::new()).map(drop)),
        ("dtype", gather(DTYPES[usize::from(odd)], 4)),
        ("buffer length", gather(DType::F32, if odd { 5 } else { 6 })),
    ];
    are_mismatches(comm.world(), &failures)?;
    Ok(comm.barrier()?)
}

/// Every call failed because rank 1 differed in what is named beside it.
fn are_mismatches(world: usize, failures: &[(&str, crate::Result<()>)]) -> Checked {
    for (what, result) in failures {
        let Err(Error::Mismatch { asked }) = result else {
            return Err(format!("ranks that differ in {what} got {result:?}").into());
        };
        let others = asked.iter().enumerate().all(|(rank, call)| (*call == asked[0]) == (rank != 1));
        ensure!(asked.len() == world && others, "a mismatch in {what} names {asked:?}");
    }
    Ok(())
}

/// The tree of [`spmd_core::ops::OrderedSum`], on numbers whose sum depends on the order.
fn sums(part: &Part, received: &mut Vec<u8>) -> Checked {
    fn tree(parts: &[f32]) -> f32 {
        match parts.len() {
            n if n % 2 == 0 => tree(&parts[..n / 2]) + tree(&parts[n / 2..]),
            _ => parts[1..].iter().fold(parts[0], |sum, x| sum + x),
        }
    }
    const SHARD: usize = 37;
    let (comm, place, size) = (&part.comm, part.comm.rank(), part.ranks.len());
    let (device, own) = (Device::cpu(1)?, part.own());
    // Powers of two from 2^-12 to 2^12 beside 1/3: fp32 keeps 24 bits, so which pair meets first shows in the last ones.
    let term = |from: usize, i: usize| (((from * 5 + i) % 25) as f32 - 12.0).exp2() / 3.0;
    for dtype in DTYPES {
        for out_dtype in DTYPES {
            let send = filled(dtype, SHARD * size, |i| term(own, i))?;
            let scratch = Buffer::zeros(dtype, SHARD * size, "a conformance buffer")?;
            let mut out = Buffer::zeros(out_dtype, SHARD, "a conformance buffer")?;
            comm.reduce_scatter(&device, send, scratch)?.wait(out.view_mut())?;
            for i in 0..SHARD {
                let rounded = |from: &usize| dtype.round(term(*from, place * SHARD + i));
                let terms: Vec<f32> = part.ranks.iter().map(rounded).collect();
                let (found, expected) = (out.view().get(i), out_dtype.round(tree(&terms)));
                ensure!(found.to_bits() == expected.to_bits(), "sum {i} in {dtype} is {found:e}, not {expected:e}");
            }
            received.extend_from_slice(out.bytes());
        }
    }
    Ok(())
}

/// A short fingerprint of what [`run`] received (FNV-1a, 64 bits), to compare transports in different processes.
pub fn fingerprint(received: &[u8]) -> u64 {
    received.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}
