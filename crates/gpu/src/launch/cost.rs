//! What the products with stored weights cost: counted in the kernels' text, for the table of kernels in the documentation.

/// Operations of a kernel for each weight, and what it keeps busy. Counted for one row of activations; an integer or float
/// operation is one of MSL's. A device that joins shifts and logic needs fewer: NVRTC 13 makes for sm_90, in all, 7.4
/// instructions a weight of MCG, 8.4 of MUL1, 6.5 of fp8, 5.8 of fp4 and 3.1 of bf16.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Kernel function.
    pub kernel: &'static str,
    /// What it is counted for: a form, a codebook.
    pub of: &'static str,
    /// Threads of a threadgroup, at most.
    pub threads: u32,
    /// Threadgroup memory, in bytes.
    pub threadgroup: u32,
    /// Integer operations for each weight.
    pub integer: f32,
    /// Float operations for each weight, conversions included.
    pub float: f32,
    /// Float operations for each weight and further row.
    pub row: f32,
    /// Bytes that a launch moves, by the operator's sizes: o outputs, k inputs, T rows.
    pub bytes: &'static str,
}

const fn cost(
    kernel: &'static str,
    of: &'static str,
    [integer, float, row]: [f32; 3],
    bytes: &'static str,
) -> Cost {
    Cost { kernel, of, threads: 256, threadgroup: 1024, integer, float, row, bytes }
}

const PLAIN: &str = "weights once for 8 rows; 4 T k from cache for every 4 outputs; 4 T o";
const TRELLIS: &str =
    "weights once for 8 rows; 4 T k from cache for every 128 outputs; 4 T o for every split of the inputs";

/// The kernels that multiply by stored weights.
pub const COSTS: &[Cost] = &[
    cost("linear_rows", "f32", [0.0, 1.1, 1.1], PLAIN),
    cost("linear_rows", "bf16", [1.0, 1.1, 1.1], PLAIN),
    // Four codes: 9 to place them, 3 to keep NaN in mind; a scale for eight.
    cost("linear_rows", "fp8", [3.5, 2.3, 1.3], PLAIN),
    cost("linear_rows", "fp4", [3.5, 2.3, 1.3], PLAIN),
    Cost { threadgroup: 2048, ..cost("linear_pair", "fp8", [3.5, 2.3, 1.3], PLAIN) },
    cost("experts_rows", "fp4", [3.5, 2.3, 1.3], PLAIN),
    cost("experts_gated", "fp4", [3.5, 2.3, 1.3], "as experts_rows; gate and up leave as one value"),
    cost("experts_down", "fp4", [3.5, 2.3, 1.3], PLAIN),
    Cost {
        threadgroup: 2048,
        ..cost("gate_and_shared", "fp8", [3.5, 2.3, 1.3], "as linear_rows; w1 and w3 leave as one value")
    },
    Cost { threadgroup: 8192, ..cost("route_and_shared", "fp8", [3.5, 2.3, 1.3], PLAIN) },
    Cost { threadgroup: 16448, ..cost("linear_ordered", "fp8", [3.1, 2.1, 1.1], PLAIN) },
    Cost { threadgroup: 16448, ..cost("experts_ordered", "fp4", [3.1, 2.1, 1.1], PLAIN) },
    Cost {
        threads: 128,
        threadgroup: 13312,
        ..cost(
            "linear_tiles",
            "fp8",
            [3.3, 2.0, 0.0],
            "weights once for 32 rows; 4 T k for every 64 outputs; 4 T o",
        )
    },
    // A window of the stream 3, a product 1, the mask and the flip 2; one half sum, one conversion, one product.
    Cost { threadgroup: 8192, ..cost("exl3_product", "MCG", [6.0, 3.0, 1.0], TRELLIS) },
    Cost { threadgroup: 8192, ..cost("exl3_product", "3INST", [7.0, 3.0, 1.0], TRELLIS) },
    // The sum of four bytes takes 7 (1 on NVIDIA) and lies in a float's mantissa; a product, a half and a float again.
    Cost { threadgroup: 8192, ..cost("exl3_product", "MUL1", [12.0, 4.0, 1.0], TRELLIS) },
    Cost { threadgroup: 16384, ..cost("exl3_expert_product", "MCG", [6.0, 3.0, 1.0], TRELLIS) },
    Cost { threadgroup: 16384, ..cost("exl3_expert_product", "MUL1", [12.0, 4.0, 1.0], TRELLIS) },
];

