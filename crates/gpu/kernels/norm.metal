// RMSNorm.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "norm.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

struct NormParams {
    uint width;
    float part; // 1/width
    float eps;
};

// y [T, width] = weight * (x * rsqrt(mean(x^2) + eps)). A threadgroup takes a row; its size depends on the width alone.
kernel void rmsnorm(device const float* x [[buffer(0)]],
                    device const float* weight [[buffer(1)]],
                    device float* y [[buffer(2)]],
                    constant NormParams& p [[buffer(3)]],
                    uint row [[threadgroup_position_in_grid]],
                    uint tid [[thread_index_in_threadgroup]],
                    uint3 size [[threads_per_threadgroup]]) {
    threadgroup float scratch[32];
    ulong at = ulong(row) * p.width;
    norm_row(x + at, weight, y + at, p.width, p.part, p.eps, SOURCE, scratch, tid, size.x);
}
