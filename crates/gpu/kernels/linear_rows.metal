// Products of few rows with stored weights of every form but EXL3: linear layers, and routed experts, of which those that all
// slots chose go in one launch.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "product_slices.h"
#include "experts.h"

struct LinearParams {
    uint rows;
    uint cols;
    uint outs;        // of one group
    uint groups;
    uint scale_shift;
    uint slices;      // simdgroups that share the columns of an output
    uint round;       // results are rounded to bf16
    uint head_pairs;  // pairs of a head, where results are turned
    uint turned;      // last pairs of a head that are turned, or 0
};

// y [rows, groups * outs] from x [rows, groups * cols]: group z of the grid multiplies its own columns of x; then, without groups,
// pairs turned by turns [rows, turned, 2]. A threadgroup of 8 simdgroups makes 32 / slices outputs of ROWS rows.
kernel void linear_rows(device const float* x [[buffer(0)]],
                        device const uchar* data [[buffer(1)]],
                        device const uchar* scale [[buffer(2)]],
                        device float* y [[buffer(3)]],
                        device const float* turns [[buffer(4)]],
                        constant LinearParams& p [[buffer(5)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[256];
    uint slice = simd % p.slices;
    uint o0 = (group.x * (8 / p.slices) + simd / p.slices) * OUTS;
    uint r0 = group.y * ROWS;
    uint first = group.z * p.outs;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) rows[r] = ulong(min(r0 + r, p.rows - 1)) * p.groups * p.cols;
    Outputs w = take_rows(FORM, data, scale, p.cols, p.scale_shift, first + o0, first + p.outs);
    sums[simd * 32 + lane] = product_slice(FORM, w, x + ulong(group.z) * p.cols, rows, p.cols, slice, p.slices, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n = OUTS * ROWS;
    uint index = fold_index(n, lane);
    uint o = o0 + index / ROWS;
    uint r = r0 + index % ROWS;
    if (slice != 0) return;
    float v = 0.0f;
    for (uint s = 0; s < p.slices; s++) v = v + sums[(simd + s) * 32 + lane];
    if (p.round != 0) v = round_bf16(v);
    if (p.turned != 0) {
        // The other value of the pair lies two lanes away: that is the lowest bit of the output's number.
        float other = simd_shuffle_xor(v, ushort(2));
        uint pair = o / 2 % p.head_pairs;
        uint unturned = p.head_pairs - p.turned;
        if (pair >= unturned && r < p.rows) {
            device const float* turn = turns + (ulong(r) * p.turned + (pair - unturned)) * 2;
            float a = (o & 1) != 0 ? other : v;
            float b = (o & 1) != 0 ? v : other;
            v = (o & 1) != 0 ? a * turn[1] + b * turn[0] : a * turn[0] - b * turn[1];
            if (p.round != 0) v = round_bf16(v);
        }
    }
    if (lane < n && o < p.outs && r < p.rows) y[(ulong(r) * p.groups + group.z) * p.outs + o] = v;
}

// y [slots, parts, outs] for the experts of class `klass`. Gate and up take row slot / top of x, down row slot.
kernel void experts_rows(device const float* x [[buffer(0)]],
                         device const uchar* slab [[buffer(1)]],
                         device const ulong* table [[buffer(2)]],
                         device const int* runs [[buffer(3)]],
                         device float* y [[buffer(4)]],
                         constant ExpertParams& p [[buffer(5)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[256];
    Run run = run_of(runs, group.z, ROWS > 1);
    uint part = p.first + group.y;
    if (run.count == 0 || run.expert >= p.experts) return;
    if (uint(table[(ulong(run.expert) * 3 + part) * ENTRY + 3]) != p.klass) return;
    uint slice = simd % p.slices;
    uint o0 = (group.x * (8 / p.slices) + simd / p.slices) * OUTS;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) {
        uint slot = run.slots[min(r, run.count - 1)];
        rows[r] = ulong(p.first == 0 ? slot / p.top : slot) * p.cols;
    }
    Outputs w = expert_rows(slab, table, run.expert, part, p.klass, p.cols, o0, p.outs);
    sums[simd * 32 + lane] = product_slice(FORM, w, x, rows, p.cols, slice, p.slices, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n = OUTS * ROWS;
    uint index = fold_index(n, lane);
    uint o = o0 + index / ROWS;
    uint r = index % ROWS;
    if (slice == 0 && lane < n && o < p.outs && r < run.count) {
        float v = 0.0f;
        for (uint s = 0; s < p.slices; s++) v = v + sums[(simd + s) * 32 + lane];
        y[(ulong(run.slots[r]) * p.parts + group.y) * p.outs + o] = p.round != 0 ? round_bf16(v) : v;
    }
}
