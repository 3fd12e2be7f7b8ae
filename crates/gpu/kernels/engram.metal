// Engram memory: gathered table rows to values, and the gate.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "math.h"
#include "reduce.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

struct RowsParams {
    uint count;  // values in all
    uint width;  // of a row
    uint stride; // bytes of a gathered row: codes, then scales
};

// e: the values of gathered rows, E4M3 codes and an E8M0 scale for every 32.
kernel void engram_rows(device const uchar* rows [[buffer(0)]],
                        device float* e [[buffer(1)]],
                        constant RowsParams& p [[buffer(2)]],
                        uint i [[thread_position_in_grid]]) {
    if (i >= p.count) return;
    device const uchar* row = rows + ulong(i / p.width) * p.stride;
    uint c = i % p.width;
    e[i] = e4m3_decode(row[c]) * e8m0_decode(row[p.width + c / 32]);
}

struct GateParams {
    uint width;
    float part; // 1/width
    float root; // width^-0.5
};

// Stream i of row t: gate from its key in kv [T, 5, width], then X + gate * value (the fifth part). A threadgroup of 256.
kernel void engram_gate(device const float* streams [[buffer(0)]],
                        device const float* kv [[buffer(1)]],
                        device const float* q_weight [[buffer(2)]],
                        device const float* k_weight [[buffer(3)]],
                        device const uint* alive [[buffer(4)]],
                        device float* out [[buffer(5)]],
                        device float* gates [[buffer(6)]],
                        constant GateParams& p [[buffer(7)]],
                        uint2 group [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float scratch[32];
    ulong at = (ulong(group.y) * 4 + group.x) * p.width;
    device const float* x = streams + at;
    device const float* key = kv + (ulong(group.y) * 5 + group.x) * p.width;
    device const float* value = kv + (ulong(group.y) * 5 + 4) * p.width;
    device const float* q = q_weight + ulong(group.x) * p.width;
    device const float* k = k_weight + ulong(group.x) * p.width;
    float2 dots = float2(0.0f, 0.0f);
    float2 xs = float2(0.0f, 0.0f);
    float2 keys = float2(0.0f, 0.0f);
    for (uint c = tid; c < p.width; c += 256) {
        dots = pair_add(dots, float2(x[c] * (q[c] * k[c]) * key[c], 0.0f));
        xs = pair_multiply_add(xs, x[c], x[c]);
        keys = pair_multiply_add(keys, key[c], key[c]);
    }
    float dot = pair_total(dots, scratch, lane, simdgroup, 8);
    float x_mean = pair_total(xs, scratch, lane, simdgroup, 8) * p.part;
    float key_mean = pair_total(keys, scratch, lane, simdgroup, 8) * p.part;
    float norms = rsqrt_precise(x_mean + 1e-20f) * rsqrt_precise(key_mean + 1e-20f);
    float scaled = dot * norms * p.root;
    float size = as_type<float>(as_type<uint>(scaled) & 0x7fffffffu);
    float root = precise::sqrt(max(size, 1e-6f));
    root = as_type<float>(as_type<uint>(root) | (as_type<uint>(scaled) & 0x80000000u));
    float gate = alive[group.y] != 0 ? sigmoid(root) : 0.0f;
    if (tid == 0) gates[ulong(group.y) * 4 + group.x] = gate;
    for (uint c = tid; c < p.width; c += 256) {
        float v = x[c] + gate * value[c];
        out[at + c] = SOURCE ? round_bf16(v) : v;
    }
}
