//! The golden files of `fixtures/exl3` (made with exllamav3's own kernels; see the README there).
#![allow(dead_code)] // each test binary uses its part

use exl3::{Codebook, Linear, Parts, Tensor};
use half::f16;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// One golden file, in memory.
pub struct Golden(Vec<u8>);

pub fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/exl3").join(file)
}

pub fn meta() -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path("meta.json")).expect("meta.json")).expect("JSON")
}

impl Golden {
    pub fn open(file: &str) -> Golden {
        Golden(std::fs::read(path(file)).unwrap_or_else(|e| panic!("{file}: {e}")))
    }

    pub fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).expect("safetensors header")
    }

    /// Names that end in `.trellis`, without that ending.
    pub fn layers(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .tensors()
            .names()
            .iter()
            .filter_map(|n| n.strip_suffix(".trellis").map(String::from))
            .collect();
        names.sort();
        assert!(!names.is_empty());
        names
    }

    fn view(&self, name: &str) -> TensorView<'_> {
        self.tensors().tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub fn bytes(&self, name: &str) -> &[u8] {
        let length = self.view(name).data().len();
        let start = self.view(name).data().as_ptr() as usize - self.0.as_ptr() as usize;
        &self.0[start..start + length]
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors().tensor(name).is_ok()
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.view(name).shape().to_vec()
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn f16(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
    }

    pub fn u16(&self, name: &str) -> Vec<u16> {
        self.bytes(name).as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect()
    }

    pub fn i64(&self, name: &str) -> Vec<i64> {
        self.bytes(name).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    }

    /// The layer stored under `name`, through the same door as a checkpoint's.
    pub fn layer(&self, name: &str) -> Linear<'_> {
        let field = |f: &str| format!("{name}.{f}");
        let shape = self.shape(&field("trellis"));
        let (suh_shape, svh_shape) = ([16 * shape[0]], [16 * shape[1]]);
        let marker = |f: &str| {
            self.has(&field(f)).then(|| Tensor { dtype: "I32", shape: &[], bytes: self.bytes(&field(f)) })
        };
        let parts = Parts {
            trellis: Some(Tensor { dtype: "I16", shape: &shape, bytes: self.bytes(&field("trellis")) }),
            suh: Some(Tensor { dtype: "F16", shape: &suh_shape, bytes: self.bytes(&field("suh")) }),
            svh: Some(Tensor { dtype: "F16", shape: &svh_shape, bytes: self.bytes(&field("svh")) }),
            mcg: marker("mcg"),
            mul1: marker("mul1"),
            ..Parts::default()
        };
        Linear::from_parts(name, &parts).expect("golden layer")
    }
}

/// The codebook that a variant's name begins with.
pub fn codebook(variant: &str) -> Codebook {
    Codebook::from_name(variant.split('.').next().unwrap_or_default()).expect("codebook")
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

pub fn halves(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()
}

pub fn max_abs(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// Largest difference, over the largest magnitude of `want`.
pub fn relative_max(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let worst = got.iter().zip(want).fold(0f32, |m, (g, w)| m.max((g - w).abs()));
    worst / max_abs(want)
}

/// ||got - want|| / ||want||.
pub fn nrms(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |v: f64| v * v;
    let error: f64 = got.iter().zip(want).map(|(g, w)| square(f64::from(*g) - f64::from(*w))).sum();
    (error / want.iter().map(|w| square(f64::from(*w))).sum::<f64>()).sqrt()
}
