//! A model folder: typed configuration, inventory of the tensors it implies, memory-mapped weights.

mod bytes;
mod checkpoint;
mod config;
pub mod engram;
mod error;
mod exl3;
mod files;
pub mod generate;
mod generation;
mod header;
mod index;
mod inventory;
mod json;
mod pack;
mod page_in;
mod part;
mod scan;
mod source;
mod summary;
mod weight;
pub mod write;

pub use bytes::Bytes;
pub use checkpoint::{Checkpoint, ModelFile, TensorInfo};
pub use config::{
    Config, Dspark, Engram, LayerPlan, Quantization, ROUTED_SCOPE, Role, Vision, Yarn, engram_rows,
};
pub use error::{Error, Result};
pub use exl3::Exl3;
pub use generation::{Generation, Stops};
pub use header::{Dtype, MAX_HEADER_BYTES};
pub use index::weight_map;
pub use inventory::{Expected, Group};
pub use page_in::{PageIn, PagedIn};
pub use part::Part;
pub use summary::{DtypeSum, FormSum, GroupSum, LayerRow, ShardSum, Summary};
pub use weight::{Form, Weight};
