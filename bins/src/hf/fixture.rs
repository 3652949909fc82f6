//! Small safetensors files for tests, well-formed and not.

use super::FileDType;
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use spmd_core::{ParamKind, ParamSpec, UnitSpec};
use std::path::Path;

pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: FileDType,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// A tensor whose values count up from `first` in steps of 1/8: exact in every dtype while below 32.
pub(crate) fn tensor(name: &str, dtype: FileDType, shape: &[usize], first: f32) -> Tensor {
    let len: usize = shape.iter().product();
    let values = (0..len).map(|i| first + i as f32 / 8.0).collect();
    Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), values }
}

pub(crate) fn bytes(tensor: &Tensor) -> Vec<u8> {
    let value = |v: &f32| match tensor.dtype {
        FileDType::F32 => v.to_le_bytes().to_vec(),
        FileDType::Bf16 => bf16::from_f32(*v).to_le_bytes().to_vec(),
        FileDType::F16 => f16::from_f32(*v).to_le_bytes().to_vec(),
    };
    tensor.values.iter().flat_map(value).collect()
}

/// The header of `tensors` as JSON, for tests to spoil.
pub(crate) fn header(tensors: &[Tensor]) -> Map<String, Value> {
    let mut out = Map::new();
    let mut at = 0;
    for t in tensors {
        let end = at + bytes(t).len();
        let entry = json!({"dtype": t.dtype.header_name(), "shape": t.shape, "data_offsets": [at, end]});
        out.insert(t.name.clone(), entry);
        at = end;
    }
    out
}

pub(crate) fn write_raw(path: &Path, header: &Map<String, Value>, data: &[u8]) {
    let json = Value::Object(header.clone()).to_string();
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json.bytes());
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

pub(crate) fn write(path: &Path, tensors: &[Tensor]) {
    let data: Vec<u8> = tensors.iter().flat_map(bytes).collect();
    write_raw(path, &header(tensors), &data);
}

/// One unit with these parameters, all matrices.
pub(crate) fn unit(params: &[(&str, &[usize])]) -> UnitSpec {
    let param = |(name, shape): &(&str, &[usize])| ParamSpec {
        name: (*name).to_owned(),
        shape: shape.to_vec(),
        kind: ParamKind::Matrix,
    };
    UnitSpec { name: "unit".to_owned(), params: params.iter().map(param).collect() }
}
