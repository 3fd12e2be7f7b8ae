#include <metal_stdlib>
using namespace metal;

struct Copy {
    uint rows;
    uint words;       // of a row
    uint from_stride; // words between rows
    uint to_stride;
};

// Rows of 32-bit words from one place to another.
kernel void copy_rows(device const uint* from [[buffer(0)]],
                      device uint* to [[buffer(1)]],
                      constant Copy& p [[buffer(2)]],
                      uint2 at [[thread_position_in_grid]]) {
    if (at.x < p.words && at.y < p.rows) to[ulong(at.y) * p.to_stride + at.x] = from[ulong(at.y) * p.from_stride + at.x];
}
