//! Ranks and what they say to each other: one contract ([`Comm`]) over three transports.
//!
//! - *solo*: a world of one, no MPI touched;
//! - *threads*: the ranks are threads of one process ([`threads::run`]), for rank-local tests;
//! - *MPI*: one thread owns MPI and makes blocking calls, so a started operation progresses while the caller computes
//!   (feature `mpi`).
//!
//! Lengths, dtypes and the order of calls are checked once, in front of every transport ([`comm`]); all three give the
//! same bytes, which the [`conformance`] suite asserts. Sums are made locally, in an order that belongs to the run, so
//! they are the same bits on every transport ([`Comm::reduce_scatter`]).
//!
//! A communicator can be narrowed to groups of ranks ([`Comm::contiguous`], [`Comm::strided`]). Every rank still comes to
//! every call, so that one that has failed or gone elsewhere is noticed by all; only the data stays within the groups.
//!
//! Reading order: [`comm`], [`group`], `transport.rs` (what a transport owes), `solo.rs`, [`threads`], `mpi.rs`,
//! `mpi/ffi.rs`.

pub mod comm;
pub mod conformance;
pub mod error;
pub mod group;
pub mod launch;
#[cfg(feature = "mpi")]
mod mpi;
mod oneshot;
pub mod panics;
pub mod reduce;
mod solo;
pub mod threads;
mod transport;

pub use comm::{Comm, Ticket};
pub use error::{Error, Result};
pub use group::Group;
pub use launch::{Launch, connect};
pub use panics::{abort, install_panic_hook};
pub use reduce::ReduceTicket;
