//! File systems that are soon full.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file system of its own that is gone with its guard.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts one of `size` (as tmpfs spells it) at a new folder; `None`, and it is said, where this user may not.
    pub fn new(at: &Path, size: &str) -> Option<Self> {
        fs::create_dir(at).expect("a folder");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(at).stderr(Stdio::null());
        if mount.status().is_ok_and(|status| status.success()) {
            return Some(SmallDisk(at.to_owned()));
        }
        println!("SKIPPED: a full disk needs the right to mount a tmpfs");
        None
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Takes all the room but about `left` bytes and returns the file that holds it.
    pub fn fill(&self, left: usize) -> PathBuf {
        let path = self.0.join("ballast");
        let mut file = File::create(&path).expect("a file");
        let mut len = 0;
        while file.write_all(&[0; 4096]).is_ok() {
            len += 4096_u64;
        }
        file.set_len(len.saturating_sub(left as u64)).expect("a shorter file");
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A mount that stays is seen by whoever removes the folder above it.
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
