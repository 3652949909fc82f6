//! Writing a checkpoint: each rank its own byte ranges, checksums while the bytes are in cache, everything synced before
//! the folder gets its name.

use super::direct::{Aligned, OutFile};
use super::folder;
use super::format::{CHUNK, CheckpointState, Chunk, FileEntry, PlainRange, Role, RunFacts, STATE_FILE, Written};
use super::plan::{Files, PlacedRun, SavePlan};
use crate::hf::FileDType;
use crate::hf::save::{disk_failure, narrow, too_large};
use crate::{Exit, Failure, Result};
use spmd_core::View;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

impl SavePlan {
    /// Rank 0: makes the unfinished folder `step-NNNNNN.partial`, without what an earlier attempt left there.
    ///
    /// # Errors
    /// Exit 7: the disk refuses, or a folder of that name holds something that is not ours.
    pub fn create(&self) -> Result<()> {
        let partial = self.partial();
        folder::remove_partial(&partial)?;
        fs::create_dir_all(&partial).map_err(|e| self.refused("the checkpoint's folder cannot be made", &partial, &e))
    }

    /// Rank `rank`, after `create`: writes this rank's elements, and on rank 0 headers and small files, and returns when
    /// they have reached the disk. `slices(unit, role)` is this rank's slice of a unit in one of [`Role::STATE`]; the
    /// model is made from the shadow. Apart from two blocks of scratch nothing is allocated.
    ///
    /// # Errors
    /// Exit 7 when the disk refuses; exit 6 for a finite weight that bf16 can only hold as infinity; exit 1 for a slice
    /// that is not what the plan was made for.
    pub fn write_rank<'a>(&self, rank: usize, slices: impl Fn(usize, Role) -> View<'a>) -> Result<Written> {
        let runs = self.runs.get(rank).map_or(&[][..], Vec::as_slice);
        let mut writer = RankWriter {
            plan: self,
            files: (0..self.shards.len() + self.small.len()).map(|_| None).collect(),
            scratch: Vec::new(),
            bounce: Aligned::default(),
            written: Written::default(),
        };
        writer.headers(rank)?;
        for run in runs {
            writer.run(run, &slices)?;
        }
        writer.sync()?;
        Ok(writer.written)
    }

    /// Rank 0, with what every rank's [`SavePlan::write_rank`] returned: checks that nothing is missing, writes
    /// `state.rkyv`, and gives the folder its name, which it returns. Everything is durable then.
    ///
    /// # Errors
    /// Exit 1 when blocks are missing; exit 7 when the disk refuses. No earlier checkpoint is touched in either case.
    pub fn commit(&self, run: RunFacts, written: &[Written]) -> Result<PathBuf> {
        let state = self.state(run, written);
        state
            .check()
            .map_err(|e| Failure::new(Exit::Bug, "the blocks of a checkpoint do not fit together").found(e))?;
        let (partial, dir) = (self.partial(), self.dir());
        let path = partial.join(STATE_FILE);
        let bytes = state.encode()?;
        File::create(&path)
            .and_then(|file| {
                file.write_all_at(&bytes, 0)?;
                file.sync_all()
            })
            .and_then(|()| folder::sync(&partial))
            // The folder of checkpoints may be as new as this one is.
            .and_then(|()| folder::sync(&self.out_dir))
            .map_err(|e| self.refused("the state file of the checkpoint cannot be written", &path, &e))?;
        folder::put_in_place(&partial, &dir)
            .map_err(|e| self.refused("the checkpoint cannot be renamed into place", &dir, &e))?;
        Ok(dir)
    }

    /// Rank 0, when a rank failed: removes the unfinished folder. What cannot be removed stays under its other name.
    pub fn discard(&self) {
        let _ = folder::remove_partial(&self.partial());
    }

    fn partial(&self) -> PathBuf {
        folder::partial(&self.out_dir, self.step)
    }

    /// The name and length of file `index`.
    fn file_entry(&self, index: usize) -> FileEntry {
        match self.shards.get(index) {
            Some(shard) => FileEntry { name: shard.name.clone(), len: shard.len },
            None => {
                let (name, content) = &self.small[index - self.shards.len()];
                FileEntry { name: name.clone(), len: content.len() as u64 }
            }
        }
    }

    fn state(&self, run: RunFacts, written: &[Written]) -> CheckpointState {
        let mut chunks: Vec<Chunk> = written.iter().flat_map(|w| &w.chunks).copied().collect();
        let mut plain: Vec<PlainRange> = written.iter().flat_map(|w| &w.plain).copied().collect();
        chunks.sort_unstable();
        plain.sort_unstable();
        CheckpointState {
            umbra: env!("CARGO_PKG_VERSION").to_owned(),
            step: self.step,
            world: self.runs.len() as u64,
            run,
            config_json: self.config_json.clone(),
            tensors: self.tensors.clone(),
            stores_tied_head: self.stores_tied_head,
            dtypes: self.dtypes,
            files: (0..self.shards.len() + self.small.len()).map(|i| self.file_entry(i)).collect(),
            chunks,
            plain,
        }
    }

    /// An exit-7 failure; of a full disk with how much was needed, written and left.
    fn refused(&self, what: &str, path: &Path, error: &io::Error) -> Failure {
        let failure = disk_failure(what, path, error);
        if !matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
            return failure;
        }
        let free = folder::free_bytes(&self.out_dir).map_or("unknown".to_owned(), |n| n.to_string());
        failure
            .expected(format!("room for the {} bytes of this checkpoint", self.bytes()))
            .found(format!("{error}: {} bytes of it are written, {free} are free", taken(&self.partial())))
            .hint("free space, keep fewer checkpoints (--keep), or choose another place with --out")
    }
}

