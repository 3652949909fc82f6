//! Loss and gradient are means over the targets of the whole global batch, however it is split into ranks and micro-batches.
//!
//! The rows are [`chat_rows`]: answers of 1 to 89 tokens. In fp32, numbers that should be equal may differ by the order of
//! summation: up to a few hundred additions of relative error 6e-8 that mostly cancel, so 1e-5 is generous to rounding and
//! still a hundred times below any wrong divisor.

use umbra_tests::cases::{Data, Model, chat_rows, targets, uneven_rows};
use umbra_tests::tensors::{Tensors, distance};
use umbra_tests::{Metrics, Row, Train, folder, weight_files};

const NOISE: f64 = 1e-5;

/// What a run left: metrics, the first step's gradients, and by how much each weight has moved.
struct Made {
    metrics: Metrics,
    dump: Tensors,
    moved: Tensors,
}

fn model() -> Model {
    Model::widened("mistral-odd-tied")
}

fn train(model: &Model, rows: &[Row], (ranks, micro, accum): (usize, usize, usize), flags: &str) -> Made {
    let dir = folder();
    let (out, dump) = (dir.path().join("run"), dir.path().join("dump"));
    let data = Data::new(rows.to_vec());
    let flags = format!("--policy fp32 --micro-batch {micro} --accum {accum} {flags} --dump {}", dump.display());
    let metrics = Train { ranks, model: model.path(), data: &data.path(), out: &out }.run(&flags);
    let before = Tensors::read(&model.path().join("model.safetensors"));
    let after = Tensors::parse(&weight_files(&out)[0].1);
    let moved = |(name, after): (&String, &Vec<f32>)| {
        (name.clone(), after.iter().zip(before.get(name)).map(|(a, b)| a - b).collect())
    };
    let moved = Tensors(after.0.iter().map(moved).collect());
    Made { metrics, dump: Tensors::read(&dump.join("dump.safetensors")), moved }
}

/// Loss and targets of each row alone, at a learning rate of 0.
fn alone(model: &Model, rows: &[Row]) -> Vec<(f64, f64)> {
    let one = |row: &Row| {
        let made = train(model, std::slice::from_ref(row), (1, 1, 1), "--lr 0 --steps 1");
        (made.metrics.column("loss")[0], targets(row) as f64)
    };
    rows.iter().map(one).collect()
}

/// Σ loss·targets / Σ targets: what the loss of these rows together must be.
fn mean_over_targets(rows: &[(f64, f64)]) -> f64 {
    rows.iter().map(|(loss, n)| loss * n).sum::<f64>() / rows.iter().map(|(_, n)| n).sum::<f64>()
}

fn relative(a: f64, b: f64) -> f64 {
    (a / b - 1.0).abs()
}

/// A global batch of 8 as (ranks, micro-batch, accumulation).
const GRID: [(usize, usize, usize); 6] = [(1, 8, 1), (1, 1, 8), (2, 4, 1), (2, 1, 4), (4, 2, 1), (8, 1, 1)];

/// No mean of means, no division too many: loss, norm, gradients and the step made are those of one
/// micro-batch. eps 1e-3 keeps Adam from turning noise in gradients near zero into whole steps; at clip 1e-3 gradients are
/// about 4e-6, so a rate of 1 makes steps well above the rounding of the weights.
#[test]
fn a_global_batch_may_be_split_in_any_way() {
    let (model, rows) = (model(), chat_rows());
    let each = alone(&model, &rows[..8]);
    let expected = mean_over_targets(&each);
    let of_means = each.iter().map(|(loss, _)| loss).sum::<f64>() / 8.0;
    assert!((of_means - expected).abs() > 0.01, "the rows do not tell the two means apart: {of_means} {expected}");
    println!("mean over targets {expected:.6}; a mean of means would be {of_means:.6}");
    for (clip, lr) in [("0", "1e-3"), ("1e-3", "1")] {
        let flags = format!("--steps 1 --eps 1e-3 --clip {clip} --lr {lr}");
        let oracle = train(&model, &rows, GRID[0], &flags);
        for layout in GRID {
            let made = train(&model, &rows, layout, &flags);
            let one = |name: &str| (made.metrics.column(name)[0], oracle.metrics.column(name)[0]);
            let (loss, _) = one("loss");
            let (norm, oracle_norm) = one("grad_norm");
            let (gradient, name) = made.dump.worst_gradient(&oracle.dump);
            let moved = made.moved.0.iter().map(|(name, moved)| distance(moved, oracle.moved.get(name)));
            let moved = moved.fold(0.0, f64::max);
            println!(
                "{layout:?} clip {clip}: loss {loss:.7} norm {norm:.7} (relative to the first: {:.0e}), gradients \
                 {gradient:.0e}, movement {moved:.0e}",
                relative(norm, oracle_norm)
            );
            assert!(relative(loss, expected) <= NOISE, "{layout:?}: loss {loss} {expected}");
            assert!(relative(norm, oracle_norm) <= NOISE, "{layout:?}: norm {norm} {oracle_norm}");
            assert!(gradient <= NOISE, "{layout:?}: gradient of {name} {gradient:e}");
            assert!(moved <= NOISE, "{layout:?}: movement {moved:e}");
            // torch's formula: max_norm / (norm + 1e-6), at most 1.
            let factor = if clip == "0" { 1.0 } else { 1e-3 / (norm + 1e-6) };
            assert!(relative(one("clip_coef").0, factor) <= 1e-6, "{layout:?}: clip {:?}", one("clip_coef"));
        }
    }
}

