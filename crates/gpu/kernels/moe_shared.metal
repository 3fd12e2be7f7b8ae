// The router's product beside the first half of the shared expert, and the router beside the second: few rows, nothing rounded
// between. The sums are those of linear_rows.metal.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "sublayer.h"
#include "product_slices.h"
#include "gated.h"
#include "router.h"

// Form of the shared expert; FORM is that of the router's matrix.
constant uint SHARED [[function_constant(3)]];
// The row comes before the norm of a sublayer's input.
constant bool ENTER [[function_constant(4)]];

struct GateParams {
    uint rows;
    uint cols;
    uint experts;
    uint outs;   // of w1 and w3
    uint blocks; // threadgroups of the router's matrix
    uint gate_slices;
    uint slices;
    uint gate_shift;
    uint shared_shift;
    float limit;
    SublayerParams enter;
};

// logits [rows, experts] and h [rows, outs]. A threadgroup of 256 takes either; of h a simdgroup makes two values. ENTER: as in
// linear_pair.metal.
kernel void gate_and_shared(device const float* x [[buffer(0)]],
                            device const uchar* gate [[buffer(1)]],
                            device const uchar* gate_scale [[buffer(2)]],
                            device float* logits [[buffer(3)]],
                            device const uchar* w1 [[buffer(4)]],
                            device const uchar* w1_scale [[buffer(5)]],
                            device const uchar* w3 [[buffer(6)]],
                            device const uchar* w3_scale [[buffer(7)]],
                            device float* h [[buffer(8)]],
                            device const float* norm [[buffer(9)]],
                            device float* normed [[buffer(10)]],
                            device const float* entered [[buffer(11)]],
                            device const float* mix_scale [[buffer(12)]],
                            device const float* mix_base [[buffer(13)]],
                            device float* pre [[buffer(14)]],
                            device float* post [[buffer(15)]],
                            device float* comb [[buffer(16)]],
                            constant GateParams& p [[buffer(17)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[32 * PARTS];
    uint block = group.x;
    Norm own = norm_of(norm, 1.0f);
    if (ENTER) {
        if (entering(block, x, norm, normed, entered, mix_scale, mix_base, pre, post, comb, p.enter, sums, simd * 32 + lane)) return;
        own = norm_of(norm, input_factor(entered, p.enter, lane));
        block -= 2;
    }
    bool shared = block >= p.blocks;
    if (shared) block -= p.blocks;
    uint slices = shared ? p.slices : p.gate_slices;
    uint slice = simd % slices;
    uint o0 = (block * (8 / slices) + simd / slices) * (shared ? 2 : OUTS);
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) rows[r] = ulong(min(r, p.rows - 1)) * p.cols;
    Outputs w;
    float sum;
    if (shared) {
        for (uint i = 0; i < 2; i++) {
            uint row = min(o0 + i, p.outs - 1);
            take_row(w, i, SHARED, w1, w1_scale, p.cols, p.shared_shift, row);
            take_row(w, i + 2, SHARED, w3, w3_scale, p.cols, p.shared_shift, row);
        }
        sum = normed_slice(SHARED, w, x, own, ENTER, rows, p.cols, slice, slices, lane);
    } else {
        w = take_rows(FORM, gate, gate_scale, p.cols, p.gate_shift, o0, p.experts);
        sum = normed_slice(FORM, w, x, own, ENTER, rows, p.cols, slice, slices, lane);
    }
    sums[simd * 32 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n = OUTS * ROWS;
    uint index = fold_index(n, lane);
    uint o = o0 + index / ROWS;
    uint r = index % ROWS;
    if (slice != 0 || lane >= n || r >= p.rows) return;
    float a = 0.0f;
    for (uint s = 0; s < slices; s++) a = a + sums[(simd + s) * 32 + lane];
    if (!shared) {
        if (o < p.experts) logits[ulong(r) * p.experts + o] = a;
        return;
    }
    // An even lane has a sum of w1; the lane beside it has that of w3.
    if (lane % 2 != 0 || o >= p.outs) return;
    float b = 0.0f;
    for (uint s = 0; s < slices; s++) b = b + sums[(simd + s) * 32 + lane + 1];
    h[ulong(r) * p.outs + o] = gated(a, b, p.limit, 1.0f);
}

struct DownParams {
    uint rows;
    uint cols;
    uint outs;
    uint slices;
    uint shared_shift;
    uint experts;
    uint top;
    float scale;
    uint images;
};

// The choice of experts of every row, and y [rows, outs] from h [rows, cols]. The first threadgroups of 256 route a row each.
kernel void route_and_shared(device const float* logits [[buffer(0)]],
                             device const float* bias [[buffer(1)]],
                             device const float* other [[buffer(2)]],
                             device const uint* image [[buffer(3)]],
                             device int* experts [[buffer(4)]],
                             device float* weights [[buffer(5)]],
                             device const float* h [[buffer(6)]],
                             device const uchar* w2 [[buffer(7)]],
                             device const uchar* w2_scale [[buffer(8)]],
                             device float* y [[buffer(9)]],
                             constant DownParams& p [[buffer(10)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float memory[2 * MOST];
    if (group.x < p.rows) {
        RouterParams router;
        router.experts = p.experts;
        router.top = p.top;
        router.scale = p.scale;
        router.images = p.images;
        route(logits, bias, other, image, experts, weights, router, group.x, memory, memory + MOST, tid, 256);
        return;
    }
    uint lane = tid % 32;
    uint simd = tid / 32;
    uint slice = simd % p.slices;
    uint o0 = ((group.x - p.rows) * (8 / p.slices) + simd / p.slices) * OUTS;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) rows[r] = ulong(min(r, p.rows - 1)) * p.cols;
    Outputs w = take_rows(SHARED, w2, w2_scale, p.cols, p.shared_shift, o0, p.outs);
    memory[tid] = product_slice(SHARED, w, h, rows, p.cols, slice, p.slices, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n = OUTS * ROWS;
    uint index = fold_index(n, lane);
    uint o = o0 + index / ROWS;
    uint r = index % ROWS;
    if (slice == 0 && lane < n && o < p.outs && r < p.rows) {
        float v = 0.0f;
        for (uint s = 0; s < p.slices; s++) v = v + memory[(simd + s) * 32 + lane];
        y[ulong(r) * p.outs + o] = v;
    }
}
