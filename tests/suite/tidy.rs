//! The rules of the house that a machine can check: who may depend on whom, who may touch the outside world, and how
//! files look. Where a rule has an exception, it stands here with its reason; an exception that is no longer used fails.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A file of the project: its path from the top, with `/`, and its text.
struct File {
    path: String,
    text: String,
}

impl File {
    /// Whether it is a test, an example or a build script rather than the product.
    fn is_beside(&self) -> bool {
        let within = |part: &str| self.path.split('/').any(|p| p == part);
        ["tests", "examples", "probe"].into_iter().any(within)
            || self.path.ends_with("/tests.rs")
            || self.path.ends_with("/build.rs")
    }

    /// The lines that are compiled into the product, with their numbers and without comments: the unit tests come last in
    /// a file and are cut off.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines: Vec<&str> = self.text.lines().collect();
        let is_tests = |i: usize| lines[i] == "#[cfg(test)]" && lines.get(i + 1).is_some_and(|l| l.ends_with('{'));
        let end = (0..lines.len()).find(|i| is_tests(*i)).unwrap_or(lines.len());
        lines.into_iter().take(end).enumerate().filter_map(|(i, line)| {
            let code = line.split(" // ").next().unwrap_or(line);
            (!code.trim_start().starts_with("//")).then_some((i + 1, code))
        })
    }
}

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace's folder").to_owned()
}

/// Every text file of the project, what .gitignore names left out.
fn files() -> Vec<File> {
    let ignored = fs::read_to_string(top().join(".gitignore")).expect(".gitignore");
    let ignored: Vec<&str> = ignored.lines().map(|line| line.trim_matches('/')).chain([".git"]).collect();
    let mut found = Vec::new();
    let mut folders = vec![top()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the project") {
            let path = entry.expect("an entry of a folder").path();
            let name = path.strip_prefix(top()).expect("a path below the top").to_string_lossy().replace('\\', "/");
            match () {
                () if ignored.contains(&name.as_str()) || path.is_symlink() => {}
                () if path.is_dir() => folders.push(path),
                // What is not UTF-8 holds weights.
                () => found.extend(fs::read_to_string(&path).ok().map(|text| File { path: name, text })),
            }
        }
    }
    assert!(found.len() > 100, "only {} files in {}", found.len(), top().display());
    found
}

/// The Rust files of the product: modules that exist only for tests are left out.
fn product() -> Vec<File> {
    let mut rust: Vec<File> = files().into_iter().filter(|f| f.path.ends_with(".rs") && !f.is_beside()).collect();
    let test_modules: BTreeSet<String> = rust.iter().flat_map(modules_for_tests).collect();
    rust.retain(|file| !test_modules.contains(&file.path));
    rust
}

/// The paths of the modules that `file` declares under `#[cfg(test)]`.
fn modules_for_tests(file: &File) -> Vec<String> {
    let own = file.path.trim_end_matches(".rs");
    let crate_root = own.ends_with("/lib") || own.ends_with("/main");
    let folder = if crate_root { own.rsplit_once('/').map_or("", |(folder, _)| folder) } else { own };
    let lines: Vec<&str> = file.text.lines().collect();
    let declared = lines.windows(2).filter(|pair| pair[0] == "#[cfg(test)]").filter_map(|pair| {
        let name = pair[1].strip_suffix(';')?.rsplit_once("mod ")?.1;
        Some(format!("{folder}/{name}.rs"))
    });
    declared.collect()
}

/// Fails with every place at which `found` holds and that `allowed` (file, reason) does not excuse, and for every excuse
/// that nothing needs.
fn forbid(rule: &str, files: &[File], allowed: &[(&str, &str)], found: impl Fn(&str) -> bool) {
    let mut bad = Vec::new();
    let mut used = BTreeSet::new();
    for file in files {
        for (number, line) in file.code().filter(|(_, line)| found(line)) {
            match allowed.iter().find(|(path, _)| *path == file.path) {
                Some((path, _)) => drop(used.insert(*path)),
                None => bad.push(format!("{}:{number}: {}", file.path, line.trim())),
            }
        }
    }
    bad.extend(
        allowed.iter().filter(|(path, _)| !used.contains(path)).map(|(p, _)| format!("{p}: exception not needed")),
    );
    assert!(bad.is_empty(), "{rule}:\n{}", bad.join("\n"));
}

