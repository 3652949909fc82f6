//! The model against an independent f64 implementation of forward, loss and backward, which is itself checked by central
//! differences; chunked logits; and generation from the cache against the whole forward.

#[path = "support/oracle.rs"]
mod reference;

use models::params::{stages, units};
use models::{Config, Family, KvCache, Mistral, RopeScaling};
use spmd_core::dtype::round_bf16;
use spmd_core::rng::{Purpose, Stream, tensor_key};
use spmd_core::{Batch, Buffer, DType, Device, ParamKind, UnitModel, View, ViewMut};

fn config() -> Config {
    Config {
        family: Family::Mistral,
        vocab_size: 37,
        hidden_size: 24,
        intermediate_size: 40,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window: None,
        tied: false,
        max_positions: 64,
        initializer_range: 0.02,
    }
}

/// Name, model, sequences, tokens a sequence.
fn cases() -> Vec<(&'static str, Config, usize, usize)> {
    let c = config;
    let llama3 = RopeScaling::Llama3 {
        factor: 4.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 32.0,
    };
    vec![
        ("untied, 4 heads on 2", c(), 2, 7),
        (
            "tied, 5 heads on 1, head_dim 8 of 24",
            Config { heads: 5, kv_heads: 1, head_dim: 8, tied: true, ..c() },
            2,
            33,
        ),
        ("window of 5", Config { sliding_window: Some(5), ..c() }, 1, 33),
        ("window of 1", Config { sliding_window: Some(1), ..c() }, 2, 7),
        ("window beyond the sequence, tied", Config { sliding_window: Some(40), tied: true, ..c() }, 2, 7),
        ("one token", c(), 2, 1),
        ("4 heads on 4, one layer", Config { kv_heads: 4, layers: 1, ..c() }, 1, 33),
        ("one head, three layers", Config { heads: 1, kv_heads: 1, head_dim: 10, layers: 3, ..c() }, 2, 7),
        ("linear frequencies", Config { rope_scaling: RopeScaling::Linear { factor: 2.0 }, ..c() }, 1, 33),
        ("llama3 frequencies", Config { family: Family::Llama, rope_scaling: llama3, head_dim: 16, ..c() }, 1, 33),
    ]
}

/// Weights that bf16 holds, large enough (N(0, 1/4²)) that attention is far from uniform and gains matter (1 ± 0.1).
fn weights(c: &Config) -> Vec<Vec<f32>> {
    let param = |p: &spmd_core::ParamSpec| {
        let stream = Stream::new(1, Purpose::Init, tensor_key(&p.name), 0);
        let gain = p.kind == ParamKind::Gain;
        let draw = move |i: usize| stream.normal(i as u64) * if gain { 0.1 } else { 0.25 } + f64::from(u8::from(gain));
        (0..p.len()).map(move |i| round_bf16(draw(i) as f32)).collect::<Vec<f32>>()
    };
    units(c).iter().map(|u| u.params.iter().flat_map(param).collect()).collect()
}

/// Random ids and next-token targets; every fifth position has no target, and the last row ends in two padded ones.
fn batch(c: &Config, rows: usize, cols: usize) -> Batch {
    let stream = Stream::new(2, Purpose::Sample, 0, 0);
    let ids: Vec<u32> = (0..rows * cols).map(|i| stream.below(i as u64, c.vocab_size as u64) as u32).collect();
    let padded = |i: usize| cols > 3 && i + 2 >= rows * cols;
    let target = |i: usize| {
        let last = cols > 1 && i % cols == cols - 1;
        let next = if cols > 1 { ids.get(i + 1).copied().unwrap_or(0) } else { ids[rows * cols - 1 - i] };
        if last || i % 5 == 3 || padded(i) { Batch::NO_TARGET } else { next }
    };
    Batch { rows, cols, targets: (0..rows * cols).map(target).collect(), tokens: rows * cols, ids }
}

#[derive(Debug, PartialEq)]
struct Found {
    loss: f64,
    logits: Vec<f32>,
    grads: Vec<Vec<f32>>,
}

/// What [`weights`] draws, in the compute dtype.
fn buffers(c: &Config, compute: DType) -> Vec<Buffer> {
    weights(c).iter().map(|w| Buffer::from_f32(compute, w, "weights").expect("memory")).collect()
}

fn run(c: &Config, compute: DType, batch: &Batch, room: (usize, usize), dump: bool) -> Found {
    let device = Device::cpu(1).expect("one thread runs inline");
    let mut model = Mistral::new(device, c.clone(), compute, room.0, room.1, false).expect("memory");
    if dump {
        model.collect_logits();
    }
    step(&mut model, &buffers(c, compute), batch)
}

