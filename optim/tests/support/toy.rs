//! A model whose backward returns prescribed gradients, so that a test knows every contribution exactly, and the run of
//! one trainer a rank over it.

use collectives::{Comm, threads};
use optim::{Grads, Hyper, Result, Sharding, StepReport, Trainer, train_step};
use spmd_core::rng::{Purpose, Stream, tensor_key};
use spmd_core::{Batch, Device, Error, ParamKind, ParamSpec, Precision, Stage, UnitModel, UnitSpec, View, ViewMut};
use std::time::Duration;

/// Ranks that lose another one give up after this long. Nothing here computes for more than a fraction of it.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);

/// One micro-batch of one lane; travels as the batch's token ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) lane: u32,
    pub(crate) step: u32,
    pub(crate) micro: u32,
}

impl At {
    pub(crate) fn batch(self) -> Batch {
        let ids = vec![self.lane, self.step, self.micro];
        Batch { rows: 1, cols: 3, ids, targets: vec![0; 3], tokens: 3 }
    }
}

/// What the model answers. Pure functions, so that a reference can ask for any lane's numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answers {
    /// Fills the gradient of the unit at `position` of stage `stage`.
    pub(crate) gradient: fn(At, stage: usize, position: usize, &mut [f32]),
    /// The micro-batch's loss sum.
    pub(crate) loss: fn(At) -> f64,
}

/// The model.
#[derive(Debug)]
pub(crate) struct Toy {
    units: Vec<UnitSpec>,
    stages: Vec<Stage>,
    answers: Answers,
    at: At,
    /// Per unit: the weights the last forward or backward that needed it was given.
    pub(crate) gathered: Vec<Vec<f32>>,
}

/// Four units: one matrix; gains and matrices of sizes that no block divides; a single element; a single gain. The last
/// stage needs the first unit as well, like a tied head.
pub(crate) fn units() -> Vec<UnitSpec> {
    let matrix = |name: &str, shape: [usize; 2]| ParamSpec {
        name: name.to_owned(),
        shape: shape.to_vec(),
        kind: ParamKind::Matrix,
    };
    let gain = |name: &str, len: usize| ParamSpec { name: name.to_owned(), shape: vec![len], kind: ParamKind::Gain };
    let unit = |name: &str, params: Vec<ParamSpec>| UnitSpec { name: name.to_owned(), params };
    vec![
        unit("embed", vec![matrix("embed.weight", [90, 100])]),
        unit(
            "block",
            vec![
                gain("block.norm.weight", 48),
                matrix("block.a.weight", [241, 17]),
                gain("block.scale.weight", 1),
                matrix("block.b.weight", [100, 90]),
            ],
        ),
        unit("one", vec![matrix("one.weight", [1, 1])]),
        unit("head", vec![gain("head.norm.weight", 48)]),
    ]
}

/// The stages of [`units`], the units' own first.
pub(crate) const STAGES: [&[usize]; 4] = [&[0], &[1], &[2], &[3, 0]];

/// [`STAGES`] as the model gives them.
pub(crate) fn stages() -> Vec<Stage> {
    STAGES.iter().map(|units| Stage { units: units.to_vec() }).collect()
}

impl Toy {
    pub(crate) fn new(answers: Answers) -> Self {
        let units = units();
        let gathered = vec![Vec::new(); units.len()];
        Toy { units, stages: stages(), answers, at: At { lane: 0, step: 0, micro: 0 }, gathered }
    }

    fn see(&mut self, stage: usize, weights: &[View<'_>]) {
        for (unit, weights) in self.stages[stage].units.iter().zip(weights) {
            self.gathered[*unit] = weights.to_f32();
        }
    }
}

impl UnitModel for Toy {
    fn units(&self) -> &[UnitSpec] {
        &self.units
    }

    fn stages(&self) -> &[Stage] {
        &self.stages
    }

    fn begin(&mut self, batch: &Batch, _inv_targets: f64) -> spmd_core::Result<()> {
        let [lane, step, micro] = batch.ids[..] else {
            let found = format!("{} ids", batch.ids.len());
            return Err(Error::Shape { op: "begin", what: "batch", expected: "3 ids".to_owned(), found });
        };
        self.at = At { lane, step, micro };
        Ok(())
    }

