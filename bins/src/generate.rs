//! `umbra generate`: continues a text, alone or sharded over ranks, with a key/value cache.

use crate::cli::GenerateArgs;
use crate::data::tokenizer::TextStream;
use crate::host::{answer, clock};
use crate::launch::meet;
use crate::plan::ModelSource;
use crate::source::Source;
use crate::{Failure, Result, hf};
use collectives::Comm;
use models::{KvCache, Mistral};
use optim::weights::{Context, Weights};
use optim::{Grid, Layout, State};
use spmd_core::rng::{Purpose, Stream};
use spmd_core::{Device, Policy, UnitModel};
use std::io::Read;

/// Continues a text on every rank; rank 0 writes it to standard output as it comes.
///
/// Weights, activations and cache are fp32: on a CPU bf16 would have to be widened for every token.
///
/// # Errors
/// The failure to show, the same on every rank.
pub fn generate(args: &GenerateArgs, threads: usize, comm: &Comm) -> Result<()> {
    let source = meet(comm, Source::open(&ModelSource::from(args.model.clone()), args.seed))?;
    let tokenizer = source.tokenizer();
    let prompt = meet(comm, prompt(args, comm))?;
    let ids = meet(comm, tokenizer.get().and_then(|t| t.encode_prompt(&prompt)))?;
    let limit = source.config.max_positions;
    if ids.is_empty() {
        return Err(Failure::usage("the prompt is empty")
            .at("--prompt")
            .expected("at least one token to continue")
            .found("none")
            .hint("some text to start from"));
    }
    if ids.len() >= limit {
        return Err(Failure::input("the prompt does not fit the model")
            .expected(format!("1 to {} tokens", limit - 1))
            .found(format!("{} tokens", ids.len()))
            .hint("another --prompt"));
    }
    let mut session = meet(comm, Session::new(&source, threads, comm, ids.len(), args))?;
    let stop = source.dir.as_deref().map(|d| hf::eos_token_ids(d, &source.config_json)).unwrap_or_default();
    let sampler = Stream::new(args.seed, Purpose::Sample, 0, 0);
    let mut text = TextStream::default();
    let mut next = ids;
    let mut written = 0;
    let room = args.max_new_tokens.min(limit - next.len());
    while written < room {
        let logits = session.logits(&next)?;
        let token = pick(&logits, args.temperature, args.top_p, sampler.f64(written as u64));
        if stop.contains(&token) {
            break;
        }
        written += 1;
        if !say(comm, tokenizer.get().and_then(|t| text.push(t, token)))? {
            return Ok(());
        }
        next = vec![token];
    }
    let rest = tokenizer.get().and_then(|t| text.finish(t)).map(|rest| rest + "\n");
    say(comm, rest).map(|_| ())
}

/// Rank 0 writes; a text that cannot be written stops every rank. `false`, on every rank: nobody reads any more.
fn say(comm: &Comm, text: Result<String>) -> Result<bool> {
    let written = text.and_then(|text| if comm.rank() == 0 { answer(&text) } else { Ok(true) });
    let read = meet(comm, written)?;
    Ok(comm.gather_u64(&[u64::from(read)]).map_err(Failure::from)?[0] == 1)
}

/// The prompt: the flag, or rank 0's standard input, which only rank 0 has under mpirun.
fn prompt(args: &GenerateArgs, comm: &Comm) -> Result<String> {
    if let Some(prompt) = &args.prompt {
        return Ok(prompt.clone());
    }
    let mut bytes = Vec::new();
    let read = if comm.rank() == 0 { std::io::stdin().read_to_end(&mut bytes) } else { Ok(0) };
    let read = read.map_err(|e| Failure::input("the prompt could not be read from standard input").found(e));
    meet(comm, read)?;
    let bytes = comm.broadcast_bytes(0, bytes).map_err(Failure::from)?;
    String::from_utf8(bytes).map_err(|e| Failure::input("the prompt is not UTF-8").at("standard input").found(e))
}

/// A model being asked for one token after another.
struct Session {
    model: Mistral,
    state: State,
    layout: Layout,
    weights: Weights,
    cache: KvCache,
    device: Device,
    comm: Comm,
    position: usize,
}

