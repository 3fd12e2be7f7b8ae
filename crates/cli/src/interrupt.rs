//! Ctrl-C: once stops the answer, a second time while nothing was stopped ends the program.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// A flag that Ctrl-C sets.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes over Ctrl-C. A signal that finds the flag still set ends the process as an unhandled one would.
    pub fn install() -> Self {
        let flag = Arc::new(AtomicBool::new(false));
        let seen = flag.clone();
        let installed = ctrlc::set_handler(move || {
            if seen.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        });
        if let Err(e) = installed {
            eprintln!("warning: Ctrl-C will end the program instead of the answer ({e})");
        }
        Self(flag)
    }

    /// Whether it was pressed since the last [`Interrupt::clear`].
    pub fn pressed(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Forgets it.
    pub fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
