//! How much memory this process has and may still have. Linux only; elsewhere there is no answer.

use std::fs::read_to_string;
use std::path::PathBuf;

/// Bytes of this process that are in memory now (VmRSS).
pub fn resident() -> Option<u64> {
    kib_field(&read_to_string("/proc/self/status").ok()?, "VmRSS")
}

/// The most bytes of this process that ever were in memory (VmHWM).
pub fn peak_rss() -> Option<u64> {
    kib_field(&read_to_string("/proc/self/status").ok()?, "VmHWM")
}

/// Starts [`peak_rss`] anew from what is resident now, for another run in the same process; where the kernel does not let it,
/// the old peak stands.
pub fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Bytes that could be had now without swapping: what the machine has left, or the control group if that is less.
pub fn available() -> Option<u64> {
    let machine = kib_field(&read_to_string("/proc/meminfo").ok()?, "MemAvailable")?;
    Some(group_available().map_or(machine, |group| group.min(machine)))
}

/// The value of a `Name:   123 kB` line, in bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What the tightest control group above this process leaves it, if any sets a limit.
fn group_available() -> Option<u64> {
    let groups = read_to_string("/proc/self/cgroup").ok()?;
    let (root, path, names) = group_path(&groups)?;
    let mut dir: PathBuf = format!("{root}{path}").into();
    let mut least = None;
    // A limit set anywhere up the tree binds; inside a container the path may not exist and the root is the group itself.
    while dir.starts_with(root) {
        let read = |name: &str| read_to_string(dir.join(name)).ok();
        if let (Some(limit), Some(used)) = (read(names.0), read(names.1)) {
            let left = left_of(&limit, &used, read("memory.stat").as_deref().unwrap_or(""));
            least = [least, left].into_iter().flatten().min();
        }
        if !dir.pop() {
            break;
        }
    }
    least
}

/// Names of the files that hold a group's limit and what it uses.
type Names = (&'static str, &'static str);

/// Root, path and file names of the memory controller, from the text of `/proc/self/cgroup`. Version 1 wins where both
/// are mounted, because the controller belongs to one of them and version 1 lists it by name.
fn group_path(groups: &str) -> Option<(&'static str, &str, Names)> {
    let fields = |line: &'_ str| -> Option<(usize, usize)> {
        let first = line.find(':')?;
        Some((first, first + 1 + line[first + 1..].find(':')?))
    };
    let mut second = None;
    for line in groups.lines() {
        let (a, b) = fields(line)?;
        let (controllers, path) = (&line[a + 1..b], line[b + 1..].trim_end_matches('/'));
        if controllers.split(',').any(|c| c == "memory") {
            return Some(("/sys/fs/cgroup/memory", path, ("memory.limit_in_bytes", "memory.usage_in_bytes")));
        }
        if controllers.is_empty() {
            second = Some(("/sys/fs/cgroup", path, ("memory.max", "memory.current")));
        }
    }
    second
}

/// What is left under a limit; file pages that nobody used lately count as free. None if the limit is `max`.
fn left_of(limit: &str, used: &str, stat: &str) -> Option<u64> {
    let limit: u64 = limit.trim().parse().ok()?;
    let used: u64 = used.trim().parse().ok()?;
    let field = |name: &str| stat.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok());
    let cache = field("total_inactive_file ").or_else(|| field("inactive_file ")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_read_in_bytes() {
        let text = "Name:\tumbra\nVmHWM:\t   12345 kB\nVmRSS:\t    1000 kB\nThreads:\t2\n";
        assert_eq!(kib_field(text, "VmHWM"), Some(12345 * 1024));
        assert_eq!(kib_field(text, "VmRSS"), Some(1_024_000));
        assert_eq!(kib_field(text, "Vm"), None);
        assert_eq!(kib_field(text, "Threads"), None);
        assert_eq!(kib_field("", "VmRSS"), None);
    }

    #[test]
    fn the_memory_controller_is_found_in_either_version() {
        let (root, path, names) = group_path("0::/user.slice/run-1.scope\n").unwrap();
        assert_eq!((root, path, names.0), ("/sys/fs/cgroup", "/user.slice/run-1.scope", "memory.max"));
        let hybrid = "12:cpu,cpuacct:/a\n7:memory:/slurm/job_1\n0::/b\n";
        let (root, path, names) = group_path(hybrid).unwrap();
        assert_eq!((root, path, names.1), ("/sys/fs/cgroup/memory", "/slurm/job_1", "memory.usage_in_bytes"));
        assert_eq!(group_path("0::/\n").unwrap().1, "");
        assert!(group_path("").is_none());
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_cannot_be_dropped() {
        assert_eq!(left_of("1000\n", "600\n", "anon 5\ninactive_file 100\n"), Some(500));
        assert_eq!(left_of("1000", "600", ""), Some(400));
        assert_eq!(left_of("1000", "1600", ""), Some(0));
        assert_eq!(left_of("max\n", "600", ""), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn readings_follow_an_allocation() {
        let before = resident().unwrap();
        let block = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = resident().unwrap();
        // Other tests of this process run at the same time, so only most of the block is asked for.
        assert!(after >= before + (32 << 20), "{before} {after}");
        assert!(peak_rss().unwrap() >= after.min(block.len() as u64));
        assert!(available().unwrap() > 0);
        drop(block);
    }
}
