//! Tables, units and the start-up table.

use super::*;

fn facts() -> StartupFacts {
    StartupFacts {
        model: "DIR".into(),
        shape: "Llama, 30 layers, hidden 576".into(),
        params: 134_515_008,
        policy: Policy::LowSr,
        precision: Policy::LowSr.precision(),
        optimizer: "adamw, torch's arithmetic".into(),
        world: 2,
        layout: "2 ranks, ZeRO-3, 4 lanes in 2 passes".into(),
        lanes: 4,
        same_bits: true,
        stages: vec![
            StageFacts { stage: 0, bytes: 9 << 30, sent: 1 << 30, chosen: false },
            StageFacts { stage: 3, bytes: 3 << 30, sent: 3 << 29, chosen: true },
        ],
        device: "cpu, 1 thread(s), avx2".into(),
        data: "train.jsonl".into(),
        rows: 1319,
        cut: 3,
        without_target: 0,
        seq_len: 128,
        micro_batch: 4,
        accum: 2,
        tokens_per_step: 2048,
        steps: 20,
        epochs: 0.25,
        schedule: "1e-5, constant".into(),
        segments: vec![("shadow shard".into(), 128 << 20), ("activations".into(), 3 << 30)],
        baseline: Some(64 << 20),
        available: Some(8 << 30),
        out: "umbra-out".into(),
        preset: false,
    }
}

#[test]
fn columns_line_up_and_no_line_ends_in_spaces() {
    let rows =
        [vec!["a", "1"], vec!["long", "1000", "x"], vec!["ü"]].map(|r| r.iter().map(|s| (*s).to_owned()).collect());
    assert_eq!(render(&[Align::Left, Align::Right], &rows), "a        1\nlong  1000  x\nü\n");
    assert_eq!(render(&[], &[]), "");
}

#[test]
fn bytes_have_three_digits() {
    let cases = [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 << 20, "10.0 MiB"),
        (128 << 20, "128 MiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (5 << 28, "1.25 GiB"),
        (3 << 50, "3072 TiB"),
    ];
    for (n, text) in cases {
        assert_eq!(bytes(n), text);
    }
}

#[test]
fn counts_have_one_decimal() {
    let cases = [
        (0, "0"),
        (9_999, "9999"),
        (12_345, "12.3k"),
        (999_949, "999.9k"),
        (999_950, "1.0M"),
        (134_515_008, "134.5M"),
        (999_950_000, "1.0B"),
        (7_241_732_096, "7.2B"),
    ];
    for (n, text) in cases {
        assert_eq!(count(n), text);
    }
}

#[test]
fn numbers_are_short() {
    let cases = [(1e-5, "1e-5"), (0.002, "0.002"), (1.0, "1"), (0.0, "0"), (2.5e7, "2.5e7")];
    for (x, text) in cases {
        assert_eq!(number(x), text);
    }
}

#[test]
fn the_table_states_precision_memory_and_step() {
    let text = startup_table(&facts());
    for part in [
        "134.5M parameters",
        "low-sr: bf16 weights and moments",
        "shadow bf16 (stochastic rounding), compute bf16, grad bf16, wire bf16",
        "reduced fp32, accumulate fp32, moments bf16 (stochastic rounding)",
        "2 ranks, ZeRO-3, 4 lanes in 2 passes; each: cpu, 1 thread(s), avx2",
        "2048 tokens: micro-batch 4 x accum 2 x 4 lane(s) x 128 tokens",
        "20 steps, 0.25 passes of the data",
        "optimizer  adamw, torch's arithmetic",
        "memory of the largest rank (8.00 GiB available)",
        "umbra-out",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    // 128 MiB + 3 GiB + 64 MiB.
    assert_eq!(facts().total(), 3_422_552_064);
    let (text, stages) = text.split_once("the largest rank at each stage").expect("a table of stages");
    let stages: Vec<&str> = stages.lines().skip(1).map(str::trim).collect();
    assert_eq!(stages[0], "--stage 0  9.06 GiB  1.00 GiB sent a step");
    assert_eq!(stages[1], "--stage 3  3.06 GiB  1.50 GiB sent a step  this run");
    assert!(!startup_table(&StartupFacts { stages: Vec::new(), ..facts() }).contains("each stage"));
    let memory: Vec<Vec<&str>> = text.lines().rev().take(4).map(|l| l.split("  ").map(str::trim).collect()).collect();
    assert_eq!(memory[0].last(), Some(&"3.19 GiB"));
    assert_eq!(memory[1].last(), Some(&"64.0 MiB"));
    assert_eq!(memory[3].last(), Some(&"128 MiB"));
    assert!(!text.contains("preset"));
    assert!(
        startup_table(&StartupFacts { preset: true, ..facts() }).contains("the preset with the embedded tiny model")
    );
}
