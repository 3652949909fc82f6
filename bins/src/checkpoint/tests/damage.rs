//! Every damage is found and named.

use super::format::FORMAT_VERSION;
use super::*;

/// Changes one byte of a file, runs `look`, and puts the byte back.
fn flipped(path: &Path, at: usize, look: impl FnOnce()) {
    let sound = fs::read(path).unwrap();
    let mut bytes = sound.clone();
    bytes[at] ^= 1 << (at % 8);
    fs::write(path, bytes).unwrap();
    look();
    fs::write(path, sound).unwrap();
}

#[test]
fn a_flipped_byte_anywhere_is_found_in_its_file_and_tensor() {
    for files in [Files::Shared, Files::PerRank] {
        let top = tempfile::tempdir().unwrap();
        let dir = Save::new(files, 2).save(top.path());
        let reader = Reader::open(&dir).unwrap();
        let state = reader.state();
        for (index, file) in state.files.iter().enumerate() {
            // Every 11th byte, and so every bit position: 11 and 8 have no common divisor.
            for at in (0..file.len as usize).step_by(11).chain([file.len as usize - 1]) {
                flipped(&dir.join(&file.name), at, || {
                    let faults = verify(&dir, &mut no_progress).unwrap();
                    assert_eq!(faults.len(), 1, "byte {at} of {}: {faults:?}", file.name);
                    let covers = |c: &&Chunk| {
                        let end = c.offset + state.bytes_of(c);
                        c.file as usize == index && (c.offset..end).contains(&(at as u64))
                    };
                    let chunk = state.chunks.iter().find(covers);
                    let tensor = chunk.map(|c| (c.role, state.name_of(c).to_owned()));
                    assert_eq!((&faults[0].file, &faults[0].tensor), (&file.name, &tensor));
                    assert!(faults[0].bytes.contains(&(at as u64)));
                    assert!(matches!(faults[0].kind, FaultKind::Checksum { .. }));
                });
            }
        }
        assert_eq!(verify(&dir, &mut no_progress).unwrap(), []);
    }
}

#[test]
fn reading_a_damaged_block_fails_and_its_neighbours_still_read() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save::new(Files::Shared, 2).save(top.path());
    let reader = Reader::open(&dir).unwrap();
    let w = reader.state().tensor("model.layers.0.w").unwrap();
    let blocks = reader.state().chunks_of(Role::ExpAvgSq, w).to_vec();
    assert_eq!(blocks.len(), 2, "one a rank");
    let name = reader.state().files[blocks[1].file as usize].name.clone();
    flipped(&dir.join(&name), blocks[1].offset as usize + 4, || {
        let read = |start: u64, n: u64| {
            reader.read(Role::ExpAvgSq, "model.layers.0.w", start as usize, &mut vec![0.0; n as usize])
        };
        // Whole and in part: two ways through the reader.
        for n in [blocks[1].elements, blocks[1].elements - 1] {
            let failure = read(blocks[1].start, n).unwrap_err();
            assert_eq!(failure.exit, Exit::Input);
            let place = failure.place.unwrap();
            let range = format!("bytes {}..{}", blocks[1].offset, blocks[1].offset + 4 * blocks[1].elements);
            for part in [&*name, "exp_avg_sq", "model.layers.0.w", &range] {
                assert!(place.contains(part), "{place} lacks {part}");
            }
            assert_eq!(failure.expected, Some(format!("xxh3 {:016x}", blocks[1].xxh3)));
            assert!(failure.found.unwrap().starts_with("xxh3 "));
        }
        read(blocks[0].start, blocks[0].elements).unwrap();
        read(blocks[0].start, 3).unwrap();
    });
}

