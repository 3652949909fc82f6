//! The `umbra` binary: parse, connect, run, meet, leave.

use collectives::{Comm, Launch};
use std::process::ExitCode;
use umbra::cli::{Bench, BenchArgs, ClapOutcome, Cli, Command};
use umbra::host::note;
use umbra::launch::meet;
use umbra::{Exit, Failure, Result, bench, checkpoint, cli, compare, config, generate, host, planner, report, run};

fn var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn main() -> ExitCode {
    host::clock();
    collectives::install_panic_hook();
    let parsed = cli::parse(std::env::args_os());
    let comm = match collectives::connect(&Launch::from_vars(var)) {
        Ok(comm) => comm,
        Err(error) => {
            let failure = Failure::from(error);
            note(&failure);
            return ExitCode::from(failure.exit as u8);
        }
    };
    let code = match read_by_all(parsed, &comm) {
        Ok(Ok(cli)) => finish_with(&comm, command(cli, &comm)),
        Ok(Err(code)) => code,
        Err(failure) => finish_with(&comm, Err(failure)),
    };
    leave(comm, code)
}

/// This rank's command line if every rank can read its own; otherwise the first rank that cannot says so, and all leave
/// with its exit code.
fn read_by_all(parsed: Result<Cli, ClapOutcome>, comm: &Comm) -> Result<Result<Cli, u8>> {
    const READ: u64 = u64::MAX;
    let own = parsed.as_ref().err().map_or(READ, |outcome| outcome.exit_code() as u64);
    let codes = comm.gather_u64(&[own]).map_err(Failure::from)?;
    let first = codes.iter().position(|code| *code != READ);
    Ok(match (first, parsed) {
        (None, Ok(cli)) => Ok(cli),
        (Some(rank), Err(outcome)) if rank == comm.rank() => {
            outcome.print();
            Err(outcome.exit_code() as u8)
        }
        (rank, _) => Err(codes[rank.unwrap_or(0)] as u8),
    })
}

fn command(cli: Cli, comm: &Comm) -> Result<()> {
    if let Some(failure) = cli.command.not_built() {
        return Err(failure);
    }
    let cores = host::cores(var);
    match cli.command {
        Command::Train(args) => run::train(&args, cores, comm),
        Command::Generate(args) => {
            meet(comm, args.check())?;
            generate::generate(&args, args.threads.unwrap_or(cores), comm)
        }
        // It is about files alone: one rank reads them, the others wait.
        Command::Report(args) => {
            if comm.rank() == 0 {
                report::report(&args)
            } else {
                Ok(())
            }
        }
        Command::Compare(args) => compare::compare(&args, cores, comm),
        Command::Plan(args) if comm.rank() == 0 => planner::run(&args, comm.world(), cores),
        Command::Config(args) if comm.rank() == 0 => config::run(&args),
        Command::Plan(_) | Command::Config(_) => Ok(()),
        Command::Checkpoint(args) if comm.rank() == 0 => checkpoint::commands::run(&args, cores),
        Command::Checkpoint(_) => Ok(()),
        Command::Bench(BenchArgs { what: Bench::Step(args) }) => {
            meet(comm, args.check())?;
            bench::step(&args, args.threads.unwrap_or(cores), comm)
        }
        // `not_built` has refused every other one.
        _ => Err(Failure::new(Exit::Bug, "this command is neither built nor refused")),
    }
}

/// Shows a failure once and turns the result into an exit code. A failure on this rank alone meets the others here.
fn finish_with(comm: &Comm, result: Result<()>) -> u8 {
    match meet(comm, result) {
        Ok(()) => 0,
        Err(failure) => {
            // Every rank has the same failure, unless they could not meet: then each says what it knows.
            if comm.rank() == 0 || failure.exit == Exit::Lost {
                note(&failure);
            }
            if failure.exit == Exit::Lost {
                collectives::abort(failure.exit as i32);
            }
            failure.exit as u8
        }
    }
}

/// Ends MPI in order, so that the exit code is this program's own.
fn leave(comm: Comm, code: u8) -> ExitCode {
    match comm.finish() {
        Ok(()) => ExitCode::from(code),
        Err(error) => {
            note(Failure::from(error));
            collectives::abort(if code == 0 { Exit::Lost as i32 } else { code as i32 })
        }
    }
}
