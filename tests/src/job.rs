//! A process that is watched while it runs, and the ranks of a job under mpirun.

use crate::{LIMIT, Output, folder};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A started process with its output in files, so that it never waits for a reader.
#[derive(Debug)]
pub struct Job {
    child: Child,
    output: TempDir,
    started: Instant,
}

impl Job {
    /// Starts `command`; `stdin` is what it reads.
    pub fn start(command: &mut Command, stdin: Stdio) -> Self {
        let output = folder();
        let file = |name: &str| File::create(output.path().join(name)).expect("a file for the output");
        command.stdin(stdin).stdout(file("stdout")).stderr(file("stderr"));
        let started = Instant::now();
        let child = command.spawn().unwrap_or_else(|e| panic!("{command:?} cannot be started: {e}"));
        Job { child, output, started }
    }

    /// Waits for its end; a process that takes longer than three minutes is killed.
    pub fn wait(mut self) -> Output {
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child to wait for") {
                break status;
            }
            if self.started.elapsed() > LIMIT {
                self.child.kill().expect("a child to kill");
                break self.child.wait().expect("a child to wait for");
            }
            sleep(Duration::from_millis(2));
        };
        let (stdout, stderr) = (self.read("stdout"), self.read("stderr"));
        Output { code: status.code(), stdout, stderr, took: self.started.elapsed() }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `reached` says so, at most as long as a job may take.
    pub fn wait_until(&mut self, what: &str, mut reached: impl FnMut() -> bool) {
        while !reached() {
            let ended = self.child.try_wait().expect("a child to wait for");
            assert!(ended.is_none(), "the job ended ({ended:?}) before {what}");
            assert!(self.started.elapsed() < LIMIT, "waited too long for {what}");
            sleep(Duration::from_millis(5));
        }
    }

    /// What it has complained about so far.
    pub fn stderr(&self) -> String {
        self.read("stderr")
    }

    fn read(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.output.path().join(name)).unwrap_or_default()).into_owned()
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().expect("a child to wait for").is_none()
    }

    /// Process ids of the ranks that mpirun started, in rank order.
    pub fn ranks(&self) -> Vec<u32> {
        let mut ranks: Vec<(usize, u32)> =
            children(self.id()).into_iter().filter_map(|id| Some((rank(id)?, id))).collect();
        ranks.sort_unstable();
        ranks.into_iter().map(|(_, id)| id).collect()
    }
}

/// Sends a signal to one process.
pub fn signal(name: &str, id: u32) {
    let status = Command::new("kill").args(["-s", name, &id.to_string()]).status().expect("kill to run");
    assert!(status.success(), "{name} could not be sent to {id}");
}

/// Sends KILL to processes of which some may have ended by themselves.
pub fn kill(ids: &[u32]) {
    let mut command = Command::new("kill");
    command.args(["-s", "KILL"]).args(ids.iter().map(u32::to_string)).stderr(Stdio::null());
    command.status().expect("kill to run");
}

/// A job that breaks is over by then. It takes a second or two; the rest is for a loaded machine.
pub const SOON: Duration = Duration::from_secs(20);

/// Waits until none of the processes is there.
pub fn all_gone(ids: &[u32]) {
    let begin = Instant::now();
    while ids.iter().any(|id| alive(*id)) {
        assert!(begin.elapsed() < SOON, "still there: {:?}", ids.iter().filter(|id| alive(**id)).collect::<Vec<_>>());
        sleep(Duration::from_millis(10));
    }
}

/// The processes with `path` on their command line: a job's launcher and its ranks, by the folder they write to.
pub fn using(path: &Path) -> Vec<u32> {
    let path = path.as_os_str().as_encoded_bytes();
    let entries = fs::read_dir("/proc").expect("/proc").filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    let uses = |id: &u32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        alive(*id) && line.split(|b| *b == 0).any(|word| word == path)
    };
    entries.filter(uses).collect()
}

/// Whether a process is there and not merely waiting for its parent to notice its end.
pub fn alive(id: u32) -> bool {
    stat(id).is_some_and(|(state, _)| state != "Z" && state != "X")
}

/// State and parent of a process.
fn stat(id: u32) -> Option<(String, u32)> {
    let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name before it stands in brackets and may hold anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

fn children(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("/proc").filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    entries.filter(|id| stat(*id).is_some_and(|(_, p)| p == parent)).collect()
}

/// The rank of a process that Open MPI started.
fn rank(id: u32) -> Option<usize> {
    let variables = fs::read(format!("/proc/{id}/environ")).ok()?;
    let variable = |v: &[u8]| std::str::from_utf8(v.strip_prefix(b"OMPI_COMM_WORLD_RANK=")?).ok()?.parse().ok();
    variables.split(|b| *b == 0).find_map(variable)
}
