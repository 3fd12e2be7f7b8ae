// The gated activation of an expert.
#include "math.h"

// weight * (silu(min(gate, limit)) * clamp(up, limit)).
inline float gated(float gate, float up, float limit, float weight) {
    float g = min(gate, limit);
    float u = min(max(up, -limit), limit);
    return weight * (silu(g) * u);
}
