// The blocks of outputs that a product with EXL3 layers computes. A layer is an entry of a table as an expert's matrix is.
// A unit of 128 outputs is 8 numbers: layer, block of it, rotation, output of its first column, columns from and to which it
// gives, class of the layer, output tiles of the layer.
#define UNIT 8

struct Exl3Params {
    uint rows;
    uint cols;
    uint inputs; // columns, padded to whole runs of 128
    uint groups; // groups of columns in a row of x
    uint outs;   // values of a row of y
    uint units;
    uint splits;
    uint planes; // partial sums of an output: the splits, or 1 where one threadgroup takes them all
    uint klass;
    uint round;  // results are rounded to bf16
    uint flip;   // of trellis.h
};
