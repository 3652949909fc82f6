//! Rows read from files, good and bad.

use super::*;
use crate::Exit;
use tempfile::TempDir;

const LIMITS: Limits = Limits { seq_len: 8, vocab_size: 256, truncate: false };
const NONE: u32 = Batch::NO_TARGET;

struct Files {
    dir: TempDir,
    paths: Vec<PathBuf>,
}

impl Files {
    fn new() -> Self {
        Files { dir: tempfile::tempdir().unwrap(), paths: Vec::new() }
    }

    fn with(mut self, name: &str, content: impl AsRef<[u8]>) -> Self {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        self.paths.push(path);
        self
    }

    fn load(&self) -> Result<Dataset> {
        Dataset::load(&self.paths, LIMITS, &LazyTokenizer::byte())
    }
}

fn load(name: &str, content: impl AsRef<[u8]>) -> Result<Dataset> {
    Files::new().with(name, content).load()
}

/// The failure is exit 3, its place ends with `place`, and its text has every part.
#[track_caller]
fn refused(name: &str, content: impl AsRef<[u8]>, place: &str, parts: &[&str]) {
    let failure = load(name, content).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    let text = failure.to_string();
    assert!(failure.place.unwrap().ends_with(place), "{text}");
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }
}

#[test]
fn ids_labels_text_and_windows_may_be_mixed() {
    let files = Files::new()
        .with("a.jsonl", "{\"input_ids\": [1, 2, 3], \"labels\": [9, -100, 7], \"x\": 1}\n\n{\"text\": \"hé\"}\n")
        .with("b.txt", "0123456789abcdefg")
        .with("c", "{\"input_ids\":[4,5]}");
    let data = files.load().unwrap();
    assert_eq!(data.len(), 5);
    assert_eq!(data.row(0), Row { ids: &[1, 2, 3], labels: &[9, NONE, 7] });
    assert_eq!(data.row(1), Row { ids: &[0x68, 0xc3, 0xa9], labels: &[0x68, 0xc3, 0xa9] });
    assert_eq!(data.row(2).ids, b"01234567".map(u32::from));
    assert_eq!(data.row(3).ids, b"89abcdef".map(u32::from));
    assert_eq!(data.row(4).ids, [4, 5]);
    // The label of position 0 is never a target, and -100 is none.
    assert_eq!((0..5).map(|i| data.supervised(i)).collect::<Vec<_>>(), [1, 2, 7, 7, 1]);
    assert_eq!((data.tokens(), data.longest(), data.without_target()), (24, 8, 0));
    let place = |i| data.place(i).rsplit('/').next().unwrap().to_owned();
    assert_eq!([place(0), place(1), place(3), place(4)], ["a.jsonl:1", "a.jsonl:3", "b.txt, window 2", "c:1"]);
}

#[test]
fn the_last_short_window_is_kept_if_it_has_two_tokens() {
    assert_eq!(load("a.txt", "0123456789").unwrap().row(1).ids, b"89".map(u32::from));
    assert_eq!(load("a.txt", "012345678").unwrap().len(), 1);
    let data = Dataset::from_text("inside", "0123456789", LIMITS, &LazyTokenizer::byte()).unwrap();
    assert_eq!((data.len(), data.place(1).as_str()), (2, "inside, window 2"));
}

#[test]
fn byte_order_marks_and_carriage_returns_are_not_content() {
    let data = load("a.jsonl", "\u{feff}{\"input_ids\":[1,2]}\r\n{\"text\":\"ab\"}\r\n").unwrap();
    assert_eq!((data.row(0).ids, data.row(1).ids), (&[1, 2][..], &[97, 98][..]));
    assert_eq!(load("a.txt", "\u{feff}ab").unwrap().row(0).ids, [97, 98]);
    assert_eq!(load("notes", "plain {words}").unwrap().row(0).ids.len(), 8);
}

#[test]
fn lines_that_are_not_json_show_where() {
    let good = "{\"input_ids\":[1,2]}\n";
    refused("a.jsonl", format!("{good}not json\n"), "a.jsonl:2", &["not JSON", "column 2", "`not json`"]);
    refused("a.jsonl", "hello\n", "a.jsonl:1", &["not JSON"]);
    let long = format!("{good}\n{{\"text\": \"{}\" oops}}", "x".repeat(200));
    refused("a.jsonl", long, "a.jsonl:3", &["column 213", "`…xxxxx", "oops"]);
    refused("a.jsonl", "{\"input_ids\": [1,\n 2]}", "a.jsonl:1", &["EOF", "one row is one line"]);
    refused("a.json", "[{\"text\": \"ab\"}]", "a.json", &["JSON list", "jq -c"]);
    refused("a.jsonl", format!("{good}[1, 2]"), "a.jsonl:2", &["not a JSON object", "[1, 2]"]);
}

