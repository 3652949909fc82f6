//! The `umbra` binary: parse, connect, run, meet, leave.

use collectives::{Comm, Launch};
use std::process::ExitCode;
use umbra::cli::{Bench, BenchArgs, Cli, Command};
use umbra::launch::meet;
use umbra::plan::RunPlan;
use umbra::{Exit, Failure, Result, bench, cli, generate, host, run};

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
            eprintln!("{failure}");
            return ExitCode::from(failure.exit as u8);
        }
    };
    let code = match parsed {
        Ok(cli) => finish_with(&comm, command(cli, &comm)),
        Err(outcome) => {
            if comm.rank() == 0 {
                outcome.print();
            }
            outcome.exit_code() as u8
        }
    };
    leave(comm, code)
}

fn command(cli: Cli, comm: &Comm) -> Result<()> {
    if let Some(failure) = cli.command.not_built() {
        return Err(failure);
    }
    let cores = host::cores(var);
    match cli.command {
        Command::Train(args) => run::train(&meet(comm, RunPlan::resolve(&args, comm.world(), cores))?, comm),
        Command::Generate(args) => {
            meet(comm, args.check())?;
            generate::generate(&args, args.threads.unwrap_or(cores), comm)
        }
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
                eprintln!("{failure}");
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
            eprintln!("{}", Failure::from(error));
            collectives::abort(if code == 0 { Exit::Lost as i32 } else { code as i32 })
        }
    }
}
