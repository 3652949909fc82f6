//! End-to-end tests: the released binary, alone and under mpirun, and the same run on ranks that are threads.

mod bad_input;
mod changed;
mod config;
mod curves;
mod damage;
mod failures;
mod fixtures;
mod generate;
mod kills;
mod layouts;
mod matrix;
mod normalisation;
mod once;
mod output;
mod resume;
mod tidy;