/// Forward and backward as the training step drives them. Gradients start as NaN: each has to be overwritten.
fn step(model: &mut Mistral, weights: &[Buffer], batch: &Batch) -> Found {
    let mut grads: Vec<Vec<f32>> = weights.iter().map(|w| vec![0.0; w.len()]).collect();
    model.begin(batch, inverse(batch)).expect("a batch that fits");
    let stages = stages(model.config());
    let views = |s: usize| stages[s].units.iter().map(|u| weights[*u].view()).collect::<Vec<View<'_>>>();
    for s in 0..stages.len() - 1 {
        model.forward(s, &views(s)).expect("forward");
    }
    for s in (0..stages.len()).rev() {
        let mut full: Vec<Vec<f32>> = stages[s].units.iter().map(|u| vec![f32::NAN; weights[*u].len()]).collect();
        let mut out: Vec<ViewMut<'_>> = full.iter_mut().map(|g| ViewMut::F32(g)).collect();
        model.backward(s, &views(s), &mut out).expect("backward");
        for (unit, full) in stages[s].units.iter().zip(full) {
            grads[*unit].iter_mut().zip(full).for_each(|(sum, g)| *sum += g);
        }
    }
    Found { loss: model.loss(), logits: model.take_logits().unwrap_or_default(), grads }
}

fn inverse(batch: &Batch) -> f64 {
    1.0 / batch.supervised().max(1) as f64
}

fn exact(c: &Config, batch: &Batch) -> reference::Answer {
    reference::run(c, &widen(&weights(c)), batch, inverse(batch))
}

fn widen(units: &[Vec<f32>]) -> Vec<Vec<f64>> {
    units.iter().map(|u| u.iter().map(|x| f64::from(*x)).collect()).collect()
}