/// Whether `word` stands in `line` and is not a part of a longer name.
fn has_word(line: &str, word: &str) -> bool {
    let name = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back().is_some_and(name);
        let after = line[at + word.len()..].chars().next().is_some_and(name);
        !before && !after
    })
}

fn has_any(line: &str, words: &[&str]) -> bool {
    words.iter().any(|word| has_word(line, word))
}

/// The names below `[dependencies]` and its kin in a crate's Cargo.toml.
fn dependencies(folder: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(top().join(folder).join("Cargo.toml")).expect("a crate's Cargo.toml");
    let mut names = BTreeSet::new();
    let mut counts = false;
    for line in text.lines() {
        if let Some(section) = line.strip_prefix('[') {
            counts = section.contains("dependencies");
        } else if counts && !line.trim_start().starts_with('#') {
            names.extend(line.split(['.', '=', ' ']).next().filter(|name| !name.is_empty()).map(str::to_owned));
        }
    }
    names
}

#[test]
fn crates_depend_on_each_other_in_one_direction() {
    let allowed: [(&str, &[&str]); 6] = [
        ("spmd-core", &[]),
        ("collectives", &["spmd-core"]),
        ("models", &["spmd-core"]),
        ("optim", &["collectives", "spmd-core"]),
        ("bins", &["collectives", "models", "optim", "spmd-core"]),
        ("tests", &["collectives", "models", "optim", "spmd-core", "umbra"]),
    ];
    let ours: BTreeSet<&str> = allowed.iter().map(|(name, _)| *name).chain(["umbra"]).collect();
    for (crate_, expected) in allowed {
        let found = dependencies(crate_);
        let found: Vec<&str> = found.iter().map(String::as_str).filter(|name| ours.contains(name)).collect();
        assert_eq!(found, expected, "{crate_}/Cargo.toml");
    }
}

#[test]
fn only_bins_has_packages_for_files_and_the_command_line() {
    let outside =
        ["clap", "crc32c", "indicatif", "safetensors", "serde", "serde_json", "tokenizers"].map(str::to_owned);
    for crate_ in ["spmd-core", "collectives", "models", "optim"] {
        let found = dependencies(crate_);
        let found: Vec<&String> = outside.iter().filter(|name| found.contains(*name)).collect();
        assert!(found.is_empty(), "{crate_}/Cargo.toml: {found:?} belong to bins");
    }
}

fn libraries() -> Vec<File> {
    product().into_iter().filter(|file| !file.path.starts_with("bins/")).collect()
}

#[test]
fn only_bins_touches_the_outside_world() {
    let allowed = [("collectives/src/panics.rs", "a rank that panics says so and ends the job, whoever started it")];
    forbid("files, environment, streams, exit", &libraries(), &allowed, |line| {
        has_any(line, &["std::fs", "std::env", "std::io", "std::process", "std::net", "env::var"])
    });
    let allowed = [
        ("collectives/src/conformance.rs", "measures that a time-out comes in time"),
        ("collectives/src/mpi.rs", "ranks that do not come are given up after a time"),
        ("collectives/src/oneshot.rs", "a wait ends after a time"),
    ];
    forbid("the clock", &libraries(), &allowed, |line| has_any(line, &["Instant::now", "SystemTime"]));
}

#[test]
fn whatever_is_printed_goes_through_the_host() {
    // `host::note` and `host::answer` write a line at once and survive a reader that is gone; the macros panic.
    forbid("printing", &product(), &[], |line| has_any(line, &["println!", "eprintln!", "print!", "eprint!"]));
}

#[test]
fn features_are_seen_at_the_seams_only() {
    let allowed = [
        ("collectives/src/launch.rs", "which transport a launch gets"),
        ("collectives/src/lib.rs", "the module of the MPI transport"),
        ("collectives/src/panics.rs", "ending all ranks"),
        ("collectives/src/transport.rs", "the list of transports"),
    ];
    forbid("cfg(feature)", &product(), &allowed, |line| line.contains("cfg") && has_word(line, "feature"));
}

