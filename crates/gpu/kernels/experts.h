// The rows of an expert's matrix as a product takes them.
#include "runs.h"

inline Outputs expert_rows(device const uchar* slab,
                           device const ulong* table,
                           uint expert,
                           uint part,
                           uint klass,
                           uint cols,
                           uint first,
                           uint end) {
    device const ulong* entry = table + (ulong(expert) * 3 + part) * ENTRY;
    return take_rows(FORM, slab + entry[0], slab + entry[1], cols, (klass >> 4) & 15, first, end);
}
