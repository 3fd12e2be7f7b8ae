//! Why a command ends early, with its exit code.

use std::{fmt, io};

/// A failed command.
#[derive(Debug)]
pub enum Failure {
    /// The command line asks for something impossible: exit 2.
    Usage(String),
    /// A bad input file: exit 4.
    Input(String),
    /// Reading, writing or something internal: exit 6.
    Io(String),
    /// The engine refused or failed; it knows the code.
    Engine(engine::Error),
    /// A trace, a receipt or a qualification run failed; it knows the code.
    Qualify(qualify::Error),
    /// A gate or a verification says no: exit 1.
    Gate(String),
    /// Quantising or comparing failed; it knows the code.
    Quantize(quantize::Error),
    /// A download failed; it knows the code.
    Hub(hub::Error),
    /// The reader of the output went away; nothing to report.
    ClosedPipe,
}

impl Failure {
    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Gate(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Input(_) => 4,
            Failure::Io(_) => 6,
            Failure::Engine(e) => e.exit_code(),
            Failure::Qualify(e) => e.exit_code(),
            Failure::Quantize(e) => e.exit_code(),
            Failure::Hub(e) => e.exit_code(),
            Failure::ClosedPipe => 0,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(s) | Failure::Input(s) | Failure::Io(s) | Failure::Gate(s) => f.write_str(s),
            Failure::Engine(e) => write!(f, "{e}"),
            Failure::Qualify(e) => write!(f, "{e}"),
            Failure::Quantize(e) => write!(f, "{e}"),
            Failure::Hub(e) => write!(f, "{e}"),
            Failure::ClosedPipe => Ok(()),
        }
    }
}

impl<E: Into<engine::Error>> From<E> for Failure {
    fn from(e: E) -> Self {
        Failure::Engine(e.into())
    }
}

/// A failed write to standard output.
pub fn output(e: io::Error) -> Failure {
    if e.kind() == io::ErrorKind::BrokenPipe {
        Failure::ClosedPipe
    } else {
        Failure::Io(format!("standard output: {e}"))
    }
}
