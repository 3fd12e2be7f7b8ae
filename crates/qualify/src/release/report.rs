//! From figures to gates.

use ops::Host;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    fixtures::Fixtures,
    knobs::{KNOBS, Knob},
    lanes::{BlockFigure, ForcedFigure, Kind, LayerFigures, Spec},
    limits::{at_most, limit},
    routes::Slots,
};
use crate::{
    Result, Thresholds,
    judge::metrics,
    receipt::{Check, Gate, Rule},
};

/// The layers whose input and output streams the fixtures hold.
pub const FORCED: [usize; 7] = [0, 1, 2, 14, 20, 24, 39];
/// The layers that the fixtures hold as blocks.
pub const BLOCKS: [usize; 6] = [0, 1, 2, 3, 20, 24];
/// The three figures that the proposal gave for its own port; the first is the NRMS of the logits.
pub const PROPOSAL: [f64; 3] = [0.040_960_584_768_951_355, 1.512_363_910_675_048_8, 0.0];

/// A token or row that may have another expert.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flip {
    /// Where.
    pub at: String,
    /// Layer and token or position.
    pub place: (usize, usize),
    /// NRMS of its streams.
    pub nrms: f64,
    /// Our router's margin there.
    pub margin: f64,
    /// Margin below which a flip is set apart.
    pub allowed: f64,
    /// Whether the fixtures say that the experts differ; otherwise it is inferred from the size of the error.
    pub known: bool,
    /// Whether it is set apart.
    pub excused: bool,
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    match v.len() {
        0 => f64::INFINITY,
        n if n % 2 == 1 => v[n / 2],
        n => (v[n / 2 - 1] + v[n / 2]) / 2.0,
    }
}

/// Margin that excuses a flip: four times the score error. The reference's scores are not known, so the error is taken
/// from what is: logits are linear in the normed input, whose relative error is about that of the streams.
fn allowed(errors: impl Iterator<Item = f64>) -> f64 {
    *Thresholds::built_in().flips.margin_factor * median(errors.collect())
}

/// Flips of a single teacher-forced layer. The reference's experts are not known there.
fn forced_flips(f: &ForcedFigure) -> Vec<Flip> {
    if f.from != f.layer {
        return Vec::new();
    }
    let allowed = allowed(f.tokens.iter().copied());
    let suspects = f.tokens.iter().enumerate().filter(|(_, e)| **e > limit("g2.flip"));
    suspects
        .map(|(t, e)| Flip {
            at: format!("layer {} token {t}", f.layer),
            place: (f.layer, t),
            nrms: *e,
            margin: f.margins[t],
            allowed,
            known: false,
            excused: f.margins[t] <= allowed,
        })
        .collect()
}

/// Tokens that a flip sets apart.
pub(super) fn flipped(f: &ForcedFigure) -> Vec<usize> {
    forced_flips(f).into_iter().filter(|f| f.excused).map(|f| f.place.1).collect()
}

/// Flips of the rows of one block.
fn block_flips(rows: &[&BlockFigure]) -> Vec<Flip> {
    let allowed = allowed(rows.iter().filter(|r| r.same_experts != Some(false)).map(|r| r.nrms));
    let inferred = |r: &BlockFigure| r.same_experts.is_none() && r.nrms > limit("g2.flip");
    let suspects = rows.iter().filter(|r| r.same_experts == Some(false) || inferred(r));
    suspects
        .map(|r| Flip {
            at: format!("block {} position {}", r.layer, r.position),
            place: (r.layer, r.position),
            nrms: r.nrms,
            margin: r.margin,
            allowed,
            known: r.same_experts.is_some(),
            excused: r.margin <= allowed,
        })
        .collect()
}

