//! The plots of `docs/qualification.md`, as SVG.

use std::fmt::Write as _;

use super::{
    Outcome,
    fixtures::Fixtures,
    lanes::LayerFigures,
    report::{FORCED, RUNS},
};
use crate::{
    Result, Thresholds,
    receipt::{Gate, Rule},
};

const WIDTH: f64 = 760.0;
const COLOURS: [&str; 5] = ["#0b6e4f", "#b3261e", "#3557a8", "#8a6d00", "#6b6b6b"];

/// A curve over layers.
struct Curve {
    label: String,
    points: Vec<(f64, f64)>,
    line: bool,
}

fn head(height: f64, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n<text x=\"16\" y=\"22\" \
         font-size=\"15\">{title}</text>\n"
    )
}

/// Curves over the layers on a logarithmic scale from 10^`low` to 1.
fn curves(title: &str, low: i32, curves: &[Curve]) -> String {
    let (left, top, right, bottom) = (64.0, 40.0, WIDTH - 16.0, 340.0);
    let x = |l: f64| left + (right - left) * l / 39.0;
    let y = |v: f64| {
        let share = (v.max(1e-12).log10() - f64::from(low)) / -f64::from(low);
        bottom - (bottom - top) * share.clamp(0.0, 1.0)
    };
    let mut s = head(370.0 + 18.0 * curves.len() as f64, title);
    for e in low..=0 {
        let at = y(10f64.powi(e));
        let _ = writeln!(
            s,
            "<path d=\"M{left} {at:.1}H{right}\" stroke=\"#ddd\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 6.0,
            at + 4.0,
            10f64.powi(e)
        );
    }
    for l in (0..40).step_by(5).chain([39]) {
        let _ = writeln!(
            s,
            "<text x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{l}</text>",
            x(f64::from(l)),
            bottom + 16.0
        );
    }
    for (c, curve) in curves.iter().enumerate() {
        let colour = COLOURS[c % COLOURS.len()];
        if curve.line {
            let path: Vec<String> =
                curve.points.iter().map(|(l, v)| format!("{:.1} {:.1}", x(*l), y(*v))).collect();
            let _ = writeln!(
                s,
                "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"/>",
                path.join("L")
            );
        } else {
            for (l, v) in &curve.points {
                let _ = writeln!(
                    s,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>",
                    x(*l),
                    y(*v)
                );
            }
        }
        let at = 372.0 + 18.0 * c as f64;
        let _ = writeln!(
            s,
            "<rect x=\"{left}\" y=\"{:.0}\" width=\"14\" height=\"4\" fill=\"{colour}\"/><text x=\"{:.0}\" y=\"{at:.0}\">{}</text>",
            at - 6.0,
            left + 22.0,
            curve.label
        );
    }
    s + "</svg>\n"
}

/// One horizontal bar: label, colour index, figure, limit if any.
struct Bar {
    label: String,
    colour: usize,
    figure: f64,
    limit: Option<f64>,
}

/// Bars; a limit is a line across its bar.
fn bars(title: &str, most: f64, bars: &[Bar]) -> String {
    let (left, top, right) = (250.0, 40.0, WIDTH - 90.0);
    let x = |v: f64| left + (right - left) * (v / most).clamp(0.0, 1.0);
    let mut s = head(top + 22.0 * bars.len() as f64 + 12.0, title);
    for (i, bar) in bars.iter().enumerate() {
        let y = top + 22.0 * i as f64;
        let _ = writeln!(
            s,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text><rect x=\"{left}\" y=\"{y}\" width=\"{:.1}\" height=\"14\" fill=\"{}\"/>",
            left - 8.0,
            y + 11.0,
            bar.label,
            x(bar.figure) - left,
            COLOURS[bar.colour]
        );
        let mut text = format!("{:.4}", bar.figure);
        if let Some(limit) = bar.limit {
            let at = x(limit);
            let _ =
                writeln!(s, "<path d=\"M{at:.1} {:.0}v20\" stroke=\"#000\" stroke-width=\"2\"/>", y - 3.0);
            text += &format!(" of {limit:.4}");
        }
        let at = x(bar.figure.max(bar.limit.unwrap_or(0.0))) + 6.0;
        let _ = writeln!(s, "<text x=\"{at:.1}\" y=\"{:.0}\" font-size=\"11\">{text}</text>", y + 11.0);
    }
    s + "</svg>\n"
}

