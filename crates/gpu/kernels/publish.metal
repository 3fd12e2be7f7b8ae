// What a KV source publishes of the groups that a step completes.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "norm.h"
#include "pooled.h"
#include "turned.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

struct PairsParams {
    uint width;
    uint open; // rows before those of the step: 0 or 1
    float part; // 1/width
    float eps;
};

// latent [G, width]: pool_pairs, then rmsnorm, of the open row and those of the step. A threadgroup of 256 takes a pair of rows.
kernel void pool_normed(device const float* open_kv [[buffer(0)]],
                        device const float* open_score [[buffer(1)]],
                        device const float* kv [[buffer(2)]],
                        device const float* score [[buffer(3)]],
                        device const float* weight [[buffer(4)]],
                        device float* latent [[buffer(5)]],
                        constant PairsParams& p [[buffer(6)]],
                        uint pair [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float scratch[32];
    device float* to = latent + ulong(pair) * p.width;
    bool before = pair == 0 && p.open != 0;
    ulong second = ulong(2 * pair + 1 - p.open) * p.width;
    ulong first = before ? 0 : second - p.width;
    device const float* first_kv = before ? open_kv : kv;
    device const float* first_score = before ? open_score : score;
    for (uint i = tid; i < p.width; i += 256) {
        float v = pooled(first_score[first + i], score[second + i], first_kv[first + i], kv[second + i]);
        to[i] = SOURCE ? round_bf16(v) : v;
    }
    // A thread norms what it has pooled.
    norm_row(to, weight, to, p.width, p.part, p.eps, SOURCE, scratch, tid, 256);
}

// Most values of a row.
#define DIM 512

struct PublishParams {
    uint width; // of an entry
    uint key_width;
    uint turned; // last pairs of either that are turned
    uint first;
    float key_part; // 1/key_width
    float eps;
};

// Entries first.. of two caches: latent [G, width] turned, in the form of publish_kv; key [G, key_width] normed and turned, in the
// form of publish_key. A threadgroup of 256 takes either.
kernel void publish_rows(device const float* latent [[buffer(0)]],
                         device const float* key [[buffer(1)]],
                         device const float* weight [[buffer(2)]],
                         device const float* turns [[buffer(3)]],
                         device uchar* entries [[buffer(4)]],
                         device uchar* keys [[buffer(5)]],
                         constant PublishParams& p [[buffer(6)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float scratch[32];
    threadgroup float values[DIM];
    bool is_key = group.x == 1;
    uint width = is_key ? p.key_width : p.width;
    device const float* x = (is_key ? key : latent) + ulong(group.y) * width;
    if (is_key) {
        float r = norm_factor(x, width, p.key_part, p.eps, scratch, tid, 256);
        for (uint i = tid; i < width; i += 256) {
            float v = weight[i] * (x[i] * r);
            values[i] = SOURCE ? round_bf16(v) : v;
        }
    } else {
        for (uint i = tid; i < width; i += 256) values[i] = x[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    turn_row(values, width, p.turned, turns + ulong(group.y) * p.turned * 2, SOURCE, tid, 256);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint lane = tid % 32;
    uint size = is_key ? 32 : 16;
    uint blocks = (width + size - 1) / size;
    device uchar* row = (is_key ? keys : entries) + ulong(p.first + group.y) * (width / 2 + blocks);
    for (uint c = tid; c - lane < width; c += 256) {
        float v = c < width ? values[c] : 0.0f;
        float largest = block_largest(0.0f, v);
        for (uint m = 1; m < size; m *= 2) largest = max(largest, simd_shuffle_xor(largest, ushort(m)));
        int e = fp4_exponent(largest);
        uint scale = kv_scale(largest);
        uint code = is_key ? fp4_code(v, e) : kv_code(v, e4m3_decode(scale));
        uint next = simd_shuffle_xor(code, ushort(1));
        if (c % 2 == 0 && c < width) row[c / 2] = uchar(code | (next << 4));
        if (c % size == 0 && c < width) row[width / 2 + c / size] = uchar(is_key ? uint(e + 127) : scale);
    }
}
