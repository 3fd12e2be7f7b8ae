// The k highest of many values, the lower place on ties: a threshold by four passes over the bits, then one ordered pass.

// Most threads of a threadgroup.
#define SELECTORS 1024

// Larger for larger values; 0 for what is never chosen (minus infinity, NaN).
inline uint order_key(float v) {
    uint b = as_type<uint>(v);
    if (!(v > as_type<float>(0xff800000u))) return 0;
    return (b & 0x80000000u) != 0 ? ~b : b | 0x80000000u;
}

struct Selection {
    uint threshold; // keys above it are chosen
    uint ties;      // of those equal to it, the first so many
    uint above;     // chosen ones of this thread's range before ...
    uint equal;     // ... and those equal to the threshold
};

// How the `k` highest of values [n] are chosen, and what lies before the range of this thread (`each` values).
inline Selection select_highest(device const float* values,
                                uint n,
                                uint k,
                                uint each,
                                threadgroup atomic_uint* bins,
                                threadgroup uint* shared,
                                uint tid,
                                uint threads) {
    uint prefix = 0;
    uint mask = 0;
    uint left = k;
    for (uint shift = 24;; shift -= 8) {
        for (uint i = tid; i < 256; i += threads) atomic_store_explicit(&bins[i], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < n; i += threads) {
            uint key = order_key(values[i]);
            if (key != 0 && (key & mask) == prefix) {
                atomic_fetch_add_explicit(&bins[(key >> shift) & 255u], 1u, memory_order_relaxed);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (tid == 0) {
            uint bin = 255;
            uint rest = left;
            uint count = atomic_load_explicit(&bins[255], memory_order_relaxed);
            while (bin > 0 && count < rest) {
                rest -= count;
                bin--;
                count = atomic_load_explicit(&bins[bin], memory_order_relaxed);
            }
            shared[0] = bin;
            shared[1] = rest;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        prefix |= shared[0] << shift;
        left = shared[1];
        mask |= 255u << shift;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (shift == 0) break;
    }
    // Fewer than k finite values: the search ended at key 0, which is never chosen.
    Selection s;
    s.threshold = prefix;
    s.ties = prefix == 0 ? 0 : left;
    uint first = min(tid * each, n);
    uint last = min(first + each, n);
    uint above = 0;
    uint equal = 0;
    for (uint i = first; i < last; i++) {
        uint key = order_key(values[i]);
        above += key > prefix ? 1 : 0;
        equal += key == prefix ? 1 : 0;
    }
    shared[tid] = above;
    shared[SELECTORS + tid] = equal;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < 2) {
        uint sum = 0;
        for (uint i = 0; i < threads; i++) {
            uint count = shared[tid * SELECTORS + i];
            shared[tid * SELECTORS + i] = sum;
            sum += count;
        }
        shared[2 * SELECTORS + tid] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s.above = shared[tid];
    s.equal = shared[SELECTORS + tid];
    return s;
}

// mask [n]: 1 for the k highest values.
inline void write_mask(device const float* values,
                       uint n,
                       uint k,
                       uint each,
                       device uchar* mask,
                       threadgroup atomic_uint* bins,
                       threadgroup uint* shared,
                       uint tid,
                       uint threads) {
    Selection s = select_highest(values, n, k, each, bins, shared, tid, threads);
    uint equal = s.equal;
    uint last = min((tid + 1) * each, n);
    for (uint i = tid * each; i < last; i++) {
        uint key = order_key(values[i]);
        bool chosen = key > s.threshold || (key == s.threshold && equal < s.ties);
        equal += key == s.threshold ? 1 : 0;
        mask[i] = chosen ? 1 : 0;
    }
}

// to [k]: the places of the k highest values, ascending, then -1.
inline void write_places(device const float* values,
                         uint n,
                         uint k,
                         uint each,
                         device int* to,
                         threadgroup atomic_uint* bins,
                         threadgroup uint* shared,
                         uint tid,
                         uint threads) {
    Selection s = select_highest(values, n, k, each, bins, shared, tid, threads);
    uint equal = s.equal;
    uint at = s.above + min(equal, s.ties);
    uint last = min((tid + 1) * each, n);
    for (uint i = tid * each; i < last; i++) {
        uint key = order_key(values[i]);
        bool chosen = key > s.threshold || (key == s.threshold && equal < s.ties);
        equal += key == s.threshold ? 1 : 0;
        if (chosen) {
            to[at] = int(i);
            at++;
        }
    }
    uint total = shared[2 * SELECTORS] + min(shared[2 * SELECTORS + 1], s.ties);
    for (uint i = total + tid; i < k; i += threads) to[i] = -1;
}
