// A product of one to eight rows of activations with stored weights; the rows share the decoding.
#include "weights.h"

// Rows of activations that share the decoding: 1, 2, 4 or 8.
constant uint ROWS [[function_constant(2)]];
// Outputs of a simdgroup.
#define OUTS 4

// One matrix and the rows that it multiplies.
struct Product {
    device const uchar* data;
    device const uchar* scale;
    uint cols;
    uint end;         // rows of the matrix that may be read
    uint scale_shift; // log2 of the rows that share a scale
    device const float* x;
};
