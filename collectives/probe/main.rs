//! One rank of the MPI tests: `mpirun -n N collectives-probe SCENARIO`.

use collectives::{Comm, Error, Launch, abort, conformance, connect};
use std::error::Error as AnyError;
use std::process::Command;
use std::time::Duration;

fn main() -> Result<(), Box<dyn AnyError>> {
    let scenario = std::env::args().nth(1).unwrap_or_default();
    let comm = match connect(&Launch::from_vars(|name| std::env::var(name).ok())) {
        Ok(comm) => comm,
        Err(error) => {
            println!("refused: {error}");
            return Ok(());
        }
    };
    comm.set_timeout(Duration::from_secs(60));
    let victim = comm.rank() == 1;
    match scenario.as_str() {
        "conformance" => return conform(comm),
        // One rank goes in the middle of a job while the others wait for it.
        "panic" => alone(&comm, || panic!("the cat is on the keyboard"))?,
        "panic-thread" => alone(&comm, || {
            // The thread's own panic ends the job; what `join` says is of no interest.
            let _ = std::thread::spawn(|| panic!("the cat is on the keyboard")).join();
        })?,
        "abort" => alone(&comm, || abort(3))?,
        "exit" => alone(&comm, || std::process::exit(4))?,
        "kill" => alone(&comm, || {
            let status = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
            unreachable!("survived SIGKILL: {status:?}")
        })?,
        "missing" => return missing(&comm, &comm, victim),
        "missing-group" => return missing(&comm, &comm.contiguous(2)?, victim),
        "busy" => busy(&comm)?,
        // Every rank leaves without `finish`, an operation still on its way.
        "leave" => {
            comm.barrier()?;
            println!("rank {} leaves", comm.rank());
            return Ok(());
        }
        other => return Err(format!("no such scenario: {other:?}").into()),
    }
    Ok(comm.finish()?)
}

fn conform(comm: Comm) -> Result<(), Box<dyn AnyError>> {
    // A check that fails on one rank leaves the others waiting, so it has to end the job.
    let received = conformance::run(&comm).unwrap_or_else(|failed| {
        eprintln!("rank {}: {failed}", comm.rank());
        abort(1)
    });
    let fingerprints = comm.gather_u64(&[conformance::fingerprint(&received)])?;
    if comm.rank() == 0 {
        println!("{} {fingerprints:?}", comm.transport());
    }
    let clone = comm.clone();
    comm.finish()?;
    match clone.barrier() {
        Err(Error::Ended { .. }) => Ok(()),
        other => Err(format!("a call after finish gave {other:?}").into()),
    }
}

fn alone(comm: &Comm, end: impl FnOnce()) -> collectives::Result<()> {
    comm.barrier()?;
    if comm.rank() == 1 {
        end();
    }
    comm.barrier()
}

/// Rank 1 never comes to `group`'s call; the others are told who is missing.
fn missing(comm: &Comm, group: &Comm, victim: bool) -> Result<(), Box<dyn AnyError>> {
    comm.barrier()?;
    comm.set_timeout(Duration::from_millis(500));
    if victim {
        loop {
            std::thread::park();
        }
    }
    let error = group.gather_u64(&[1]).err();
    // Every rank hears of it from the clock. The last one says so alone and in one write, since mpirun may mix what
    // several write, and takes the others along, the parked one too.
    while comm.rank() + 1 < comm.world() {
        std::thread::park();
    }
    let line = format!("rank {}: {error:?}\n", comm.rank());
    eprint!("{line}");
    abort(5)
}

/// Prints how much processor time rank 0 used while it waited a second for rank 1.
fn busy(comm: &Comm) -> Result<(), Box<dyn AnyError>> {
    comm.barrier()?;
    if comm.rank() == 1 {
        std::thread::sleep(Duration::from_secs(1));
    }
    let before = ticks()?;
    comm.barrier()?;
    if comm.rank() == 0 {
        println!("ticks {}", ticks()? - before);
    }
    Ok(())
}

/// Processor time of this process in hundredths of a second (utime and stime of proc(5)).
fn ticks() -> Result<u64, Box<dyn AnyError>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    // Fields 14 and 15 of the line; the first after the name is field 3.
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}
