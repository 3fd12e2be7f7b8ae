// Activations as fp8 products take them in `source`.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"

struct QuantiseParams {
    uint rows;
    uint cols;
};

// out [rows, cols]: x through E4M3 with a power-of-two scale for every 32 columns. A thread takes such a group.
kernel void quantise_fp8(device const float* x [[buffer(0)]],
                         device float* out [[buffer(1)]],
                         constant QuantiseParams& p [[buffer(2)]],
                         uint2 at [[thread_position_in_grid]]) {
    uint first = at.x * 32;
    if (first >= p.cols) return;
    uint n = min(p.cols - first, 32u);
    device const float* from = x + ulong(at.y) * p.cols + first;
    device float* to = out + ulong(at.y) * p.cols + first;
    float largest = 0.0f;
    for (uint i = 0; i < n; i++) largest = fp8_largest(largest, from[i]);
    int e = fp8_exponent(largest);
    for (uint i = 0; i < n; i++) to[i] = fp8_round(from[i], e);
}