/// Bytes that the files of a folder take on disk.
fn taken(dir: &Path) -> u64 {
    // The kernel counts blocks in units of 512 bytes, whatever the file system's own are (stat(2)).
    fs::read_dir(dir)
        .map_or(0, |entries| entries.flatten().filter_map(|e| e.metadata().ok()).map(|m| m.blocks() * 512).sum())
}

struct RankWriter<'p> {
    plan: &'p SavePlan,
    /// By file index; only those this rank writes to.
    files: Vec<Option<OutFile>>,
    /// A block narrowed to bf16.
    scratch: Vec<u16>,
    bounce: Aligned,
    written: Written,
}

impl RankWriter<'_> {
    /// Headers, lengths and small files: those of shared files are rank 0's.
    fn headers(&mut self, rank: usize) -> Result<()> {
        let plan = self.plan;
        let own = |index: usize| match plan.files {
            Files::Shared => rank == 0,
            Files::PerRank => rank == index,
        };
        for (index, shard) in plan.shards.iter().enumerate().filter(|(index, _)| own(*index)) {
            // Never shorter than what another rank may have written already.
            let sized = self.file(index)?.set_len(shard.len);
            sized.map_err(|e| self.refused("a file of the checkpoint cannot be made", index, &e))?;
            self.plain(index, &shard.header)?;
        }
        if rank == 0 {
            for (index, (_, content)) in plan.small.iter().enumerate() {
                self.plain(plan.shards.len() + index, content)?;
            }
        }
        Ok(())
    }

    fn plain(&mut self, file: usize, bytes: &[u8]) -> Result<()> {
        self.write_at(file, bytes, 0)?;
        let range = PlainRange { file: file as u32, offset: 0, len: bytes.len() as u64, xxh3: xxh3_64(bytes) };
        self.written.plain.push(range);
        Ok(())
    }

    fn run<'a>(&mut self, run: &PlacedRun, slices: &impl Fn(usize, Role) -> View<'a>) -> Result<()> {
        let len = run.range.len();
        for at in (0..len).step_by(CHUNK) {
            let elements = CHUNK.min(len - at);
            let part = run.range.start + at..run.range.start + at + elements;
            for &(role, file, offset) in &run.places {
                let source = if Role::STATE.contains(&role) { role } else { Role::Shadow };
                let view = slices(run.unit, source);
                let expected = self.plan.dtypes.of(source);
                if view.len() < part.end || FileDType::from(view.dtype()) != expected {
                    let found = format!("{} elements in {}", view.len(), view.dtype());
                    let what = format!("a slice of {role} of unit {} does not fit its plan", run.unit);
                    let wanted = format!("at least {} in {}", part.end, expected.header_name());
                    return Err(Failure::new(Exit::Bug, what).expected(wanted).found(found));
                }
                let offset = offset + (at * self.plan.dtypes.of(role).size()) as u64;
                let (tensor, start, elements) = (run.tensor, (run.start + at) as u64, elements as u64);
                let chunk = Chunk { role, tensor, start, elements, file, offset, xxh3: 0 };
                self.chunk(chunk, view.slice(part.clone()))?;
            }
        }
        Ok(())
    }

    /// Writes one block: the numbers' own bytes where they have the right dtype.
    fn chunk(&mut self, chunk: Chunk, values: View<'_>) -> Result<()> {
        let dtype = self.plan.dtypes.of(chunk.role);
        let xxh3 = match values {
            View::F32(values) if dtype == FileDType::Bf16 => {
                let mut scratch = std::mem::take(&mut self.scratch);
                scratch.resize(values.len(), 0);
                narrow(dtype, values, &mut scratch).map_err(|i| {
                    let name = &self.plan.tensors[chunk.tensor as usize].name;
                    too_large(name, dtype, chunk.start as usize + i, values[i])
                })?;
                let xxh3 = self.block(&chunk, bytemuck::cast_slice(&scratch));
                self.scratch = scratch;
                xxh3?
            }
            values => self.block(&chunk, values.bytes())?,
        };
        self.written.chunks.push(Chunk { xxh3, ..chunk });
        std::thread::sleep(slowness());
        Ok(())
    }

    fn block(&mut self, chunk: &Chunk, bytes: &[u8]) -> Result<u64> {
        let xxh3 = xxh3_64(bytes);
        self.write_at(chunk.file as usize, bytes, chunk.offset)?;
        Ok(xxh3)
    }

    fn write_at(&mut self, file: usize, bytes: &[u8], offset: u64) -> Result<()> {
        let mut bounce = std::mem::take(&mut self.bounce);
        let written = self.file(file)?.write_all_at(bytes, offset, &mut bounce);
        self.bounce = bounce;
        written.map_err(|e| self.refused("a file of the checkpoint cannot be written", file, &e))
    }

    /// File `index`, made by whichever rank comes first.
    fn file(&mut self, index: usize) -> Result<&mut OutFile> {
        let opened = match self.files[index].take() {
            Some(file) => file,
            None => {
                let opened = OutFile::open(&self.path(index));
                opened.map_err(|e| self.refused("a file of the checkpoint cannot be opened", index, &e))?
            }
        };
        Ok(self.files[index].insert(opened))
    }

    fn sync(&self) -> Result<()> {
        for (index, file) in self.files.iter().enumerate() {
            let synced = file.as_ref().map_or(Ok(()), OutFile::sync_all);
            synced.map_err(|e| self.refused("a file of the checkpoint cannot be synced", index, &e))?;
        }
        Ok(())
    }

    fn path(&self, index: usize) -> PathBuf {
        self.plan.partial().join(self.plan.file_entry(index).name)
    }

    fn refused(&self, what: &str, index: usize, error: &io::Error) -> Failure {
        self.plan.refused(what, &self.path(index), error)
    }
}

/// A pause after every block, for tests that end a run in the middle of a save: `UMBRA_TEST_SLOW_SAVE_MS` milliseconds.
/// No setting of a run: without the variable there is none.
fn slowness() -> Duration {
    static PAUSE: OnceLock<Duration> = OnceLock::new();
    *PAUSE.get_or_init(|| {
        let ms = std::env::var("UMBRA_TEST_SLOW_SAVE_MS").ok().and_then(|ms| ms.parse().ok());
        Duration::from_millis(ms.unwrap_or(0))
    })
}
