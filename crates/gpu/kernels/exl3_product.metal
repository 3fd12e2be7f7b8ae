// Products with EXL3 weights, straight from the trellis: linear layers, and routed experts, of which those that all slots chose go
// in one launch.
#include <metal_stdlib>
using namespace metal;
#include "trellis.h"
#include "runs.h"
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
    trellis_block(trellis, p.inputs / 16, unit[7], unit[1], s0, s1, p.splits, xh, rows, scratch, tid, p.flip, z);
    for (uint i = 0; i < (ROWS + 1) / 2; i++) {
        uint r = 2 * i + tid / 128;
        if (r < ROWS && r0 + r < p.rows) {
            ulong at = (ulong(group.y) * p.rows + r0 + r) * p.units + group.x;
            sums[at * 128 + tid % 128] = z[i];
        }
    }
}

// sums [planes, slots, parts, outputs] for the experts of class `klass`; the y dimension of the grid is part * planes + split.
kernel void exl3_expert_product(device const float* xh [[buffer(0)]],
                                device const uchar* slab [[buffer(1)]],
                                device const ulong* table [[buffer(2)]],
                                device const int* runs [[buffer(3)]],
                                device float* sums [[buffer(4)]],
                                constant ExpertParams& p [[buffer(5)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float scratch[2048];
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
    trellis_block((device const uint*)(slab + entry[0]), p.inputs / 16, p.outputs / 16, group.x, s0, s1, p.splits, xh,
                  rows, scratch, tid, p.flip, z);
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
