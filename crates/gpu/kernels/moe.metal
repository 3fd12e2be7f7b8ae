// The parts of a mixture of experts that are no products.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "moe_outputs.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

struct RunParams {
    uint slots;
    uint experts;
    uint runs;
};

// Rows of experts, ascending by expert, in runs of at most 8 slots; unused runs are empty. One threadgroup.
kernel void moe_runs(device const int* ids [[buffer(0)]],
                     device int* runs [[buffer(1)]],
                     constant RunParams& p [[buffer(2)]],
                     uint tid [[thread_index_in_threadgroup]]) {
    threadgroup uint starts[257];
    uint each = (p.experts + 255) / 256;
    uint count = 0;
    for (uint i = 0; i < each; i++) {
        uint n = 0;
        for (uint s = 0; s < p.slots; s++) n += uint(ids[s]) == tid * each + i ? 1 : 0;
        count += (n + 7) / 8;
    }
    starts[tid + 1] = count;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {
        starts[0] = 0;
        for (uint i = 0; i < 256; i++) starts[i + 1] += starts[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint at = starts[tid];
    for (uint i = 0; i < each; i++) {
        uint expert = tid * each + i;
        uint n = 0;
        for (uint s = 0; s < p.slots; s++) {
            if (uint(ids[s]) != expert) continue;
            device int* run = runs + (at + n / 8) * RUN;
            run[0] = int(expert);
            run[1] = int(n % 8 + 1);
            run[2 + n % 8] = int(s);
            n++;
        }
        at += (n + 7) / 8;
    }
    for (uint i = starts[256] + tid; i < p.runs; i += 256) {
        runs[i * RUN] = 0;
        runs[i * RUN + 1] = 0;
    }
}

struct SwigluParams {
    uint count;
    float limit;
};

// h [count] of a shared expert.
kernel void swiglu(device const float* gate [[buffer(0)]],
                   device const float* up [[buffer(1)]],
                   device float* h [[buffer(2)]],
                   constant SwigluParams& p [[buffer(3)]],
                   uint i [[thread_position_in_grid]]) {
    if (i < p.count) h[i] = rounded(gated(gate[i], up[i], p.limit, 1.0f), SOURCE);
}

// The input of down: hidden [slots, outs], or rotated [slots, outputs] where down is EXL3. A simdgroup takes 128 values.
kernel void moe_hidden(device const float* values [[buffer(0)]],
                       device const float* sums [[buffer(1)]],
                       device const uchar* slab [[buffer(2)]],
                       device const ulong* table [[buffer(3)]],
                       device const int* ids [[buffer(4)]],
                       device const float* weights [[buffer(5)]],
                       device float* hidden [[buffer(6)]],
                       device float* rotated [[buffer(7)]],
                       constant ExpertParams& p [[buffer(8)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]]) {
    uint block = group.y * 4 + simd;
    uint slot = group.x;
    uint expert = uint(ids[slot]);
    if (block * 128 >= p.outputs || expert >= p.experts) return;
    device const ulong* entry = table + ulong(expert) * 3 * ENTRY;
    uint column = block * 128 + lane * 4;
    Results o;
    o.values = values;
    o.sums = sums;
    o.slab = slab;
    o.slots = p.slots;
    o.parts = p.parts;
    o.planes = p.planes;
    o.outs = p.outs;
    o.outputs = p.outputs;
    float g[4];
    float u[4];
    expert_outputs(o, entry, slot, 0, column, lane, SOURCE, g);
    expert_outputs(o, entry + ENTRY, slot, 1, column, lane, SOURCE, u);
    float h[4];
    for (uint i = 0; i < 4; i++) {
        h[i] = column + i < p.outs ? rounded(gated(g[i], u[i], p.limit, weights[slot]), SOURCE) : 0.0f;
    }
    if (uint(entry[2 * ENTRY + 3]) >= EXL3_CLASS) {
        rotate_input(h, slab + entry[2 * ENTRY + 1], column, SOURCE, lane);
        for (uint i = 0; i < 4; i++) rotated[ulong(slot) * p.outputs + column + i] = h[i];
    } else {
        for (uint i = 0; i < 4; i++) {
            if (column + i < p.outs) hidden[ulong(slot) * p.outs + column + i] = h[i];
        }
    }
}

// acc [rows, outs]: the results of a row's experts, ascending by expert, and where there is one, that of the shared expert on top.
// A simdgroup takes 128 values.
kernel void moe_combine(device const float* values [[buffer(0)]],
                        device const float* sums [[buffer(1)]],
                        device const uchar* slab [[buffer(2)]],
                        device const ulong* table [[buffer(3)]],
                        device const int* ids [[buffer(4)]],
                        device const float* shared [[buffer(5)]],
                        device float* acc [[buffer(6)]],
                        constant ExpertParams& p [[buffer(7)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint simd [[simdgroup_index_in_threadgroup]]) {
    uint block = group.x * 4 + simd;
    if (block * 128 >= p.outputs) return;
    uint column = block * 128 + lane * 4;
    device const int* chosen = ids + group.y * p.top;
    Results o;
    o.values = values;
    o.sums = sums;
    o.slab = slab;
    o.slots = p.slots;
    o.parts = p.parts;
    o.planes = p.planes;
    o.outs = p.outs;
    o.outputs = p.outputs;
    float total[4];
    for (uint i = 0; i < 4; i++) total[i] = 0.0f;
    int last = -1;
    for (uint n = 0; n < p.top; n++) {
        // The lowest id above the last one.
        uint next = 0;
        int id = 0x7fffffff;
        for (uint c = 0; c < p.top; c++) {
            int candidate = chosen[c];
            if (candidate > last && candidate < id) {
                id = candidate;
                next = c;
            }
        }
        if (uint(id) >= p.experts) break;
        last = id;
        float v[4];
        device const ulong* entry = table + (ulong(id) * 3 + 2) * ENTRY;
        expert_outputs(o, entry, group.y * p.top + next, 0, column, lane, SOURCE, v);
        for (uint i = 0; i < 4; i++) total[i] = total[i] + v[i];
    }
    for (uint i = 0; i < 4; i++) {
        if (column + i >= p.outs) continue;
        ulong at = ulong(group.y) * p.outs + column + i;
        acc[at] = p.shared != 0 ? rounded(total[i] + shared[at], SOURCE) : total[i];
    }
}
