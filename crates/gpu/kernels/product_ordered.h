// Products that add up in the order of the released fp8 and fp4 kernels.
#include "product.h"

// Threads of a threadgroup of the released order.
#define ORDERED 256

// As the released fp8 and fp4 kernels add: 32 columns first, one fused multiply-add each, then these sums, ascending. All 256
// threads of a threadgroup take part: a thread sums groups of 32 columns, thread i < OUTS * ROWS (16 at most) adds them
// up and returns the sum of output `i / ROWS` and row `i % ROWS`.
inline float product_ordered(Product p, uint o0, thread const ulong* rows, threadgroup float* parts, uint tid) {
    uint groups = (p.cols + 31) / 32;
    ulong stride = row_bytes(p.cols);
    float total = 0.0f;
    for (uint base = 0; base < groups; base += ORDERED) {
        uint g = base + tid;
        if (g < groups) {
            float x[4][32];
            for (uint r = 0; r < ROWS; r++) {
                for (uint i = 0; i < 32; i++) x[r][i] = 0.0f;
                for (uint i = 0; i < 32; i += 8) {
                    if (g * 32 + i < p.cols) load8(p.x + rows[r], g * 32 + i, p.cols, x[r] + i);
                }
            }
            for (uint o = 0; o < OUTS; o++) {
                uint row = min(o0 + o, p.end - 1);
                float w[32];
                for (uint i = 0; i < 32; i++) w[i] = 0.0f;
                for (uint i = 0; i < 32; i += 8) {
                    if (g * 32 + i < p.cols) decode8(p.data + row * stride, g * 32 + i, p.cols, w + i);
                }
                float s = decode_e8m0(p.scale[ulong(row >> p.scale_shift) * groups + g]);
                for (uint r = 0; r < ROWS; r++) {
                    float sum = 0.0f;
                    for (uint i = 0; i < 32; i++) sum = fma(w[i], x[r][i], sum);
                    parts[(o * ROWS + r) * (ORDERED + 1) + tid] = sum * form_factor() * s;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (tid < OUTS * ROWS) {
            uint n = min(groups - base, uint(ORDERED));
            for (uint i = 0; i < n; i++) total = total + parts[tid * (ORDERED + 1) + i];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    return total;
}