/// G2 from the figures of the layers that ran, with the flips.
pub fn layers(figures: &[LayerFigures]) -> (Gate, Vec<Flip>) {
    let mut checks = Vec::new();
    let mut flips = Vec::new();
    let find = |l: usize| figures.iter().find(|f| f.layer == l);
    let mut singles = Vec::new();
    for l in FORCED {
        let name = format!("teacher-forced layer {l}");
        match find(l).and_then(|f| f.forced.as_ref()) {
            None => {
                checks.push(Check::not_run(name, "the layer, or one whose entries it reads, was left out"))
            }
            Some(f) => {
                singles.push(f.nrms);
                let worst = f.tokens.iter().copied().fold(0.0, f64::max);
                let note = format!("NRMS of the streams of 8 tokens; worst token {worst:.5}");
                checks.push(Check::new(name, f.nrms, at_most("g2.layer")).noted(note));
                flips.extend(forced_flips(f));
            }
        }
    }
    let name = "teacher-forced layers: median";
    checks.push(match singles.len() == FORCED.len() {
        true => Check::new(name, median(singles), at_most("g2.median")),
        false => Check::not_run(name, "not every layer ran"),
    });
    for f in figures.iter().filter_map(|f| f.forced.as_ref()).filter(|f| f.from != f.layer) {
        let name = format!("accumulated over layers {} to {}", f.from, f.layer);
        checks.push(
            Check::new(name, f.all, Rule::Shown).noted("from the reference's streams before the first"),
        );
    }
    let served = (Slots::RowInvariant, Knob::Off, "with the row-invariant slot list that serves");
    let knobs = KNOBS.map(|(knob, what)| (Slots::Released, knob, what));
    for (slots, knob, what) in [served].into_iter().chain(knobs) {
        let own = |f: &LayerFigures| {
            let of = f.variants.iter().find(|v| (v.0, v.1) == (slots, knob) && v.2.from == v.2.layer);
            of.map(|v| (f.layer, v.2.all))
        };
        let all: Vec<(usize, f64)> =
            figures.iter().filter_map(own).filter(|k| FORCED.contains(&k.0)).collect();
        for (l, all) in &all {
            let past = *all > limit("g2.layer");
            let note = if past { "past the limit of the layer: FAIL if it were gated" } else { "" };
            checks.push(Check::new(format!("layer {l} {what}"), *all, Rule::Shown).noted(note));
        }
        if all.len() == FORCED.len() {
            let all = median(all.into_iter().map(|k| k.1).collect());
            let past = all > limit("g2.median");
            let note = if past { "past the limit of the median: FAIL if it were gated" } else { "" };
            checks.push(Check::new(format!("median of the layers {what}"), all, Rule::Shown).noted(note));
        }
    }
    let mut token_layers = 8 * FORCED.len();
    for l in BLOCKS {
        let name = format!("block {l}: worst row");
        let rows: Vec<&BlockFigure> =
            find(l).iter().flat_map(|f| &f.blocks).filter(|b| b.layer == l).collect();
        if rows.is_empty() {
            checks.push(Check::not_run(name, "the layer, or one whose entries it reads, was left out"));
            continue;
        }
        token_layers += rows.len();
        let own = block_flips(&rows);
        let apart = |r: &BlockFigure| own.iter().any(|f| f.excused && f.place.1 == r.position);
        let worst = rows.iter().filter(|r| !apart(r)).map(|r| r.nrms).fold(0.0, f64::max);
        let list: Vec<String> = rows.iter().map(|r| format!("{}: {:.5}", r.position, r.nrms)).collect();
        checks.push(
            Check::new(name, worst, at_most("g2.row"))
                .noted(format!("NRMS by position (prefill of 48, then decode): {}", list.join(", "))),
        );
        flips.extend(own);
    }
    let t = Thresholds::built_in();
    let most = *t.flips.base + *t.flips.share * token_layers as f64;
    let apart = flips.iter().filter(|f| f.excused).count() as f64;
    let list: Vec<String> = flips
        .iter()
        .map(|f| {
            let how = if f.known { "known" } else { "inferred" };
            format!("{} ({how}): NRMS {:.4}, margin {:.4} of {:.4}", f.at, f.nrms, f.margin, f.allowed)
        })
        .collect();
    let unexcused = flips.iter().filter(|f| !f.excused).count() as f64;
    checks.push(Check::new("flips that no margin explains", unexcused, Rule::Zero).noted(list.join("; ")));
    checks.push(
        Check::new("flips set apart beyond the allowance", (apart - most).max(0.0), Rule::Zero)
            .noted(format!("{apart} set apart, {most:.1} allowed of {token_layers} token-layers")),
    );
    (Gate::new("G2", checks), flips)
}

/// Figures of a whole run's logits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Whole {
    /// The run.
    pub lane: String,
    /// What it is held against: `cuda` or the plain run of our own.
    pub against: String,
    /// NRMS of all logits.
    pub nrms: f64,
    /// Largest difference.
    pub max_abs: f64,
    /// Mean KL.
    pub kl: f64,
    /// Share of positions with the same best token.
    pub top1: f64,
    /// Expert choices that differ from those of the run it is held against; `None` for CUDA, whose are not known.
    pub changes: Option<usize>,
}