/// Dispatches of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Dispatches {
    /// Name in the registry; `moe` is the block without its router.
    pub operator: &'static str,
    /// In `exact` and `native`, one row.
    pub one: u32,
    /// In `exact` and `native`, 2 to 8 rows.
    pub few: u32,
    /// In `source`, one row.
    pub source: u32,
}

const fn dispatches(operator: &'static str, [one, few, source]: [u32; 3]) -> Dispatches {
    Dispatches { operator, one, few, source }
}

/// Dispatches of the operators with stored weights, of one form, rate and codebook in each weight and layer.
pub const DISPATCHES: &[Dispatches] = &[
    dispatches("linear_fp8", [1, 1, 2]),
    dispatches("linear_bf16", [1, 1, 1]),
    dispatches("linear_f32", [1, 1, 1]),
    dispatches("grouped_linear", [1, 1, 1]),
    // Rotation, product, rotation.
    dispatches("linear_exl3", [3, 3, 3]),
    dispatches("grouped_linear_exl3", [3, 3, 3]),
    // Gate and up, activation, down, sum; several rows are grouped by expert first, `source` quantises twice.
    dispatches("routed_experts", [4, 5, 6]),
    dispatches("shared_expert", [4, 4, 7]),
    // Of one row the products make their inputs themselves; else a rotation more than routed_experts.
    dispatches("experts_exl3", [3, 6, 3]),
    // Routed and shared experts with their sum.
    dispatches("moe", [3, 4, 13]),
];

/// Where `native` departs from `exact`.
#[derive(Clone, Copy, Debug)]
pub struct Departure {
    /// Kernel function.
    pub kernel: &'static str,
    /// Operators that it computes.
    pub operators: &'static [&'static str],
    /// When.
    pub when: &'static str,
    /// What differs, and the limit of the NRMS.
    pub what: &'static str,
}

/// The departures of `native`; row invariance holds on either side of each border.
pub const DEPARTURES: &[Departure] = &[Departure {
    kernel: "linear_tiles",
    operators: &["linear_fp8", "linear_bf16", "linear_f32", "grouped_linear", "shared_expert"],
    when: "more than 8 rows, on devices that multiply matrices (Metal, emulator)",
    what: "sums go over spans of 512 columns, in them eight by eight, instead of over lanes; single precision as in exact, same tolerance",
}];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::KERNELS;

    #[test]
    fn the_tables_name_kernels_and_operators_that_exist() {
        let known = |name: &str| KERNELS.iter().any(|k| k.name == name);
        let operator = |name: &str| name == "moe" || ops::registry::SPECS.iter().any(|s| s.name == name);
        assert!(COSTS.iter().all(|c| known(c.kernel) && c.threads % 32 == 0 && c.threadgroup <= 32 << 10));
        assert!(DISPATCHES.iter().all(|d| operator(d.operator)));
        assert!(DEPARTURES.iter().all(|d| known(d.kernel) && d.operators.iter().all(|o| operator(o))));
        let files =
            ["linear_rows", "linear_pair", "linear_ordered", "linear_tiles", "moe_gated", "moe_shared"];
        let counted = |name: &str| COSTS.iter().any(|c| c.kernel == name);
        for k in KERNELS.iter().filter(|k| files.contains(&k.file)) {
            assert!(counted(k.name), "{} has no cost", k.name);
        }
    }
}
