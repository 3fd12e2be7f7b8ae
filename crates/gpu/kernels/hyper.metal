// Hyper-connections.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "sublayer.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

// Dimensions of a threadgroup, two a lane.
#define SLICE 64

struct StreamsParams {
    uint width;
    uint slices;
    uint expand;   // the last sublayer's result is mixed in first
    uint collapse; // the sublayer's input is made
};

// A sublayer's way in: the streams after the last sublayer (`next`, if its result `y` comes in here), the collapsed input x, and
// sums [T, slices, 32] over a slice of the dimensions: f.fn_k, f.f and x.x. A threadgroup of 128 takes a slice of a row, a simdgroup
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
    device float* to = sums + (row * p.slices + group.x) * SUMS;
    if (j == 0) {
        float s = parts[lane];
        for (uint i = 1; i < 4; i++) s = s + parts[i * SUMS + lane];
        if (lane < SQUARES) to[lane] = s;
    } else if (p.collapse != 0 && j < 3) {
        // Two of the simdgroups collapse, a dimension a lane.
        uint at = (j - 1) * 32 + lane;
        uint c = group.x * SLICE + at;
        float sum = 0.0f;
        for (uint i = 0; i < 4; i++) sum = sum + pre[row * 4 + i] * fresh[i * SLICE + at];
        if (SOURCE) sum = round_bf16(sum);
        if (c < p.width) x[row * p.width + c] = sum;
        float2 square = pair_multiply_add(float2(0.0f, 0.0f), sum, c < p.width ? sum : 0.0f);
        for (uint m = 16; m > 0; m /= 2) {
            float v0 = simd_shuffle_xor(square.x, ushort(m));
            float v1 = simd_shuffle_xor(square.y, ushort(m));
            square = pair_add(square, float2(v0, v1));
        }
        if (lane < 2) to[SQUARES + 2 * (j - 1) + lane] = lane == 0 ? square.x : square.y;
    }
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
    threadgroup float scratch[32 * PARTS];
    ulong row = group.y;
    device const float* from = sums + row * p.slices * SUMS;
    if (group.x + p.first == 0) {
        ulong at = row * p.width;
        float r = input_factor(from, p, tid % 32);
        for (uint i = tid; i < p.width; i += size.x) {
            float v = weight[i] * (x[at + i] * r);
            y[at + i] = SOURCE ? round_bf16(v) : v;
        }
        return;
    }
    mix_coefficients(from, scale, base, pre + row * 4, post + row * 4, comb + row * 16, p, scratch, tid);
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
