// A product of one to eight rows of activations with stored weights; the rows share the decoding.
#include "weights.h"

// Rows of activations that share the decoding: 1, 2, 4 or 8.
constant uint ROWS [[function_constant(2)]];
// Outputs of a simdgroup.
#define OUTS 4

// Rows of matrices that a simdgroup multiplies by, each from its first code and its first scale.
struct Outputs {
    device const uchar* data[OUTS];
    device const uchar* scale[OUTS];
};

// Output `i` becomes row `row` of a matrix whose rows share scales by 2^shift.
inline void take_row(thread Outputs& w,
                     uint i,
                     uint form,
                     device const uchar* data,
                     device const uchar* scale,
                     uint cols,
                     uint shift,
                     uint row) {
    w.data[i] = data + row * row_bytes(form, cols);
    w.scale[i] = scale + ulong(row >> shift) * ((cols + 31) / 32);
}

// Rows `first` to `first + 3`, none beyond `end`.
inline Outputs take_rows(uint form, device const uchar* data, device const uchar* scale, uint cols, uint shift, uint first, uint end) {
    Outputs w;
    for (uint i = 0; i < OUTS; i++) take_row(w, i, form, data, scale, cols, shift, min(first + i, end - 1));
    return w;
}
