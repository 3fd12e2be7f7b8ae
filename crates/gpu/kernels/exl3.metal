// Rotations around products with EXL3 weights.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "hadamard.h"
#include "runs.h"
#include "exl3_units.h"

// Activations and rotated inputs are rounded to fp16.
constant bool SOURCE [[function_constant(0)]];

// xh [rotations, rows, inputs]: a rotation is a layer and a group of columns. A simdgroup takes 128 inputs.
kernel void exl3_rotate(device const float* x [[buffer(0)]],
                        device const uchar* slab [[buffer(1)]],
                        device const ulong* table [[buffer(2)]],
                        device const uint* rotations [[buffer(3)]],
                        device float* xh [[buffer(4)]],
                        constant Exl3Params& p [[buffer(5)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint simd [[simdgroup_index_in_threadgroup]]) {
    uint block = group.x * 4 + simd;
    if (block * 128 >= p.inputs) return;
    uint column = block * 128 + lane * 4;
    device const ulong* layer = table + ulong(rotations[2 * group.z]) * ENTRY;
    device const float* row = x + (ulong(group.y) * p.groups + rotations[2 * group.z + 1]) * p.cols;
    float v[4];
    for (uint i = 0; i < 4; i++) v[i] = column + i < p.cols ? row[column + i] : 0.0f;
    rotate_input(v, slab + layer[1], column, SOURCE, lane);
    device float* to = xh + (ulong(group.z) * p.rows + group.y) * p.inputs + column;
    for (uint i = 0; i < 4; i++) to[i] = v[i];
}

// xh [slots, 2, inputs]: the input of a slot, rotated for its expert's gate and for its up. A simdgroup takes 128 inputs.
kernel void exl3_expert_rotate(device const float* x [[buffer(0)]],
                               device const uchar* slab [[buffer(1)]],
                               device const ulong* table [[buffer(2)]],
                               device const int* ids [[buffer(3)]],
                               device float* xh [[buffer(4)]],
                               constant ExpertParams& p [[buffer(5)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint lane [[thread_index_in_simdgroup]],
                               uint simd [[simdgroup_index_in_threadgroup]]) {
    uint block = group.z * 4 + simd;
    uint slot = group.x;
    uint expert = uint(ids[slot]);
    if (block * 128 >= p.inputs || expert >= p.experts) return;
    device const ulong* entry = table + (ulong(expert) * 3 + group.y) * ENTRY;
    if (uint(entry[3]) < EXL3_CLASS) return;
    uint column = block * 128 + lane * 4;
    device const float* row = x + ulong(slot / p.top) * p.cols;
    float v[4];
    for (uint i = 0; i < 4; i++) v[i] = column + i < p.cols ? row[column + i] : 0.0f;
    rotate_input(v, slab + entry[1], column, SOURCE, lane);
    device float* to = xh + (ulong(slot) * 2 + group.y) * p.inputs + column;
    for (uint i = 0; i < 4; i++) to[i] = v[i];
}

// y [rows, outs]: planes added up, rotated and scaled. A simdgroup takes a unit.
kernel void exl3_finish(device const float* sums [[buffer(0)]],
                        device const uchar* slab [[buffer(1)]],
                        device const ulong* table [[buffer(2)]],
                        device const uint* units [[buffer(3)]],
                        device float* y [[buffer(4)]],
                        constant Exl3Params& p [[buffer(5)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint simd [[simdgroup_index_in_threadgroup]]) {
    uint u = group.x * 4 + simd;
    if (u >= p.units) return;
    device const uint* unit = units + u * UNIT;
    float v[4];
    for (uint i = 0; i < 4; i++) v[i] = 0.0f;
    for (uint s = 0; s < p.planes; s++) {
        device const float* from = sums + ((ulong(s) * p.rows + group.y) * p.units + u) * 128 + lane * 4;
        for (uint i = 0; i < 4; i++) v[i] = s == 0 ? from[i] : v[i] + from[i];
    }
    rotate_output(v, slab + table[ulong(unit[0]) * ENTRY + 2], ulong(unit[1]) * 128 + lane * 4, lane);
    for (uint i = 0; i < 4; i++) {
        uint e = lane * 4 + i;
        // Counted from the group's first output, which a block may straddle.
        if (e >= unit[4] && e < unit[5]) {
            y[ulong(group.y) * p.outs + unit[3] + e] = p.round != 0 ? round_bf16(v[i]) : v[i];
        }
    }
}
