// Pooling of pairs, index scores, candidate blocks and the choice of entries.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "pooled.h"
#include "select.h"

// Values are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

struct PoolParams {
    uint width;
};

// latent [G, width] from kv and score [G, 2, width]: per channel the softmax of two scores weighs two values.
kernel void pool_pairs(device const float* kv [[buffer(0)]],
                       device const float* score [[buffer(1)]],
                       device float* latent [[buffer(2)]],
                       constant PoolParams& p [[buffer(3)]],
                       uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.width) return;
    ulong i = ulong(at.y) * 2 * p.width + at.x;
    float v = pooled(score[i], score[i + p.width], kv[i], kv[i + p.width]);
    latent[ulong(at.y) * p.width + at.x] = SOURCE ? round_bf16(v) : v;
}

// Keys of a threadgroup, and most values of a query and heads.
#define KEYS 64
#define QUERY 4096
#define HEADS 64

struct ScoreParams {
    uint heads;
    uint dim; // of a head, whole runs of 32, at most 128
    uint n;
    uint stride; // bytes of a key
    float factor;
    uint raw; // queries come before their quantiser
};

// score [T, n]; minus infinity from visible[t] on. A threadgroup of 256 takes 64 keys of a row, four lanes a key, 32 values a
// lane.
kernel void index_scores(device const float* q [[buffer(0)]],
                         device const float* w [[buffer(1)]],
                         device const uchar* keys [[buffer(2)]],
                         device const uint* visible [[buffer(3)]],
                         device float* score [[buffer(4)]],
                         constant ScoreParams& p [[buffer(5)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint tid [[thread_index_in_threadgroup]]) {
    // Runs of 32 values, 36 apart, so that the four lanes of a key read from different banks.
    threadgroup float4 query[QUERY / 32 * 9];
    threadgroup float weights[HEADS];
    threadgroup float* into = (threadgroup float*)query;
    uint width = p.heads * p.dim;
    for (uint i = tid; i < width; i += 256) {
        float v = q[ulong(group.y) * width + i];
        // A simdgroup has a run.
        if (p.raw != 0) v = fp4_round(v, fp4_exponent(simd_max(block_largest(0.0f, v))));
        into[i / 32 * 36 + i % 32] = v;
    }
    for (uint i = tid; i < p.heads; i += 256) {
        float v = w[ulong(group.y) * p.heads + i];
        weights[i] = SOURCE ? round_bf16(round_bf16(v) * p.factor) : v * p.factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint seen = min(visible[group.y], p.n);
    uint part = tid % 4;
    bool some = part * 32 < p.dim;
    uint j = group.x * KEYS + tid / 4;
    device const uchar* key = keys + ulong(min(j, p.n - 1)) * p.stride;
    float k[32];
    float scale = e8m0_decode(key[p.dim / 2 + (some ? part : 0)]);
    for (uint d = 0; d < 32; d += 2) {
        uint byte = some ? uint(key[part * 16 + d / 2]) : 0;
        k[d] = e2m1_decode(byte) * scale;
        k[d + 1] = e2m1_decode(byte >> 4) * scale;
    }
    float sum = 0.0f;
    for (uint h = 0; h < p.heads; h++) {
        float dot = 0.0f;
        if (some) {
            threadgroup const float4* from = query + (h * p.dim / 32 + part) * 9;
            for (uint d = 0; d < 32; d += 4) {
                float4 v = from[d / 4];
                dot = fma(v.x, k[d], dot);
                dot = fma(v.y, k[d + 1], dot);
                dot = fma(v.z, k[d + 2], dot);
                dot = fma(v.w, k[d + 3], dot);
            }
        }
        dot = dot + simd_shuffle_xor(dot, ushort(1));
        dot = dot + simd_shuffle_xor(dot, ushort(2));
        float v = max(SOURCE ? round_bf16(dot) : dot, 0.0f) * weights[h];
        sum = sum + (SOURCE ? round_bf16(v) : v);
    }
    if (part == 0 && j < p.n) {
        float v = SOURCE ? round_bf16(sum) : sum;
        score[ulong(group.y) * p.n + j] = j < seen ? v : as_type<float>(0xff800000u);
    }
}

struct BlockParams {
    uint n;
    uint block;
    uint blocks;
};

// The highest score of a block of a row, plus infinity for the newest of `seen` entries.
inline float best_of(device const float* scores, uint at, uint block, uint n, uint seen) {
    float v = as_type<float>(0xff800000u);
    uint last = min((at + 1) * block, n);
    for (uint j = at * block; j < last; j++) v = max(v, scores[j]);
    if (seen > 0 && (seen - 1) / block == at) v = as_type<float>(0x7f800000u);
    return seen == 0 ? as_type<float>(0xff800000u) : v;
}

// best [T, blocks]: the highest score of every block, plus infinity for the newest of visible[t] entries.
kernel void block_best(device const float* scores [[buffer(0)]],
                       device const uint* visible [[buffer(1)]],
                       device float* best [[buffer(2)]],
                       constant BlockParams& p [[buffer(3)]],
                       uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.blocks) return;
    best[ulong(at.y) * p.blocks + at.x] = best_of(scores + ulong(at.y) * p.n, at.x, p.block, p.n, visible[at.y]);
}

// The same scores with minus infinity outside kept blocks.
kernel void mask_scores(device const float* scores [[buffer(0)]],
                        device const uchar* mask [[buffer(1)]],
                        device float* out [[buffer(2)]],
                        constant BlockParams& p [[buffer(3)]],
                        uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n) return;
    ulong i = ulong(at.y) * p.n + at.x;
    out[i] = mask[ulong(at.y) * p.blocks + at.x / p.block] == 1 ? scores[i] : as_type<float>(0xff800000u);
}

struct SelectParams {
    uint n;
    uint k;
    uint each; // values of a thread
};

// mask [T, n]: 1 for the k highest values. A threadgroup takes a row.
kernel void select_mask(device const float* values [[buffer(0)]],
                        device uchar* mask [[buffer(1)]],
                        constant SelectParams& p [[buffer(2)]],
                        uint row [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint threads [[threads_per_threadgroup]]) {
    threadgroup atomic_uint bins[256];
    threadgroup uint shared[2 * SELECTORS + 2];
    write_mask(values + ulong(row) * p.n, p.n, p.k, p.each, mask + ulong(row) * p.n, bins, shared, tid, threads);
}

// index [T, k]: the places of the k highest values, ascending, then -1. A threadgroup takes a row.
kernel void select_places(device const float* values [[buffer(0)]],
                          device int* index [[buffer(1)]],
                          constant SelectParams& p [[buffer(2)]],
                          uint row [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]],
                          uint threads [[threads_per_threadgroup]]) {
    threadgroup atomic_uint bins[256];
    threadgroup uint shared[2 * SELECTORS + 2];
    write_places(values + ulong(row) * p.n, p.n, p.k, p.each, index + ulong(row) * p.k, bins, shared, tid, threads);
}

struct ChooseParams {
    uint n;
    uint k;
    uint each; // values of a thread
    uint block;
    uint blocks;
    uint keep; // blocks that are kept, or 0
    uint each_block; // blocks of a thread
    uint masked;
};

// index [T, k] as select_places makes it of scores [T, n], and beside it, where blocks are kept, mask [T, blocks] as block_best and
// select_mask do. `masked`: of scores in kept blocks alone, by way of kept [T, n]. A threadgroup takes either of a row.
kernel void choose_entries(device const float* scores [[buffer(0)]],
                           device const uint* visible [[buffer(1)]],
                           device uchar* mask [[buffer(2)]],
                           device float* best [[buffer(3)]],
                           device float* kept [[buffer(4)]],
                           device int* index [[buffer(5)]],
                           constant ChooseParams& p [[buffer(6)]],
                           uint2 group [[threadgroup_position_in_grid]],
                           uint tid [[thread_index_in_threadgroup]],
                           uint3 size [[threads_per_threadgroup]]) {
    threadgroup atomic_uint bins[256];
    threadgroup uint shared[2 * SELECTORS + 2];
    device const float* from = scores + ulong(group.y) * p.n;
    device uchar* row_mask = mask + ulong(group.y) * p.blocks;
    if (group.x == 1) {
        device float* to = best + ulong(group.y) * p.blocks;
        for (uint b = tid; b < p.blocks; b += size.x) to[b] = best_of(from, b, p.block, p.n, visible[group.y]);
        threadgroup_barrier(mem_flags::mem_device);
        write_mask(to, p.blocks, p.keep, p.each_block, row_mask, bins, shared, tid, size.x);
        return;
    }
    if (p.masked != 0) {
        device float* to = kept + ulong(group.y) * p.n;
        for (uint i = tid; i < p.n; i += size.x) {
            to[i] = row_mask[i / p.block] == 1 ? from[i] : as_type<float>(0xff800000u);
        }
        threadgroup_barrier(mem_flags::mem_device);
        from = to;
    }
    write_places(from, p.n, p.k, p.each, index + ulong(group.y) * p.k, bins, shared, tid, size.x);
}
