// Products of few rows with two matrices at once.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "sublayer.h"
#include "product_slices.h"

// The rows come before the norm of a sublayer's input.
constant bool ENTER [[function_constant(3)]];

struct PairParams {
    uint rows;
    uint cols;
    uint outs;   // of the first matrix
    uint outs_b; // of the second
    uint scale_shift;
    uint slices;
    uint slices_b;
    uint blocks; // threadgroups of the first matrix
    uint round;
    SublayerParams enter;
};

// Two matrices of one form on the same rows: y [rows, outs] and y_b [rows, outs_b], each as linear_rows makes it. ENTER: x is one
// row, a sublayer's input before its norm, and two threadgroups more make what sublayer_finish would.
kernel void linear_pair(device const float* x [[buffer(0)]],
                        device const uchar* data [[buffer(1)]],
                        device const uchar* scale [[buffer(2)]],
                        device float* y [[buffer(3)]],
                        device const uchar* data_b [[buffer(4)]],
                        device const uchar* scale_b [[buffer(5)]],
                        device float* y_b [[buffer(6)]],
                        device const float* norm [[buffer(7)]],
                        device float* normed [[buffer(8)]],
                        device const float* entered [[buffer(9)]],
                        device const float* mix_scale [[buffer(10)]],
                        device const float* mix_base [[buffer(11)]],
                        device float* pre [[buffer(12)]],
                        device float* post [[buffer(13)]],
                        device float* comb [[buffer(14)]],
                        constant PairParams& p [[buffer(15)]],
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
    bool second = block >= p.blocks;
    if (second) block -= p.blocks;
    uint slices = second ? p.slices_b : p.slices;
    uint outs = second ? p.outs_b : p.outs;
    uint slice = simd % slices;
    uint o0 = (block * (8 / slices) + simd / slices) * OUTS;
    uint r0 = group.y * ROWS;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) rows[r] = ulong(min(r0 + r, p.rows - 1)) * p.cols;
    Outputs w = take_rows(FORM, second ? data_b : data, second ? scale_b : scale, p.cols, p.scale_shift, o0, outs);
    sums[simd * 32 + lane] = normed_slice(FORM, w, x, own, ENTER, rows, p.cols, slice, slices, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n = OUTS * ROWS;
    uint index = fold_index(n, lane);
    uint o = o0 + index / ROWS;
    uint r = r0 + index % ROWS;
    if (slice == 0 && lane < n && o < outs && r < p.rows) {
        float v = 0.0f;
        for (uint s = 0; s < slices; s++) v = v + sums[(simd + s) * 32 + lane];
        device float* to = second ? y_b : y;
        to[ulong(r) * outs + o] = p.round != 0 ? round_bf16(v) : v;
    }
}
