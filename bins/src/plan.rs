//! The run, resolved: every setting has a value and an origin, and nothing is left to decide.
//!
//! What was written is [`TrainArgs`]; [`RunPlan::resolve`] turns it into a [`RunPlan`] or a sentence about what is wrong.
//! Code after start-up sees only the plan.

mod checks;
mod layout;
mod optimizer;
mod params;
mod pick;
mod refuse;
pub mod resume;
mod schedule;

pub use params::{ParamValue, ScheduleParams};
use pick::Settings;
pub(crate) use resume::setting_of;

use crate::Result;
use crate::cli::{
    CheckpointFiles, ClipFormArg, DTypeArg, OptimizerForm, OptimizerKind, Recompute, ResumeArg, SaveFailure,
    ScheduleKind, ScheduleStepping, TrainArgs,
};
use crate::config::{Assume, Files};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spmd_core::Policy;
use std::path::PathBuf;

/// What is set when nothing is: the values `--help` states.
pub mod defaults {
    /// `--policy`.
    pub const POLICY: super::Policy = super::Policy::Shadow;
    /// `--lr`.
    pub const LR: f64 = 1e-5;
    /// `--schedule`.
    pub const SCHEDULE: super::ScheduleKind = super::ScheduleKind::Constant;
    /// `--schedule-stepping`.
    pub const SCHEDULE_STEPPING: super::ScheduleStepping = super::ScheduleStepping::Once;
    /// `--optimizer`.
    pub const OPTIMIZER: super::OptimizerKind = super::OptimizerKind::AdamW;
    /// `--momentum`.
    pub const MOMENTUM: f64 = 0.0;
    /// `--beta1`.
    pub const BETA1: f64 = 0.9;
    /// `--beta2`.
    pub const BETA2: f64 = 0.999;
    /// `--eps`.
    pub const EPS: f64 = 1e-8;
    /// `--clip`.
    pub const CLIP: f64 = 1.0;
    /// `--epochs`.
    pub const EPOCHS: f64 = 1.0;
    /// `--seq-len`, unless the model's limit is smaller.
    pub const SEQ_LEN: usize = 512;
    /// `--stage`.
    pub const STAGE: u8 = 3;
    /// `--out`.
    pub const OUT: &str = "umbra-out";
    /// `--out` of `umbra compare`.
    pub const COMPARE_OUT: &str = "umbra-compare";
    /// `--keep`.
    pub const KEEP: u64 = 2;
    /// `--save-failure`.
    pub const SAVE_FAILURE: super::SaveFailure = super::SaveFailure::Stop;
    /// `--checkpoint-files`.
    pub const CHECKPOINT_FILES: super::CheckpointFiles = super::CheckpointFiles::Shared;
}

/// What a run without model and data uses in place of the defaults, so that it visibly learns in under a minute.
pub mod preset {
    /// `--steps`.
    pub const STEPS: u64 = 200;
    /// `--lr`.
    pub const LR: f64 = 2e-3;
    /// `--warmup-ratio`.
    pub const WARMUP_RATIO: f64 = 0.05;
    /// `--micro-batch`.
    pub const MICRO_BATCH: usize = 4;
    /// `--seq-len`.
    pub const SEQ_LEN: usize = 128;
}

/// Where a setting's value came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The command line.
    Flag,
    /// A configuration file.
    Config,
    /// Nobody set it.
    Default,
    /// The preset of a run without model and data.
    Preset,
    /// The checkpoint the run goes on from.
    Checkpoint,
}

/// Which model is trained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelSource {
    /// The embedded one.
    Tiny,
    /// A Hugging Face folder.
    Folder(PathBuf),
}

impl From<PathBuf> for ModelSource {
    /// `tiny` is the embedded model; a folder of that name is spelled `./tiny`.
    fn from(path: PathBuf) -> Self {
        if path.as_os_str() == "tiny" { ModelSource::Tiny } else { ModelSource::Folder(path) }
    }
}

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    /// Optimizer steps.
    Steps(u64),
    /// Passes over the data.
    Epochs(f64),
}

/// How long the learning rate warms up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Warmup {
    /// Optimizer steps.
    Steps(u64),
    /// A share of the run, rounded up to whole steps.
    Ratio(f64),
}

/// Where a run goes on from. run.json has `auto`, `never` or the folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest checkpoint of the output folder, if there is one.
    Auto {
        /// Whether it was written: only then may a damaged checkpoint be passed over for the one before.
        told: bool,
    },
    /// Nothing; a used output folder is refused.
    Never,
    /// This checkpoint.
    From(PathBuf),
}

impl From<&ResumeArg> for Resume {
    fn from(written: &ResumeArg) -> Self {
        match written {
            ResumeArg::Auto => Resume::Auto { told: true },
            ResumeArg::Never => Resume::Never,
            ResumeArg::Dir(dir) => Resume::From(dir.clone()),
        }
    }
}

