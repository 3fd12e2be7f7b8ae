// Sparse attention over window rows and compressed entries, with sinks: online softmax in blocks of 64 columns, as the
// reference steps. The scores of all columns come first; then the values, where every dimension of every head adds up its columns
// in their order, so that heads and dimensions may be spread over the whole GPU.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "math.h"

// Probabilities and results are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

// Most values of a head; 16-byte pieces of a decoded column, whose values are bf16, which holds every stored value exactly.
#define DIM 512
#define PIECES 64
// Columns of a threadgroup of scores, and its heads, two a simdgroup.
#define CHUNK 8
#define HEADS 16
// Columns of a step of the softmax, and steps whose probabilities are kept at a time.
#define STEP 64
#define SPAN 16
// Dimensions of a threadgroup of values, two a lane, and its heads, one a simdgroup.
#define SLICE 64
#define TEAM 4

struct AttentionParams {
    uint heads;
    uint dim;
    uint window; // columns of the window, oldest first; those before the text are empty
    uint slots;  // rows of the ring
    uint base;   // positions from here on lie in `fresh`
    uint extra;  // rows of `fresh` that every query sees behind its window
    uint top;    // compressed entries of a query
    uint key_bytes;
    uint entry_bytes;
    uint columns; // padded to whole steps
    float scale;
};

// Where a column lies: 0 nowhere, 1 ring, 2 fresh, 3 compressed; and its row there.
inline uint2 column_place(constant AttentionParams& p, device const int* top, uint position, uint row, uint c) {
    if (c < p.window) {
        uint oldest = position + 1 > p.window ? position + 1 - p.window : 0;
        uint s = oldest + c;
        if (s > position) return uint2(0, 0);
        return s >= p.base ? uint2(2, s - p.base) : uint2(1, s % p.slots);
    }
    c -= p.window;
    if (c < p.extra) return uint2(2, c);
    c -= p.extra;
    int entry = c < p.top ? top[ulong(row) * p.top + c] : -1;
    return entry < 0 ? uint2(0, 0) : uint2(3, uint(entry));
}

// Two values as a word of bf16.
inline uint bf16_pair(float a, float b) {
    return (as_type<uint>(a) >> 16) | (as_type<uint>(b) & 0xffff0000u);
}

// 16 values of a stored window row: codes and the scale of their 32.
inline void decode_key(device const uchar* codes, uint scale_code, bool whole, thread uint* w) {
    float scale = e8m0_decode(scale_code);
    uint c[4];
    if (whole) {
        uint4 v = *(device const uint4*)codes;
        c[0] = v.x; c[1] = v.y; c[2] = v.z; c[3] = v.w;
    } else {
        for (uint i = 0; i < 4; i++) {
            c[i] = uint(codes[4 * i]) | (uint(codes[4 * i + 1]) << 8) | (uint(codes[4 * i + 2]) << 16) |
                   (uint(codes[4 * i + 3]) << 24);
        }
    }
    for (uint i = 0; i < 8; i++) {
        uint pair = c[i / 2] >> (16 * (i % 2));
        w[i] = bf16_pair(e4m3_decode(pair & 255u) * scale, e4m3_decode((pair >> 8) & 255u) * scale);
    }
}

// 16 values of a compressed entry: packed codes and their scale.
inline void decode_entry(device const uchar* codes, uint scale_code, bool whole, thread uint* w) {
    float scale = e4m3_decode(scale_code);
    uint c[2];
    if (whole) {
        uint2 v = *(device const uint2*)codes;
        c[0] = v.x; c[1] = v.y;
    } else {
        for (uint i = 0; i < 2; i++) {
            c[i] = uint(codes[4 * i]) | (uint(codes[4 * i + 1]) << 8) | (uint(codes[4 * i + 2]) << 16) |
                   (uint(codes[4 * i + 3]) << 24);
        }
    }
    for (uint i = 0; i < 8; i++) {
        uint pair = c[i / 4] >> (8 * (i % 4));
        w[i] = bf16_pair(e2m1_decode(pair) * scale, e2m1_decode(pair >> 4) * scale);
    }
}

