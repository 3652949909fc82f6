//! Each model of `fixtures/models` against what transformers computes on it: logits, loss and every gradient.

use serde_json::Value;
use std::path::{Path, PathBuf};
use umbra_tests::tensors::{Tensors, distance, same_bits};
use umbra_tests::{Metrics, Row, Train, fixtures, folder, write_rows};

/// A fixture and its rows as a data file.
struct Fixture {
    name: String,
    model: PathBuf,
    reference: Tensors,
    expected: Value,
    _dir: tempfile::TempDir,
    rows: PathBuf,
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Every folder of `fixtures/models`, so that one that is added is tested.
fn all() -> Vec<Fixture> {
    let models = std::fs::read_dir(fixtures().join("models")).unwrap();
    let mut models: Vec<PathBuf> = models.map(|entry| entry.unwrap().path()).collect();
    models.sort();
    assert!(models.len() >= 3, "{models:?}");
    models.into_iter().map(open).collect()
}

fn open(model: PathBuf) -> Fixture {
    let batch = read_json(&model.join("batch.json"));
    let matrix = |name: &str| -> Vec<Vec<i64>> { serde_json::from_value(batch[name].clone()).unwrap() };
    let ids = matrix("input_ids").into_iter().map(|row| row.into_iter().map(|id| id as u32).collect());
    let rows: Vec<Row> = ids.zip(matrix("labels")).collect();
    let dir = folder();
    let path = dir.path().join("rows.jsonl");
    write_rows(&path, &rows);
    Fixture {
        name: model.file_name().unwrap().to_string_lossy().into_owned(),
        reference: Tensors::read(&model.join("reference.safetensors")),
        expected: read_json(&model.join("reference.json")),
        model,
        _dir: dir,
        rows: path,
    }
}

impl Fixture {
    /// The dump and the metrics of one step at a learning rate of 0.
    fn step(&self, ranks: usize, flags: &str) -> (Tensors, Metrics) {
        let out = folder();
        let dump = out.path().join("dump");
        let run = out.path().join("run");
        let flags = format!("--lr 0 --steps 1 --dump {} {flags}", dump.display());
        let metrics = Train { ranks, model: &self.model, data: &self.rows, out: &run }.run(&flags);
        (Tensors::read(&dump.join("dump.safetensors")), metrics)
    }
}

/// fp32 against transformers' eager fp32. 1e-5 is two hundred times the rounding error of one operation (2⁻²⁴): sums of a
/// few hundred terms in another order stay below it, a wrong formula does not.
#[test]
fn fp32_logits_and_gradients_are_those_of_transformers() {
    for fixture in all() {
        let (dump, metrics) = fixture.step(1, "--policy fp32 --micro-batch 3");
        let logits = distance(dump.get("logits"), fixture.reference.get("logits.fp32"));
        let (worst, name) = dump.worst_gradient(&fixture.reference);
        println!("{}: logits {logits:.2e}, worst gradient {worst:.2e} ({name})", fixture.name);
        assert!(logits <= 1e-5, "{}: logits {logits:e}", fixture.name);
        assert!(worst <= 1e-5, "{}: gradient of {name} {worst:e}", fixture.name);
        for (ours, theirs, largest) in [("loss", "loss.fp32", 1e-5), ("grad_norm", "grad_norm.fp32", 1e-5)] {
            let (ours, theirs) = (metrics.column(ours)[0], fixture.expected[theirs].as_f64().unwrap());
            assert!((ours / theirs - 1.0).abs() <= largest, "{}: {ours} {theirs}", fixture.name);
        }
        assert_eq!(metrics.0[0]["supervised"], fixture.expected["supervised"], "{}", fixture.name);
    }
}

/// bf16 has 8 bits: no two implementations agree in the last one. So the loss is held to the reference's own within 1e-3,
/// and the logits may be no further from the true ones than 1.2 times what the reference's bf16 logits are.
#[test]
fn bf16_is_as_close_to_fp32_as_that_of_transformers() {
    for fixture in all() {
        let (dump, metrics) = fixture.step(1, "--policy shadow --micro-batch 3");
        let exact = fixture.reference.get("logits.fp32");
        let theirs = distance(fixture.reference.get("logits.bf16"), exact);
        let ratio = distance(dump.get("logits"), exact) / theirs;
        let loss = (metrics.column("loss")[0] - fixture.expected["loss.bf16"].as_f64().unwrap()).abs();
        println!("{}: bf16 loss off by {loss:.1e}, logits {ratio:.3} times as far", fixture.name);
        assert!(loss <= 1e-3, "{}: loss {loss:e}", fixture.name);
        assert!(ratio <= 1.2 && ratio > 0.0, "{}: logits {ratio}", fixture.name);
    }
}

/// Rows on ranks of their own. Two and three lanes are summed from left to right, as one rank sums its micro-batches: equal
/// bits. All rows in one micro-batch is another order of summation: 1e-6 is a few units in the last place of fp32, whose
/// half is 6e-8.
#[test]
fn ranks_compute_what_one_rank_computes() {
    for fixture in all() {
        let (whole, _) = fixture.step(1, "--policy fp32 --micro-batch 3");
        for (ranks, policy) in [(2, "fp32"), (3, "fp32"), (2, "shadow"), (3, "shadow")] {
            let (many, m) = fixture.step(ranks, &format!("--policy {policy} --micro-batch 1"));
            let (one, o) = fixture.step(1, &format!("--policy {policy} --micro-batch 1 --accum {ranks}"));
            let place = format!("{} at {ranks} ranks, {policy}", fixture.name);
            assert_eq!(m.results(), o.results(), "{place}");
            assert!(many.0.keys().eq(one.0.keys()), "{place}");
            for (name, values) in &many.0 {
                assert!(same_bits(values, one.get(name)), "{place}: {name}");
            }
            if (ranks, policy) == (3, "fp32") {
                let (logits, (worst, name)) =
                    (distance(many.get("logits"), whole.get("logits")), many.worst_gradient(&whole));
                assert!(logits <= 1e-6, "{place}: logits {logits:e}");
                assert!(worst <= 1e-6, "{place}: gradient of {name} {worst:e}");
            }
        }
    }
}
