// The root mean square of a row, and rows divided by it.
#include "math.h"
#include "reduce.h"

// 1/sqrt(mean(x^2) + eps), the same in every thread. `scratch` holds two numbers a simdgroup.
inline float norm_factor(device const float* x,
                         uint width,
                         float part,
                         float eps,
                         threadgroup float* scratch,
                         uint tid,
                         uint threads) {
    float2 sum = float2(0.0f, 0.0f);
    for (uint i = tid; i < width; i += threads) sum = pair_multiply_add(sum, x[i], x[i]);
    return rsqrt_precise(pair_total(sum, scratch, tid % 32, tid / 32, threads / 32) * part + eps);
}

// y = weight * (x / rms), rounded to bf16 in `source`.
inline void norm_row(device const float* x,
                     device const float* weight,
                     device float* y,
                     uint width,
                     float part,
                     float eps,
                     bool source,
                     threadgroup float* scratch,
                     uint tid,
                     uint threads) {
    float r = norm_factor(x, width, part, eps, scratch, tid, threads);
    for (uint i = tid; i < width; i += threads) {
        float v = weight[i] * (x[i] * r);
        y[i] = source ? round_bf16(v) : v;
    }
}
