//! The demo model: in the binary, or named as missing.

use checkpoint::Checkpoint;

#[cfg(feature = "demo")]
mod files {
    /// Bytes at an address that vector loads like.
    #[repr(C, align(64))]
    struct Aligned<T: ?Sized>(T);

    macro_rules! embed {
        ($($name:literal),* $(,)?) => {
            pub static FILES: &[(&str, &[u8])] = &[$(($name, {
                static FILE: &Aligned<[u8]> =
                    &Aligned(*include_bytes!(concat!("../../../models/demo/", $name)));
                &FILE.0
            })),*];
        };
    }

    embed! {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
}

/// The demo model of this binary.
///
/// # Errors
/// A build without the demo is refused.
#[cfg(feature = "demo")]
pub fn open() -> Result<Checkpoint, engine::Error> {
    Ok(Checkpoint::embedded(files::FILES)?)
}

/// The demo model of this binary.
///
/// # Errors
/// This build has none.
#[cfg(not(feature = "demo"))]
pub fn open() -> Result<Checkpoint, engine::Error> {
    Err(engine::Error::Refused("this build does not contain the demo model; name a model folder".into()))
}
