// What works element by element.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];
// The table is bf16, else f32.
constant bool HALVES [[function_constant(1)]];

struct EmbedParams {
    uint width;
    uint copies;
};

// x [T, copies, width]: rows `ids` of a table.
kernel void embed(device const uchar* table [[buffer(0)]],
                  device const uint* ids [[buffer(1)]],
                  device float* x [[buffer(2)]],
                  constant EmbedParams& p [[buffer(3)]],
                  uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.width) return;
    ulong from = ulong(ids[at.y]) * p.width + at.x;
    float v;
    if (HALVES) v = as_type<float>(uint(((device const ushort*)table)[from]) << 16);
    else v = ((device const float*)table)[from];
    for (uint i = 0; i < p.copies; i++) x[(ulong(at.y) * p.copies + i) * p.width + at.x] = v;
}

// y [T, copies, width]: every row `copies` times.
kernel void replicate(device const float* x [[buffer(0)]],
                      device float* y [[buffer(1)]],
                      constant EmbedParams& p [[buffer(2)]],
                      uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.width) return;
    float v = x[ulong(at.y) * p.width + at.x];
    for (uint i = 0; i < p.copies; i++) y[(ulong(at.y) * p.copies + i) * p.width + at.x] = v;
}

struct AddParams {
    uint count;
};

// y = a + b, rounded in `source`.
kernel void add(device const float* a [[buffer(0)]],
                device const float* b [[buffer(1)]],
                device float* y [[buffer(2)]],
                constant AddParams& p [[buffer(3)]],
                uint i [[thread_position_in_grid]]) {
    if (i >= p.count) return;
    float v = a[i] + b[i];
    y[i] = SOURCE ? round_bf16(v) : v;
}

struct StreamParams {
    uint width;
};

// x [T, width]: mean of the four streams of every row.
kernel void stream_mean(device const float* streams [[buffer(0)]],
                        device float* x [[buffer(1)]],
                        constant StreamParams& p [[buffer(2)]],
                        uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.width) return;
    device const float* from = streams + ulong(at.y) * 4 * p.width + at.x;
    float sum = from[0];
    for (uint i = 1; i < 4; i++) sum = sum + from[ulong(i) * p.width];
    float v = sum * 0.25f;
    x[ulong(at.y) * p.width + at.x] = SOURCE ? round_bf16(v) : v;
}

struct ArgmaxParams {
    uint width;
};

// id [T]: place of the largest value of a row, the lowest on ties. A threadgroup of 1024 takes a row.
kernel void argmax(device const float* x [[buffer(0)]],
                   device int* id [[buffer(1)]],
                   constant ArgmaxParams& p [[buffer(2)]],
                   uint row [[threadgroup_position_in_grid]],
                   uint tid [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float bests[32];
    threadgroup uint places[32];
    device const float* from = x + ulong(row) * p.width;
    float best = as_type<float>(0xff800000u);
    uint place = 0xffffffffu;
    for (uint i = tid; i < p.width; i += 1024) {
        float v = from[i];
        if (v > best) {
            best = v;
            place = i;
        }
    }
    for (uint m = 16; m > 0; m /= 2) {
        float v = simd_shuffle_xor(best, ushort(m));
        uint i = simd_shuffle_xor(place, ushort(m));
        if (v > best || (v == best && i < place)) {
            best = v;
            place = i;
        }
    }
    if (lane == 0) {
        bests[simdgroup] = best;
        places[simdgroup] = place;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {
        for (uint s = 1; s < 32; s++) {
            if (bests[s] > best || (bests[s] == best && places[s] < place)) {
                best = bests[s];
                place = places[s];
            }
        }
        id[row] = place == 0xffffffffu ? 0 : int(place);
    }
}
