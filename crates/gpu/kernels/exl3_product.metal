// Products with EXL3 weights, straight from the trellis: linear layers, and routed experts, of which those that all slots chose go
// in one launch.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "trellis.h"
#include "moe_outputs.h"
#include "exl3_units.h"

// sums [planes, rows, units, 128] of the units of class `klass`.
kernel void exl3_product(device const float* xh [[buffer(0)]],
                         device const uchar* slab [[buffer(1)]],
                         device const ulong* table [[buffer(2)]],
                         device const uint* units [[buffer(3)]],
                         device float* sums [[buffer(4)]],
                         constant Exl3Params& p [[buffer(5)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float scratch[2048];
    device const uint* unit = units + group.x * UNIT;
    if (unit[6] != p.klass) return;
    device const uint* trellis = (device const uint*)(slab + table[ulong(unit[0]) * ENTRY]);
    uint r0 = group.z * ROWS;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) {
        rows[r] = (ulong(unit[2]) * p.rows + min(r0 + r, p.rows - 1)) * p.inputs;
    }
    bool whole = p.planes == 1;
    uint s0 = whole ? 0 : group.y;
    uint s1 = whole ? p.splits : group.y + 1;
    float z[4];
    trellis_block(trellis, p.inputs / 16, unit[7], unit[1], s0, s1, p.splits, (device const float2*)xh, 0, rows, scratch,
                  tid, p.flip, z);
    for (uint i = 0; i < (ROWS + 1) / 2; i++) {
        uint r = 2 * i + tid / 128;
        if (r < ROWS && r0 + r < p.rows) {
            ulong at = (ulong(group.y) * p.rows + r0 + r) * p.units + group.x;
            sums[at * 128 + tid % 128] = z[i];
        }
    }
}

// Most values of a product's own input.
#define INNER 2048

// Runs of 128 rotated inputs from `first` to `last` for the expert at `entry`, in `to`: of the activations, or of the activation of
// the products of gate and up. The simdgroups take every eighth.
inline void inner_input(device const float* x,
                        Results gate_up,
                        device const ulong* table,
                        device const float* weights,
                        uint expert,
                        uint slot,
                        uint part,
                        constant ExpertParams& p,
                        uint first,
                        uint last,
                        threadgroup float* to,
                        uint tid) {
    uint lane = tid % 32;
    device const ulong* entry = table + (ulong(expert) * 3 + p.first + part) * ENTRY;
    for (uint b = first + tid / 32; b < last; b += 8) {
        uint column = b * 128 + lane * 4;
        float v[4];
        if (p.inner == 1) {
            device const float* row = x + ulong(slot / p.top) * p.cols;
            for (uint i = 0; i < 4; i++) v[i] = column + i < p.cols ? row[column + i] : 0.0f;
        } else {
            device const ulong* gate = table + ulong(expert) * 3 * ENTRY;
            float g[4];
            float u[4];
            expert_outputs(gate_up, gate, slot, 0, column, lane, p.round != 0, g);
            expert_outputs(gate_up, gate + ENTRY, slot, 1, column, lane, p.round != 0, u);
            for (uint i = 0; i < 4; i++) {
                v[i] = column + i < p.cols ? rounded(gated(g[i], u[i], p.limit, weights[slot]), p.round != 0) : 0.0f;
            }
        }
        rotate_input(v, gate_up.slab + entry[1], column, p.round != 0, lane);
        for (uint i = 0; i < 4; i++) to[(b - first) * 128 + lane * 4 + i] = v[i];
    }
}

// sums [planes, slots, parts, outputs] for the experts of class `klass`; the y dimension of the grid is part * planes + split.
// xh is the rotated input, or where the product makes it itself, the activations.
kernel void exl3_expert_product(device const float* xh [[buffer(0)]],
                                device const uchar* slab [[buffer(1)]],
                                device const ulong* table [[buffer(2)]],
                                device const int* runs [[buffer(3)]],
                                device float* sums [[buffer(4)]],
                                device const float* gate_up_values [[buffer(5)]],
                                device const float* gate_up_sums [[buffer(6)]],
                                device const float* weights [[buffer(7)]],
                                constant ExpertParams& p [[buffer(8)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float scratch[2048];
    threadgroup float2 own[INNER / 2];
    Run run = run_of(runs, group.z, ROWS > 1);
    uint part = group.y / p.planes;
    uint plane = group.y % p.planes;
    if (run.count == 0 || run.expert >= p.experts) return;
    device const ulong* entry = table + (ulong(run.expert) * 3 + p.first + part) * ENTRY;
    if (uint(entry[3]) != p.klass) return;
    ulong rows[8];
    for (uint r = 0; r < ROWS; r++) {
        rows[r] = (ulong(run.slots[min(r, run.count - 1)]) * p.parts + part) * p.inputs;
    }
    bool whole = p.planes == 1;
    uint s0 = whole ? 0 : plane;
    uint s1 = whole ? p.splits : plane + 1;
    float z[4];
    device const uint* trellis = (device const uint*)(slab + entry[0]);
    uint tile_rows = p.inputs / 16;
    uint tiles = p.outputs / 16;
    if (ROWS == 1 && p.inner != 0) {
        Results gate_up;
        gate_up.values = gate_up_values;
        gate_up.sums = gate_up_sums;
        gate_up.slab = slab;
        gate_up.slots = p.slots;
        gate_up.parts = 2;
        gate_up.planes = p.before;
        gate_up.outs = p.cols;
        gate_up.outputs = p.inputs;
        // Whole runs around the tile rows of the splits.
        uint begin = s0 * tile_rows / p.splits / 8;
        uint end = (s1 * tile_rows / p.splits + 7) / 8;
        inner_input(xh, gate_up, table, weights, run.expert, run.slots[0], part, p, begin, end, (threadgroup float*)own, tid);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        rows[0] = 0;
        trellis_block(trellis, tile_rows, tiles, group.x, s0, s1, p.splits, (threadgroup const float2*)own, begin * 8, rows,
                      scratch, tid, p.flip, z);
    } else {
        trellis_block(trellis, tile_rows, tiles, group.x, s0, s1, p.splits, (device const float2*)xh, 0, rows, scratch, tid,
                      p.flip, z);
    }
    for (uint i = 0; i < (ROWS + 1) / 2; i++) {
        uint r = 2 * i + tid / 128;
        if (r < ROWS && r < run.count) {
            ulong at = (ulong(plane) * p.slots + run.slots[r]) * p.parts + part;
            sums[at * p.outputs + group.x * 128 + tid % 128] = z[i];
        }
    }
}

// The values of the weights before scales and rotations, [inputs, 128 units]: what tests compare with the format's reference.
kernel void exl3_decode(device const uchar* slab [[buffer(0)]],
                        device const ulong* table [[buffer(1)]],
                        device const uint* units [[buffer(2)]],
                        device float* values [[buffer(3)]],
                        constant Exl3Params& p [[buffer(4)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
    device const uint* unit = units + group.x * UNIT;
    if (unit[6] != p.klass) return;
    device const uint* trellis = (device const uint*)(slab + table[ulong(unit[0]) * ENTRY]);
    device const uint* tile = trellis + (ulong(group.y) * unit[7] + unit[1] * 8 + lane / 4) * (4 * HALF_BITS);
    uint q = lane % 4;
    uint w[17];
    load_quarter(tile, q, w);
    for (uint i = 0; i < 64; i++) {
        uint row = 2 * ((i / 8) % 4) + (i & 1) + 8 * ((i >> 1) & 1);
        uint column = 2 * q + i / 32 + 8 * ((i >> 2) & 1);
        values[(ulong(group.y) * 16 + row) * p.units * 128 + group.x * 128 + lane / 4 * 16 + column] =
            codebook_value(state_at(w, i), p.flip);
    }
}
