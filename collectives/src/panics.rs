//! How a rank ends when it cannot go on: at once, for all ranks, with one message that names it.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Exit code of a job in which a rank panicked.
pub const PANIC_EXIT: i32 = 5;

/// This process's rank, for the panic message; 0 until it is known.
static RANK: AtomicUsize = AtomicUsize::new(0);

#[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "one process is one rank only under MPI"))]
pub(crate) fn set_rank(rank: usize) {
    RANK.store(rank, Ordering::Relaxed);
}

/// Ends the job: all ranks at once if MPI is up, otherwise this process. Never returns; may be called from any thread.
pub fn abort(code: i32) -> ! {
    #[cfg(feature = "mpi")]
    crate::mpi::abort_all(code);
    std::process::exit(code)
}

/// From now on a panic on any thread of this process prints one message with the rank and ends the job with
/// [`abort`]`(5)`. Without it a panic under MPI hangs the job: the other ranks wait for one that has gone home.
/// [`crate::connect`] calls it for a rank of several.
pub fn install_panic_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| std::panic::set_hook(Box::new(die)));
}

fn die(info: &std::panic::PanicHookInfo<'_>) {
    static DYING: AtomicBool = AtomicBool::new(false);
    if DYING.swap(true, Ordering::SeqCst) {
        // Another thread is ending the process; a second message would only hide the cause.
        loop {
            std::thread::park();
        }
    }
    let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
    let mut text = format!("rank {} panicked{place}: {}\n", RANK.load(Ordering::Relaxed), message(info.payload()));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        text.push_str(&format!("{backtrace}\n"));
    }
    // One write, so that lines of other ranks do not get between. Nobody is left to tell if it fails.
    let _ = std::io::stderr().write_all(text.as_bytes());
    abort(PANIC_EXIT)
}

/// The text of a panic, where it has one.
pub(crate) fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