fn norm(x: impl IntoIterator<Item = f64>) -> f64 {
    x.into_iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// ‖found − exact‖ and ‖exact‖.
fn distance(found: &[f32], exact: &[f64]) -> (f64, f64) {
    assert_eq!(found.len(), exact.len());
    (norm(found.iter().zip(exact).map(|(a, b)| f64::from(*a) - b)), norm(exact.iter().copied()))
}

/// Every gradient tensor, the logits and the loss within `relative`. A gradient that is zero or nearly so in exact
/// arithmetic (queries and keys that see one position) is what is left of numbers of the unit's size, hence `floor`.
fn close(name: &str, c: &Config, found: &Found, exact: &reference::Answer, relative: f64, floor: f64) {
    assert!((found.loss - exact.loss).abs() <= relative * exact.loss.abs(), "{name}: {} {}", found.loss, exact.loss);
    if !found.logits.is_empty() {
        let (error, size) = distance(&found.logits, &exact.logits);
        assert!(error <= relative * size, "{name}: logits {:e}", error / size);
    }
    for (u, unit) in units(c).iter().enumerate() {
        let whole = norm(exact.grads[u].iter().copied());
        for (param, range) in unit.params.iter().zip(unit.ranges()) {
            let (error, size) = distance(&found.grads[u][range.clone()], &exact.grads[u][range]);
            assert!(
                error <= relative * size + floor * whole,
                "{name}: {} {error:e} of {size:e}, {whole:e}",
                param.name
            );
        }
    }
}

/// fp32 rounds by 6e-8, and a sum of some ten layers of products of 24 to 100 terms stays within 30 of these. Angles are
/// fp32 products of fp32 frequencies: at position 32 they are off by up to 32·2·6e-8 = 4e-6, and so are the scores.
const FP32: f64 = 1e-5;

/// The f64 gradient is the slope of the f64 loss. With h = 1e-5 a central difference errs by h²·L‴/6 ≈ 1e-10 times the
/// third derivative, and by 1e-16·L/h ≈ 1e-10 from rounding.
#[test]
fn the_reference_is_the_slope_of_its_own_loss() {
    let h = 1e-5;
    for (name, c, rows, cols) in cases() {
        let (batch, start) = (batch(&c, rows, cols), widen(&weights(&c)));
        let inv = inverse(&batch);
        let grads = reference::run(&c, &start, &batch, inv).grads;
        for (u, unit) in units(&c).iter().enumerate() {
            for (param, range) in unit.params.iter().zip(unit.ranges()) {
                let direction = Stream::new(9, Purpose::Sample, tensor_key(&param.name), 0);
                let moved = |by: f64| {
                    let mut units = start.clone();
                    range.clone().for_each(|i| units[u][i] += by * direction.normal(i as u64));
                    reference::run(&c, &units, &batch, inv).loss * inv
                };
                let slope = (moved(h) - moved(-h)) / (2.0 * h);
                let along: f64 = range.clone().map(|i| grads[u][i] * direction.normal(i as u64)).sum();
                let size = norm(grads[u][range.clone()].iter().copied());
                assert!((slope - along).abs() <= 1e-6 * size + 1e-8, "{name}: {}: {slope} {along}", param.name);
            }
        }
    }
}

#[test]
fn fp32_is_the_reference() {
    for (name, c, rows, cols) in cases() {
        let batch = batch(&c, rows, cols);
        let exact = exact(&c, &batch);
        close(name, &c, &run(&c, DType::F32, &batch, (rows, cols), true), &exact, FP32, 1e-7);
        // A model made for larger micro-batches than this one gives the same.
        close(name, &c, &run(&c, DType::F32, &batch, (rows + 2, cols + 9), false), &exact, FP32, 1e-7);
    }
}

/// Every weight off by up to one bf16 rounding (half a unit in the last place, 2^-9 of the number), at random.
fn roughened(c: &Config) -> Vec<Vec<f64>> {
    let rough = |u: usize, i: usize, x: f64| {
        let random = Stream::new(4, Purpose::Sample, u as u64, 0).f64(i as u64);
        x * (1.0 + (2.0 * random - 1.0) / 512.0)
    };
    let units = widen(&weights(c)).into_iter().enumerate();
    units.map(|(u, unit)| unit.into_iter().enumerate().map(|(i, x)| rough(u, i, x)).collect()).collect()
}

/// How much one rounding of every term of every product moves a result is measured in f64, by roughening the weights. bf16
/// compute rounds more often: a product's input twice (after the norm and after its gain), its output, what the rotation,
/// the nonlinearity and the residual make of it, and all of that again on the way back. Roundings are independent, so some
/// ten of them do √10 = 3.2 times what one does; a quarter more for the luck of one draw.
#[test]
fn bf16_is_the_reference_within_its_roundings() {
    let apart = |a: &[f64], b: &[f64]| norm(a.iter().zip(b).map(|(a, b)| a - b));
    for (name, c, rows, cols) in cases() {
        let batch = batch(&c, rows, cols);
        let (inv, exact) = (inverse(&batch), exact(&c, &batch));
        let rough = reference::run(&c, &roughened(&c), &batch, inv);
        let found = run(&c, DType::Bf16, &batch, (rows, cols), true);
        let within = |what: String, found: &[f32], rough: &[f64], exact: &[f64]| {
            let ((error, size), one) = (distance(found, exact), apart(rough, exact));
            assert!(error <= 4.0 * one, "{name}: {what}: {error:e} of {size:e}, one rounding does {one:e}");
        };
        within("logits".to_owned(), &found.logits, &rough.logits, &exact.logits);
        for (u, grads) in found.grads.iter().enumerate() {
            within(format!("unit {u}"), grads, &rough.grads[u], &exact.grads[u]);
        }
        // Each logit is off by its row's error, and each target's loss by no more than twice that.
        let (error, _) = distance(&found.logits, &exact.logits);
        let bound = 2.0 * error / ((rows * cols * c.vocab_size) as f64).sqrt() * 3.0;
        assert!(((found.loss - exact.loss) * inv).abs() <= bound, "{name}: loss {} {}", found.loss, exact.loss);
    }
}

#[test]
fn a_batch_without_rows_gives_zeros() {
    for tied in [false, true] {
        let c = Config { tied, ..config() };
        for cols in [0, 7] {
            let empty = Batch { cols, ..Batch::default() };
            let found = run(&c, DType::Bf16, &empty, (2, 7), false);
            assert_eq!(found.loss, 0.0);
            assert!(found.grads.iter().flatten().all(|g| *g == 0.0));
        }
    }
}

#[test]
fn a_batch_without_targets_gives_zeros() {
    let c = config();
    let batch = Batch { targets: vec![Batch::NO_TARGET; 14], ..batch(&c, 2, 7) };
    let found = run(&c, DType::F32, &batch, (2, 7), false);
    assert_eq!(found.loss, 0.0);
    assert!(found.grads.iter().flatten().all(|g| *g == 0.0));
}

/// Logits exist for at most 1,024 rows at a time (fewer for a large vocabulary, at least 128): these batches take three
/// chunks, of which the last is short, and in the second case the first has no target at all.
#[test]
fn logits_in_several_chunks_change_nothing() {
    let small = Config { layers: 1, ..config() };
    let large = Config { vocab_size: 40_000, hidden_size: 4, layers: 1, tied: true, ..config() };
    for (name, c, rows, cols, chunk) in [("2,100 rows", small, 300, 7, 1024), ("vocabulary", large, 43, 7, 128)] {
        for without in [0, chunk] {
            let mut batch = batch(&c, rows, cols);
            batch.targets[..without].fill(Batch::NO_TARGET);
            let exact = exact(&c, &batch);
            for dump in [false, true] {
                close(name, &c, &run(&c, DType::F32, &batch, (rows, cols), dump), &exact, FP32, 1e-7);
            }
        }
    }
}

/// Recompute runs the same kernels on the same numbers, so nothing differs by a bit: several micro-batches of different
/// shapes through one model, one of them without rows. No gradient is NaN, so `==` compares every one of them.
#[test]
fn recompute_changes_no_bit() {
    for (name, c, rows, cols) in cases() {
        let batches = [
            batch(&c, rows, cols),
            batch(&c, 1, cols),
            Batch { cols, ..Batch::default() },
            batch(&c, rows, cols.div_ceil(2)),
            batch(&c, rows, cols),
        ];
        for compute in [DType::F32, DType::Bf16] {
            let weights = buffers(&c, compute);
            for threads in [1, 2] {
                let device = Device::cpu(threads).expect("threads for a test");
                let [mut kept, mut recomputed] = [false, true].map(|recompute| {
                    Mistral::new(device.clone(), c.clone(), compute, rows, cols, recompute).expect("memory")
                });
                for (i, batch) in batches.iter().enumerate() {
                    kept.collect_logits();
                    recomputed.collect_logits();
                    let (a, b) = (step(&mut kept, &weights, batch), step(&mut recomputed, &weights, batch));
                    assert!(a.grads.iter().flatten().all(|g| g.is_finite()), "{name} {compute}, batch {i}");
                    assert!(a == b, "{name} {compute}, batch {i}");
                }
            }
        }
    }
}

/// The logits after each prefix: a prompt of `prompt` tokens at once, then token by token.
fn decoded(c: &Config, ids: &[u32], prompt: usize, recompute: bool) -> Vec<Vec<f32>> {
    let device = Device::cpu(1).expect("one thread runs inline");
    let weights = weights(c);
    let mut model = Mistral::new(device.clone(), c.clone(), DType::F32, 1, prompt, recompute).expect("memory");
    model.reserve_positions(ids.len());
    let mut cache = KvCache::new(&device, c, DType::F32, ids.len()).expect("memory");
    let mut logits = Vec::new();
    let mut at = 0;
    while at < ids.len() {
        let end = if at == 0 { prompt } else { at + 1 };
        model.begin_decode(&ids[at..end], at).expect("tokens that fit");
        for (s, stage) in stages(c).iter().enumerate() {
            let views: Vec<View<'_>> = stage.units.iter().map(|u| View::F32(&weights[*u])).collect();
            logits.extend(model.decode(s, &views, &mut cache).expect("decode"));
        }
        at = end;
    }
    logits
}

#[test]
fn decoding_from_the_cache_is_the_whole_forward() {
    let c = config;
    let window = |w| Config { sliding_window: Some(w), ..c() };
    let tied = Config { heads: 5, kv_heads: 1, head_dim: 8, tied: true, ..window(6) };
    for (c, len) in [(c(), 12), (window(5), 33), (window(1), 7), (window(33), 33), (window(50), 20), (tied, 33)] {
        let batch = batch(&c, 1, len);
        let whole = exact(&c, &batch).logits;
        // Prompts shorter than, as long as and longer than the windows, so that the cache rolls within a prompt too.
        for prompt in [1, 2, 5, 7] {
            let logits = decoded(&c, &batch.ids, prompt, false);
            assert!(logits == decoded(&c, &batch.ids, prompt, true), "blocks that share their activations");
            assert_eq!(logits.len(), len - prompt + 1);
            for (i, logits) in logits.iter().enumerate() {
                let at = (prompt - 1 + i) * c.vocab_size;
                let (error, size) = distance(logits, &whole[at..at + c.vocab_size]);
                assert!(error <= FP32 * size, "window {:?}, prompt {prompt}, {i}: {error:e}", c.sliding_window);
            }
        }
    }
}
