// Hyper-connections.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "math.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

// Columns of a threadgroup, and sums that it leaves: 24 projections, the sum of squares, unused ones.
#define SLICE 1024
#define SUMS 32

struct MixParams {
    uint columns; // 4 d
    uint slices;
    float part; // 1/columns
    float eps;
    float norm_eps;
    uint iterations;
};

// sums [T, slices, 32] of f.fn_k and f.f over a slice of the columns. A threadgroup of 256 takes a slice of a row.
kernel void hc_project(device const float* streams [[buffer(0)]],
                       device const float* fun [[buffer(1)]],
                       device float* sums [[buffer(2)]],
                       constant MixParams& p [[buffer(3)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint tid [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float parts[8 * SUMS];
    device const float* x = streams + ulong(group.y) * p.columns;
    float v[SUMS];
    for (uint k = 0; k < SUMS; k++) v[k] = 0.0f;
    for (uint i = 0; i < SLICE; i += 256) {
        uint c = group.x * SLICE + i + tid;
        if (c < p.columns) {
            float f = x[c];
            for (uint k = 0; k < 24; k++) v[k] = fma(f, fun[ulong(k) * p.columns + c], v[k]);
            v[24] = fma(f, f, v[24]);
        }
    }
    // A tree over the lanes; lane l ends up with sum l.
    for (uint m = 16; m > 0; m /= 2) {
        bool upper = (lane & m) != 0;
        for (uint i = 0; i < m; i++) {
            float keep = upper ? v[i + m] : v[i];
            float give = upper ? v[i] : v[i + m];
            v[i] = keep + simd_shuffle_xor(give, ushort(m));
        }
    }
    parts[simdgroup * SUMS + lane] = v[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < SUMS) {
        float s = parts[tid];
        for (uint i = 1; i < 8; i++) s = s + parts[i * SUMS + tid];
        sums[(ulong(group.y) * p.slices + group.x) * SUMS + tid] = s;
    }
}

// Sum over four lanes a distance apart, as the reference adds: (0 + 2) + (1 + 3).
inline float sum4(float v, uint step) {
    v = v + simd_shuffle_xor(v, ushort(2 * step));
    return v + simd_shuffle_xor(v, ushort(step));
}

// Coefficient `lane` of a mix (pre, post, comb), by one simdgroup; lanes from 24 on are unused.
inline float mix_coefficient(device const float* sums,
                             device const float* scale,
                             device const float* base,
                             constant MixParams& p,
                             uint lane) {
    float total = sums[lane];
    for (uint s = 1; s < p.slices; s++) total = total + sums[ulong(s) * SUMS + lane];
    float squares = simd_shuffle(total, ushort(24));
    float r = rsqrt_precise(squares * p.part + p.norm_eps);
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

// pre [T, 4], post [T, 4], comb [T, 4, 4] from the sums of hc_project. A simdgroup takes a row.
kernel void hc_mix(device const float* sums [[buffer(0)]],
                   device const float* scale [[buffer(1)]],
                   device const float* base [[buffer(2)]],
                   device float* pre [[buffer(3)]],
                   device float* post [[buffer(4)]],
                   device float* comb [[buffer(5)]],
                   constant MixParams& p [[buffer(6)]],
                   uint row [[threadgroup_position_in_grid]],
                   uint lane [[thread_index_in_simdgroup]]) {
    float v = mix_coefficient(sums + ulong(row) * p.slices * SUMS, scale, base, p, lane);
    if (lane < 4) pre[ulong(row) * 4 + lane] = v;
    else if (lane < 8) post[ulong(row) * 4 + lane - 4] = v;
    else if (lane < 24) comb[ulong(row) * 16 + lane - 8] = v;
}

struct StreamParams {
    uint width;
};

// x [T, width] = sum of pre_i X_i.
kernel void hc_collapse(device const float* streams [[buffer(0)]],
                        device const float* pre [[buffer(1)]],
                        device float* x [[buffer(2)]],
                        constant StreamParams& p [[buffer(3)]],
                        uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.width) return;
    device const float* from = streams + ulong(at.y) * 4 * p.width + at.x;
    device const float* w = pre + ulong(at.y) * 4;
    float sum = 0.0f;
    for (uint i = 0; i < 4; i++) sum = sum + w[i] * from[ulong(i) * p.width];
    x[ulong(at.y) * p.width + at.x] = SOURCE ? round_bf16(sum) : sum;
}

// out_j = post_j y + sum of comb_ij X_i. A thread takes a column of all four streams.
kernel void hc_expand(device const float* streams [[buffer(0)]],
                      device const float* y [[buffer(1)]],
                      device const float* post [[buffer(2)]],
                      device const float* comb [[buffer(3)]],
                      device float* out [[buffer(4)]],
                      constant StreamParams& p [[buffer(5)]],
                      uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.width) return;
    ulong first = ulong(at.y) * 4 * p.width + at.x;
    float v = y[ulong(at.y) * p.width + at.x];
    float x[4];
    for (uint i = 0; i < 4; i++) x[i] = streams[first + ulong(i) * p.width];
    for (uint j = 0; j < 4; j++) {
        float mixed = 0.0f;
        for (uint i = 0; i < 4; i++) mixed = mixed + comb[ulong(at.y) * 16 + i * 4 + j] * x[i];
        float o = post[ulong(at.y) * 4 + j] * v + mixed;
        out[first + ulong(j) * p.width] = SOURCE ? round_bf16(o) : o;
    }
}
