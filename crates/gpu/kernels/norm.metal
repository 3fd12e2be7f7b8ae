// RMSNorm.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "math.h"
#include "reduce.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

struct NormParams {
    uint width;
    float part; // 1/width
    float eps;
};

// y [T, width] = weight * (x * rsqrt(mean(x^2) + eps)). A threadgroup of 256 takes a row.
kernel void rmsnorm(device const float* x [[buffer(0)]],
                    device const float* weight [[buffer(1)]],
                    device float* y [[buffer(2)]],
                    constant NormParams& p [[buffer(3)]],
                    uint row [[threadgroup_position_in_grid]],
                    uint tid [[thread_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float scratch[32];
    device const float* from = x + ulong(row) * p.width;
    device float* to = y + ulong(row) * p.width;
    float2 sum = float2(0.0f, 0.0f);
    for (uint i = tid; i < p.width; i += 256) sum = pair_multiply_add(sum, from[i], from[i]);
    float r = rsqrt_precise(pair_total(sum, scratch, lane, simdgroup, 8) * p.part + p.eps);
    for (uint i = tid; i < p.width; i += 256) {
        float v = weight[i] * (from[i] * r);
        to[i] = SOURCE ? round_bf16(v) : v;
    }
}
