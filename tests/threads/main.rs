//! `umbra train` on ranks that are threads of one process: `umbra-threads RANKS train ...`, like `mpirun -n RANKS umbra
//! train ...`. Only the transport differs.

use collectives::threads;
use std::process::ExitCode;
use std::time::Duration;
use umbra::cli::{self, Command};
use umbra::host::note;
use umbra::{Exit, Failure, Result, run};

fn main() -> ExitCode {
    match train() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            note(&failure);
            ExitCode::from(failure.exit as u8)
        }
    }
}

fn train() -> Result<()> {
    let mut words = std::env::args_os();
    let program = words.next();
    let ranks = words.next().and_then(|word| word.to_str()?.parse::<usize>().ok()).filter(|ranks| *ranks > 0);
    let parsed = cli::parse(program.into_iter().chain(words));
    let (Some(ranks), Ok(Command::Train(args))) = (ranks, parsed.map(|cli| cli.command)) else {
        return Err(Failure::usage("umbra-threads does nothing but `umbra-threads RANKS train ...`"));
    };
    let results = threads::run(ranks, Duration::from_secs(60), |comm| run::train(&args, 1, &comm));
    // Every rank returns the same; one that panicked says more than those that waited for it.
    let died = results.iter().find_map(|rank| rank.as_ref().err());
    match died {
        Some(error) => Err(Failure::new(Exit::Lost, error.to_string())),
        None => results.into_iter().flatten().collect(),
    }
}