// scores [T, heads, columns], minus infinity in empty columns, and the decoded columns [T, columns, DIM]. A threadgroup of 256
// takes 8 columns and 16 heads.
kernel void attention_scores(device const float* q [[buffer(0)]],
                             device const uchar* ring [[buffer(1)]],
                             device const uchar* fresh [[buffer(2)]],
                             device const uchar* cache [[buffer(3)]],
                             device const int* top [[buffer(4)]],
                             device const uint* positions [[buffer(5)]],
                             device float* scores [[buffer(6)]],
                             device uint4* decoded [[buffer(7)]],
                             constant AttentionParams& p [[buffer(8)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint tid [[thread_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint4 panel[CHUNK * PIECES];
    uint row = group.z;
    uint position = positions[row];
    uint first = group.x * CHUNK;
    uint blocks = p.dim / 16;
    for (uint item = tid; item < CHUNK * blocks; item += 256) {
        uint j = item / blocks;
        uint b = item % blocks;
        uint2 place = column_place(p, top, position, row, first + j);
        uint w[8];
        if (place.x == 0) {
            for (uint i = 0; i < 8; i++) w[i] = 0;
        } else if (place.x == 3 && p.entry_bytes == 4 * p.dim) {
            // Entries given as values, which no cache stores: another implementation's keys.
            device const float* from = (device const float*)(cache + ulong(place.y) * p.entry_bytes) + b * 16;
            for (uint i = 0; i < 8; i++) w[i] = bf16_pair(from[2 * i], from[2 * i + 1]);
        } else if (place.x == 3) {
            device const uchar* from = cache + ulong(place.y) * p.entry_bytes;
            decode_entry(from + b * 8, from[p.dim / 2 + b], p.entry_bytes % 8 == 0, w);
        } else {
            device const uchar* from = (place.x == 1 ? ring : fresh) + ulong(place.y) * p.key_bytes;
            decode_key(from + b * 16, from[p.dim + b / 2], p.key_bytes % 16 == 0, w);
        }
        uint4 low = uint4(w[0], w[1], w[2], w[3]);
        uint4 high = uint4(w[4], w[5], w[6], w[7]);
        panel[j * PIECES + 2 * b] = low;
        panel[j * PIECES + 2 * b + 1] = high;
        if (group.y == 0) {
            device uint4* to = decoded + (ulong(row) * p.columns + first + j) * PIECES + 2 * b;
            to[0] = low;
            to[1] = high;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint head = group.y * HEADS + simdgroup * 2;
    if (head >= p.heads) return;
    threadgroup const uint2* words = (threadgroup const uint2*)panel;
    ulong at = (ulong(row) * p.heads + head) * p.dim;
    ulong next = head + 1 < p.heads ? p.dim : 0;
    // Value j is the score of column j of this head, value j + 8 that of the next head.
    float s[2 * CHUNK];
    for (uint j = 0; j < 2 * CHUNK; j++) s[j] = 0.0f;
    for (uint i = 0; i < 4; i++) {
        uint d = i * 128 + lane * 4;
        if (d < p.dim) {
            float4 a = *(device const float4*)(q + at + d);
            float4 b = *(device const float4*)(q + at + next + d);
            for (uint j = 0; j < CHUNK; j++) {
                uint2 w = words[j * 2 * PIECES + i * 32 + lane];
                float k0 = as_type<float>(w.x << 16);
                float k1 = as_type<float>(w.x & 0xffff0000u);
                float k2 = as_type<float>(w.y << 16);
                float k3 = as_type<float>(w.y & 0xffff0000u);
                s[j] = fma(a.w, k3, fma(a.z, k2, fma(a.y, k1, fma(a.x, k0, s[j]))));
                s[j + CHUNK] = fma(b.w, k3, fma(b.z, k2, fma(b.y, k1, fma(b.x, k0, s[j + CHUNK]))));
            }
        }
    }
    // A tree over the lanes; lanes 0 to 15 end up with a value each.
    for (uint n = CHUNK; n > 0; n /= 2) {
        uint bit = CHUNK / n;
        bool upper = (lane & bit) != 0;
        for (uint i = 0; i < n; i++) {
            float keep = upper ? s[i + n] : s[i];
            float give = upper ? s[i] : s[i + n];
            s[i] = keep + simd_shuffle_xor(give, ushort(bit));
        }
    }
    s[0] = s[0] + simd_shuffle_xor(s[0], ushort(16));
    uint which = head + (lane & 1);
    if (lane < 16 && which < p.heads) {
        uint c = first + (lane & 2) * 2 + (lane & 4) / 2 + (lane & 8) / 8;
        bool real = column_place(p, top, position, row, c).x != 0;
        float none = as_type<float>(0xff800000u);
        scores[(ulong(row) * p.heads + which) * p.columns + c] = real ? s[0] * p.scale : none;
    }
}

struct ValuesParams {
    uint heads;
    uint dim;
    uint columns;
    uint turned;     // last pairs of a head that are turned back
    uint kept;       // rows of `codes` that go to the ring
    uint code_bytes; // of a row
    uint slots;      // rows of the ring
};

// out [T, heads * dim], turned back by turns [T, turned, 2]; beside it row t of `codes` goes to slot kept_positions[t] mod slots of
// the ring, which the scores have read. A threadgroup of 128 takes 64 dimensions of four heads.
kernel void attention_values(device const float* scores [[buffer(0)]],
                             device const uint4* decoded [[buffer(1)]],
                             device const float* sinks [[buffer(2)]],
                             device float* out [[buffer(3)]],
                             device const float* turns [[buffer(4)]],
                             device const uchar* codes [[buffer(5)]],
                             device const uint* kept_positions [[buffer(6)]],
                             device uchar* ring [[buffer(7)]],
                             constant ValuesParams& p [[buffer(8)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint tid [[thread_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup uint4 panel[STEP * SLICE / 8];
    threadgroup float4 probs[TEAM * SPAN * STEP / 4];
    threadgroup float alphas[TEAM * SPAN];
    uint row = group.z;
    uint head = group.y * TEAM + simdgroup;
    bool real = head < p.heads;
    ulong line = ulong(row) * p.heads + (real ? head : 0);
    device const float* from = scores + line * p.columns;
    device const uint4* rows = decoded + ulong(row) * p.columns * PIECES + group.x * (SLICE / 8);
    threadgroup float* mine = (threadgroup float*)probs + simdgroup * SPAN * STEP;
    threadgroup const uint* words = (threadgroup const uint*)panel;
    if (group.x == 0 && group.y == 0 && row < p.kept) {
        device uchar* slot = ring + ulong(kept_positions[row] % p.slots) * p.code_bytes;
        for (uint i = tid; i < p.code_bytes; i += 128) slot[i] = codes[ulong(row) * p.code_bytes + i];
    }
    // The next step's part of this thread, on its way while a step is computed.
    uint4 ahead[4];
    for (uint i = 0; i < 4; i++) {
        uint item = tid + i * 128;
        ahead[i] = rows[ulong(item / 8) * PIECES + item % 8];
    }
    float m = -1e30f;
    float l = 0.0f;
    float o0 = 0.0f;
    float o1 = 0.0f;
    for (uint start = 0; start < p.columns; start += SPAN * STEP) {
        uint steps = min((p.columns - start) / STEP, uint(SPAN));
        float low[SPAN];
        float high[SPAN];
        for (uint b = 0; b < SPAN; b++) {
            if (b < steps) {
                low[b] = from[start + b * STEP + lane];
                high[b] = from[start + b * STEP + lane + 32];
            }
        }
        // What the last span left has been read.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint b = 0; b < SPAN; b++) {
            if (b < steps) {
                float next = max(m, simd_max(max(low[b], high[b])));
                if (lane == 0) alphas[simdgroup * SPAN + b] = exp_precise(m - next);
                mine[b * STEP + lane] = exp_precise(low[b] - next);
                mine[b * STEP + lane + 32] = exp_precise(high[b] - next);
                m = next;
            }
        }
        for (uint b = 0; b < steps; b++) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = 0; i < 4; i++) panel[tid + i * 128] = ahead[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            uint following = start + (b + 1) * STEP;
            if (following < p.columns) {
                for (uint i = 0; i < 4; i++) {
                    uint item = tid + i * 128;
                    ahead[i] = rows[ulong(following + item / 8) * PIECES + item % 8];
                }
            }
            float alpha = alphas[simdgroup * SPAN + b];
            l = l * alpha;
            o0 = o0 * alpha;
            o1 = o1 * alpha;
            threadgroup const float4* four = probs + (simdgroup * SPAN + b) * (STEP / 4);
            for (uint j = 0; j < STEP; j += 4) {
                float4 v = four[j / 4];
                float e[4];
                e[0] = v.x; e[1] = v.y; e[2] = v.z; e[3] = v.w;
                for (uint i = 0; i < 4; i++) {
                    float weight = SOURCE ? round_bf16(e[i]) : e[i];
                    uint w = words[(j + i) * (SLICE / 2) + lane];
                    l = l + e[i];
                    o0 = fma(weight, as_type<float>(w << 16), o0);
                    o1 = fma(weight, as_type<float>(w & 0xffff0000u), o1);
                }
            }
        }
    }
    uint d = group.x * SLICE + 2 * lane;
    if (!real || d >= p.dim) return;
    l = l + exp_precise(sinks[head] - m);
    float a = precise::divide(o0, l);
    float b = precise::divide(o1, l);
    if (SOURCE) {
        a = round_bf16(a);
        b = round_bf16(b);
    }
    uint unturned = p.dim / 2 - p.turned;
    if (d / 2 >= unturned) {
        device const float* turn = turns + (ulong(row) * p.turned + (d / 2 - unturned)) * 2;
        float c = turn[0];
        float s = -turn[1];
        float u = a * c - b * s;
        float v = a * s + b * c;
        a = SOURCE ? round_bf16(u) : u;
        b = SOURCE ? round_bf16(v) : v;
    }
    device float* to = out + line * p.dim + d;
    to[0] = a;
    to[1] = b;
}
