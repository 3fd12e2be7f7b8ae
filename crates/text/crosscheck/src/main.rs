//! Compares the `text` crate with the model maker's own library, `deepseek-recipe` 0.2.0, on random requests and random
//! model output.
//!
//! ```text
//! cargo run --release --manifest-path crates/text/crosscheck/Cargo.toml -- TOKENIZER.json [CASES] [SEED]
//! ```
//!
//! Exits 1 and prints the case when the two differ. Requests and output are drawn so that the decisions in which the crate
//! departs from the library on purpose do not arise; each such restriction is named where it is made.

mod output;
mod requests;

use std::path::Path;
use std::process::ExitCode;

use deepseek_recipe_encoding::PromptTokenizer;
use deepseek_recipe_encoding::v4::dsv41::DeepseekV41Encoding;

/// A small generator of reproducible choices.
pub struct Choices(u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of the given.
    pub fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = args.first() else {
        eprintln!("usage: text-crosscheck TOKENIZER.json [CASES] [SEED]");
        return ExitCode::from(2);
    };
    let number = |i: usize, default: u64| args.get(i).and_then(|n| n.parse().ok()).unwrap_or(default);
    let (cases, seed) = (number(1, 20_000), number(2, 1));
    let reference = tokenizers::Tokenizer::from_file(path).expect("the reference reads the tokenizer");
    let encoding = DeepseekV41Encoding::new()
        .with_special_tokens(requests::special_tokens())
        .with_tokenizer(PromptTokenizer::new(&reference));
    let reference = std::sync::Arc::new(reference);
    let ours = text::Tokenizer::from_file(Path::new(path)).expect("this crate reads the tokenizer");
    let ours = std::sync::Arc::new(ours);
    let (mut accepted, mut with_calls, mut differences) = (0, 0, 0);
    for case in 0..cases {
        let mut choices = Choices(seed.wrapping_mul(1 << 32).wrapping_add(case));
        let found = requests::compare(&mut choices, &ours, &encoding)
            .and_then(|both| Ok((both, output::compare(&mut choices, &ours, &reference)?)));
        match found {
            Ok((both, calls)) => {
                accepted += u64::from(both);
                with_calls += u64::from(calls);
            }
            Err(difference) => {
                differences += 1;
                println!("case {case}: {difference}\n");
                if differences == 5 {
                    break;
                }
            }
        }
    }
    println!(
        "{cases} requests ({accepted} accepted by both) and {cases} outputs ({with_calls} with calls) from seed {seed}: \
         {differences} differences"
    );
    if differences == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
