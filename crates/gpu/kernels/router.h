// The choice of experts.
#include "math.h"

// Most experts of a layer.
#define MOST 1024

struct RouterParams {
    uint experts;
    uint top;
    float scale;
    uint images; // whether `image` and `other` count
};

// The `top` experts with the highest sqrt(softplus(logit)) + bias, lower id on ties, in the order of choice, and their
// weights. Rows whose `image` is set take the bias `other`. A threadgroup takes a row; its first simdgroup chooses. `scores` and
// `biased` hold MOST values.
inline void route(device const float* logits,
                  device const float* bias,
                  device const float* other,
                  device const uint* image,
                  device int* experts,
                  device float* weights,
                  RouterParams p,
                  uint row,
                  threadgroup float* scores,
                  threadgroup float* biased,
                  uint tid,
                  uint threads) {
    bool vision = p.images != 0 && image[row] != 0;
    for (uint e = tid; e < p.experts; e += threads) {
        float s = precise::sqrt(softplus(logits[ulong(row) * p.experts + e]));
        scores[e] = s;
        biased[e] = s + (vision ? other[e] : bias[e]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid >= 32) return;
    uint lane = tid;
    float none = as_type<float>(0xff800000u);
    float sum = 0.0f;
    for (uint i = 0; i < p.top; i++) {
        float best = none;
        uint place = 0xffffffffu;
        for (uint e = lane; e < p.experts; e += 32) {
            if (biased[e] > best) {
                best = biased[e];
                place = e;
            }
        }
        for (uint m = 16; m > 0; m /= 2) {
            float v = simd_shuffle_xor(best, ushort(m));
            uint e = simd_shuffle_xor(place, ushort(m));
            if (v > best || (v == best && e < place)) {
                best = v;
                place = e;
            }
        }
        // No finite score left: the first expert, as a wrong input deserves no wild access.
        uint e = place < p.experts ? place : 0;
        sum = sum + scores[e];
        if (lane == 0) experts[ulong(row) * p.top + i] = int(e);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (lane == 0) {
            biased[e] = none;
            weights[ulong(row) * p.top + i] = scores[e];
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (lane == 0) {
        for (uint i = 0; i < p.top; i++) {
            ulong at = ulong(row) * p.top + i;
            weights[at] = precise::divide(weights[at], sum + 1e-20f) * p.scale;
        }
    }
}
