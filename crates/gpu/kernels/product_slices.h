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

// Sums of outputs `o0` to `o0 + 3` for rows at `rows[r]` of `p.x`, over the columns of one of `slices` slices: lane l has the sum
// of output `fold_index / ROWS` and row `fold_index % ROWS`. A lane adds its eight columns of a step, then the steps.
inline float product_slice(Product p, uint o0, thread const ulong* rows, uint slice, uint slices, uint lane) {
    float acc[OUTS * 8];
    for (uint i = 0; i < OUTS * ROWS; i++) acc[i] = 0.0f;
    uint groups = (p.cols + 31) / 32;
    ulong stride = row_bytes(p.cols);
    for (uint c = slice * STEP + lane * 8; c < p.cols; c += slices * STEP) {
        float w[OUTS][8];
        float s[OUTS];
        for (uint o = 0; o < OUTS; o++) {
            uint row = min(o0 + o, p.end - 1);
            decode8(p.data + row * stride, c, p.cols, w[o]);
            if (FORM >= 2) s[o] = decode_e8m0(p.scale[ulong(row >> p.scale_shift) * groups + c / 32]);
        }
        for (uint r = 0; r < ROWS; r++) {
            float x[8];
            load8(p.x + rows[r], c, p.cols, x);
            float sum[OUTS];
            for (uint o = 0; o < OUTS; o++) sum[o] = 0.0f;
            for (uint i = 0; i < 8; i++) {
                for (uint o = 0; o < OUTS; o++) sum[o] = fma(w[o][i], x[i], sum[o]);
            }
            for (uint o = 0; o < OUTS; o++) {
                uint at = o * ROWS + r;
                acc[at] = FORM >= 2 ? fma(sum[o] * form_factor(), s[o], acc[at]) : acc[at] + sum[o];
            }
        }
    }
    return fold(acc, OUTS * ROWS, lane);
}
