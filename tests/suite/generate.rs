//! `umbra generate` with the embedded model, which is freshly drawn and writes noise: what counts is whose noise it is.

use crate::once::{ALONE, BOTH, refuses, strings};
use std::fs::File;
use std::process::Stdio;
use umbra_tests::job::Job;
use umbra_tests::{Output, command, exclusive, folder, model, run, umbra};

fn generate(ranks: usize, args: &[&str]) -> Output {
    let output = run(command(ranks).args(["generate", "--model", "tiny"]).args(args));
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{args:?}");
    output
}

#[test]
fn the_same_text_on_any_number_of_ranks_and_threads() {
    let args = ["--prompt", "To be, or not", "--max-new-tokens", "40"];
    let alone = generate(1, &args).stdout;
    assert!(alone.chars().count() > 1 && alone.ends_with('\n'), "{alone:?}");
    for (ranks, threads) in [(1, "1"), (1, "3"), (2, "1"), (3, "1")] {
        assert_eq!(generate(ranks, &[&args[..], &["--threads", threads]].concat()).stdout, alone, "{ranks} {threads}");
    }
}

#[test]
fn sampling_follows_its_seed() {
    let sample = |ranks, seed| {
        let args =
            ["--prompt", "a", "--temperature", "0.9", "--top-p", "0.95", "--max-new-tokens", "30", "--seed", seed];
        generate(ranks, &args).stdout
    };
    let first = sample(1, "7");
    assert_eq!(sample(1, "7"), first);
    assert_eq!(sample(2, "7"), first);
    assert_ne!(sample(1, "8"), first);
}

#[test]
fn the_number_of_tokens_is_a_limit() {
    assert_eq!(generate(1, &["--prompt", "a", "--max-new-tokens", "0"]).stdout, "\n");
    assert_eq!(generate(2, &["--prompt", "a", "--max-new-tokens", "0"]).stdout, "\n");
    // The embedded model has 1024 positions: a prompt of 1020 leaves four.
    let prompt = "a".repeat(1020);
    let all = generate(1, &["--prompt", &prompt, "--max-new-tokens", &u64::MAX.to_string()]).stdout;
    assert_eq!(all, generate(1, &["--prompt", &prompt, "--max-new-tokens", "4"]).stdout);
    assert_ne!(all, generate(1, &["--prompt", &prompt, "--max-new-tokens", "3"]).stdout);
}

#[test]
fn the_prompt_may_come_from_standard_input() {
    let dir = folder();
    let path = dir.path().join("prompt");
    std::fs::write(&path, "To be").expect("a prompt");
    let said = generate(1, &["--prompt", "To be", "--max-new-tokens", "20"]).stdout;
    for ranks in [1, 2] {
        let _machine = exclusive();
        let mut command = command(ranks);
        command.args(["generate", "--model", "tiny", "--max-new-tokens", "20"]);
        let output = Job::start(&mut command, Stdio::from(File::open(&path).expect("a prompt"))).wait();
        assert_eq!((output.code, output.stdout.as_str()), (Some(0), said.as_str()), "{}", output.stderr);
    }
}

#[test]
fn what_cannot_be_continued_is_refused() {
    let tiny = |args: &[&str]| strings(&[&["generate", "--model", "tiny"], args].concat());
    refuses(BOTH, &tiny(&["--prompt", &"a".repeat(1024)]), 3, &["--prompt", "1 to 1023 tokens", "1024 tokens"]);
    refuses(ALONE, &tiny(&["--prompt", ""]), 2, &["--prompt", "empty"]);
    refuses(BOTH, &tiny(&["--prompt", "a", "--temperature", "-1"]), 2, &["--temperature", "-1"]);
    refuses(ALONE, &tiny(&["--prompt", "a", "--top-p", "0"]), 2, &["--top-p"]);
    let folder = model("mistral-tiny").display().to_string();
    refuses(
        BOTH,
        &strings(&["generate", "--model", &folder, "--prompt", "a"]),
        3,
        &["tokenizer.json", "text needs a tokenizer"],
    );
    refuses(BOTH, &strings(&["generate", "--model", "/no/such", "--prompt", "a"]), 3, &["/no/such", "--model"]);
}

/// What is started through `sh`, so that its output goes where the script says.
fn shell(script: &str) -> Output {
    let mut sh = std::process::Command::new("sh");
    sh.env("UMBRA", umbra()).env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    run(sh.arg("-c").arg(script))
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    // The exit code of umbra goes through standard error, as the pipe's is that of its last command.
    let script = "{ \"$UMBRA\" generate --model tiny --prompt a --max-new-tokens 1000; echo \"code $?\" >&2; } \
                  | head -c 5 | wc -c";
    let output = shell(script);
    assert_eq!((output.code, output.stderr.as_str(), output.stdout.trim()), (Some(0), "code 0\n", "5"));
}

#[test]
fn a_run_does_not_mind_that_nobody_reads_what_it_says() {
    let dir = folder();
    let out = dir.path().join("out").display().to_string();
    let script = format!(
        "exec 3>&1; {{ \"$UMBRA\" train --steps 3 --seq-len 32 --out '{out}' 2>&1; echo \"code $?\" >&3; }} | head -c 0"
    );
    let output = shell(&script);
    assert_eq!((output.code, output.stdout.as_str(), output.stderr.as_str()), (Some(0), "code 0\n", ""));
    assert!(dir.path().join("out/model/model.safetensors").exists());
}

#[test]
fn a_text_that_cannot_be_written_is_a_disk_failure() {
    let output = shell("\"$UMBRA\" generate --model tiny --prompt a --max-new-tokens 3 > /dev/full");
    assert_eq!(output.code, Some(7), "{}", output.stderr);
    assert!(output.stderr.contains("standard output cannot be written"), "{}", output.stderr);
}

/// A model trained on bytes is a folder like any other: it has a tokenizer, and text goes in and comes out.
#[test]
fn a_trained_tiny_model_continues_text() {
    let dir = folder();
    let out = dir.path().join("run");
    let mut train = command(1);
    train.args(["train", "--model", "tiny", "--steps", "2", "--seq-len", "32", "--micro-batch", "2", "--out"]);
    assert_eq!(run(train.arg(&out)).code, Some(0));
    let mut generate = command(1);
    generate.args(["generate", "--prompt", "To be", "--max-new-tokens", "8", "--model"]).arg(out.join("model"));
    let output = run(&mut generate);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
    assert!(output.stdout.ends_with('\n'));
}
