// Sums whose order depends on nothing but the shape.

// Adds two unevaluated sums (value, rounding error).
inline float2 pair_add(float2 a, float2 b) {
    float s = a.x + b.x;
    float t = s - a.x;
    float e = (a.x - (s - t)) + (b.x - t);
    return float2(s, e + (a.y + b.y));
}

// acc + a * b with the rounding errors of both.
inline float2 pair_multiply_add(float2 acc, float a, float b) {
    float p = a * b;
    return pair_add(acc, float2(p, fma(a, b, -p)));
}

// Over the threadgroup, the same in every thread. `scratch` holds two numbers a simdgroup, at most 32.
inline float pair_total(float2 v, threadgroup float* scratch, uint lane, uint simdgroup, uint simdgroups) {
    for (uint m = 16; m > 0; m /= 2) {
        float x = simd_shuffle_xor(v.x, ushort(m));
        float y = simd_shuffle_xor(v.y, ushort(m));
        v = pair_add(v, float2(x, y));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
        scratch[2 * simdgroup] = v.x;
        scratch[2 * simdgroup + 1] = v.y;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float2 total = float2(0.0f, 0.0f);
    for (uint s = 0; s < simdgroups; s++) total = pair_add(total, float2(scratch[2 * s], scratch[2 * s + 1]));
    return total.x + total.y;
}
