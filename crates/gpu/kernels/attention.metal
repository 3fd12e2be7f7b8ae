// Sparse attention over window rows and compressed entries, with sinks: online softmax in blocks of 64 columns, as the
// reference steps. A simdgroup takes a head; the simdgroups of a threadgroup share the decoding of eight columns at a time.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "math.h"

// Probabilities and results are rounded as the released reference rounds.
constant bool SOURCE [[function_constant(0)]];

// Most values of a head, columns decoded at a time, columns of a step, most simdgroups.
#define DIM 512
#define CHUNK 8
#define STEP 64
#define GROUPS 8

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

kernel void attention(device const float* q [[buffer(0)]],
                      device const uchar* ring [[buffer(1)]],
                      device const uchar* fresh [[buffer(2)]],
                      device const uchar* cache [[buffer(3)]],
                      device const int* top [[buffer(4)]],
                      device const float* sinks [[buffer(5)]],
                      device const uint* positions [[buffer(6)]],
                      device float* out [[buffer(7)]],
                      constant AttentionParams& p [[buffer(8)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint tid [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float panel[CHUNK * DIM];
    threadgroup float probs[GROUPS * STEP];
    uint row = group.y;
    uint position = positions[row];
    uint head = group.x * simdgroups + simdgroup;
    bool real = head < p.heads;
    ulong at = (ulong(row) * p.heads + (real ? head : 0)) * p.dim;
    // Lane l holds values 128 i + 4 l to 128 i + 4 l + 3.
    float query[16];
    float o[16];
    for (uint i = 0; i < 16; i++) {
        uint d = (i / 4) * 128 + lane * 4 + i % 4;
        query[i] = d < p.dim ? q[at + d] : 0.0f;
        o[i] = 0.0f;
    }
    threadgroup float* mine = probs + simdgroup * STEP;
    float none = as_type<float>(0xff800000u);
    float m = -1e30f;
    float l = 0.0f;
    uint columns = p.window + p.extra + p.top;
    uint blocks = p.dim / 16;
    for (uint first = 0; first < columns; first += STEP) {
        float alpha = 1.0f;
        // Scores first, then values: the columns of a step fit in threadgroup memory eight at a time only.
        for (uint pass = 0; pass < 2; pass++) {
            for (uint chunk = 0; chunk < STEP; chunk += CHUNK) {
                bool any = false;
                for (uint j = 0; j < CHUNK; j++) {
                    uint c = first + chunk + j;
                    if (c < columns && column_place(p, top, position, row, c).x != 0) any = true;
                }
                if (any) {
                    threadgroup_barrier(mem_flags::mem_threadgroup);
                    for (uint item = tid; item < CHUNK * blocks; item += 32 * simdgroups) {
                        uint j = item / blocks;
                        uint b = item % blocks;
                        uint c = first + chunk + j;
                        threadgroup float* to = panel + j * DIM + b * 16;
                        uint2 place = c < columns ? column_place(p, top, position, row, c) : uint2(0, 0);
                        if (place.x == 0) {
                            for (uint i = 0; i < 16; i++) to[i] = 0.0f;
                        } else if (place.x == 3) {
                            device const uchar* from = cache + ulong(place.y) * p.entry_bytes;
                            float scale = e4m3_decode(from[p.dim / 2 + b]);
                            for (uint i = 0; i < 8; i++) {
                                uint byte = from[b * 8 + i];
                                to[2 * i] = e2m1_decode(byte) * scale;
                                to[2 * i + 1] = e2m1_decode(byte >> 4) * scale;
                            }
                        } else {
                            device const uchar* from = (place.x == 1 ? ring : fresh) + ulong(place.y) * p.key_bytes;
                            float scale = e8m0_decode(from[p.dim + b / 2]);
                            for (uint i = 0; i < 16; i++) to[i] = e4m3_decode(from[b * 16 + i]) * scale;
                        }
                    }
                    threadgroup_barrier(mem_flags::mem_threadgroup);
                }
                if (pass == 0) {
                    float s[CHUNK];
                    for (uint j = 0; j < CHUNK; j++) {
                        s[j] = 0.0f;
                        if (any) {
                            for (uint i = 0; i < 16; i++) {
                                uint d = (i / 4) * 128 + lane * 4 + i % 4;
                                if (d < p.dim) s[j] = fma(query[i], panel[j * DIM + d], s[j]);
                            }
                        }
                    }
                    // A tree over the lanes; lane l ends up with column 4 (l & 1) + (l & 2) + (l >> 2 & 1).
                    for (uint n = 4; n > 0; n /= 2) {
                        uint bit = 4 / n;
                        bool upper = (lane & bit) != 0;
                        for (uint i = 0; i < n; i++) {
                            float keep = upper ? s[i + n] : s[i];
                            float give = upper ? s[i] : s[i + n];
                            s[i] = keep + simd_shuffle_xor(give, ushort(bit));
                        }
                    }
                    s[0] = s[0] + simd_shuffle_xor(s[0], ushort(8));
                    s[0] = s[0] + simd_shuffle_xor(s[0], ushort(16));
                    if (lane < CHUNK) {
                        uint j = chunk + (lane & 1) * 4 + (lane & 2) + (lane >> 2);
                        uint c = first + j;
                        bool ok = c < columns && column_place(p, top, position, row, c).x != 0;
                        mine[j] = ok ? s[0] * p.scale : none;
                    }
                } else if (any) {
                    for (uint j = 0; j < CHUNK; j++) {
                        float weight = SOURCE ? round_bf16(mine[chunk + j]) : mine[chunk + j];
                        for (uint i = 0; i < 16; i++) {
                            uint d = (i / 4) * 128 + lane * 4 + i % 4;
                            if (d < p.dim) o[i] = fma(weight, panel[j * DIM + d], o[i]);
                        }
                    }
                }
            }
            if (pass == 0) {
                threadgroup_barrier(mem_flags::mem_threadgroup);
                float low = mine[lane];
                float high = mine[lane + 32];
                float next = max(m, simd_max(max(low, high)));
                alpha = exp_precise(m - next);
                mine[lane] = exp_precise(low - next);
                mine[lane + 32] = exp_precise(high - next);
                threadgroup_barrier(mem_flags::mem_threadgroup);
                l = l * alpha;
                for (uint j = 0; j < STEP; j++) l = l + mine[j];
                for (uint i = 0; i < 16; i++) o[i] = o[i] * alpha;
                m = next;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (!real) return;
    l = l + exp_precise(sinks[head] - m);
    for (uint i = 0; i < 16; i++) {
        uint d = (i / 4) * 128 + lane * 4 + i % 4;
        if (d < p.dim) {
            float v = precise::divide(o[i], l);
            out[at + d] = SOURCE ? round_bf16(v) : v;
        }
    }
}