impl Serialize for Resume {
    fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        match self {
            Resume::Auto { .. } => out.serialize_str("auto"),
            Resume::Never => out.serialize_str("never"),
            Resume::From(dir) => dir.serialize(out),
        }
    }
}

/// What a checkpoint says of the layout of the run it belongs to: the defaults of a run that goes on from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Canonical ranks.
    pub lanes: usize,
    /// Micro-batches of a step.
    pub accum: usize,
}

/// A validated run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunPlan {
    /// The model.
    pub model: ModelSource,
    /// Files of rows; none means the embedded text.
    pub data: Vec<PathBuf>,
    /// Which dtype each role has.
    #[serde(serialize_with = "name_of")]
    pub policy: Policy,
    /// The dtype of a contribution to a gradient's sum.
    pub wire: DTypeArg,
    /// The dtype of the finished sum.
    pub reduced: DTypeArg,
    /// The dtype gradients are accumulated in.
    pub accumulate: DTypeArg,
    /// How long it is.
    pub length: Length,
    /// The learning rate after warm-up.
    pub lr: f64,
    /// Where a falling learning rate ends.
    pub min_lr: f64,
    /// The course after warm-up.
    pub schedule: ScheduleKind,
    /// What is set of the parameters of one of DeepSpeed's schedules.
    pub schedule_params: ScheduleParams,
    /// How often a schedule of transformers is stepped for each optimizer step.
    pub schedule_stepping: ScheduleStepping,
    /// Warm-up.
    pub warmup: Warmup,
    /// Steps over which wsd decays; none means the last 20 %.
    pub decay_steps: Option<u64>,
    /// Rows of a micro-batch, per lane.
    pub micro_batch: usize,
    /// Micro-batches of a step.
    pub accum: usize,
    /// Rows of a step: micro_batch · accum · lanes.
    pub global_batch: usize,
    /// Longest row in tokens; none means [`defaults::SEQ_LEN`] or the model's limit.
    pub seq_len: Option<usize>,
    /// Largest gradient norm; 0 is off.
    pub clip: f64,
    /// Whose form the clipping factor has.
    pub clip_form: ClipFormArg,
    /// What steps the weights.
    pub optimizer: OptimizerKind,
    /// Whose arithmetic it has.
    pub optimizer_form: OptimizerForm,
    /// SGD's momentum.
    pub momentum: f64,
    /// Weight decay: decoupled, or L2 where the optimizer is not AdamW.
    pub weight_decay: f64,
    /// Whether gains are decayed as well.
    pub decay_norms: bool,
    /// Decay of exp_avg.
    pub beta1: f64,
    /// Decay of exp_avg_sq.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Seed of everything random.
    pub seed: u64,
    /// The releases of engines whose defaults and arithmetic are meant where an engine's schedule is asked for.
    #[serde(serialize_with = "words_of")]
    pub assume: Assume,
    /// Threads of this rank.
    pub threads: usize,
    /// Whether rows are shuffled.
    pub shuffle: bool,
    /// Whether rows that are too long are cut instead of refused.
    pub truncate: bool,
    /// Progress every so many steps.
    pub log_every: u64,
    /// Whether TensorBoard event files are written.
    pub tensorboard: bool,
    /// Where the first step's logits and gradients go.
    pub dump: Option<PathBuf>,
    /// The output folder.
    pub out: PathBuf,
    /// Where it goes on from.
    pub resume: Resume,
    /// Settings, by field name, that may differ from those of the checkpoint.
    pub overrides: Vec<String>,
    /// A checkpoint every so many steps; none means at the end only.
    pub save_every: Option<u64>,
    /// Checkpoints that are kept; 0 writes none at all.
    pub keep: u64,
    /// What happens when a checkpoint cannot be written.
    pub save_failure: SaveFailure,
    /// The files of a checkpoint.
    pub checkpoint_files: CheckpointFiles,
    /// The hash of the state every so many steps; none means never.
    pub hash_every: Option<u64>,
    /// Ranks.
    pub world: usize,
    /// Canonical ranks.
    pub lanes: usize,
    /// ZeRO stage.
    pub stage: u8,
    /// Ranks that share one copy of the state; 1 at stage 0. It divides the world.
    pub shard_group: usize,
    /// Whether this layout adds in another order than the lanes': only where the command line allows it.
    pub different_bits: bool,
    /// Whether the backward pass computes each block's activations again.
    pub recompute: bool,
    /// Whether gathered weights are released between forward and backward; only at stage 3.
    pub reshard_after_forward: bool,
    /// Whether this is the preset of a run without model and data.
    pub preset: bool,
    /// Where each setting above came from, by field name.
    #[serde(skip)]
    pub origins: Vec<(&'static str, Origin)>,
    /// The configuration files.
    #[serde(skip)]
    pub files: Files,
}

