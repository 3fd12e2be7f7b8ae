// H128 / sqrt(128) over a simdgroup: lane l holds elements 4 l to 4 l + 3 [EXL3 specification, section 5].
#define HADAMARD_FACTOR 0.088388346f

inline void hadamard128(thread float* v, uint lane) {
    float a = v[0] + v[1];
    float b = v[0] - v[1];
    float c = v[2] + v[3];
    float d = v[2] - v[3];
    v[0] = a + c;
    v[1] = b + d;
    v[2] = a - c;
    v[3] = b - d;
    for (uint m = 1; m < 32; m *= 2) {
        bool upper = (lane & m) != 0;
        for (uint i = 0; i < 4; i++) {
            float other = simd_shuffle_xor(v[i], ushort(m));
            v[i] = upper ? other - v[i] : v[i] + other;
        }
    }
    for (uint i = 0; i < 4; i++) v[i] = v[i] * HADAMARD_FACTOR;
}

// Four fp16 values from element 4 l on.
inline void load_half4(device const uchar* halves, ulong first, thread float* v) {
    uint2 bits = *(device const uint2*)(halves + 2 * first);
    half2 a = as_type<half2>(bits.x);
    half2 b = as_type<half2>(bits.y);
    v[0] = float(a.x);
    v[1] = float(a.y);
    v[2] = float(b.x);
    v[3] = float(b.y);
}

// The rotated input (x * suh) P of one run of 128; `source` rounds to fp16 where the format's library does.
inline void rotate_input(thread float* v, device const uchar* suh, ulong first, bool source, uint lane) {
    float s[4];
    load_half4(suh, first, s);
    for (uint i = 0; i < 4; i++) {
        if (source) v[i] = float(half(v[i]));
        v[i] = v[i] * s[i];
        if (source) v[i] = float(half(v[i]));
    }
    hadamard128(v, lane);
    if (source) {
        for (uint i = 0; i < 4; i++) v[i] = float(half(v[i]));
    }
}

// The result z P * svh of one run of 128 sums.
inline void rotate_output(thread float* v, device const uchar* svh, ulong first, uint lane) {
    float s[4];
    load_half4(svh, first, s);
    hadamard128(v, lane);
    for (uint i = 0; i < 4; i++) v[i] = v[i] * s[i];
}
