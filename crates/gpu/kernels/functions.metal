// The functions of our headers one by one, for their tests.
#include <metal_stdlib>
using namespace metal;
#include "numerics.h"
#include "math.h"

// Which function.
constant uint FUNCTION [[function_constant(0)]];

struct FunctionParams {
    uint count;
    uint first;
    uint step;
};

// y [count]: bits of the function at the single whose bits are first + i * step.
kernel void functions(device uint* y [[buffer(0)]],
                      constant FunctionParams& p [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
    if (i >= p.count) return;
    uint bits = p.first + i * p.step;
    float x = as_type<float>(bits);
    uint v = 0;
    if (FUNCTION == 0) v = as_type<uint>(exp_precise(x));
    if (FUNCTION == 1) v = as_type<uint>(log1p_precise(x));
    if (FUNCTION == 2) v = as_type<uint>(softplus(x));
    if (FUNCTION == 3) v = as_type<uint>(sigmoid(x));
    if (FUNCTION == 4) v = as_type<uint>(silu(x));
    if (FUNCTION == 5) v = as_type<uint>(rsqrt_precise(x));
    if (FUNCTION == 6) v = as_type<uint>(round_bf16(x));
    if (FUNCTION == 7) v = e4m3_encode(x);
    if (FUNCTION == 8) v = e2m1_encode(x);
    if (FUNCTION == 9) v = as_type<uint>(e4m3_decode(bits));
    if (FUNCTION == 10) v = as_type<uint>(e2m1_decode(bits));
    if (FUNCTION == 11) v = as_type<uint>(e8m0_decode(bits));
    y[i] = v;
}
