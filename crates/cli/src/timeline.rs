//! What was done when, by thread, in a form that browsers show.

use std::{fs::File, path::Path};

use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::layer::SubscriberExt;

use crate::failure::Failure;

/// Begins to write spans to `path`; the rest is written when the guard is dropped.
///
/// # Errors
/// A file that cannot be made.
pub fn begin(path: &Path) -> Result<FlushGuard, Failure> {
    let bad = |e: String| Failure::Io(format!("{}: {e}", path.display()));
    let file = File::create(path).map_err(|e| bad(e.to_string()))?;
    let (layer, guard) = ChromeLayerBuilder::new().writer(file).include_args(true).build();
    let spans = tracing_subscriber::registry().with(layer);
    tracing::subscriber::set_global_default(spans).map_err(|e| bad(e.to_string()))?;
    Ok(guard)
}
