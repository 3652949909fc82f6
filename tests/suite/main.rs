//! End-to-end tests: the released binary, alone and under mpirun, and the same run on ranks that are threads.

mod bad_input;
mod curves;
mod failures;
mod fixtures;
mod generate;
mod layouts;
mod normalisation;
mod once;
mod output;
mod tidy;
