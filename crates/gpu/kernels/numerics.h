// Number formats, bit for bit as crates/numerics has them.

// Nearest bf16, even on ties; NaN stays NaN.
inline float round_bf16(float x) {
    uint b = as_type<uint>(x);
    uint up = b + 0x7fffu + ((b >> 16) & 1u);
    uint kept = (b & 0x7fffffffu) > 0x7f800000u ? (b | 0x00400000u) : up;
    return as_type<float>(kept & 0xffff0000u);
}

// 2^e for -126 <= e <= 127; 2^-127 as a subnormal.
inline float pow2(int e) {
    return as_type<float>(e >= -126 ? uint(e + 127) << 23 : 0x00400000u);
}

// The value of an E8M0 byte; 255 is NaN.
inline float e8m0_decode(uint byte) {
    return as_type<float>(byte == 0 ? 0x00400000u : (byte == 255 ? 0x7fc00000u : byte << 23));
}

// The value of an E4M3 code.
inline float e4m3_decode(uint code) {
    uint sign = (code & 0x80u) << 24;
    uint exponent = (code >> 3) & 15u;
    uint mantissa = code & 7u;
    uint normal = ((exponent + 120u) << 23) | (mantissa << 20);
    uint small = as_type<uint>(float(mantissa) * 0.001953125f);
    uint magnitude = exponent == 0 ? small : ((code & 0x7fu) == 0x7fu ? 0x7fc00000u : normal);
    return as_type<float>(sign | magnitude);
}

// The nearest E4M3 code, even on ties, saturating; NaN gives 0x7f. The sign of zero is kept.
inline uint e4m3_encode(float x) {
    uint b = as_type<uint>(x);
    uint sign = (b >> 24) & 0x80u;
    uint magnitude = b & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7fu;
    if (magnitude >= 0x43e00000u) return sign | 0x7eu; // 448
    if (magnitude < 0x3c800000u) {                     // 1/64: multiples of 2^-9
        float shifted = as_type<float>(magnitude) + 24576.0f;
        return sign | (as_type<uint>(shifted) - 0x46c00000u);
    }
    uint rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    return sign | min((rounded >> 20) - 960u, 0x7eu);
}

// The value of an E2M1 code (low four bits).
inline float e2m1_decode(uint code) {
    uint m = code & 7u;
    uint exponent = m >> 1;
    uint normal = ((exponent + 126u) << 23) | ((m & 1u) << 22);
    uint magnitude = m < 2 ? (m == 0 ? 0u : 0x3f000000u) : normal;
    return as_type<float>(((code & 8u) << 28) | magnitude);
}

// The nearest E2M1 code, even on ties, saturating. The sign of zero is kept; NaN gives the largest magnitude.
inline uint e2m1_encode(float x) {
    uint b = as_type<uint>(x);
    uint m = b & 0x7fffffffu;
    uint code = 0;
    code += m > 0x3e800000u ? 1u : 0u;  // 0.25
    code += m >= 0x3f400000u ? 1u : 0u; // 0.75
    code += m > 0x3fa00000u ? 1u : 0u;  // 1.25
    code += m >= 0x3fe00000u ? 1u : 0u; // 1.75
    code += m > 0x40200000u ? 1u : 0u;  // 2.5
    code += m >= 0x40600000u ? 1u : 0u; // 3.5
    code += m > 0x40a00000u ? 1u : 0u;  // 5
    return ((b >> 28) & 8u) | code;
}

// The larger of `largest` and |v|; NaN is passed over.
inline float block_largest(float largest, float v) {
    float a = as_type<float>(as_type<uint>(v) & 0x7fffffffu);
    return a > largest ? a : largest;
}

// Exponent of the smallest power of two that is >= v, for a positive normal v; at most 127.
inline int ceil_log2(float v) {
    uint b = as_type<uint>(v);
    int e = int(b >> 23) - 127 + ((b & 0x7fffffu) != 0 ? 1 : 0);
    return min(e, 127);
}

// fp8 with power-of-two scales: largest magnitude, exponent of the scale, code, value.
inline float fp8_largest(float largest, float v) {
    return block_largest(largest, v);
}
inline int fp8_exponent(float largest) {
    return ceil_log2(max(largest, 1e-4f) * (1.0f / 448.0f));
}
inline uint fp8_code(float v, int e) {
    return e4m3_encode(v * pow2(-e));
}
inline float fp8_round(float v, int e) {
    return e4m3_decode(fp8_code(v, e)) * pow2(e);
}

// fp4 with power-of-two scales.
inline int fp4_exponent(float largest) {
    return ceil_log2(max(largest, 6.0f * 1.17549435e-38f) * (1.0f / 6.0f));
}
inline uint fp4_code(float v, int e) {
    return e2m1_encode(precise::divide(v, pow2(e)));
}
inline float fp4_round(float v, int e) {
    return e2m1_decode(fp4_code(v, e)) * pow2(e);
}

// fp4 with E4M3 scales: the scale's code, and the code of a value under the scale.
inline uint kv_scale(float largest) {
    return e4m3_encode(precise::divide(max(largest, 0.01171875f), 6.0f)); // 6/512
}
inline uint kv_code(float v, float scale) {
    return e2m1_encode(precise::divide(v, scale));
}