fn samples(layers: &[LayerFigures], lane: &str) -> Vec<(f64, f64)> {
    let one = |f: &LayerFigures| {
        let free = f.free.iter().find(|r| r.lane == lane)?;
        Some((f.layer as f64, free.sample))
    };
    layers.iter().filter_map(one).collect()
}

/// Figures of checks with a limit, as bars.
fn budget(gate: &Gate) -> Vec<Bar> {
    let one = |c: &crate::receipt::Check| match (&c.rule, c.figure) {
        (Rule::AtMost { limit, .. }, Some(figure)) => Some(Bar {
            label: c.name.clone(),
            colour: usize::from(figure > *limit),
            figure,
            limit: Some(*limit),
        }),
        _ => None,
    };
    gate.checks.iter().filter_map(one).collect()
}

/// The plots of a full run by file name.
///
/// # Errors
/// Fixtures that can't be read.
pub fn plots(o: &Outcome) -> Result<Vec<(&'static str, String)>> {
    let f = Fixtures::open()?;
    let number = |v: &[f64]| v.iter().enumerate().map(|(l, v)| (l as f64, *v)).collect();
    let forced = |l: usize| o.layers.iter().find(|f| f.layer == l)?.forced.as_ref();
    let by_layer = [
        Curve {
            label: "ours, each layer on the reference's own streams (the gate G2)".into(),
            points: FORCED.iter().filter_map(|l| Some((*l as f64, forced(*l)?.nrms))).collect(),
            line: false,
        },
        Curve {
            label: "ours, free-running, against the reference (8 tokens)".into(),
            points: samples(&o.layers, "free8"),
            line: true,
        },
        Curve {
            label: "the reference against itself after one bf16 ulp in one embedding element".into(),
            points: number(&f.variant(RUNS[0].1)?.layer_sample_nrms),
            line: true,
        },
        Curve {
            label: "the released model.py on the CPU (torch), free-running, against the reference".into(),
            points: f.port().iter().map(|p| (p.layer as f64, p.free_nrms)).collect(),
            line: true,
        },
        Curve {
            label: "the same, each layer on the reference's own streams".into(),
            points: f.port().iter().map(|p| (p.layer as f64, p.forced_nrms)).collect(),
            line: true,
        },
    ];
    let factor = *Thresholds::built_in().g3.factor;
    let mut noise = Vec::new();
    for (lane, variant, what) in RUNS {
        let n = f.variant(variant)?;
        let find = |name: &str| o.wholes.iter().find(|w| w.lane == name).map(|w| w.nrms);
        if let Some(d) = find(lane) {
            noise.push(Bar {
                label: format!("{what}: ours"),
                colour: usize::from(d > factor * n.nrms),
                figure: d,
                limit: Some(factor * n.nrms),
            });
        }
        noise.push(Bar {
            label: format!("{what}: reference, one ulp (N)"),
            colour: 2,
            figure: n.nrms,
            limit: None,
        });
        let own = if lane == "calm8" { "calm.ulp8".to_owned() } else { lane.replace("free", "ulp") };
        if let Some(d) = find(&own) {
            noise.push(Bar { label: format!("{what}: ours, one ulp"), colour: 4, figure: d, limit: None });
        }
    }
    let g2 = o.gates.iter().find(|g| g.gate == "G2").map(budget).unwrap_or_default();
    Ok(vec![
        ("error-by-layer.svg", curves("NRMS of the streams behind each layer", -4, &by_layer)),
        ("layer-budget.svg", bars("G2: figure and limit", 0.024, &g2)),
        ("self-noise.svg", bars("G3: NRMS of the logits; the line is 1.2 N", 0.55, &noise)),
    ])
}