impl Session {
    fn new(source: &Source, threads: usize, comm: &Comm, prompt: usize, args: &GenerateArgs) -> Result<Self> {
        let precision = Policy::Fp32.precision();
        let device = Device::cpu(threads)?;
        // Nothing runs backward here, so the blocks share one set of activations.
        let mut model = Mistral::new(device.clone(), source.config.clone(), precision.compute, 1, prompt, true)?;
        let positions = prompt.saturating_add(args.max_new_tokens).min(source.config.max_positions);
        model.reserve_positions(positions);
        let layout = Layout::new(model.units(), Grid::whole(comm.rank(), comm.world()), false);
        let mut state = State::weights_only(&device, &layout, &precision).map_err(Failure::from)?;
        state.load(source.units(), &layout, |param, start, out| source.fill(param, start, out))?;
        let cache = KvCache::new(&device, &source.config, precision.compute, positions)?;
        // Alone, every unit stays gathered; with other ranks each is gathered when it is needed.
        let weights = Weights::new(precision.compute, model.units().len(), model.stages(), comm.world() == 1);
        Ok(Session { model, state, layout, weights, cache, device, comm: comm.clone(), position: 0 })
    }

    /// The logits that follow `ids`, which come after everything asked so far.
    fn logits(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        self.model.begin_decode(ids, self.position)?;
        self.position += ids.len();
        let (device, comm, layout, state) = (&self.device, &self.comm, &self.layout, &self.state);
        // One copy of the weights, so nobody is a replica of anybody; only gradients would ask for them.
        let ctx = Context { device, shard: comm, replicas: comm, layout, state, clock };
        let stages = self.model.stages().to_vec();
        let mut logits = None;
        for (s, stage) in stages.iter().enumerate() {
            let next = stages.get(s + 1).unwrap_or(&stages[0]);
            let weights = self.weights.gather(&ctx, stage, Some(next)).map_err(Failure::from)?;
            logits = self.model.decode(s, &weights, &mut self.cache)?;
        }
        logits.ok_or_else(|| Failure::new(crate::Exit::Bug, "the last stage gave no logits"))
    }
}

/// The likeliest token at temperature 0; otherwise one drawn with `uniform` from the smallest set of tokens whose
/// probabilities reach `top_p`.
fn pick(logits: &[f32], temperature: f64, top_p: f64, uniform: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Equal logits: the lower id first, so that the choice is the same everywhere.
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    if temperature == 0.0 {
        return order[0];
    }
    let max = logits[order[0] as usize] as f64;
    let weights: Vec<f64> = order.iter().map(|t| ((logits[*t as usize] as f64 - max) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut kept = 0.0;
    let nucleus = weights.iter().position(|w| {
        kept += w;
        kept >= top_p * total
    });
    let count = nucleus.map_or(weights.len(), |last| last + 1);
    let mut left = uniform * weights[..count].iter().sum::<f64>();
    for (token, weight) in order[..count].iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return *token;
        }
    }
    order[count - 1]
}

#[cfg(test)]
mod tests {
    use super::pick;

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        assert_eq!(pick(&[1.0, 3.0, 3.0], 0.0, 1.0, 0.9), 1);
    }

    #[test]
    fn sampling_follows_the_probabilities_within_the_nucleus() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let at = |u: f64, p: f64| pick(&logits, 1.0, p, u);
        assert_eq!((at(0.0, 1.0), at(0.49, 1.0), at(0.51, 1.0), at(0.79, 1.0), at(0.81, 1.0)), (0, 0, 1, 1, 2));
        assert_eq!(at(0.99, 0.6), 1, "0.5 is below 0.6, so the second belongs to the nucleus and the third does not");
        assert_eq!(at(0.99, 0.4), 0);
        // At temperature 0.5 probabilities are squared: 25, 9, 4 of 38.
        assert_eq!(pick(&logits, 0.5, 1.0, 0.65), 0);
        assert_eq!(pick(&logits, 0.5, 1.0, 0.67), 1);
    }
}
