//! Weights into memory, with progress.

use std::{io::IsTerminal, path::Path, sync::atomic::AtomicBool, time::Duration};

use checkpoint::{Checkpoint, PagedIn};
use engine::{Residency, plan::gb};
use indicatif::{ProgressBar, ProgressStyle};

use crate::failure::Failure;

/// Checks the hashes of a pulled folder on a thread of its own.
///
/// # Errors
/// A folder without a record of a pull.
pub fn verify_behind(dir: &Path) -> Result<(), Failure> {
    let never = AtomicBool::new(true);
    hub::verify(dir, &never).map_err(Failure::Hub)?;
    let dir = dir.to_path_buf();
    std::thread::spawn(move || match hub::verify(&dir, &AtomicBool::new(false)) {
        Ok(done) => eprintln!("{}: {} files, every hash right", dir.display(), done.files),
        Err(e) => {
            eprintln!("hallmark: {e}");
            std::process::exit(e.exit_code().into());
        }
    });
    Ok(())
}

/// Bytes that are worth a line.
const LARGE: u64 = 1 << 28;

/// Brings what `residency` says, shows how it gets on and says what came of it.
///
/// # Errors
/// Too little memory, or a file that cannot be read.
pub fn page_in(ckpt: &Checkpoint, residency: &Residency, threads: Option<usize>) -> Result<PagedIn, Failure> {
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let total = ckpt.page_in_bytes(residency.wanted(threads));
    let bar = if total > LARGE && std::io::stderr().is_terminal() {
        ProgressBar::new(total)
    } else {
        ProgressBar::hidden()
    };
    let style = ProgressStyle::with_template(
        "{bytes:>11} of {total_bytes:11} {binary_bytes_per_sec:>13} {eta:>5} [{wide_bar}] into memory",
    );
    if let Ok(style) = style {
        bar.set_style(style.progress_chars("=> "));
    }
    let paged = residency.page_in(ckpt, threads, &|done, _| bar.set_position(done))?;
    bar.finish_and_clear();
    if total > LARGE {
        let rate = gb(paged.bytes) / paged.time.max(Duration::from_micros(1)).as_secs_f64();
        eprintln!(
            "{:.3} GB in memory after {:.2} s, {rate:.2} GB/s",
            gb(paged.bytes),
            paged.time.as_secs_f64()
        );
    }
    if let Some(why) = &paged.not_locked {
        eprintln!(
            "warning: {} of {} bytes are locked ({why}); raise the limit of locked memory (ulimit -l)",
            paged.locked, paged.bytes
        );
    }
    Ok(paged)
}
