//! NumPy's `default_rng(seed).integers(0, bound, n, int64)`: SeedSequence, PCG64 (XSL-RR 128/64) and Lemire's
//! bounded integers, for bounds above 2^32.

const MULTIPLIER: u128 = (2_549_297_995_355_413_924 << 64) + 4_865_540_595_714_422_341;

/// SeedSequence's pool of four words, expanded to eight.
fn seed_words(mut seed: u64) -> [u32; 8] {
    const XSHIFT: u32 = 16;
    let mut entropy = Vec::new();
    while seed > 0 || entropy.is_empty() {
        entropy.push(seed as u32);
        seed >>= 32;
    }
    let mut hash_const = 0x43b0_d7e5u32;
    let mut hash = |mut v: u32| {
        v ^= hash_const;
        hash_const = hash_const.wrapping_mul(0x931e_8875);
        v = v.wrapping_mul(hash_const);
        v ^ (v >> XSHIFT)
    };
    let mix = |x: u32, y: u32| {
        let r = x.wrapping_mul(0xca01_f9dd).wrapping_sub(y.wrapping_mul(0x4973_f715));
        r ^ (r >> XSHIFT)
    };
    let mut pool = [0u32; 4];
    for (i, slot) in pool.iter_mut().enumerate() {
        *slot = hash(entropy.get(i).copied().unwrap_or(0));
    }
    for src in 0..4 {
        for dst in 0..4 {
            if src != dst {
                pool[dst] = mix(pool[dst], hash(pool[src]));
            }
        }
    }
    let mut hash_const = 0x8b51_f9ddu32;
    std::array::from_fn(|i| {
        let mut v = pool[i % 4] ^ hash_const;
        hash_const = hash_const.wrapping_mul(0x58f3_8ded);
        v = v.wrapping_mul(hash_const);
        v ^ (v >> XSHIFT)
    })
}

pub(super) struct Pcg64 {
    state: u128,
    inc: u128,
}

impl Pcg64 {
    pub(super) fn new(seed: u64) -> Self {
        let w = seed_words(seed);
        let word = |i: usize| u128::from(w[2 * i]) | u128::from(w[2 * i + 1]) << 32;
        let (initial, stream) = (word(0) << 64 | word(1), word(2) << 64 | word(3));
        let mut rng = Self { state: 0, inc: stream << 1 | 1 };
        rng.step();
        rng.state = rng.state.wrapping_add(initial);
        rng.step();
        rng
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.inc);
    }

    fn next(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// A uniform value below `bound`. NumPy draws 32-bit words for bounds up to 2^32, which never occur here.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 1 << 32, "bound {bound} needs the 32-bit draw");
        let mut product = u128::from(self.next()) * u128::from(bound);
        if (product as u64) < bound {
            let threshold = bound.wrapping_neg() % bound;
            while (product as u64) < threshold {
                product = u128::from(self.next()) * u128::from(bound);
            }
        }
        (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::Pcg64;

    /// `numpy.random.default_rng(SEED).integers(0, BOUND, 4, dtype=numpy.int64)` of NumPy 2.
    const NUMPY: &[(u64, u64, [u64; 4])] = &[
        (10007, 46539438283891, [38316048023122, 2419938046656, 17979836159674, 36993668729195]),
        (140098, 46539438283891, [33858405369630, 25755403400457, 15460673601360, 41309613242795]),
        (40028, 8477364004462110, [7492030868896765, 458828021277435, 6708150831369557, 1726355956085172]),
        (
            0,
            4611686018427387903,
            [2937467307694268567, 1244171615822312903, 188957027462249005, 76220265684581383],
        ),
        // Seeds of two words, and bounds at which draws are rejected.
        (
            1099511627776,
            9223372036854775807,
            [3327880930111194816, 5794493534087600624, 9179370629039794666, 1454725940890779249],
        ),
        (
            7,
            4611686018427400249,
            [2882744023523094727, 4137668341471495657, 3577218852397966272, 1038584849328936108],
        ),
        (
            12345678901,
            6917529027641081857,
            [5784007353044120053, 2190809493638723627, 448714414865592843, 5526135640336888550],
        ),
    ];

    #[test]
    fn equals_numpy() {
        for (seed, bound, want) in NUMPY {
            let mut rng = Pcg64::new(*seed);
            assert_eq!(std::array::from_fn(|_| rng.below(*bound)), *want, "seed {seed} bound {bound}");
        }
    }
}
