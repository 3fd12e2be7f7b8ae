// An expert's matrix as a product takes it.
#include "runs.h"

inline Product expert_product(device const uchar* slab,
                              device const ulong* table,
                              device const float* x,
                              uint cols,
                              uint outs,
                              uint klass,
                              uint expert,
                              uint part) {
    device const ulong* entry = table + (ulong(expert) * 3 + part) * ENTRY;
    Product m;
    m.data = slab + entry[0];
    m.scale = slab + entry[1];
    m.cols = cols;
    m.end = outs;
    m.scale_shift = (klass >> 4) & 15;
    m.x = x;
    return m;
}
