//! Mode `exact` at the released widths of attention (64 heads of 512, 32 index heads of 128): the golden of `wide`.
//! It holds whole logits and choices, and of large tensors the last two rows and the RMS of every row.

mod common;

use common::{
    Golden, Tokens, load, on_backends, row_nrms,
    trace::{Kind, compare_rows, kind, limit, trace},
};
use ops::{Backend, Host, Mode};

on_backends!(wide_equals_the_golden);

/// The bar; two other implementations agree to 4.8e-7 in their worst row.
const ROW: f64 = 2e-6;

fn wide_equals_the_golden<B: Backend>(make: impl Fn(Mode) -> B) {
    let golden = Golden::open("wide/golden.safetensors");
    let model = load("wide", make(Mode::Exact));
    for group in ["prompt5", "prompt33"] {
        let tokens = Tokens::text(golden.tokens(group));
        let trace = trace(&model, tokens.input());
        let (mut compared, mut worst) = (0, (0.0, String::new()));
        for (name, got) in &trace {
            let (key, tail, rms) =
                (format!("{group}/{name}"), format!("{group}/{name}.tail"), format!("{group}/{name}.rms"));
            if golden.has(&key) {
                let want = golden.get(&key);
                for row in compare_rows(name, got, &want) {
                    let most = limit(name);
                    assert!(
                        row.distance <= most,
                        "{key} row {}: {:.2e}, limit {most:.0e}",
                        row.row,
                        row.distance
                    );
                    if kind(name) == Kind::Values && row.distance > worst.0 {
                        worst = (row.distance, format!("{name} row {}", row.row));
                    }
                }
            }
            if golden.has(&tail) {
                let want = golden.get(&tail);
                let last = got.slice_rows(got.rows() - want.rows(), want.rows());
                for row in compare_rows(name, &last, &want) {
                    let most = limit(name);
                    assert!(
                        row.distance <= most,
                        "{tail} row {}: {:.2e}, limit {most:.0e}",
                        row.row,
                        row.distance
                    );
                }
            }
            if golden.has(&rms) {
                let want = golden.get(&rms);
                for (row, want) in want.as_f32().iter().enumerate() {
                    let d = f64::from((root_mean_square(got, row) - want).abs() / want);
                    assert!(d < ROW, "{rms} row {row}: {d:.2e}, limit {ROW:.0e}");
                }
            }
            compared += [key, tail, rms].iter().filter(|k| golden.has(k)).count();
        }
        // Tokens, margins and the candidates of later layers, which are the source's.
        let prefix = format!("{group}/");
        let names: Vec<String> = golden.names().into_iter().filter(|n| n.starts_with(&prefix)).collect();
        let other = names.iter().filter(|n| n.ends_with("tokens") || n.ends_with(".margin")).count();
        let mut inherited = 0;
        let find = |name: &str| trace.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
        for key in names.iter().filter(|n| n.ends_with(".candidates")) {
            let name = key.strip_prefix(&prefix).unwrap();
            if find(name).is_none() {
                assert_eq!(find("layers.1.candidates"), Some(golden.get(key)), "{key}");
                inherited += 1;
            }
        }
        assert_eq!(compared + other + inherited, names.len(), "{group}: a golden tensor is not compared");

        let logits = &trace.last().unwrap().1;
        let rows: Vec<Vec<f32>> = (0..logits.rows()).map(|r| logits.row(r).to_vec()).collect();
        let rows = row_nrms(&rows, &golden.get(&format!("{group}/logits")));
        let row = rows.iter().copied().fold(0.0, f64::max);
        eprintln!(
            "wide {group}: {compared} tensors, worst logits row {row:.2e}, worst value {:.2e} ({})",
            worst.0, worst.1
        );
        assert!(row < ROW, "wide {group}: worst row {row:.2e}, limit {ROW:.0e}");
    }
}

fn root_mean_square(x: &Host, row: usize) -> f32 {
    let sum: f64 = x.row(row).iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    (sum / x.width() as f64).sqrt() as f32
}