#[test]
fn missing_truncated_longer_and_unlisted_files_are_named() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save::new(Files::Shared, 2).save(top.path());
    let (gone, short, long) =
        ("shadow-00002-of-00003.safetensors", "exp_avg-00001-of-00003.safetensors", "config.json");
    fs::remove_file(dir.join(gone)).unwrap();
    let file = fs::File::options().write(true).open(dir.join(short)).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len - 1).unwrap();
    let mut text = fs::read(dir.join(long)).unwrap();
    text.push(b' ');
    fs::write(dir.join(long), text).unwrap();
    fs::write(dir.join("notes.txt"), "mine").unwrap();

    let failure = Reader::open(&dir).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    for name in [gone, short, long] {
        assert!(failure.found.as_ref().unwrap().contains(name), "{failure}");
    }
    let mut last = (0, 0);
    let faults = verify(&dir, &mut |done, total| last = (done, total)).unwrap();
    assert_eq!(last.0, last.1, "the progress ends at its total");
    let of = |name: &str| faults.iter().find(|f| f.file == name).unwrap();
    let tensor = |role: Role, name: &str| Some((role, name.to_owned()));
    assert_eq!(faults.len(), 4, "{faults:?}");
    assert_eq!((&of(gone).kind, &of(gone).tensor), (&FaultKind::Missing, &tensor(Role::Shadow, "model.layers.0.w")));
    assert_eq!(of(short).kind, FaultKind::Length { expected: len, found: len - 1 });
    assert_eq!(of(short).tensor, tensor(Role::ExpAvg, "model.layers.0.norm"), "the last tensor of the file");
    assert!(matches!(of(long).kind, FaultKind::Length { .. }));
    assert_eq!(of("notes.txt").kind, FaultKind::Unlisted);
    let shown: Vec<String> = faults.iter().map(Fault::to_string).collect();
    assert!(shown.contains(&format!("{gone}, shadow of tensor model.layers.0.w: the file is missing")), "{shown:?}");
}

#[test]
fn a_state_file_that_is_not_as_written_is_refused_by_name() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save::new(Files::PerRank, 2).save(top.path());
    let path = dir.join(STATE_FILE);
    let sound = fs::read(&path).unwrap();
    let refused = |what: &str| {
        let failure = Reader::open(&dir).unwrap_err();
        assert_eq!(failure.exit, Exit::Input, "{what}");
        assert!(failure.place.as_ref().unwrap().ends_with(STATE_FILE), "{what}: {failure}");
        assert_eq!(verify(&dir, &mut no_progress).unwrap_err(), failure);
        failure
    };
    for at in 0..sound.len() {
        flipped(&path, at, || drop(refused(&format!("byte {at}"))));
    }
    for len in (0..sound.len()).step_by(5) {
        fs::write(&path, &sound[..len]).unwrap();
        let failure = refused(&format!("cut to {len}"));
        assert!(failure.what.contains("truncated"), "cut to {len}: {failure}");
    }
    fs::write(&path, [&sound[..], b"x"].concat()).unwrap();
    assert!(refused("longer").what.contains("longer"));
    fs::write(&path, "{\"some\": \"other file\"}").unwrap();
    assert!(refused("foreign").what.contains("not the state file"));
    let mut newer = sound.clone();
    newer[8..12].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
    fs::write(&path, newer).unwrap();
    let failure = refused("newer");
    assert!(failure.what.contains("newer"));
    assert_eq!((failure.expected.as_deref(), failure.found.as_deref()), (Some("format 1"), Some("format 2")));
    fs::remove_file(&path).unwrap();
    refused("missing");
    assert!(!is_checkpoint(&dir));
}

#[test]
fn a_state_that_contradicts_itself_is_refused() {
    let top = tempfile::tempdir().unwrap();
    let dir = Save::new(Files::Shared, 2).save(top.path());
    let sound = read::read_state(&dir).unwrap();
    let spoiled = |spoil: &dyn Fn(&mut CheckpointState)| {
        let mut state = sound.clone();
        spoil(&mut state);
        let failure = CheckpointState::decode(Path::new("x"), &state.encode().unwrap()).unwrap_err();
        assert!(failure.what.contains("contradicts itself"), "{failure}");
    };
    spoiled(&|s| s.chunks.truncate(3));
    spoiled(&|s| s.chunks[3].offset += 1);
    spoiled(&|s| s.chunks[3].file = 99);
    spoiled(&|s| s.chunks[3].tensor = 99);
    spoiled(&|s| s.chunks.swap(2, 3));
    spoiled(&|s| s.chunks[2].elements = u64::MAX);
    spoiled(&|s| s.files[0].name = "../elsewhere".to_owned());
    spoiled(&|s| s.files[0].name = s.files[1].name.clone());
    spoiled(&|s| s.files[0].len += 1);
    spoiled(&|s| s.tensors[0].shape = vec![u64::MAX, 2]);
    spoiled(&|s| s.tensors[1].shape = vec![6]);
    spoiled(&|s| s.plain.truncate(1));
    spoiled(&|s| s.plain[0].len = u64::MAX);
    spoiled(&|s| s.stores_tied_head = false);
}
