// EXL3 tiles to values and their products with rotated inputs [EXL3 specification, sections 2 to 4].

// Twice the bits of a weight.
constant uint HALF_BITS [[function_constant(0)]];
// 0 3INST, 1 MCG, 2 MUL1.
constant uint CODEBOOK [[function_constant(1)]];
// Rows that share the decoding: 1, 2, 4 or 8.
constant uint ROWS [[function_constant(2)]];

// The sum of the four bytes of `v` and `seed`: one instruction where a device has it.
#ifndef MSL_BYTE_SUM
inline uint byte_sum(uint v, uint seed) {
    uint pairs = (v & 0x00ff00ffu) + ((v >> 8) & 0x00ff00ffu);
    return (pairs & 0xffffu) + (pairs >> 16) + seed;
}
#endif

// The low word of `high` and `low` shifted right together, by 1 to 31: one instruction where a device has it.
#ifndef MSL_FUNNEL
inline uint funnel(uint high, uint low, uint n) {
    return (high << (32 - n)) | (low >> n);
}
#endif

// Value of a 16-bit state, an fp16 number. `flip` is 0x3B603B60, what 3INST and MCG flip after the mask: passed at run time, so that
// mask and flip can be one instruction of three inputs.
inline float codebook_value(uint state, uint flip) {
    if (CODEBOOK == 2) {
        // The sum sits in the mantissa of 2^23; slope * 2^23 is taken off again in the constant. Exact but for the rounding.
        float sum = as_type<float>(byte_sum(state * 0x83DCD12Du, 0x4B000000u));
        return float(half(fma(sum, 887.0f / 131072.0f, -56771.453125f)));
    }
    uint x = CODEBOOK == 1 ? state * 0xCBAC1FEDu : state * 89226354u + 64248484u;
    half2 h = as_type<half2>((x & 0x8FFF8FFFu) ^ flip);
    return float(h.x + h.y);
}

// The 64 positions from 64 q of a tile's ring: HALF_BITS words and the word before them.
inline void load_quarter(device const uint* tile, uint q, thread uint* w) {
    uint first = q * HALF_BITS;
    w[0] = tile[q == 0 ? 4 * HALF_BITS - 1 : first - 1];
    if (HALF_BITS % 4 == 0) {
        for (uint i = 0; i < HALF_BITS; i += 4) {
            uint4 v = *(device const uint4*)(tile + first + i);
            w[i + 1] = v.x; w[i + 2] = v.y; w[i + 3] = v.z; w[i + 4] = v.w;
        }
    } else if (HALF_BITS % 2 == 0) {
        for (uint i = 0; i < HALF_BITS; i += 2) {
            uint2 v = *(device const uint2*)(tile + first + i);
            w[i + 1] = v.x; w[i + 2] = v.y;
        }
    } else {
        for (uint i = 0; i < HALF_BITS; i++) w[i + 1] = tile[first + i];
    }
}

// State of position i (0 to 63) of the quarter in `w`.
inline uint state_at(thread const uint* w, uint i) {
    uint begin = (i + 1) * HALF_BITS / 2 + 16; // of the window's 16 bits, counted from w[0]
    uint shift = begin % 32;
    uint word = w[begin / 32];
    // The window lies in one word or runs into the next.
    if (shift <= 16) return (word >> (16 - shift)) & 0xffffu;
    return funnel(word, w[begin / 32 + 1], 48 - shift) & 0xffffu;
}

// Adds the products of tile row `kt` of the 128 outputs of `block`: lane l has quarter l % 4 of tile l / 4, that is 16 inputs and
// the outputs 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the tile, whose sums are acc[output * ROWS + row].
// `x` counts in pairs of values, from tile row `origin` on; it may lie in device or in threadgroup memory.
template <class X>
inline void trellis_tile(device const uint* trellis,
                         uint tiles,
                         uint block,
                         uint kt,
                         X x,
                         uint origin,
                         thread const ulong* rows,
                         uint lane,
                         uint flip,
                         thread float* acc) {
    device const uint* tile = trellis + (ulong(kt) * tiles + block * 8 + lane / 4) * (4 * HALF_BITS);
    uint w[17];
    load_quarter(tile, lane % 4, w);
    for (uint m = 0; m < 4; m++) {
        float v[16];
        for (uint j = 0; j < 8; j++) {
            v[j] = codebook_value(state_at(w, 8 * m + j), flip);
            v[j + 8] = codebook_value(state_at(w, 8 * m + 32 + j), flip);
        }
        for (uint r = 0; r < ROWS; r++) {
            ulong at = rows[r] / 2 + (kt - origin) * 8 + m;
            float2 a = x[at];
            float2 b = x[at + 4];
            for (uint c = 0; c < 4; c++) {
                uint sum = c * ROWS + r;
                uint j = (c & 1) * 8 + (c / 2) * 4;
                acc[sum] = fma(v[j], a.x, acc[sum]);
                acc[sum] = fma(v[j + 1], a.y, acc[sum]);
                acc[sum] = fma(v[j + 2], b.x, acc[sum]);
                acc[sum] = fma(v[j + 3], b.y, acc[sum]);
            }
        }
    }
}

// Adds up one block of 128 outputs over the splits `s0` to `s1` of `splits`: thread t returns in z[i] the sum of output
// t % 128 and row 2 i + t / 128. Within a split, simdgroup s takes every eighth tile row; then the simdgroups are added,
// ascending, then the splits.
template <class X>
inline void trellis_block(device const uint* trellis,
                          uint tile_rows,
                          uint tiles,
                          uint block,
                          uint s0,
                          uint s1,
                          uint splits,
                          X x,
                          uint origin,
                          thread const ulong* rows,
                          threadgroup float* sums,
                          uint tid,
                          uint flip,
                          thread float* z) {
    uint lane = tid % 32;
    uint simd = tid / 32;
    uint column = lane / 4 * 16 + 2 * (lane % 4);
    for (uint s = s0; s < s1; s++) {
        float acc[32];
        for (uint i = 0; i < 4 * ROWS; i++) acc[i] = 0.0f;
        uint last = (s + 1) * tile_rows / splits;
        for (uint kt = s * tile_rows / splits + simd; kt < last; kt += 8) {
            trellis_tile(trellis, tiles, block, kt, x, origin, rows, lane, flip, acc);
        }
        for (uint r = 0; r < ROWS; r += 2) {
            for (uint i = 0; i < 2; i++) {
                if (r + i < ROWS) {
                    threadgroup float* to = sums + i * 1024 + simd * 128 + column;
                    to[0] = acc[r + i];
                    to[1] = acc[ROWS + r + i];
                    to[8] = acc[2 * ROWS + r + i];
                    to[9] = acc[3 * ROWS + r + i];
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float v = 0.0f;
            if (r + tid / 128 < ROWS) {
                threadgroup const float* from = sums + tid / 128 * 1024 + tid % 128;
                for (uint i = 0; i < 8; i++) v = v + from[i * 128];
            }
            z[r / 2] = s == s0 ? v : z[r / 2] + v;
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}
