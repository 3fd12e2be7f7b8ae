// What attention needs of its own rows, behind the first two projections: the query latent's norm, and the window row with norm,
// rotation and quantiser.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "norm.h"
#include "turned.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

// Most values of a window row.
#define DIM 512

struct AttentionRowsParams {
    uint rank;  // of the latent
    uint width; // of a window row
    uint turned; // last pairs of it that are turned
    float rank_part; // 1/rank
    float width_part;
    float eps;
};

// latent [T, rank] normed; codes [T, width + width/32] of kv [T, width] normed and turned by turns [T, turned, 2]. A threadgroup of
// 256 takes one of the two.
kernel void attention_rows(device const float* raw [[buffer(0)]],
                           device const float* q_weight [[buffer(1)]],
                           device float* latent [[buffer(2)]],
                           device const float* kv [[buffer(3)]],
                           device const float* kv_weight [[buffer(4)]],
                           device const float* turns [[buffer(5)]],
                           device uchar* codes [[buffer(6)]],
                           constant AttentionRowsParams& p [[buffer(7)]],
                           uint2 group [[threadgroup_position_in_grid]],
                           uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float scratch[32];
    threadgroup float values[DIM];
    if (group.x == 0) {
        ulong at = ulong(group.y) * p.rank;
        norm_row(raw + at, q_weight, latent + at, p.rank, p.rank_part, p.eps, SOURCE, scratch, tid, 256);
        return;
    }
    device const float* x = kv + ulong(group.y) * p.width;
    float r = norm_factor(x, p.width, p.width_part, p.eps, scratch, tid, 256);
    for (uint i = tid; i < p.width; i += 256) {
        float v = kv_weight[i] * (x[i] * r);
        values[i] = SOURCE ? round_bf16(v) : v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    turn_row(values, p.width, p.turned, turns + ulong(group.y) * p.turned * 2, SOURCE, tid, 256);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint blocks = (p.width + 31) / 32;
    uint lane = tid % 32;
    device uchar* row = codes + ulong(group.y) * (p.width + blocks);
    for (uint b = tid / 32; b < blocks; b += 8) {
        uint c = b * 32 + lane;
        float v = c < p.width ? values[c] : 0.0f;
        int e = fp8_exponent(simd_max(block_largest(0.0f, v)));
        if (c < p.width) row[c] = uchar(fp8_code(v, e));
        if (lane == 0) row[p.width + b] = uchar(e + 127);
    }
}