/// Figures of every whole run.
///
/// # Errors
/// Fixtures that can't be read.
pub fn wholes(logits: &[(Spec, Host)], figures: &[LayerFigures], f: &Fixtures) -> Result<Vec<Whole>> {
    let mut out = Vec::new();
    for (spec, got) in logits {
        let model = if spec.calm { "calm" } else { "whole" };
        let plain = logits
            .iter()
            .find(|(p, _)| p.kind == Kind::Free && (p.tokens, p.calm) == (spec.tokens, spec.calm));
        let (want, against) = match (spec.kind, plain) {
            (Kind::Perturbed(_), Some((p, host))) => (host.as_f32().to_vec(), p.name.to_owned()),
            _ => (f.whole.values(&format!("{model}.{}.logits", spec.tokens))?, "cuda".into()),
        };
        let v = metrics::values(got.as_f32(), &want);
        let l = metrics::logits(got.as_f32(), &want, got.width());
        let own = figures.iter().flat_map(|f| &f.free).filter(|f| f.lane == spec.name);
        let changes = (against != "cuda").then(|| own.filter_map(|f| f.changes).sum());
        let lane = spec.name.to_owned();
        out.push(Whole { lane, against, nrms: v.nrms, max_abs: v.max_abs, kl: l.kl, top1: l.top1, changes });
    }
    Ok(out)
}

/// The runs of G3: ours, the reference's one-ulp variant, and what they are.
pub const RUNS: [(&str, &str, &str); 3] = [
    ("free8", "8.one_ulp_in_one_embedding_element", "8 tokens"),
    ("free160", "160.one_ulp_in_one_embedding_element", "160 tokens"),
    ("calm8", "calm.8.one_ulp_in_one_embedding_element", "8 tokens, calm weights"),
];

/// G3 from the figures of the whole runs.
///
/// # Errors
/// Fixtures that can't be read.
pub fn whole_gate(wholes: &[Whole], f: &Fixtures) -> Result<Gate> {
    let t = Thresholds::built_in();
    let mut checks = Vec::new();
    for (lane, variant, what) in RUNS {
        let Some(w) = wholes.iter().find(|w| w.lane == lane) else {
            checks.push(Check::not_run(
                format!("{what}: logits"),
                "not all layers ran, or the run was left out",
            ));
            continue;
        };
        let n = f.variant(variant)?;
        let rule = |noise: f64, floor: f64, name: &str| Rule::Noise {
            noise,
            factor: *t.g3.factor,
            floor,
            thresholds: ["g3.factor".into(), name.into()],
        };
        let note = format!("N {:.4} is the reference's own, one embedding ulp", n.nrms);
        let nrms = rule(n.nrms, *t.g3.floor_nrms, "g3.floor_nrms");
        checks.push(Check::new(format!("{what}: NRMS of the logits"), w.nrms, nrms).noted(note));
        let kl = rule(n.kl_mean, *t.g3.floor_kl, "g3.floor_kl");
        checks.push(Check::new(format!("{what}: KL"), w.kl, kl).noted(format!("N {:.4}", n.kl_mean)));
        let top1 = format!("the reference against its one-ulp run: {:.3}", n.top1_agree);
        checks.push(Check::new(format!("{what}: same best token"), w.top1, Rule::Shown).noted(top1));
    }
    for w in wholes.iter().filter(|w| RUNS.iter().all(|r| r.0 != w.lane)) {
        let name = if w.against == "cuda" {
            format!("{}: NRMS with the experts of the teacher-forced run", w.lane)
        } else {
            format!("{}: our own noise, NRMS against {}", w.lane, w.against)
        };
        let changes = w.changes.map_or_else(String::new, |c| format!("; {c} expert choices differ"));
        checks.push(Check::new(name, w.nrms, Rule::Shown).noted(format!("KL {:.4}{changes}", w.kl)));
    }
    Ok(Gate::new("G3", checks))
}

/// The reference's own noise and the proposal's figures, as they stand beside ours in the receipt.
///
/// # Errors
/// Fixtures that can't be read.
pub fn measurements(
    figures: &[LayerFigures],
    flips: &[Flip],
    wholes: &[Whole],
    f: &Fixtures,
) -> Result<Value> {
    let mut noise = serde_json::Map::new();
    for (_, variant, _) in RUNS {
        for suffix in ["", ".routed"] {
            let v = f.variant(&format!("{variant}{suffix}"))?;
            noise.insert(
                format!("{variant}{suffix}"),
                json!({ "nrms": v.nrms, "kl": v.kl_mean, "top1": v.top1_agree, "expert_changes": v.expert_changes }),
            );
        }
    }
    let port = f.port_logits();
    Ok(json!({
        "layers": figures,
        "flips": flips,
        "whole": wholes,
        "reference_noise": noise,
        "torch_cpu_port": { "nrms": port.nrms, "kl": port.kl_mean, "top1": port.top1_agree },
        "proposal": PROPOSAL,
    }))
}
