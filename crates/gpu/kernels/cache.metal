// The caches: rows in their exact stored forms.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"

struct CacheParams {
    uint width; // values of a row, or bytes where rows are codes
    uint first; // first row that is written
    uint slots; // rows of the ring
};

// codes [T, width + width/32]: E4M3 codes, then E8M0 scales. A thread takes 32 values.
kernel void store_window(device const float* x [[buffer(0)]],
                         device uchar* codes [[buffer(1)]],
                         constant CacheParams& p [[buffer(2)]],
                         uint2 at [[thread_position_in_grid]]) {
    uint blocks = (p.width + 31) / 32;
    if (at.x >= blocks) return;
    device const float* from = x + ulong(at.y) * p.width + at.x * 32;
    device uchar* row = codes + ulong(at.y) * (p.width + blocks);
    uint n = min(p.width - at.x * 32, 32u);
    float largest = 0.0f;
    for (uint i = 0; i < n; i++) largest = block_largest(largest, from[i]);
    int e = fp8_exponent(largest);
    for (uint i = 0; i < n; i++) row[at.x * 32 + i] = uchar(fp8_code(from[i], e));
    row[p.width + at.x] = uchar(e + 127);
}

// Rows first.. of the cache: packed E2M1, then an E4M3 scale for every 16. A thread takes 16 values.
kernel void publish_kv(device const float* x [[buffer(0)]],
                       device uchar* cache [[buffer(1)]],
                       constant CacheParams& p [[buffer(2)]],
                       uint2 at [[thread_position_in_grid]]) {
    uint blocks = (p.width + 15) / 16;
    if (at.x >= blocks) return;
    device const float* from = x + ulong(at.y) * p.width + at.x * 16;
    device uchar* row = cache + ulong(p.first + at.y) * (p.width / 2 + blocks);
    uint n = min(p.width - at.x * 16, 16u);
    float largest = 0.0f;
    for (uint i = 0; i < n; i++) largest = block_largest(largest, from[i]);
    uint code = kv_scale(largest);
    float scale = e4m3_decode(code);
    for (uint i = 0; i < n; i += 2) {
        uint low = kv_code(from[i], scale);
        row[at.x * 8 + i / 2] = uchar(low | (kv_code(from[i + 1], scale) << 4));
    }
    row[p.width / 2 + at.x] = uchar(code);
}

// Rows first.. of the cache: packed E2M1, then an E8M0 scale for every 32. A thread takes 32 values.
kernel void publish_key(device const float* x [[buffer(0)]],
                        device uchar* cache [[buffer(1)]],
                        constant CacheParams& p [[buffer(2)]],
                        uint2 at [[thread_position_in_grid]]) {
    uint blocks = (p.width + 31) / 32;
    if (at.x >= blocks) return;
    device const float* from = x + ulong(at.y) * p.width + at.x * 32;
    device uchar* row = cache + ulong(p.first + at.y) * (p.width / 2 + blocks);
    uint n = min(p.width - at.x * 32, 32u);
    float largest = 0.0f;
    for (uint i = 0; i < n; i++) largest = block_largest(largest, from[i]);
    int e = fp4_exponent(largest);
    for (uint i = 0; i < n; i += 2) {
        uint low = fp4_code(from[i], e);
        row[at.x * 16 + i / 2] = uchar(low | (fp4_code(from[i + 1], e) << 4));
    }
    row[p.width / 2 + at.x] = uchar(e + 127);
}

// y: x through E2M1 with a power-of-two scale for every 32 values. A thread takes 32 values.
kernel void quantise_query(device const float* x [[buffer(0)]],
                           device float* y [[buffer(1)]],
                           constant CacheParams& p [[buffer(2)]],
                           uint2 at [[thread_position_in_grid]]) {
    if (at.x * 32 >= p.width) return;
    ulong first = ulong(at.y) * p.width + at.x * 32;
    uint n = min(p.width - at.x * 32, 32u);
    float largest = 0.0f;
    for (uint i = 0; i < n; i++) largest = block_largest(largest, x[first + i]);
    int e = fp4_exponent(largest);
    for (uint i = 0; i < n; i++) y[first + i] = fp4_round(x[first + i], e);
}

// Row t of the codes to slot positions[t] mod slots of the ring. A thread takes a byte.
kernel void ring_write(device const uchar* codes [[buffer(0)]],
                       device const uint* positions [[buffer(1)]],
                       device uchar* ring [[buffer(2)]],
                       constant CacheParams& p [[buffer(3)]],
                       uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.width) return;
    ring[ulong(positions[at.y] % p.slots) * p.width + at.x] = codes[ulong(at.y) * p.width + at.x];
}

struct BytesParams {
    uint count;
};

// `count` bytes to another place.
kernel void copy_bytes(device const uchar* from [[buffer(0)]],
                       device uchar* to [[buffer(1)]],
                       constant BytesParams& p [[buffer(2)]],
                       uint i [[thread_position_in_grid]]) {
    if (i < p.count) to[i] = from[i];
}
