// Linear layers for many rows, `native` alone: tiles of 32 rows by 64 outputs through 8x8 matrices.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#include "weights.h"

// Rows, outputs and columns of a tile, and what a row of activations, and one of weights or sums takes in threadgroup memory.
#define TILE_ROWS 32
#define TILE_OUTS 64
#define TILE_COLS 32
#define X_STRIDE 36
#define W_STRIDE 68
// Columns that are summed before their sum is added to the others.
#define SPAN 512

struct TileParams {
    uint rows;
    uint cols;
    uint outs;
    uint groups;
    uint scale_shift;
};

// y [rows, groups * outs] from x [rows, groups * cols]. The sum of an output goes over spans of columns, ascending, within a span
// eight by eight: it depends on its own row alone.
kernel void linear_tiles(device const float* x [[buffer(0)]],
                         device const uchar* data [[buffer(1)]],
                         device const uchar* scale [[buffer(2)]],
                         device float* y [[buffer(3)]],
                         constant TileParams& p [[buffer(4)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint tid [[thread_index_in_threadgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    // Activations and weights while columns go by, sums at the end.
    threadgroup float memory[TILE_ROWS * X_STRIDE + TILE_COLS * W_STRIDE];
    threadgroup float* xs = memory;
    threadgroup float* ws = memory + TILE_ROWS * X_STRIDE;
    uint o0 = group.x * TILE_OUTS;
    uint r0 = group.y * TILE_ROWS;
    uint groups = (p.cols + 31) / 32;
    // This thread's part of the activations and of the weights.
    uint xr = tid / 4;
    uint xc = tid % 4 * 8;
    device const float* xrow = x + (ulong(min(r0 + xr, p.rows - 1)) * p.groups + group.z) * p.cols;
    uint wr = tid / 2;
    uint wc = tid % 2 * 16;
    uint row = group.z * p.outs + min(o0 + wr, p.outs - 1);
    device const uchar* wrow = data + row * row_bytes(FORM, p.cols);
    device const uchar* srow = scale + ulong(row >> p.scale_shift) * groups;
    // Simdgroup s has rows 16 (s / 2) on and outputs 32 (s % 2) on.
    simdgroup_float8x8 sums[2][4];
    for (uint i = 0; i < 2; i++) {
        for (uint j = 0; j < 4; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    // Of the outputs number tid, tid + 128, ...: the spans so far.
    float totals[16];
    for (uint i = 0; i < 16; i++) totals[i] = 0.0f;
    for (uint c = 0; c < p.cols; c += TILE_COLS) {
        float v[8];
        for (uint i = 0; i < 8; i++) v[i] = 0.0f;
        if (c + xc < p.cols) load8(xrow, c + xc, p.cols, v);
        for (uint i = 0; i < 8; i++) xs[xr * X_STRIDE + xc + i] = v[i];
        float s = form_factor(FORM);
        if (FORM >= 2) s = s * decode_e8m0(srow[c / 32]);
        for (uint h = 0; h < 16; h += 8) {
            for (uint i = 0; i < 8; i++) v[i] = 0.0f;
            uint nan = 0;
            if (c + wc + h < p.cols) nan = decode8(FORM, wrow, c + wc + h, p.cols, v);
            v[0] = with_nan(v[0], nan);
            for (uint i = 0; i < 8; i++) ws[(wc + h + i) * W_STRIDE + wr] = v[i] * s;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint k = 0; k < TILE_COLS; k += 8) {
            simdgroup_float8x8 a[2];
            simdgroup_float8x8 b[4];
            for (uint i = 0; i < 2; i++) simdgroup_load(a[i], xs + (simd / 2 * 16 + i * 8) * X_STRIDE + k, X_STRIDE);
            for (uint j = 0; j < 4; j++) simdgroup_load(b[j], ws + k * W_STRIDE + simd % 2 * 32 + j * 8, W_STRIDE);
            for (uint i = 0; i < 2; i++) {
                for (uint j = 0; j < 4; j++) simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (c + TILE_COLS < p.cols && (c + TILE_COLS) % SPAN != 0) continue;
        for (uint i = 0; i < 2; i++) {
            for (uint j = 0; j < 4; j++) {
                simdgroup_store(sums[i][j], memory + (simd / 2 * 16 + i * 8) * W_STRIDE + simd % 2 * 32 + j * 8, W_STRIDE);
                sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < 16; i++) {
            uint at = tid + i * 128;
            totals[i] = totals[i] + memory[at / TILE_OUTS * W_STRIDE + at % TILE_OUTS];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint i = 0; i < 16; i++) {
        uint at = tid + i * 128;
        uint r = r0 + at / TILE_OUTS;
        uint o = o0 + at % TILE_OUTS;
        if (r < p.rows && o < p.outs) y[(ulong(r) * p.groups + group.z) * p.outs + o] = totals[i];
    }
}
