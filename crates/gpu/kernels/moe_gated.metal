// Routed and shared experts of one to eight rows in two launches, without rounding between: gate, up and the activation, then
// down. The sums are those of linear_rows.metal.
#include <metal_stdlib>
using namespace metal;
#include "product_slices.h"
#include "runs.h"
#include "gated.h"

// Form of the shared expert.
constant uint SHARED [[function_constant(3)]];

struct GatedParams {
    uint rows;
    uint slots;        // of routed experts; the shared expert's rows follow
    uint top;
    uint experts;
    uint runs;
    uint cols;
    uint outs;
    uint scale_shift;
    uint shared_shift;
    uint slices;
    float limit;
};

// The run of the shared expert whose first row is `r0`.
inline Run shared_run(uint r0, uint rows, uint slots) {
    Run run;
    run.expert = 0;
    run.count = min(rows - r0, ROWS);
    for (uint i = 0; i < 8; i++) run.slots[i] = slots + r0 + i;
    return run;
}

// h [slots + rows, outs]. A simdgroup makes two values: two outputs of gate, the same two of up.
kernel void experts_gated(device const float* x [[buffer(0)]],
                          device const uchar* slab [[buffer(1)]],
                          device const ulong* table [[buffer(2)]],
                          device const int* runs [[buffer(3)]],
                          device const float* weights [[buffer(4)]],
                          device const uchar* gate [[buffer(5)]],
                          device const uchar* gate_scale [[buffer(6)]],
                          device const uchar* up [[buffer(7)]],
                          device const uchar* up_scale [[buffer(8)]],
                          device float* h [[buffer(9)]],
                          constant GatedParams& p [[buffer(10)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[256];
    bool shared = group.z >= p.runs;
    Run run;
    if (shared) {
        run = shared_run((group.z - p.runs) * ROWS, p.rows, p.slots);
    } else {
        run = run_of(runs, group.z, ROWS > 1);
        if (run.count == 0 || run.expert >= p.experts) return;
    }
    uint slice = simd % p.slices;
    uint o0 = (group.x * (8 / p.slices) + simd / p.slices) * 2;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) {
        uint slot = run.slots[min(r, run.count - 1)];
        rows[r] = ulong(shared ? slot - p.slots : slot / p.top) * p.cols;
    }
    Outputs w;
    float sum;
    if (shared) {
        for (uint i = 0; i < 2; i++) {
            uint row = min(o0 + i, p.outs - 1);
            take_row(w, i, SHARED, gate, gate_scale, p.cols, p.shared_shift, row);
            take_row(w, i + 2, SHARED, up, up_scale, p.cols, p.shared_shift, row);
        }
        sum = product_slice(SHARED, w, x, rows, p.cols, slice, p.slices, lane);
    } else {
        device const ulong* entry = table + ulong(run.expert) * 3 * ENTRY;
        for (uint i = 0; i < 2; i++) {
            uint row = min(o0 + i, p.outs - 1);
            take_row(w, i, FORM, slab + entry[0], slab + entry[1], p.cols, p.scale_shift, row);
            take_row(w, i + 2, FORM, slab + entry[ENTRY], slab + entry[ENTRY + 1], p.cols, p.scale_shift, row);
        }
        sum = product_slice(FORM, w, x, rows, p.cols, slice, p.slices, lane);
    }
    sums[simd * 32 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // An even lane has a sum of gate; the lane beside it has that of up.
    uint n = OUTS * ROWS;
    uint index = fold_index(n, lane);
    uint o = o0 + index / ROWS;
    uint r = index % ROWS;
    if (slice == 0 && lane < n && lane % 2 == 0 && o < p.outs && r < run.count) {
        float g = 0.0f;
        float u = 0.0f;
        for (uint s = 0; s < p.slices; s++) {
            g = g + sums[(simd + s) * 32 + lane];
            u = u + sums[(simd + s) * 32 + lane + 1];
        }
        uint slot = run.slots[r];
        h[ulong(slot) * p.outs + o] = gated(g, u, p.limit, shared ? 1.0f : weights[slot]);
    }
}

// y [slots + rows, outs] from h [slots + rows, cols].
kernel void experts_down(device const float* h [[buffer(0)]],
                         device const uchar* slab [[buffer(1)]],
                         device const ulong* table [[buffer(2)]],
                         device const int* runs [[buffer(3)]],
                         device const uchar* down [[buffer(4)]],
                         device const uchar* down_scale [[buffer(5)]],
                         device float* y [[buffer(6)]],
                         constant GatedParams& p [[buffer(7)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[256];
    bool shared = group.z >= p.runs;
    Run run;
    if (shared) {
        run = shared_run((group.z - p.runs) * ROWS, p.rows, p.slots);
    } else {
        run = run_of(runs, group.z, ROWS > 1);
        if (run.count == 0 || run.expert >= p.experts) return;
    }
    uint slice = simd % p.slices;
    uint o0 = (group.x * (8 / p.slices) + simd / p.slices) * OUTS;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) rows[r] = ulong(run.slots[min(r, run.count - 1)]) * p.cols;
    float sum;
    if (shared) {
        Outputs w = take_rows(SHARED, down, down_scale, p.cols, p.shared_shift, o0, p.outs);
        sum = product_slice(SHARED, w, h, rows, p.cols, slice, p.slices, lane);
    } else {
        device const ulong* entry = table + (ulong(run.expert) * 3 + 2) * ENTRY;
        Outputs w = take_rows(FORM, slab + entry[0], slab + entry[1], p.cols, p.scale_shift, o0, p.outs);
        sum = product_slice(FORM, w, h, rows, p.cols, slice, p.slices, lane);
    }
    sums[simd * 32 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n = OUTS * ROWS;
    uint index = fold_index(n, lane);
    uint o = o0 + index / ROWS;
    uint r = index % ROWS;
    if (slice == 0 && lane < n && o < p.outs && r < run.count) {
        float v = 0.0f;
        for (uint s = 0; s < p.slices; s++) v = v + sums[(simd + s) * 32 + lane];
        y[ulong(run.slots[r]) * p.outs + o] = v;
    }
}