/// The count of targets and tokens belongs to one step; memory does not grow with the number of micro-batches.
#[test]
fn every_step_counts_its_own_targets() {
    let (model, rows) = (model(), uneven_rows(37));
    let made = train(&model, &rows, (3, 1, 3), "--lr 1e-3 --steps 10");
    // An epoch is four steps of 9 rows and one of the last row.
    let steps: Vec<&[Row]> = (0..2).flat_map(|_| rows.chunks(9)).collect();
    let supervised: Vec<f64> = steps.iter().map(|rows| rows.iter().map(targets).sum::<u64>() as f64).collect();
    assert_eq!(made.metrics.column("supervised"), supervised);
    let mut total = 0;
    let tokens = steps.iter().map(|rows| {
        total += rows.iter().map(|(ids, _)| ids.len()).sum::<usize>();
        total as f64
    });
    assert_eq!(made.metrics.column("tokens"), tokens.collect::<Vec<_>>());
    println!("targets by step {supervised:?}");

    let data = Data::new(uneven_rows(64));
    let peak = |accum| {
        let out = folder();
        let run = Train { ranks: 1, model: model.path(), data: &data.path(), out: out.path() };
        let metrics = run.run(&format!("--policy fp32 --accum {accum} --steps 2"));
        metrics.column("mem_gib").into_iter().fold(0.0, f64::max)
    };
    let (one, many) = (peak(1), peak(64));
    println!("peak memory {one:.4} GiB with 1 micro-batch, {many:.4} with 64");
    // 63 micro-batches of ids and targets are 20 kB; one gradient of this model is 0.23 MiB, 63 of them 14 MiB.
    assert!(many - one < 2.0 / 1024.0, "{one} {many}");
}

/// An epoch's last step takes what is left, is divided by its own targets and never reaches into the next epoch.
#[test]
fn a_short_last_step_is_a_step_of_its_own() {
    let (model, rows) = (model(), chat_rows());
    // 7 micro-batches, 4 a step, 3 epochs: 4, 3, 4, 3, 4, 3.
    let made = train(&model, &rows[..7], (1, 1, 4), "--lr 1e-3 --epochs 3 --schedule linear");
    let count = |rows: &[Row]| rows.iter().map(targets).sum::<u64>() as f64;
    let expected = [count(&rows[..4]), count(&rows[4..7])].repeat(3);
    assert_eq!(made.metrics.column("supervised"), expected);
    let (lr, epoch) = (made.metrics.column("lr"), made.metrics.column("epoch"));
    assert_eq!(lr[5], 0.0, "the schedule ends with the last step: {lr:?}");
    assert_eq!((epoch[1], epoch[5]), (1.0, 3.0));
    println!("7 micro-batches, 4 a step, 3 epochs: targets {expected:?}, last rate {}", lr[5]);

    // 10 rows in steps of 4: 4, 4, 2. At a rate of 0 each step is what its rows are alone.
    for layout in [(1, 1, 4), (2, 1, 2), (4, 1, 1), (1, 4, 1)] {
        let made = train(&model, &rows, layout, "--lr 0 --epochs 1");
        for (step, rows) in rows.chunks(4).enumerate() {
            let alone = train(&model, rows, (1, rows.len(), 1), "--lr 0 --steps 1");
            for name in ["loss", "grad_norm", "supervised"] {
                let (here, there) = (made.metrics.column(name)[step], alone.metrics.column(name)[0]);
                assert!(relative(here, there) <= NOISE, "{layout:?}, step {step}: {name} {here} {there}");
            }
        }
        println!("{layout:?}: 10 rows in steps of {:?} targets", made.metrics.column("supervised"));
    }
}