fn name_of<S: serde::Serializer>(policy: &Policy, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(policy.name())
}

/// As `--assume` takes them.
fn words_of<S: serde::Serializer>(assume: &Assume, out: S) -> Result<S::Ok, S::Error> {
    let Assume { deepspeed, accelerate, load } = assume;
    let load = load.map(|dtype| format!("load={dtype:?}").to_lowercase());
    out.collect_seq([format!("deepspeed={deepspeed}"), format!("accelerate={accelerate}")].into_iter().chain(load))
}

impl RunPlan {
    /// Checks what can be said of the flags before a folder is looked at.
    ///
    /// # Errors
    /// A usage failure (exit 2): flags of later versions, values that mean nothing, flags that contradict each other.
    pub fn check_written(args: &TrainArgs) -> Result<()> {
        refuse::later_versions(args)?;
        checks::written(args)?;
        optimizer::written(args)?;
        let kind = args.schedule.unwrap_or(defaults::SCHEDULE);
        let assume = Assume::read(&args.assume)?;
        schedule::written(args, &ScheduleParams::read(&args.schedule_params, kind, assume.deepspeed)?)
    }

    /// Resolves and checks what was written, for a world of `world` ranks whose own share of the machine is `cores`. A run
    /// that goes on from a checkpoint takes what it does not set of the layout from `kept`.
    ///
    /// # Errors
    /// A usage failure (exit 2): first flags of later versions, then values that mean nothing or contradict each other,
    /// then layouts that would change the result.
    pub fn resolve(args: &TrainArgs, world: usize, cores: usize, kept: Option<&Kept>) -> Result<RunPlan> {
        RunPlan::resolved(args, world, cores, kept).map_err(|failure| args.files.locate(failure))
    }

