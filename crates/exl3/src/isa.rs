//! Instruction sets, chosen at run time.

/// What a kernel is compiled for. All give the same decoded weights and the same search results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// AVX-512 with VBMI and VNNI, and fp16 arithmetic.
    #[cfg(target_arch = "x86_64")]
    Avx512Half,
    /// AVX-512 with VBMI and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Nothing beyond what the compiler was told.
    Portable,
}

impl Isa {
    /// Those that this machine has, best first; never empty.
    pub fn available() -> Vec<Isa> {
        let mut list = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 {
                list.push(Isa::Avx2);
            }
            if avx512 {
                list.push(Isa::Avx512);
            }
            if avx512 && is_x86_feature_detected!("avx512fp16") {
                list.push(Isa::Avx512Half);
            }
        }
        list.reverse();
        list
    }

    /// The best that this machine has.
    pub fn best() -> Isa {
        use std::sync::LazyLock;
        static BEST: LazyLock<Isa> = LazyLock::new(|| Isa::available()[0]);
        *BEST
    }
}