/// Fewer rows than one step are refused, not dropped without a word, and so are rows without a target.
#[test]
fn what_cannot_make_a_step_is_refused_before_the_first() {
    let model = model();
    let masked = |(ids, labels): Row| (ids, vec![-100; labels.len()]);
    let all_masked: Vec<Row> = chat_rows().into_iter().map(masked).collect();
    let cases = [
        (chat_rows()[..3].to_vec(), "--accum 4", "fewer rows than one step needs"),
        (all_masked, "--accum 2", "no row has anything to predict"),
        // Answers that lie wholly beyond the cut.
        (
            chat_rows()
                .into_iter()
                .map(|(ids, labels)| (ids, [vec![-100; 4], labels[4..].to_vec()].concat()))
                .collect(),
            "--seq-len 4 --truncate",
            "no row has anything to predict",
        ),
    ];
    for (rows, flags, message) in cases {
        for ranks in [1, 2] {
            let data = Data::new(rows.clone());
            let dir = folder();
            let out = dir.path().join("run");
            let output = Train { ranks, model: model.path(), data: &data.path(), out: &out }.attempt(flags);
            assert_eq!(output.code, Some(3), "{flags}: {}", output.stderr);
            assert!(output.stderr.contains(message), "{flags}: {}", output.stderr);
            assert!(!out.exists(), "{flags}: no partial output");
        }
    }
}

/// A step whose rows have no target is refused by its rows before the run begins; nothing is divided by zero.
#[test]
fn a_step_without_a_target_is_refused_by_its_rows() {
    let (model, mut rows) = (model(), chat_rows());
    for (_, labels) in &mut rows[4..6] {
        labels.fill(-100);
    }
    let data = Data::new(rows);
    let dir = folder();
    let run = Train { ranks: 2, model: model.path(), data: &data.path(), out: &dir.path().join("run") };
    let output = run.attempt("--micro-batch 1 --steps 5");
    assert_eq!(output.code, Some(3), "{}", output.stderr);
    for part in ["step 2 has nothing to predict", "rows.jsonl:5", "rows.jsonl:6"] {
        assert!(output.stderr.contains(part), "{part} in {}", output.stderr);
    }
    assert!(!dir.path().join("run").exists(), "no partial output");
}

/// A lane without rows counts nothing and changes nothing: the rows' mean loss over an epoch at a rate of 0 is the
/// same on 1, 4, 5 and 8 ranks, some of which have no row in the last step.
#[test]
fn ranks_without_rows_do_not_shift_the_loss() {
    let (model, rows) = (model(), uneven_rows(24));
    let mean = |rows: &[Row], layout| {
        let made = train(&model, rows, layout, "--lr 0 --epochs 1");
        let (loss, n) = (made.metrics.column("loss"), made.metrics.column("supervised"));
        assert_eq!(n.iter().sum::<f64>(), rows.iter().map(targets).sum::<u64>() as f64, "{layout:?}: every row once");
        mean_over_targets(&loss.into_iter().zip(n).collect::<Vec<_>>())
    };
    for (rows, layouts) in [(&rows[..], &[(8, 3, 1), (5, 4, 1)][..]), (&rows[..7], &[(4, 1, 1), (5, 1, 1)][..])] {
        let one = mean(rows, (1, rows.len(), 1));
        for layout in layouts {
            let many = mean(rows, *layout);
            println!("{} rows, {layout:?}: loss {many:.7}, on one rank {one:.7}", rows.len());
            assert!(relative(many, one) <= NOISE, "{layout:?}: {many} {one}");
        }
    }
}

/// What is shown has no part in what is computed, and no rank waits for one that has nothing to show.
#[test]
fn how_often_progress_is_shown_changes_nothing() {
    let (model, data) = (model(), Data::new(uneven_rows(37)));
    let runs = [1, 7, 1000].map(|every| {
        let dir = folder();
        let run = Train { ranks: 3, model: model.path(), data: &data.path(), out: dir.path() };
        let flags = format!("--micro-batch 2 --accum 2 --steps 15 --lr 1e-3 --log-every {every}");
        (run.run(&flags).results(), weight_files(dir.path()))
    });
    assert_eq!(runs[0].0.len(), 15);
    assert!(runs.iter().all(|run| *run == runs[0]));
}
