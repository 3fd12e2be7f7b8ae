// The end of a sublayer's way in: what follows once sublayer_streams has left its sums.
#include "norm.h"

// Sums that a slice of the dimensions leaves: 24 projections, the sum of squares of the streams, two pairs (value, rounding error)
// of the sum of squares of the collapsed input, unused ones.
#define SUMS 32
#define SQUARES 25
// Threads that make the coefficients, and the most parts that they add the slices in.
#define MIXERS 256
#define PARTS 16

struct SublayerParams {
    uint width;
    uint slices;
    uint parts; // of the slices, each added alone: PARTS at most
    uint first; // 1 where there is no row to norm
    float mix_part; // 1/(4 width)
    float norm_part; // 1/width
    float eps;
    float norm_eps;
    uint iterations;
};

// 1/sqrt(mean(x^2) + eps) of a collapsed row from its sums, the same in every lane.
inline float input_factor(device const float* sums, constant SublayerParams& p, uint lane) {
    float2 v = float2(0.0f, 0.0f);
    for (uint h = lane; h < 2 * p.slices; h += 32) {
        device const float* pair = sums + h / 2 * SUMS + SQUARES + 2 * (h % 2);
        v = pair_add(v, float2(pair[0], pair[1]));
    }
    for (uint m = 16; m > 0; m /= 2) {
        float x = simd_shuffle_xor(v.x, ushort(m));
        float y = simd_shuffle_xor(v.y, ushort(m));
        v = pair_add(v, float2(x, y));
    }
    return rsqrt_precise((v.x + v.y) * p.norm_part + p.norm_eps);
}

// Sum over four lanes a distance apart, as the reference adds: (0 + 2) + (1 + 3).
inline float sum4(float v, uint step) {
    v = v + simd_shuffle_xor(v, ushort(2 * step));
    return v + simd_shuffle_xor(v, ushort(step));
}

// Coefficient `lane` of a mix (pre, post, comb) from its projection or the sum of squares, by one simdgroup; lanes from 25 on are
// unused.
inline float mix_coefficient(float total,
                             device const float* scale,
                             device const float* base,
                             constant SublayerParams& p,
                             uint lane) {
    float squares = simd_shuffle(total, ushort(24));
    float r = rsqrt_precise(squares * p.mix_part + p.norm_eps);
    float m = 0.0f;
    if (lane < 24) m = fma(total * r, scale[lane < 4 ? 0 : (lane < 8 ? 1 : 2)], base[lane]);
    float gate = sigmoid(m);
    float side = lane < 4 ? gate + p.eps : 2.0f * gate;
    // The matrix in lanes 0 to 15, four a row; the lanes above repeat it.
    float c = simd_shuffle(m, ushort(8 + lane % 16));
    float largest = max(c, simd_shuffle_xor(c, ushort(1)));
    largest = max(largest, simd_shuffle_xor(largest, ushort(2)));
    float e = exp_precise(c - largest);
    c = precise::divide(e, sum4(e, 1)) + p.eps;
    c = precise::divide(c, sum4(c, 4) + p.eps);
    for (uint i = 1; i < p.iterations; i++) {
        c = precise::divide(c, sum4(c, 1) + p.eps);
        c = precise::divide(c, sum4(c, 4) + p.eps);
    }
    float comb = simd_shuffle(c, ushort((lane + 24) % 32 % 16));
    return lane < 8 ? side : comb;
}

// pre [4], post [4] and comb [4, 4] of a row from its sums, by the first MIXERS threads of a threadgroup; `scratch` holds 32 numbers
// a part.
inline void mix_coefficients(device const float* sums,
                             device const float* scale,
                             device const float* base,
                             device float* pre,
                             device float* post,
                             device float* comb,
                             constant SublayerParams& p,
                             threadgroup float* scratch,
                             uint tid) {
    uint lane = tid % 32;
    if (tid < MIXERS) {
        for (uint n = tid / 32; n < p.parts; n += MIXERS / 32) {
            float part = 0.0f;
            for (uint s = n; s < p.slices; s += p.parts) part = part + sums[s * SUMS + lane];
            scratch[n * 32 + lane] = part;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid >= 32) return;
    float total = scratch[lane];
    for (uint n = 1; n < p.parts; n++) total = total + scratch[n * 32 + lane];
    float v = mix_coefficient(total, scale, base, p, lane);
    if (lane < 4) pre[lane] = v;
    else if (lane < 8) post[lane - 4] = v;
    else if (lane < 24) comb[lane - 8] = v;
}

// What sublayer_finish makes of a row, by the first two threadgroups of 256 of another launch: true for those. `sums` are the row's.
inline bool entering(uint block,
                     device const float* x,
                     device const float* norm,
                     device float* normed,
                     device const float* sums,
                     device const float* scale,
                     device const float* base,
                     device float* pre,
                     device float* post,
                     device float* comb,
                     constant SublayerParams& p,
                     threadgroup float* scratch,
                     uint tid) {
    if (block == 0) {
        mix_coefficients(sums, scale, base, pre, post, comb, p, scratch, tid);
    } else if (block == 1) {
        float r = input_factor(sums, p, tid % 32);
        for (uint i = tid; i < p.width; i += 256) normed[i] = norm[i] * (x[i] * r);
    }
    return block < 2;
}
