//! The `umbra` binary.
fn main() {}
