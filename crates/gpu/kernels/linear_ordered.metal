// As linear_rows.metal, in the released order of the sums.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "product_ordered.h"
#include "experts.h"

struct OrderedParams {
    uint rows;
    uint cols;
    uint outs;
    uint scale_shift;
    uint round; // results are rounded to bf16
};

// As linear_rows without groups, in the released order of the sums: 4 outputs of ROWS (1 or 4) rows a threadgroup.
kernel void linear_ordered(device const float* x [[buffer(0)]],
                           device const uchar* data [[buffer(1)]],
                           device const uchar* scale [[buffer(2)]],
                           device float* y [[buffer(3)]],
                           constant OrderedParams& p [[buffer(4)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint tid [[thread_index_in_threadgroup]],
                           uint3 size [[threads_per_threadgroup]]) {
    threadgroup float parts[16 * (ORDERED + 1)];
    uint o0 = group.x * OUTS;
    uint r0 = group.y * ROWS;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) rows[r] = ulong(min(r0 + r, p.rows - 1)) * p.cols;
    Outputs w = take_rows(FORM, data, scale, p.cols, p.scale_shift, o0, p.outs);
    float v = product_ordered(w, x, rows, p.cols, parts, tid, size.x);
    uint o = o0 + tid / ROWS;
    uint r = r0 + tid % ROWS;
    if (tid < OUTS * ROWS && o < p.outs && r < p.rows) y[ulong(r) * p.outs + o] = p.round != 0 ? round_bf16(v) : v;
}

// As experts_rows in the released order of the sums; a run of more than ROWS slots takes several rounds.
kernel void experts_ordered(device const float* x [[buffer(0)]],
                            device const uchar* slab [[buffer(1)]],
                            device const ulong* table [[buffer(2)]],
                            device const int* runs [[buffer(3)]],
                            device float* y [[buffer(4)]],
                            constant ExpertParams& p [[buffer(5)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint tid [[thread_index_in_threadgroup]],
                            uint3 size [[threads_per_threadgroup]]) {
    threadgroup float parts[16 * (ORDERED + 1)];
    Run run = run_of(runs, group.z, ROWS > 1);
    uint part = p.first + group.y;
    if (run.count == 0 || run.expert >= p.experts) return;
    if (uint(table[(ulong(run.expert) * 3 + part) * ENTRY + 3]) != p.klass) return;
    uint o0 = group.x * OUTS;
    Outputs w = expert_rows(slab, table, run.expert, part, p.klass, p.cols, o0, p.outs);
    for (uint r0 = 0; r0 < run.count; r0 += ROWS) {
        ulong rows[8];
        for (uint r = 0; r < ROWS; r++) {
            uint slot = run.slots[min(r0 + r, run.count - 1)];
            rows[r] = ulong(p.first == 0 ? slot / p.top : slot) * p.cols;
        }
        float v = product_ordered(w, x, rows, p.cols, parts, tid, size.x);
        uint o = o0 + tid / ROWS;
        uint r = r0 + tid % ROWS;
        if (tid < OUTS * ROWS && o < p.outs && r < run.count) {
            y[(ulong(run.slots[r]) * p.parts + group.y) * p.outs + o] = p.round != 0 ? round_bf16(v) : v;
        }
    }
}
