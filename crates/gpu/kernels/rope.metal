// Rotary position embedding.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

struct RopeParams {
    uint pairs;      // of a row
    uint head_pairs; // of a head
    uint turned;     // last pairs of a head that are turned
    uint inverse;
};

// y: the last `turned` pairs of every head turned by turns [T, turned, 2] (cosine, sine). A thread takes a pair.
kernel void rope(device const float* x [[buffer(0)]],
                 device const float* turns [[buffer(1)]],
                 device float* y [[buffer(2)]],
                 constant RopeParams& p [[buffer(3)]],
                 uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.pairs) return;
    ulong i = (ulong(at.y) * p.pairs + at.x) * 2;
    float a = x[i];
    float b = x[i + 1];
    uint pair = at.x % p.head_pairs;
    uint first = p.head_pairs - p.turned;
    if (pair >= first) {
        ulong t = (ulong(at.y) * p.turned + (pair - first)) * 2;
        float c = turns[t];
        float s = p.inverse != 0 ? -turns[t + 1] : turns[t + 1];
        float u = a * c - b * s;
        float v = a * s + b * c;
        a = SOURCE ? round_bf16(u) : u;
        b = SOURCE ? round_bf16(v) : v;
    }
    y[i] = a;
    y[i + 1] = b;
}
