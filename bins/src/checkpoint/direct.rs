//! Files of a checkpoint written past the page cache. A save is far larger than what the kernel should keep of it, and
//! writing through the cache costs a second copy, page by page, with the file's lock held: on a quick disk three times
//! the time. `O_DIRECT` (open(2)) wants address, offset and length aligned; the blocks of a checkpoint begin anywhere, so
//! their ragged ends go through the cache and what lies between goes straight to the disk.

use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// What every file system with `O_DIRECT` is content with: a page, which no disk's sector exceeds.
const ALIGN: usize = 4096;

/// Below this a write through the cache is as quick.
const LEAST: usize = 64 << 10;

/// Bytes that begin at a multiple of [`ALIGN`] in memory. Grows to the largest block it has held.
#[derive(Debug, Default)]
pub(super) struct Aligned {
    memory: Vec<u8>,
}

impl Aligned {
    /// The first `len` bytes, whatever they hold.
    fn take(&mut self, len: usize) -> &mut [u8] {
        if self.memory.len() < len + ALIGN {
            // A new vector rather than `resize`: what an old one held is of no use.
            self.memory = vec![0; len + ALIGN];
        }
        let start = self.memory.as_ptr().align_offset(ALIGN);
        &mut self.memory[start..start + len]
    }
}

/// A file that one rank writes blocks of.
#[derive(Debug)]
pub(super) struct OutFile {
    cached: File,
    /// The same file past the cache, where the file system can.
    direct: Option<File>,
}

impl OutFile {
    /// Opens `path`, making it when it is not there.
    ///
    /// # Errors
    /// What the file system answers.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        let cached = options.open(path)?;
        // File systems without it (tmpfs of older kernels, some of FUSE) refuse the flag with EINVAL.
        let direct = options.custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path).ok();
        Ok(OutFile { cached, direct })
    }

    /// Writes `bytes` at `offset`, with `bounce` for what has to be aligned.
    ///
    /// # Errors
    /// What the file system answers.
    pub(super) fn write_all_at(&mut self, bytes: &[u8], offset: u64, bounce: &mut Aligned) -> io::Result<()> {
        let Some(direct) = &self.direct else { return self.cached.write_all_at(bytes, offset) };
        let head = (offset.next_multiple_of(ALIGN as u64) - offset).min(bytes.len() as u64) as usize;
        let middle = (bytes.len() - head) / ALIGN * ALIGN;
        if middle < LEAST {
            return self.cached.write_all_at(bytes, offset);
        }
        let (head, rest) = bytes.split_at(head);
        let (middle, tail) = rest.split_at(middle);
        let at = offset + head.len() as u64;
        let aligned = bounce.take(middle.len());
        aligned.copy_from_slice(middle);
        match direct.write_all_at(aligned, at) {
            Ok(()) => {}
            // Alignment is the file system's own affair: one that wants more than a page gets the rest through the cache.
            Err(e) if e.kind() == ErrorKind::InvalidInput => {
                self.direct = None;
                return self.cached.write_all_at(bytes, offset);
            }
            Err(e) => return Err(e),
        }
        self.cached.write_all_at(head, offset)?;
        self.cached.write_all_at(tail, at + middle.len() as u64)
    }

    /// Sets the file's length.
    ///
    /// # Errors
    /// What the file system answers.
    pub(super) fn set_len(&self, len: u64) -> io::Result<()> {
        self.cached.set_len(len)
    }

    /// Returns when everything written is on the disk, by whichever way it went.
    ///
    /// # Errors
    /// What the file system answers.
    pub(super) fn sync_all(&self) -> io::Result<()> {
        self.cached.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIGN, Aligned, LEAST, OutFile};

    /// Neighbouring blocks of many lengths, written out of order and by two handles as two ranks would: every byte lands
    /// where it belongs, past the cache and (`direct` taken away) through it.
    #[test]
    fn ragged_blocks_fill_a_file() {
        let lengths = [8, ALIGN - 8, LEAST, 1, LEAST + ALIGN - 1, 3 * LEAST + 17, 2 * ALIGN, LEAST + 2 * ALIGN, 5];
        let bytes: Vec<u8> = (0..lengths.iter().sum::<usize>()).map(|i| (i * 31 % 253) as u8).collect();
        let dir = tempfile::tempdir().unwrap();
        for direct in [true, false] {
            let path = dir.path().join(format!("blocks-{direct}"));
            let mut handles = [OutFile::open(&path).unwrap(), OutFile::open(&path).unwrap()];
            for handle in handles.iter_mut().filter(|_| !direct) {
                handle.direct = None;
            }
            handles[0].set_len(bytes.len() as u64).unwrap();
            let mut bounce = Aligned::default();
            let mut blocks: Vec<(usize, usize)> = Vec::new();
            for len in lengths {
                let start = blocks.last().map_or(0, |(start, len)| start + len);
                blocks.push((start, len));
            }
            for (n, (start, len)) in blocks.iter().copied().enumerate().rev() {
                handles[n % 2].write_all_at(&bytes[start..start + len], start as u64, &mut bounce).unwrap();
            }
            handles.iter().for_each(|handle| handle.sync_all().unwrap());
            assert!(std::fs::read(&path).unwrap() == bytes, "direct {direct}");
        }
    }

    #[test]
    fn a_bounce_begins_at_a_page_and_grows() {
        let mut bounce = Aligned::default();
        for len in [1, LEAST, 10, 3 * LEAST] {
            let block = bounce.take(len);
            assert_eq!((block.len(), block.as_ptr().align_offset(ALIGN)), (len, 0));
        }
    }
}