#[test]
fn keys_and_types_that_are_wrong_are_named() {
    refused("a.jsonl", "{\"prompt\": \"a\", \"n\": 1}", "a.jsonl:1", &["neither", "prompt, n"]);
    refused("a.jsonl", "{}", "a.jsonl:1", &["no key"]);
    refused("a.jsonl", "{\"text\": 3}", "a.jsonl:1", &["text has the wrong type", "a string", "3"]);
    refused("a.jsonl", "{\"input_ids\": \"1 2\"}", "a.jsonl:1", &["input_ids has the wrong type", "\"1 2\""]);
    refused("a.jsonl", "{\"input_ids\": [1, 2.5]}", "a.jsonl:1", &["2.5 at position 1"]);
    refused("a.jsonl", "{\"input_ids\": [[1, 2]]}", "a.jsonl:1", &["[1,2] at position 0"]);
    refused("a.jsonl", "{\"input_ids\":[1,2],\"labels\":{}}", "a.jsonl:1", &["labels has the wrong type"]);
    refused("a.jsonl", "{\"text\":\"a\",\"text\":\"b\"}", "a.jsonl:1", &["each key once", "text"]);
    refused("a.jsonl", "{\"input_ids\":[1,2],\"attention_mask\":[1,0]}", "a.jsonl:1", &["hides", "1 of them not 1"]);
    assert!(load("a.jsonl", "{\"input_ids\":[1,2],\"attention_mask\":[1,1],\"text\":\"ignored\"}").is_ok());
}

#[test]
fn ids_and_labels_must_be_in_the_vocabulary() {
    let good = "{\"input_ids\":[1,255]}\n";
    refused("a.jsonl", format!("{good}{{\"input_ids\":[1,256]}}"), "a.jsonl:2", &["256 at position 1", "0 to 255"]);
    refused("a.jsonl", "{\"input_ids\":[-1,2]}", "a.jsonl:1", &["-1 at position 0"]);
    refused("a.jsonl", "{\"input_ids\":[1,2],\"labels\":[1,256]}", "a.jsonl:1", &["label", "256 at position 1"]);
    refused("a.jsonl", "{\"input_ids\":[1,2],\"labels\":[-101,1]}", "a.jsonl:1", &["-101 at position 0", "-100"]);
    refused("a.jsonl", "{\"input_ids\":[1,2],\"labels\":[1]}", "a.jsonl:1", &["2 labels", "1 labels", "length"]);
    let files = Files::new().with("a.txt", "abcdefghié");
    let small = Limits { vocab_size: 128, ..LIMITS };
    let failure = Dataset::load(&files.paths, small, &LazyTokenizer::byte()).unwrap_err();
    assert!(failure.place.unwrap().ends_with("a.txt, window 2"));
    assert_eq!(failure.found.as_deref(), Some("195 at position 1"));
}

#[test]
fn rows_that_are_too_long_or_empty_are_refused() {
    let long = "{\"input_ids\":[1,2]}\n{\"input_ids\":[1,2,3,4,5,6,7,8,9]}";
    refused("a.jsonl", long, "a.jsonl:2", &["at most 8", "9 tokens", "--seq-len 9 or more, or --truncate"]);
    refused("a.jsonl", "{\"text\":\"123456789\"}", "a.jsonl:1", &["9 tokens"]);
    refused("a.jsonl", "{\"input_ids\":[]}", "a.jsonl:1", &["a row is empty"]);
    refused("a.jsonl", "{\"text\":\"\"}", "a.jsonl:1", &["a row is empty"]);
}

#[test]
fn files_that_are_missing_empty_or_not_utf8_are_refused() {
    refused("a.jsonl", "", "a.jsonl", &["empty"]);
    refused("a.txt", "\u{feff} \r\n", "a.txt", &["empty"]);
    refused("a.txt", b"ab\ncd\xff", "a.txt:2", &["not UTF-8", "byte 0xff at byte 5"]);
    let nowhere = PathBuf::from("no such file.jsonl");
    let failure = Dataset::load(&[nowhere], LIMITS, &LazyTokenizer::byte()).unwrap_err();
    assert_eq!((failure.exit, failure.place.as_deref()), (Exit::Input, Some("no such file.jsonl")));
    let dir = tempfile::tempdir().unwrap();
    let failure = Dataset::load(&[dir.path().to_owned()], LIMITS, &LazyTokenizer::byte()).unwrap_err();
    assert_eq!(failure.found.as_deref(), Some("a folder"));
}

#[test]
fn rows_without_a_target_are_counted_and_a_file_of_nothing_else_is_refused() {
    let none = "{\"input_ids\":[1,2],\"labels\":[5,-100]}\n{\"input_ids\":[3]}\n";
    assert_eq!(load("a.jsonl", format!("{none}{{\"input_ids\":[1,2]}}")).unwrap().without_target(), 2);
    refused("a.jsonl", none, "a.jsonl", &["anything to predict", "2 rows without a target"]);
}

#[test]
fn a_long_row_is_cut_only_when_told_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    let text = "{\"input_ids\":[1,2,3,4,5,6,7,8,9,10],\"labels\":[1,2,3,4,5,6,7,8,-100,10]}\n{\"input_ids\":[1,2]}\n";
    std::fs::write(&path, text).unwrap();
    let refused = Dataset::load(std::slice::from_ref(&path), LIMITS, &LazyTokenizer::byte()).unwrap_err();
    assert!(refused.to_string().contains("--truncate"), "{refused}");
    let data = Dataset::load(&[path], Limits { truncate: true, ..LIMITS }, &LazyTokenizer::byte()).unwrap();
    assert_eq!((data.len(), data.cut(), data.row(0).ids.len()), (2, 1, 8));
    assert_eq!(data.row(0).labels, [1, 2, 3, 4, 5, 6, 7, 8]);
}
