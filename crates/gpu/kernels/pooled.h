// A channel of a pair: the softmax of two scores weighs two values.
#include "math.h"

inline float pooled(float s0, float s1, float v0, float v1) {
    float m = max(s0, s1);
    float e0 = exp_precise(s0 - m);
    float e1 = exp_precise(s1 - m);
    float sum = e0 + e1;
    return precise::divide(e0, sum) * v0 + precise::divide(e1, sum) * v1;
}
