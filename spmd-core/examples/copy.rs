//! What a bare copy in memory takes: `copy MIB` prints the milliseconds of five copies of that size, the least first.
//! Both sides have been written before, as the state of a run and the room for its snapshot have been.

use std::hint::black_box;
use std::time::Instant;

fn main() {
    let mib: usize = std::env::args().nth(1).and_then(|s| s.parse().ok()).expect("copy MIB: a size in MiB");
    let (from, mut to) = (vec![1u8; mib << 20], vec![2u8; mib << 20]);
    let mut times: Vec<f64> = (0..5)
        .map(|_| {
            let began = Instant::now();
            to.copy_from_slice(black_box(&from));
            black_box(&mut to);
            began.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{}", times.iter().map(|ms| format!("{ms:.0}")).collect::<Vec<_>>().join(" "));
}
