//! A checkpoint as the model to start from, and the model folder that is written from it.

use super::*;
use crate::hf::ModelWriter;
use crate::hf::save::MAX_SHARD_BYTES;
use crate::plan::ModelSource;
use crate::source::Source;
use crate::tiny;

/// The embedded model's architecture, smaller and tied.
fn drawn() -> Source {
    let small = models::Config {
        vocab_size: 11,
        hidden_size: 16,
        intermediate_size: 24,
        layers: 1,
        heads: 2,
        ..tiny::config()
    };
    Source::drawn(models::Config { kv_heads: 1, head_dim: 8, tied: true, ..small }, 3)
}

/// Writes `source` as the checkpoint of one rank whose shadow is a hundredth above the source's weights.
fn checkpoint(source: &Source, facts: &SourceFacts, out_dir: &Path) -> PathBuf {
    let units = source.units();
    let runs = vec![runs(units, 1).remove(0)];
    let dtypes = RoleDTypes::new(DType::F32, DType::F32);
    let max_file_bytes = MAX_SHARD_BYTES;
    let spec =
        SaveSpec { out_dir, step: 4, units, dtypes, source: facts, files: Files::Shared, runs: &runs, max_file_bytes };
    let plan = SavePlan::new(spec).unwrap();
    let shadow: Vec<Vec<f32>> =
        units.iter().map(|unit| unit.params.iter().flat_map(|p| trained(source, p)).collect()).collect();
    plan.create().unwrap();
    let written = plan.write_rank(0, |unit, _| View::F32(&shadow[unit])).unwrap();
    plan.commit(run_facts(), &[written]).unwrap()
}

fn trained(source: &Source, param: &spmd_core::ParamSpec) -> Vec<f32> {
    let mut values = vec![0.0; param.len()];
    source.fill(param, 0, &mut values).unwrap();
    values.iter().map(|x| x + 0.01).collect()
}

#[test]
fn a_checkpoint_opens_as_a_model_with_the_shadow_as_its_weights() {
    let (top, source) = (tempfile::tempdir().unwrap(), drawn());
    let facts = source.facts(true).unwrap();
    assert_eq!(facts.companions.len(), 1, "the tokenizer over bytes");
    let dir = checkpoint(&source, &facts, top.path());
    let opened = Source::open(&ModelSource::Folder(dir.clone()), 0).unwrap();
    assert_eq!((&opened.config, opened.units()), (&source.config, source.units()));
    assert_eq!(opened.name(), format!("{} (checkpoint of step 4)", dir.display()));
    for param in source.units().iter().flat_map(|u| &u.params) {
        let expected = trained(&source, param);
        let mut found = vec![0.0; 5.min(param.len() - 1)];
        opened.fill(param, 1, &mut found).unwrap();
        assert_eq!(bits(&found), bits(&expected[1..1 + found.len()]), "{}", param.name);
    }
    assert_eq!(opened.facts(true).unwrap(), facts, "what is carried over survives");
}

#[test]
fn the_final_model_of_a_resumed_run_has_the_dtypes_of_the_first_source() {
    let (top, source) = (tempfile::tempdir().unwrap(), drawn());
    let mut config = source.config_json.clone();
    config["dtype"] = "float32".into();
    let mut facts = source.facts(true).unwrap();
    facts.config_json = config.to_string();
    facts.dtypes.fill(FileDType::F32);
    facts.stores_tied_head = true;
    let opened = Source::open(&ModelSource::Folder(checkpoint(&source, &facts, top.path())), 0).unwrap();
    assert!(opened.stores_tied_head());
    let dir = top.path().join("model");
    let dtype = |name: &str| opened.dtype_of(name);
    let writer = ModelWriter::plan(&dir, opened.units(), dtype, opened.stores_tied_head(), MAX_SHARD_BYTES);
    writer.create().unwrap();
    for param in opened.units().iter().flat_map(|u| &u.params) {
        writer.write(&param.name, 0, &trained(&source, param)).unwrap();
    }
    writer.sync().unwrap();
    let kept = opened.facts(true).unwrap();
    writer.finish(&kept.config_json, &kept.companions).unwrap();
    // The checkpoint's own config.json says bfloat16; the model's must not.
    assert_eq!(crate::hf::read_config(&dir).unwrap().1, config);
    let model = Source::open(&ModelSource::Folder(dir), 0).unwrap();
    assert_eq!((model.dtype_of(EMBEDDING), model.stores_tied_head()), (FileDType::F32, true));
}

#[test]
fn a_damaged_checkpoint_is_no_model() {
    let (top, source) = (tempfile::tempdir().unwrap(), drawn());
    let dir = checkpoint(&source, &source.facts(true).unwrap(), top.path());
    let mut bytes = fs::read(dir.join("shadow.safetensors")).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(dir.join("shadow.safetensors"), bytes).unwrap();
    let opened = Source::open(&ModelSource::Folder(dir.clone()), 0).unwrap();
    let param = opened.units().iter().flat_map(|u| &u.params).next_back().unwrap().clone();
    assert_eq!(opened.fill(&param, 0, &mut vec![0.0; param.len()]).unwrap_err().exit, Exit::Input);
    fs::remove_file(dir.join("shadow.safetensors")).unwrap();
    assert_eq!(Source::open(&ModelSource::Folder(dir), 0).unwrap_err().exit, Exit::Input);
}
