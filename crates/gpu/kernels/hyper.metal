// Hyper-connections.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "norm.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

// Dimensions of a threadgroup, two a lane, and sums that it leaves: 24 projections, the sum of squares, unused ones.
#define SLICE 64
#define SUMS 32

struct StreamsParams {
    uint width;
    uint slices;
    uint expand;   // the last sublayer's result is mixed in first
    uint collapse; // the sublayer's input is made
};

// A sublayer's way in: the streams after the last sublayer (`next`, if its result `y` comes in here), the collapsed input x, and
// sums [T, slices, 32] of f.fn_k and f.f over a slice of the dimensions. A threadgroup of 128 takes a slice of a row, a simdgroup
// one of the four streams.
kernel void sublayer_streams(device const float* streams [[buffer(0)]],
                             device const float* y [[buffer(1)]],
                             device const float* post [[buffer(2)]],
                             device const float* comb [[buffer(3)]],
                             device const float* pre [[buffer(4)]],
                             device const float* fun [[buffer(5)]],
                             device float* next [[buffer(6)]],
                             device float* x [[buffer(7)]],
                             device float* sums [[buffer(8)]],
                             constant StreamsParams& p [[buffer(9)]],
                             uint2 group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint j [[simdgroup_index_in_threadgroup]]) {
    threadgroup float fresh[4 * SLICE];
    threadgroup float parts[4 * SUMS];
    ulong row = group.y;
    uint d = group.x * SLICE + 2 * lane;
    bool inside = d < p.width;
    device const float* from = streams + row * 4 * p.width + d;
    float f0 = 0.0f;
    float f1 = 0.0f;
    if (inside && p.expand != 0) {
        float mixed0 = 0.0f;
        float mixed1 = 0.0f;
        for (uint i = 0; i < 4; i++) {
            float2 v = *(device const float2*)(from + ulong(i) * p.width);
            float c = comb[row * 16 + i * 4 + j];
            mixed0 = mixed0 + c * v.x;
            mixed1 = mixed1 + c * v.y;
        }
        float2 v = *(device const float2*)(y + row * p.width + d);
        float w = post[row * 4 + j];
        f0 = w * v.x + mixed0;
        f1 = w * v.y + mixed1;
        if (SOURCE) {
            f0 = round_bf16(f0);
            f1 = round_bf16(f1);
        }
        *(device float2*)(next + (row * 4 + j) * p.width + d) = float2(f0, f1);
    } else if (inside) {
        float2 v = *(device const float2*)(from + ulong(j) * p.width);
        f0 = v.x;
        f1 = v.y;
    }
    fresh[j * SLICE + 2 * lane] = f0;
    fresh[j * SLICE + 2 * lane + 1] = f1;
    float v[SUMS];
    for (uint k = 0; k < SUMS; k++) v[k] = 0.0f;
    if (inside) {
        for (uint k = 0; k < 24; k++) {
            float2 w = *(device const float2*)(fun + (ulong(k) * 4 + j) * p.width + d);
            v[k] = fma(f1, w.y, f0 * w.x);
        }
        v[24] = fma(f1, f1, f0 * f0);
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
    parts[j * SUMS + lane] = v[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (j == 0) {
        float s = parts[lane];
        for (uint i = 1; i < 4; i++) s = s + parts[i * SUMS + lane];
        sums[(row * p.slices + group.x) * SUMS + lane] = s;
    } else if (p.collapse != 0 && j < 3) {
        // Two of the simdgroups collapse, a dimension a lane.
        uint at = (j - 1) * 32 + lane;
        uint c = group.x * SLICE + at;
        float sum = 0.0f;
        for (uint i = 0; i < 4; i++) sum = sum + pre[row * 4 + i] * fresh[i * SLICE + at];
        if (c < p.width) x[row * p.width + c] = SOURCE ? round_bf16(sum) : sum;
    }
}

// Sum over four lanes a distance apart, as the reference adds: (0 + 2) + (1 + 3).
inline float sum4(float v, uint step) {
    v = v + simd_shuffle_xor(v, ushort(2 * step));
    return v + simd_shuffle_xor(v, ushort(step));
}

struct SublayerParams {
    uint width;
    uint slices;
    uint first; // 1 where there is no row to norm
    float mix_part; // 1/(4 width)
    float norm_part; // 1/width
    float eps;
    float norm_eps;
    uint iterations;
};

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

// y [T, width]: the norm of x, and beside it pre [T, 4], post [T, 4], comb [T, 4, 4] from the sums of sublayer_streams: a
// threadgroup of 512 (256 in narrow models) for either.
kernel void sublayer_finish(device const float* x [[buffer(0)]],
                            device const float* weight [[buffer(1)]],
                            device float* y [[buffer(2)]],
                            device const float* sums [[buffer(3)]],
                            device const float* scale [[buffer(4)]],
                            device const float* base [[buffer(5)]],
                            device float* pre [[buffer(6)]],
                            device float* post [[buffer(7)]],
                            device float* comb [[buffer(8)]],
                            constant SublayerParams& p [[buffer(9)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            uint tid [[thread_index_in_threadgroup]],
                            uint3 size [[threads_per_threadgroup]]) {
    threadgroup float scratch[16 * SUMS];
    ulong row = group.y;
    if (group.x + p.first == 0) {
        ulong at = row * p.width;
        norm_row(x + at, weight, y + at, p.width, p.norm_part, p.norm_eps, SOURCE, scratch, tid, size.x);
        return;
    }
    uint lane = tid % 32;
    uint simdgroups = size.x / 32;
    float part = 0.0f;
    for (uint s = tid / 32; s < p.slices; s += simdgroups) part = part + sums[(row * p.slices + s) * SUMS + lane];
    scratch[tid] = part;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid >= 32) return;
    float total = scratch[lane];
    for (uint s = 1; s < simdgroups; s++) total = total + scratch[s * SUMS + lane];
    float v = mix_coefficient(total, scale, base, p, lane);
    if (lane < 4) pre[row * 4 + lane] = v;
    else if (lane < 8) post[row * 4 + lane - 4] = v;
    else if (lane < 24) comb[row * 16 + lane - 8] = v;
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
