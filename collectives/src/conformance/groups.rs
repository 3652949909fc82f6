//! The checks of groups: the same as of the world in every group there is, and how groups and the world live together.

use super::{
    Checked, DTYPES, Part, are_mismatches, check_all_gather, data, exchange, start_all_gather, start_exchange,
};
use crate::{Comm, Error, Group};
use spmd_core::DType;

pub(super) fn run(comm: &Comm, received: &mut Vec<u8>) -> Checked {
    refused(comm)?;
    let parts = parts(comm)?;
    for part in &parts {
        data(part, received)?;
    }
    in_flight(comm, &parts, received)?;
    counted(comm, &parts)?;
    different_groups(comm)
}

/// This rank's part of every kind of group that the world can be divided into.
fn parts(comm: &Comm) -> Checked<Vec<Part>> {
    let (rank, world) = (comm.rank(), comm.world());
    let mut parts = Vec::new();
    for n in (1..=world).filter(|n| world.is_multiple_of(*n)) {
        let first = rank - rank % n;
        let contiguous = Part { comm: comm.contiguous(n)?, ranks: (first..first + n).collect() };
        let strided = Part { comm: comm.strided(n)?, ranks: (rank % n..world).step_by(n).collect() };
        for part in [contiguous, strided] {
            let (place, size) = (part.comm.rank(), part.comm.world());
            ensure!(
                size == part.ranks.len() && part.own() == rank,
                "rank {rank} is {place} of {size}: {:?}",
                part.comm
            );
            let (all, group) = (size == world, part.comm.group());
            ensure!(all == (group == Group::World), "{size} of {world} ranks are {group}");
            // What is the world has been checked.
            if !all {
                parts.push(part);
            }
        }
    }
    Ok(parts)
}

/// Groups of unequal sizes, and groups within groups.
fn refused(comm: &Comm) -> Checked {
    let world = comm.world();
    for n in (0..=world + 1).filter(|n| *n == 0 || !world.is_multiple_of(*n)) {
        for narrowed in [comm.contiguous(n), comm.strided(n)] {
            ensure!(matches!(narrowed, Err(Error::Shape { .. })), "{n} with {world} ranks gave {narrowed:?}");
        }
    }
    if world > 1 {
        let alone = comm.contiguous(1)?;
        for again in [alone.contiguous(1), alone.strided(1)] {
            ensure!(matches!(again, Err(Error::Shape { .. })), "a group in a group: {again:?}");
        }
    }
    Ok(())
}

/// Operations of all groups and of the world on their way at the same time, waited for in any order or not at all.
fn in_flight(comm: &Comm, parts: &[Part], received: &mut Vec<u8>) -> Checked {
    let world = Part { comm: comm.clone(), ranks: (0..comm.world()).collect() };
    let mut started = Vec::new();
    for (len, dtype) in [(300, DType::F32), (5000, DType::Bf16), (1, DType::F32)] {
        for part in parts.iter().chain([&world]) {
            started.push((part, len, start_all_gather(part, dtype, len)?));
            drop(start_exchange(part, dtype, len)?);
        }
    }
    // Calls that wait by themselves come after what was started.
    for part in parts {
        part.comm.barrier()?;
        let found = part.comm.gather_u64(&[part.own() as u64])?;
        let expected: Vec<u64> = part.ranks.iter().map(|rank| *rank as u64).collect();
        ensure!(found == expected, "gather_u64 gave {found:?}, not {expected:?}");
        received.extend_from_slice(exchange(&world, DType::F32, 3)?.bytes());
    }
    for (part, len, ticket) in started.into_iter().rev() {
        let buffers = ticket.wait()?;
        check_all_gather(part, len, &buffers)?;
        received.extend_from_slice(buffers.1.bytes());
    }
    Ok(())
}

/// What is sent to other ranks is counted, in one sum for all groups.
fn counted(comm: &Comm, parts: &[Part]) -> Checked {
    let mut expected = comm.sent_bytes();
    for part in parts {
        for dtype in DTYPES {
            start_all_gather(part, dtype, 5)?.wait()?;
            exchange(part, dtype, 7)?;
            part.comm.gather_bytes(&[0; 100])?;
            expected += ((part.ranks.len() - 1) * (5 + 7) * dtype.size()) as u64;
            let (all, found) = (comm.sent_bytes(), part.comm.sent_bytes());
            ensure!(all == expected && found == expected, "sent {all} and {found}, not {expected} bytes");
        }
    }
    Ok(())
}

/// Ranks that make a call in different groups, or another call, are told so: every rank in every group.
fn different_groups(comm: &Comm) -> Checked {
    let world = comm.world();
    let sizes: Vec<usize> = (2..world).filter(|n| world.is_multiple_of(*n)).collect();
    let (Some(smallest), Some(largest)) = (sizes.first(), sizes.last()) else { return Ok(()) };
    let (contiguous, strided) = (comm.contiguous(*smallest)?, comm.strided(*smallest)?);
    let odd = comm.rank() == 1;
    let pick = |a, b| if odd { a } else { b };
    let gather = |part: &Comm| {
        let zeros = |len| spmd_core::Buffer::zeros(DType::F32, len, "a conformance buffer");
        part.all_gather(zeros(3)?, zeros(3 * part.world())?)?.wait().map(drop)
    };
    let mut failures = vec![
        ("the kind of group", pick(&contiguous, &strided).barrier()),
        ("group and world", gather(pick(comm, &contiguous))),
        ("world and group", gather(pick(&strided, comm))),
        ("operation", if odd { comm.gather_bytes(&[]).map(drop) } else { gather(&strided) }),
        ("length", contiguous.gather_u64(if odd { &[1, 2] } else { &[1] }).map(drop)),
        ("root", contiguous.broadcast_bytes(usize::from(odd), Vec::new()).map(drop)),
    ];
    if smallest != largest {
        failures.push(("the group's size", pick(&contiguous, &comm.contiguous(*largest)?).barrier()));
    }
    are_mismatches(world, &failures)?;
    Ok(strided.barrier()?)
}