    fn resolved(args: &TrainArgs, world: usize, cores: usize, kept: Option<&Kept>) -> Result<RunPlan> {
        RunPlan::check_written(args)?;
        let args = &*layout::fitted(args, world);
        let preset = args.model.is_none() && args.data.is_empty();
        let mut set = Settings { preset, files: &args.files, origins: Vec::new() };
        let layout = layout::resolve(args, world, kept, &mut set)?;
        let micro_batch = set.pick("micro_batch", args.micro_batch, Some(preset::MICRO_BATCH), 1);
        let accum = checks::accum(args, micro_batch, layout.lanes)?;
        let accum = set.kept("accum", accum, kept.map(|kept| kept.accum), 1);
        let global_batch = checks::global_batch(micro_batch, accum, layout.lanes)?;
        let origin = if args.global_batch.is_some() { set.written("global_batch") } else { Origin::Default };
        set.origins.push(("global_batch", origin));
        let length = args.steps.map(Length::Steps).or(args.epochs.map(Length::Epochs));
        let warmup = args.warmup_steps.map(Warmup::Steps).or(args.warmup_ratio.map(Warmup::Ratio));
        let resume = args.resume.as_ref().map(Resume::from);
        let recompute = args.recompute.map(|what| what == Recompute::Block);
        let data = (!args.data.is_empty()).then(|| args.data.clone());
        let assume = Assume::read(&args.assume)?;
        let schedule = args.schedule.unwrap_or(defaults::SCHEDULE);
        let params = ScheduleParams::read(&args.schedule_params, schedule, assume.deepspeed)?;
        let preset_warmup = schedule::takes_warmup(schedule, &params).then_some(Warmup::Ratio(preset::WARMUP_RATIO));
        let policy = args.policy.unwrap_or(defaults::POLICY);
        let form = optimizer::default_form(policy, args.optimizer.unwrap_or(defaults::OPTIMIZER));
        let precision = policy.precision();
        let mut plan = RunPlan {
            model: set.pick("model", args.model.clone().map(Into::into), Some(ModelSource::Tiny), ModelSource::Tiny),
            data: set.pick("data", data, Some(Vec::new()), Vec::new()),
            policy: set.or("policy", args.policy, defaults::POLICY),
            wire: set.or("wire", args.wire, precision.wire.into()),
            reduced: set.or("reduced", args.reduced, precision.reduced.into()),
            accumulate: set.or("accumulate", args.accumulate, precision.accumulate.into()),
            length: set.pick("length", length, Some(Length::Steps(preset::STEPS)), Length::Epochs(defaults::EPOCHS)),
            lr: set.pick("lr", args.lr, Some(preset::LR), defaults::LR),
            min_lr: set.or("min_lr", args.min_lr, 0.0),
            schedule: set.or("schedule", args.schedule, defaults::SCHEDULE),
            schedule_params: set.or(
                "schedule_params",
                (!args.schedule_params.is_empty()).then_some(params),
                ScheduleParams::default(),
            ),
            schedule_stepping: set.or("schedule_stepping", args.schedule_stepping, defaults::SCHEDULE_STEPPING),
            warmup: set.pick("warmup", warmup, preset_warmup, Warmup::Steps(0)),
            decay_steps: set.or("decay_steps", args.decay_steps.map(Some), None),
            micro_batch,
            accum,
            global_batch,
            seq_len: set.pick("seq_len", args.seq_len.map(Some), Some(Some(preset::SEQ_LEN)), None),
            clip: set.or("clip", args.clip, defaults::CLIP),
            clip_form: set.or("clip_form", args.clip_form, precision.clip.into()),
            optimizer: set.or("optimizer", args.optimizer, defaults::OPTIMIZER),
            optimizer_form: set.or("optimizer_form", args.optimizer_form, form),
            momentum: set.or("momentum", args.momentum, defaults::MOMENTUM),
            weight_decay: set.or("weight_decay", args.weight_decay, 0.0),
            decay_norms: set.or("decay_norms", args.decay_norms.then_some(true), false),
            beta1: set.or("beta1", args.beta1, defaults::BETA1),
            beta2: set.or("beta2", args.beta2, defaults::BETA2),
            eps: set.or("eps", args.eps, defaults::EPS),
            seed: set.or("seed", args.seed, 0),
            assume: set.or("assume", (!args.assume.is_empty()).then_some(assume), Assume::default()),
            threads: set.or("threads", args.threads, cores.max(1)),
            shuffle: set.or("shuffle", args.no_shuffle.then_some(false), true),
            truncate: set.or("truncate", args.truncate.then_some(true), false),
            log_every: set.or("log_every", args.log_every, 1),
            tensorboard: set.or("tensorboard", args.tensorboard.then_some(true), false),
            dump: set.or("dump", args.dump.clone().map(Some), None),
            out: set.or("out", args.out.clone(), PathBuf::from(defaults::OUT)),
            resume: set.or("resume", resume, Resume::Auto { told: false }),
            overrides: set.or("overrides", (!args.overrides.is_empty()).then(Vec::new), Vec::new()),
            save_every: set.or("save_every", args.save_every.map(Some), None),
            keep: set.or("keep", args.keep, defaults::KEEP),
            save_failure: set.or("save_failure", args.save_failure, defaults::SAVE_FAILURE),
            checkpoint_files: set.or("checkpoint_files", args.checkpoint_files, defaults::CHECKPOINT_FILES),
            hash_every: set.or("hash_every", args.hash_every.map(Some), None),
            world,
            lanes: layout.lanes,
            stage: layout.stage,
            shard_group: layout.shard_group,
            different_bits: layout.different_bits,
            recompute: set.or("recompute", recompute, false),
            reshard_after_forward: layout.reshard_after_forward,
            preset,
            origins: Vec::new(),
            files: args.files.clone(),
        };
        // The names that may be written are those of the settings just made.
        plan.overrides = resume::overrides(&args.overrides, &set.origins)?;
        plan.origins = set.origins;
        checks::resolved(&plan)?;
        Ok(plan)
    }

    /// Passes of a micro-batch: in pass p rank r computes lane p·world + r, if there is one.
    pub fn passes(&self) -> usize {
        self.lanes.div_ceil(self.world)
    }

    /// How state and gradients are spread over the ranks.
    pub fn sharding(&self) -> optim::Sharding {
        let Self { stage, lanes, reshard_after_forward, .. } = *self;
        optim::Sharding { stage, group: self.shard_group, lanes, reshard_after_forward }
    }

    /// Where a setting came from, by field name; settings that the launch decides have none.
    pub fn origin(&self, name: &str) -> Option<Origin> {
        self.origins.iter().find(|(n, _)| *n == name).map(|(_, origin)| *origin)
    }

    /// The plan for run.json: `settings` maps each name to its `value` and where it is `from`.
    pub fn to_json(&self) -> Value {
        let mut settings = serde_json::Map::new();
        // A struct of plain fields always serialises to an object.
        if let Ok(Value::Object(fields)) = serde_json::to_value(self) {
            for (name, value) in fields {
                let from = self.origin(&name).map_or(json!("launch"), |origin| json!(origin));
                let at = self.files.sources.get(&name).map(ToString::to_string);
                let setting = match at {
                    Some(at) => json!({ "value": value, "from": from, "at": at }),
                    None => json!({ "value": value, "from": from }),
                };
                settings.insert(name, setting);
            }
        }
        let Some((_, preset)) = settings.shift_remove_entry("preset") else { return json!({ "settings": settings }) };
        json!({ "umbra": env!("CARGO_PKG_VERSION"), "preset": preset["value"], "settings": settings })
    }
}

#[cfg(test)]
mod tests;
