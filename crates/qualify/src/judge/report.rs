//! The judgement as text.

use std::fmt::Write as _;

use crate::{
    judge::{Judgement, PassResult, TensorResult},
    trace::Kind,
};

/// A summary line a pass; with `tensors` a table of every tensor too.
pub fn text(j: &Judgement, tensors: bool) -> String {
    let mut out = format!("reference  {}\ncandidate  {}\n", j.reference, j.candidate);
    if let Some(noise) = &j.noise {
        let _ = writeln!(out, "noise      {noise}");
    }
    let _ = writeln!(
        out,
        "\n{:<12} {:>6} {:>10} {:>10} {:>10} {:>7} {:>7} {:>10}  verdict",
        "pass", "rows", "nrms", "KL", "KL back", "top-1", "top-5", "noise"
    );
    for p in &j.passes {
        let _ = writeln!(out, "{}", summary(p));
    }
    for p in &j.passes {
        if let Some(name) = &p.departs {
            let _ = writeln!(out, "{}: first departure at {name}", p.pass);
        }
        for m in &p.misshapen {
            let _ = writeln!(out, "{}: not compared: {m}", p.pass);
        }
        if p.equal_tokens < p.tokens {
            let _ = writeln!(
                out,
                "{}: tokens differ from number {} on; rows behind are not compared",
                p.pass, p.equal_tokens
            );
        }
        if tensors {
            let _ = write!(out, "\n{}", table(p));
        }
    }
    let _ = write!(out, "\nverdict: {}", j.verdict);
    if j.noise.is_none() {
        out += " (no second trace of the reference was given, so its noise is unknown: --noise)";
    }
    out + "\n"
}

fn summary(p: &PassResult) -> String {
    let Some(t) = p.tensor("logits") else {
        return format!("{:<12} {:>6} no logits", p.pass, p.tokens);
    };
    let nrms = t.values.map_or(f64::NAN, |v| v.nrms);
    let mut line = format!("{:<12} {:>6} {:>10}", p.pass, t.rows, number(nrms));
    if let Some(l) = &t.logits {
        let _ =
            write!(line, " {:>10} {:>10} {:>7.4} {:>7.4}", number(l.kl), number(l.kl_back), l.top1, l.top5);
    }
    let _ = write!(line, " {:>10}", t.noise.map_or("-".into(), number));
    match &p.floor {
        None => line + "  -",
        Some(f) => {
            let ratio = f.nrms / f.noise_nrms;
            let ratio = if ratio.is_finite() { format!(" ({ratio:.2} x noise)") } else { String::new() };
            format!("{line}  {}{ratio}", f.verdict)
        }
    }
}

fn table(p: &PassResult) -> String {
    let mut out = format!(
        "{:<12} {:<28} {:>6} {:>10} {:>10} {:>12} {:>10}\n",
        p.pass, "tensor", "rows", "nrms", "max abs", "1 - cosine", "noise"
    );
    for t in &p.tensors {
        let _ = write!(out, "{:<12} {:<28} {:>6} ", "", t.name, t.rows);
        let _ = match &t.values {
            Some(v) => {
                write!(out, "{:>10} {:>10} {:>12}", number(v.nrms), number(v.max_abs), number(1.0 - v.cosine))
            }
            None => write!(out, "{:>10} {:>10} {:>12}", "-", "-", "-"),
        };
        let _ = writeln!(out, " {:>10}{}", t.noise.map_or("-".into(), number), remark(t));
    }
    out
}

fn remark(t: &TensorResult) -> String {
    if let Some(c) = &t.choices {
        let margin = t.margins.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let margin = if margin > f64::NEG_INFINITY {
            format!(", largest margin {}", number(margin))
        } else {
            String::new()
        };
        return format!(
            "  {} of {} rows differ, overlap {:.4}{margin}",
            c.differing.len(),
            c.rows,
            c.overlap
        );
    }
    match (t.kind, t.differing) {
        (_, None | Some(0)) => String::new(),
        (Kind::Cached, Some(n)) => format!("  {n} elements in another bin"),
        (_, Some(n)) => format!("  {n} elements differ"),
    }
}

/// Three digits, short.
fn number(v: f64) -> String {
    if v == 0.0 {
        "0".into()
    } else if v.is_finite() && (1e-3..1e4).contains(&v.abs()) {
        format!("{v:.4}")
    } else {
        format!("{v:.2e}")
    }
}