#[test]
fn unsafe_stays_where_it_is_reviewed() {
    let allowed = [
        ("collectives/src/mpi/ffi.rs", "calls MPI"),
        ("spmd-core/src/backend/cpu/gemm/blas.rs", "calls CBLAS"),
        ("spmd-core/src/stream.rs", "stores past the caches"),
        ("spmd-core/src/backend/cpu/matrix.rs", "rectangles of one matrix, written by several threads"),
        ("spmd-core/src/backend/cpu/gemm.rs", "says that the tiles it writes are apart"),
        ("spmd-core/src/backend/cpu/attention.rs", "says that the tiles it writes are apart"),
        ("spmd-core/src/backend/cpu/attention/backward.rs", "says that the tiles it writes are apart"),
    ];
    forbid("unsafe", &product(), &allowed, |line| has_word(line, "unsafe"));
}

#[test]
fn the_product_returns_errors() {
    let allowed = [
        ("collectives/src/comm.rs", "an operation gives back the kind of thing it was given"),
        ("spmd-core/src/backend/cpu/gemm/blas.rs", "the sizes of a tile fit a C int"),
    ];
    // Unfinished code and debugging prints are the lints' to refuse (Cargo.toml).
    let macros = ["panic!", "unreachable!"];
    forbid("panics", &product(), &allowed, |line| {
        line.contains(".unwrap()") || line.contains(".expect(\"") || has_any(line, &macros)
    });
}

#[test]
fn files_say_what_they_are_and_stay_short() {
    const LONGEST: usize = 500;
    let mut bad = Vec::new();
    for file in files().iter().filter(|file| file.path.ends_with(".rs")) {
        let lines = file.text.lines().count();
        if !file.text.starts_with("//! ") {
            bad.push(format!("{}: does not begin with `//!` and what it is", file.path));
        }
        if lines > LONGEST && !file.is_beside() {
            bad.push(format!("{}: {lines} lines, at most {LONGEST}", file.path));
        }
        if file.path.ends_with("/mod.rs") {
            bad.push(format!("{}: a module's file bears its name", file.path));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn no_file_knows_the_machine_it_was_written_on() {
    // In two pieces each, so that this file does not break its own rule.
    let machine = [("/wo", "rk/"), ("/tm", "p/"), ("/ro", "ot/"), ("/ho", "me/"), ("../sha", "red")];
    let hosts = [("crates", ".io"), ("pypi", ".org"), ("pythonho", "sted.org"), ("proxy.golang", ".org")];
    let words: Vec<String> = machine.iter().chain(&hosts).map(|(a, b)| format!("{a}{b}")).collect();
    let mut bad = Vec::new();
    // Cargo writes its own lock file, and names the registry there.
    for file in files().iter().filter(|file| file.path != "Cargo.lock") {
        for (number, line) in (1..).zip(file.text.lines()) {
            bad.extend(words.iter().filter(|w| line.contains(*w)).map(|w| format!("{}:{number}: {w}", file.path)));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn the_rules_see_what_they_should() {
    assert!(has_word("let x = unsafe { y };", "unsafe") && !has_word("deny(unsafe_code)", "unsafe"));
    assert!(has_word("eprint!(\"a\")", "eprint!") && !has_word("eprint!(\"a\")", "print!"));
    let text =
        "//! Doc.\nuse a; // std::fs\n// std::env\n#[cfg(test)]\nmod near;\nfn f() {}\n#[cfg(test)]\nmod tests {\n";
    let file = File { path: "a/src/b.rs".to_owned(), text: text.to_owned() };
    let lines: Vec<(usize, &str)> = file.code().collect();
    assert_eq!(lines, [(2, "use a;"), (4, "#[cfg(test)]"), (5, "mod near;"), (6, "fn f() {}")]);
    assert_eq!(modules_for_tests(&file), ["a/src/b/near.rs"]);
    assert!(!file.is_beside() && File { path: "a/src/b/tests.rs".to_owned(), ..file }.is_beside());
}
