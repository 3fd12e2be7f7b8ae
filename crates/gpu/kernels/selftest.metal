#include <metal_stdlib>
using namespace metal;

// What a device must do right before anything else runs on it: one small kernel for each feature that others rely on.

constant uint STEP [[function_constant(0)]];
constant bool TWICE [[function_constant(1)]];

struct SelfTest {
    uint n;
};

// Sums of 256 consecutive values: lanes, then simdgroups.
kernel void selftest_sum(device const float* x [[buffer(0)]],
                         device float* sums [[buffer(1)]],
                         constant SelfTest& p [[buffer(2)]],
                         uint group [[threadgroup_position_in_grid]],
                         uint tid [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float parts[8];
    uint at = group * 256 + tid;
    float v = at < p.n ? x[at] * float(STEP) : 0.0f;
    v = simd_sum(v);
    if (lane == 0) parts[simd] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {
        float sum = 0.0f;
        for (uint i = 0; i < 8; i++) sum = sum + parts[i];
        sums[group] = TWICE ? sum + sum : sum;
    }
}

// The values of a simdgroup turned round, through shuffles and through dynamic threadgroup memory.
kernel void selftest_exchange(device const uint* x [[buffer(0)]],
                              device uint* y [[buffer(1)]],
                              threadgroup uint* mirror [[threadgroup(0)]],
                              uint tid [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
    mirror[31 - tid] = x[tid];
    uint v = simd_shuffle_xor(x[tid], ushort(31));
    uint up = simd_shuffle(v, ushort((lane + 1) % 32));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[tid] = v == mirror[tid] ? up : 0xffffffffu;
}

// C = A B + C for 8x8 matrices.
kernel void selftest_matrix(device const float* a [[buffer(0)]],
                            device const float* b [[buffer(1)]],
                            device float* c [[buffer(2)]]) {
    simdgroup_float8x8 ma;
    simdgroup_float8x8 mb;
    simdgroup_float8x8 mc;
    simdgroup_load(ma, a, 8);
    simdgroup_load(mb, b, 8);
    simdgroup_load(mc, c, 8);
    simdgroup_multiply_accumulate(mc, ma, mb, mc);
    simdgroup_store(mc, c, 8);
}
