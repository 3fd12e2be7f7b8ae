// What the products of routed experts leave, as the next step takes it.
#include "gated.h"
#include "hadamard.h"
#include "runs.h"

// As the released reference rounds it.
inline float rounded(float v, bool source) {
    return source ? round_bf16(v) : v;
}

// Where the products of a step lie, and what they are made for.
struct Results {
    device const float* values;
    device const float* sums;
    device const uchar* slab;
    uint slots;
    uint parts;
    uint planes;
    uint outs;
    uint outputs;
};

// Outputs 4 l to 4 l + 3 of a run of 128 of one matrix: from the products of other forms, or from planes of EXL3 sums.
inline void expert_outputs(Results p,
                           device const ulong* entry,
                           uint slot,
                           uint part,
                           uint column,
                           uint lane,
                           bool source,
                           thread float* v) {
    if (uint(entry[3]) >= EXL3_CLASS) {
        for (uint s = 0; s < p.planes; s++) {
            device const float* from = p.sums + ((ulong(s) * p.slots + slot) * p.parts + part) * p.outputs + column;
            for (uint i = 0; i < 4; i++) v[i] = s == 0 ? from[i] : v[i] + from[i];
        }
        rotate_output(v, p.slab + entry[2], column, lane);
        for (uint i = 0; i < 4; i++) v[i] = rounded(v[i], source);
    } else {
        device const float* from = p.values + (ulong(slot) * p.parts + part) * p.outs + column;
        for (uint i = 0; i < 4; i++) v[i] = column + i < p.outs ? from[i] : 0.0f;
    }
}
