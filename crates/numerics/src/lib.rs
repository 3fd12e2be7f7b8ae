//! Number formats and quantisers of DeepSeek-V4.1-Flash, bit for bit.
//!
//! Everything here is plain safe Rust and exact: values are carried in `f32`, which holds every bf16, E4M3, E2M1
//! and E8M0 value without loss. Sections in brackets name the model specification.

pub mod bf16;
pub mod e2m1;
pub mod e4m3;
pub mod e8m0;
pub mod generator;
pub mod quantise;
