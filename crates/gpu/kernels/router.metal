// The router of the mixture of experts.
#include <metal_stdlib>
using namespace metal;
#include "router.h"

// As `route`. A threadgroup of 128 takes a row.
kernel void router(device const float* logits [[buffer(0)]],
                   device const float* bias [[buffer(1)]],
                   device const float* other [[buffer(2)]],
                   device const uint* image [[buffer(3)]],
                   device int* experts [[buffer(4)]],
                   device float* weights [[buffer(5)]],
                   constant RouterParams& p [[buffer(6)]],
                   uint row [[threadgroup_position_in_grid]],
                   uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float scores[MOST];
    threadgroup float biased[MOST];
    route(logits, bias, other, image, experts, weights, p, row, scores, biased, tid, 128);
}
