// Products that add up in the order of the released fp8 and fp4 kernels.
#include "product.h"

// Most threads of a threadgroup of the released order.
#define ORDERED 256

// As the released fp8 and fp4 kernels add: 32 columns first, one fused multiply-add each, then these sums, ascending. All
// threads of a threadgroup take part: a thread sums groups of 32 columns, thread i < OUTS * ROWS (16 at most) adds them
// up and returns the sum of output `i / ROWS` and row `i % ROWS`.
inline float product_ordered(Outputs w,
                             device const float* x,
                             thread const ulong* rows,
                             uint cols,
                             threadgroup float* parts,
                             uint tid,
                             uint threads) {
    uint groups = (cols + 31) / 32;
    float total = 0.0f;
    for (uint base = 0; base < groups; base += threads) {
        uint g = base + tid;
        if (g < groups) {
            float a[4][32];
            for (uint r = 0; r < ROWS; r++) {
                for (uint i = 0; i < 32; i++) a[r][i] = 0.0f;
                for (uint i = 0; i < 32; i += 8) {
                    if (g * 32 + i < cols) load8(x + rows[r], g * 32 + i, cols, a[r] + i);
                }
            }
            for (uint o = 0; o < OUTS; o++) {
                float v[32];
                for (uint i = 0; i < 32; i++) v[i] = 0.0f;
                uint nan = 0;
                for (uint i = 0; i < 32; i += 8) {
                    if (g * 32 + i < cols) nan |= decode8(FORM, w.data[o], g * 32 + i, cols, v + i);
                }
                float s = decode_e8m0(w.scale[o][g]);
                for (uint r = 0; r < ROWS; r++) {
                    float sum = 0.0f;
                    for (uint i = 0; i < 32; i++) sum = fma(v[i], a[r][i], sum);
                    parts[(o * ROWS + r) * (ORDERED + 1) + tid] = with_nan(sum * form_factor(FORM) * s, nan);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (tid < OUTS * ROWS) {
            uint n = min(groups - base, threads);
            for (uint i = 0; i < n; i++) total = total + parts[tid * (ORDERED + 1) + i];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    return total;
}
