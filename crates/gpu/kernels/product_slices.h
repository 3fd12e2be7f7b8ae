// Products whose columns are spread over the lanes of one, four or eight simdgroups.
#include "product.h"

// Columns that a simdgroup takes in a step: eight a lane.
#define STEP 256

// Adds the partial sums of the lanes: `n` (4 to 32) sums a lane, of which lane l ends up with number `fold_index(l)`. A
// binary tree over lanes of distance 1, 2, 4, 8, 16, the same for every n.
inline float fold(thread float* v, uint n, uint lane) {
    uint bit = 1;
    for (uint m = n / 2; m >= 1; m /= 2) {
        bool upper = (lane & bit) != 0;
        for (uint i = 0; i < m; i++) {
            float keep = upper ? v[i + m] : v[i];
            float give = upper ? v[i] : v[i + m];
            v[i] = keep + simd_shuffle_xor(give, ushort(bit));
        }
        bit *= 2;
    }
    for (; bit < 32; bit *= 2) v[0] = v[0] + simd_shuffle_xor(v[0], ushort(bit));
    return v[0];
}

inline uint fold_index(uint n, uint lane) {
    uint index = 0;
    for (uint m = n / 2; m >= 1; m /= 2) {
        index += (lane & 1) != 0 ? m : 0;
        lane /= 2;
    }
    return index;
}

// A norm that activations go through on their way in: its weight, and the factor of the row.
struct Norm {
    device const float* weight;
    float factor;
};

inline Norm norm_of(device const float* weight, float factor) {
    Norm norm;
    norm.weight = weight;
    norm.factor = factor;
    return norm;
}

// Sums of the outputs for rows at `rows[r]` of `x`, through `norm` if it is `normed`, over the columns of one of `slices` slices: lane l has the sum of output
// `fold_index / ROWS` and row `fold_index % ROWS`. A lane adds its eight columns of a step, then the steps.
inline float normed_slice(uint form,
                          Outputs w,
                          device const float* x,
                          Norm norm,
                          bool normed,
                          thread const ulong* rows,
                          uint cols,
                          uint slice,
                          uint slices,
                          uint lane) {
    float acc[OUTS * 8];
    for (uint i = 0; i < OUTS * ROWS; i++) acc[i] = 0.0f;
    uint nan[OUTS];
    for (uint o = 0; o < OUTS; o++) nan[o] = 0;
    Raw ahead[OUTS];
    uint first = slice * STEP + lane * 8;
    if (WHOLE && first < cols) {
        for (uint o = 0; o < OUTS; o++) ahead[o] = load_raw(form, w.data[o], first);
    }
    for (uint c = first; c < cols; c += slices * STEP) {
        float v[OUTS][8];
        float s[OUTS];
        for (uint o = 0; o < OUTS; o++) {
            nan[o] |= WHOLE ? decode_raw(form, ahead[o], v[o]) : decode8(form, w.data[o], c, cols, v[o]);
            if (form >= 2) s[o] = decode_e8m0(w.scale[o][c / 32]);
        }
        // The codes of the next step are on their way while this one is added up.
        if (WHOLE && c + slices * STEP < cols) {
            for (uint o = 0; o < OUTS; o++) ahead[o] = load_raw(form, w.data[o], c + slices * STEP);
        }
        for (uint r = 0; r < ROWS; r++) {
            float a[8];
            load8(x + rows[r], c, cols, a);
            if (normed) {
                float by[8];
                load8(norm.weight, c, cols, by);
                for (uint i = 0; i < 8; i++) a[i] = by[i] * (a[i] * norm.factor);
            }
            float sum[OUTS];
            for (uint o = 0; o < OUTS; o++) sum[o] = 0.0f;
            for (uint i = 0; i < 8; i++) {
                for (uint o = 0; o < OUTS; o++) sum[o] = fma(v[o][i], a[i], sum[o]);
            }
            for (uint o = 0; o < OUTS; o++) {
                uint at = o * ROWS + r;
                acc[at] = form >= 2 ? fma(sum[o] * form_factor(form), s[o], acc[at]) : acc[at] + sum[o];
            }
        }
    }
    if (form == 2) {
        for (uint i = 0; i < OUTS * ROWS; i++) acc[i] = with_nan(acc[i], nan[i / ROWS]);
    }
    return fold(acc, OUTS * ROWS, lane);
}

// The same of rows without a norm.
inline float product_slice(uint form,
                           Outputs w,
                           device const float* x,
                           thread const ulong* rows,
                           uint cols,
                           uint slice,
                           uint slices,
                           uint lane) {
    return normed_slice(form, w, x, norm_of(x, 1.0f), false, rows, cols, slice, slices, lane);
}
