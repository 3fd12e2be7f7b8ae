//! The work folder of a run: everything behind the last finished layer, so that an interrupted run goes on from there.

use std::{fs, path::Path};

use ops::{Backend, Data, Host};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};

use super::lanes::{Lanes, LayerFigures};
use crate::{Error, Result};

const FIGURES: &str = "figures.json";
const LANES: &str = "lanes.safetensors";

/// What is kept beside the tensors.
#[derive(Serialize, Deserialize)]
pub struct Progress {
    /// What the run is of; another is not gone on with.
    pub key: String,
    /// Layer that comes next.
    pub next: usize,
    /// Figures of the finished layers.
    pub figures: Vec<LayerFigures>,
    /// Segment of the forced lane.
    pub segment: Option<(usize, Vec<f64>)>,
}

/// The progress that `folder` holds, where it is of `key`.
///
/// # Errors
/// A file that can't be read.
pub fn load(folder: &Path, key: &str) -> Result<Option<Progress>> {
    let path = folder.join(FIGURES);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(&path)(e)),
    };
    // A file of an older program has other fields: it is of another key too.
    let progress: Option<Progress> = serde_json::from_str(&text).ok();
    Ok(progress.filter(|p| p.key == key && !p.figures.is_empty()))
}

/// Puts the lanes where they were before layer `next`.
///
/// # Errors
/// A file that can't be read or does not fit, or a device failure.
pub fn restore<B: Backend>(folder: &Path, next: usize, lanes: &mut Lanes<'_, B>) -> Result<()> {
    let path = folder.join(LANES);
    let bytes = fs::read(&path).map_err(Error::io(&path))?;
    let bad = |what: String| Error::file(LANES, format!("{what}; delete the work folder and start again"));
    let file = SafeTensors::deserialize(&bytes).map_err(|e| bad(e.to_string()))?;
    let mut parts: Vec<(String, Host)> = Vec::new();
    for (name, view) in file.tensors() {
        let data = view.data();
        let host = match view.dtype() {
            Dtype::F32 => {
                let v = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
                Host::f32(view.shape(), v)
            }
            Dtype::I32 => {
                let v = data.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
                Host::i32(view.shape(), v)
            }
            Dtype::U8 => Host::u8(view.shape(), data.to_vec()),
            other => return Err(bad(format!("{name} is {other:?}"))),
        };
        parts.push((name, host));
    }
    for lane in &mut lanes.lanes {
        for (i, walk) in lane.walks.iter_mut().enumerate() {
            let prefix = format!("{}#{i}/", lane.spec.name);
            let own: Vec<(String, Host)> = parts
                .iter()
                .filter_map(|(n, h)| Some((n.strip_prefix(&prefix)?.to_owned(), h.clone())))
                .collect();
            if !lanes.model.restore(next, walk, &mut lane.state, &own)? {
                return Err(bad(format!("{prefix} does not fit")));
            }
        }
    }
    Ok(())
}

/// Keeps the lanes and the figures.
///
/// # Errors
/// What the operating system or the device reports.
pub fn save<B: Backend>(folder: &Path, progress: &Progress, lanes: &Lanes<'_, B>) -> Result<()> {
    fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let mut parts: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for lane in &lanes.lanes {
        for (i, walk) in lane.walks.iter().enumerate() {
            for (name, host) in lanes.model.save(walk, &lane.state)? {
                let (dtype, bytes) = match host.data() {
                    Data::F32(v) => (Dtype::F32, v.iter().flat_map(|v| v.to_le_bytes()).collect()),
                    Data::I32(v) => (Dtype::I32, v.iter().flat_map(|v| v.to_le_bytes()).collect()),
                    Data::U8(v) => (Dtype::U8, v.clone()),
                };
                parts.push((format!("{}#{i}/{name}", lane.spec.name), dtype, host.shape().to_vec(), bytes));
            }
        }
    }
    let bad = |e: safetensors::SafeTensorError| Error::file(LANES, e.to_string());
    let views: Vec<(&str, TensorView)> = parts
        .iter()
        .map(|(n, d, s, b)| Ok((n.as_str(), TensorView::new(*d, s.clone(), b)?)))
        .collect::<std::result::Result<_, safetensors::SafeTensorError>>()
        .map_err(bad)?;
    let tensors = safetensors::serialize(views, None).map_err(bad)?;
    let figures = serde_json::to_vec(progress).expect("figures are plain data");
    // The figures say which layer the tensors stand before, so while the tensors change there are none.
    let _ = fs::remove_file(folder.join(FIGURES));
    for (name, bytes) in [(LANES, tensors), (FIGURES, figures)] {
        let (part, path) = (folder.join(format!("{name}.part")), folder.join(name));
        fs::write(&part, bytes).map_err(Error::io(&part))?;
        fs::rename(&part, &path).map_err(Error::io(&path))?;
    }
    Ok(())
}

/// Removes what the folder holds of a finished run.
pub fn clear(folder: &Path) {
    for name in [FIGURES, LANES] {
        let _ = fs::remove_file(folder.join(name));
    }
    let _ = fs::remove_dir(folder);
}
