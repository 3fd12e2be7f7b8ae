//! Prints the standard table of linear layers, or one case.
//!
//! `cargo run --release -p cpu --example linear [ISA [FORM OUT COLS BATCH cold|warm]]`

use checkpoint::Form;
use cpu::{
    Isa,
    bench::{self, Case},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let isas: Vec<Isa> =
        Isa::available().into_iter().filter(|i| args.first().is_none_or(|a| a == i.name())).collect();
    let cases = match &args[..] {
        [_, form, out, cols, batch, cold] => {
            let forms = [Form::F32, Form::Bf16, Form::Fp8Block32, Form::Fp8Row32, Form::Fp4Row32];
            let form = forms.into_iter().find(|f| f.name() == form).ok_or("no such form")?;
            vec![Case {
                form,
                out: out.parse()?,
                cols: cols.parse()?,
                batch: batch.parse()?,
                cold: cold == "cold",
            }]
        }
        _ => bench::standard(),
    };
    for isa in isas.into_iter().filter(|i| *i != Isa::Portable || !args.is_empty()) {
        for engine in bench::engines(Some(isa))? {
            let l = bench::limits(&engine);
            println!(
                "{} {} threads: read {:.1} GB/s (best {:.1}, cpu {:.1}), {:.1} Gfma/s (best {:.1}, cpu {:.1})",
                isa.name(),
                l.threads,
                l.read_gb_s.median,
                l.read_gb_s.best,
                l.read_gb_cpu_s.best,
                l.gfma_s.median,
                l.gfma_s.best,
                l.gfma_cpu_s.best
            );
            for case in &cases {
                let m = bench::linear(&engine, *case, &l, 9);
                println!(
                    "  {:9} {:6} x {:5} batch {:3} {}: {:6.2} Gweights/s (best {:6.2}, cpu {:6.2}/{:6.2}) {:6.2} GB/s = {:3.0} % of read, {:6.1} Gfma/s = {:3.0} % of fma",
                    case.form.name(),
                    case.out,
                    case.cols,
                    case.batch,
                    if case.cold { "cold" } else { "warm" },
                    m.gweights_s.median,
                    m.gweights_s.best,
                    m.gweights_cpu_s.median,
                    m.gweights_cpu_s.best,
                    m.gb_s.median,
                    100.0 * m.of_bandwidth,
                    m.gfma_s.median,
                    100.0 * m.of_fma
                );
            }
        }
    }
    Ok(())
}