    fn forward(&mut self, stage: usize, weights: &[View<'_>]) -> spmd_core::Result<()> {
        self.see(stage, weights);
        Ok(())
    }

    fn backward(&mut self, stage: usize, weights: &[View<'_>], grads: &mut [ViewMut<'_>]) -> spmd_core::Result<()> {
        self.see(stage, weights);
        for (position, grad) in grads.iter_mut().enumerate() {
            (self.answers.gradient)(self.at, stage, position, grad.reborrow().f32("toy", "grads")?);
        }
        Ok(())
    }

    fn evaluate(&mut self, _weights: &[View<'_>]) -> spmd_core::Result<()> {
        Ok(())
    }

    fn loss(&self) -> f64 {
        (self.answers.loss)(self.at)
    }
}

/// Start weights: fp32 numbers that bf16 does not hold.
pub(crate) fn start_weight(param: &str, index: usize) -> f32 {
    (Stream::new(3, Purpose::Init, tensor_key(param), 0).normal(index as u64) * 0.05) as f32
}

/// What one rank has after a step: its padded shards (of the gradient its slices), widened, unit after unit.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Shards {
    pub(crate) shadow: Vec<Vec<f32>>,
    pub(crate) exp_avg: Vec<Vec<f32>>,
    pub(crate) exp_avg_sq: Vec<Vec<f32>>,
    /// Accumulated, before clipping.
    pub(crate) grad: Vec<Vec<f32>>,
}

/// A trainer on this rank with the start weights, laid out as `sharding` says.
pub(crate) fn trainer(
    comm: Comm,
    precision: Precision,
    sharding: Sharding,
    decay_norms: bool,
    answers: Answers,
) -> Trainer<Toy> {
    let device = Device::cpu(1).expect("one thread runs inline");
    let toy = Toy::new(answers);
    let mut t =
        Trainer::new(toy, device, comm, precision, sharding, decay_norms, || 0.0).expect("a toy fits in memory");
    let fill = |param: &ParamSpec, start: usize, out: &mut [f32]| {
        out.iter_mut().enumerate().for_each(|(i, x)| *x = start_weight(&param.name, start + i));
        Ok::<(), std::convert::Infallible>(())
    };
    let Ok(()) = t.state.load(t.model.units(), &t.layout, fill);
    t
}

/// One step of `accum` micro-batches, and the accumulated gradient shards.
pub(crate) fn step(
    t: &mut Trainer<Toy>,
    step: u32,
    accum: u32,
    targets: u64,
    hyper: &Hyper,
) -> (Result<StepReport>, Vec<Vec<f32>>) {
    let (rank, world) = (t.comm.rank(), t.comm.world());
    let lanes = (0..t.sharding.passes(world)).map(|pass| (pass * world + rank) as u32);
    let batches: Vec<Batch> =
        (0..accum).flat_map(|micro| lanes.clone().map(move |lane| At { lane, step, micro }.batch())).collect();
    let mut grads = Vec::new();
    let report = train_step(t, &batches, targets, hyper, &mut |model: &Toy, g: &Grads| {
        grads = (0..model.units().len()).map(|unit| g.slice(unit).to_f32()).collect();
    });
    (report, grads)
}

/// This rank's shadow and moments.
pub(crate) fn shards(t: &Trainer<Toy>, grad: Vec<Vec<f32>>) -> Shards {
    let units = || t.state.units.iter();
    Shards {
        shadow: units().map(|u| u.shadow.view().to_f32()).collect(),
        exp_avg: units().map(|u| u.exp_avg.view().to_f32()).collect(),
        exp_avg_sq: units().map(|u| u.exp_avg_sq.view().to_f32()).collect(),
        grad,
    }
}

/// Runs `body` on ranks that are threads. A rank that panics (a failed assertion) fails the test.
pub(crate) fn on_ranks<T: Send>(world: usize, body: impl Fn(Comm) -> T + Sync) -> Vec<T> {
    threads::run(world, LIMIT, body).into_iter().map(|rank| rank.expect("the rank returned")).collect()
}
