// Kernels with one fault each, and `right`, which has none.
#include <metal_stdlib>
using namespace metal;

kernel void right(device const uint* x [[buffer(0)]],
                  device uint* y [[buffer(1)]],
                  uint t [[thread_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint part[64];
    part[t] = x[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint sum = simd_sum(part[63 - t]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
        part[t / 32] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = part[0] + part[1];
}

kernel void missing_barrier(device const uint* x [[buffer(0)]],
                            device uint* y [[buffer(1)]],
                            uint t [[thread_index_in_threadgroup]]) {
    threadgroup uint part[64];
    part[t] = simd_max(x[t]);
    y[t] = part[63 - t];
}

kernel void out_of_bounds(device const uint* x [[buffer(0)]],
                          device uint* y [[buffer(1)]],
                          uint t [[thread_position_in_grid]]) {
    y[t] = x[t + 1];
}

kernel void index_out_of_bounds(device const uint* x [[buffer(0)]],
                                device uint* y [[buffer(1)]],
                                uint t [[thread_index_in_threadgroup]]) {
    threadgroup uint part[32];
    part[t] = x[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = part[t];
}

kernel void divergent_barrier(device const uint* x [[buffer(0)]],
                              device uint* y [[buffer(1)]],
                              uint t [[thread_index_in_threadgroup]]) {
    if (t < 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    y[t] = x[t];
}

kernel void divergent_simd(device const uint* x [[buffer(0)]],
                           device uint* y [[buffer(1)]],
                           uint t [[thread_index_in_threadgroup]]) {
    y[t] = t % 2 == 0 ? simd_sum(x[t]) : x[t];
}

kernel void too_much_memory(device const uint* x [[buffer(0)]],
                            device uint* y [[buffer(1)]],
                            uint t [[thread_index_in_threadgroup]]) {
    threadgroup uint part[33 * 256];
    part[t] = x[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = part[t];
}
