//! One part of the model: the layers that share inputs together, each from its released weight.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use checkpoint::Checkpoint;
use exl3::{
    BLOCK,
    encode::{Calibration, Encoded, signs},
};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::{Error, Options, Result, collect::Sum, plan::Job};

/// A finished layer.
pub(crate) struct Made<'j> {
    pub job: &'j Job,
    pub encoded: Encoded,
    /// Input rows that calibrated it.
    pub rows: u64,
    pub time: Duration,
}

/// Encodes `jobs` on all threads and hands each to `done` when it is finished, in no order. The result depends on the
/// weights, the sums and the settings only.
pub(crate) fn encode<'j>(
    ckpt: &Checkpoint,
    options: &Options,
    jobs: &[&'j Job],
    sums: &BTreeMap<String, Sum>,
    done: &(dyn Fn(Made<'j>) -> Result<()> + Sync),
) -> Result<()> {
    let mut by_inputs: BTreeMap<&str, Vec<&'j Job>> = BTreeMap::new();
    jobs.iter().for_each(|j| by_inputs.entry(&j.inputs).or_default().push(j));
    let groups: Vec<(&str, Vec<&'j Job>)> = by_inputs.into_iter().collect();
    groups.par_iter().try_for_each(|(inputs, jobs)| {
        let padded = jobs[0].cols.next_multiple_of(BLOCK);
        let refused = |source| Error::Encoder { module: jobs[0].name.clone(), source };
        let sum = sums.get(*inputs);
        let calibration = match sum {
            Some(sum) => Calibration::new(&sum.mean(padded), padded, seed(inputs)),
            None => Calibration::none(padded, seed(inputs)),
        };
        let calibration = calibration.map_err(refused)?;
        let rows = sum.map_or(0, |s| s.rows);
        jobs.par_iter().try_for_each(|job| {
            let start = Instant::now();
            let weight = ckpt.weight(&job.module)?;
            let columns = job.rows.next_multiple_of(BLOCK);
            let mut w = vec![0.0; padded * columns];
            let mut row = vec![0.0; job.cols];
            for r in 0..job.rows {
                weight.decode_row(job.first + r, &mut row);
                row.iter().enumerate().for_each(|(k, v)| w[k * columns + r] = *v);
            }
            let encoder = options.search.encoder(job.rate, options.codebook);
            let encoded = encoder
                .encode(&w, &calibration, &signs(seed(&job.name) ^ 1, columns))
                .map_err(|source| Error::Encoder { module: job.name.clone(), source })?;
            done(Made { job, encoded, rows, time: start.elapsed() })
        })
    })
}

/// The seed of a layer's signs: from its name, so that no other layer bears on it.
fn seed(name: &str) -> u64 {
    let hash = Sha256::digest(name.as_bytes());
    u64::from_le_bytes(hash[..8].try_into().expect("a hash has 32 bytes"))
}
