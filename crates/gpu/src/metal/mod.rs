//! Apple's GPUs. Everything but the calls of Metal itself is in modules that are tested on every system.

pub mod budget;

#[cfg(target_os = "macos")]
mod device;
#[cfg(target_os = "macos")]
mod residency;
#[cfg(target_os = "macos")]
pub use device::{Buffer, Metal, Pipeline};

use ops::DeviceError;

/// Metal, which this system does not have.
#[cfg(not(target_os = "macos"))]
#[derive(Debug)]
pub struct Metal(());

#[cfg(not(target_os = "macos"))]
impl Metal {
    /// Refused: Metal comes with macOS.
    pub fn open() -> Result<Self, DeviceError> {
        Err(refused("Metal needs macOS 15 or later on Apple silicon; here, --device cpu runs everything"))
    }
}

fn refused(reason: impl Into<String>) -> DeviceError {
    DeviceError { backend: "metal", reason: reason.into(), refused: true }
}

#[cfg(target_os = "macos")]
fn failed(reason: impl Into<String>) -> DeviceError {
    DeviceError { backend: "metal", reason: reason.into(), refused: false }
}

#[cfg(all(test, not(target_os = "macos")))]
mod tests {
    #[test]
    fn another_system_refuses_and_names_what_is_needed() {
        let error = super::Metal::open().unwrap_err();
        assert!(error.refused && error.to_string().starts_with("metal: Metal needs macOS 15"), "{error}");
    }
}
