// Stored weights to values: eight consecutive columns of a row at a time.

// Forms are 0 f32, 1 bf16, 2 fp8 (scales by block or by row), 3 fp4.
constant uint FORM [[function_constant(0)]];
// Rows are whole runs of eight columns, so that vectors may be loaded.
constant bool WHOLE [[function_constant(1)]];

// 2^(byte - 127); 0 and 255 as E8M0 has them.
inline float decode_e8m0(uint byte) {
    uint bits = byte == 0 ? 0x00400000u : (byte == 255 ? 0x7fc00000u : byte << 23);
    return as_type<float>(bits);
}

// Four E4M3 codes, first in the low byte, as values times 2^-8: a half has the same layout with one exponent bit more. The two
// NaN codes become numbers; `nan_codes` finds them.
inline void decode_e4m3_word(uint word, thread float* v) {
    uint low = word << 8;
    half2 even = as_type<half2>((low & 0x80008000u) | ((low & 0x7f007f00u) >> 1));
    half2 odd = as_type<half2>((word & 0x80008000u) | ((word & 0x7f007f00u) >> 1));
    v[0] = float(even.x);
    v[1] = float(odd.x);
    v[2] = float(even.y);
    v[3] = float(odd.y);
}

// The highest bit of a byte is set where it holds a NaN code; the other bits mean nothing.
inline uint nan_codes(uint word) {
    return (word & 0x7f7f7f7fu) + 0x01010101u;
}

// A sum with a NaN among its weights is NaN, whichever of them it is.
inline float with_nan(float sum, uint codes) {
    return (codes & 0x80808080u) != 0 ? as_type<float>(0x7fc00000u) : sum;
}

// Eight E2M1 codes, first in the low nibble, as values times 2^-14: a half's layout with three exponent bits more.
inline void decode_e2m1_word(uint word, thread float* v) {
    for (uint i = 0; i < 4; i++) {
        uint pair = word >> (4 * i); // this code, and the one four further
        half2 h = as_type<half2>(((pair & 0x00080008u) << 12) | ((pair & 0x00070007u) << 9));
        v[i] = float(h.x);
        v[i + 4] = float(h.y);
    }
}

// What decode8 leaves out of the values: a power of two.
inline float form_factor(uint form) {
    return form == 2 ? 256.0f : (form == 3 ? 16384.0f : 1.0f);
}

// Bytes of a row of `cols` columns.
inline ulong row_bytes(uint form, uint cols) {
    return form == 0 ? ulong(cols) * 4 : (form == 1 ? ulong(cols) * 2 : (form == 2 ? ulong(cols) : ulong(cols) / 2));
}

inline float decode1(uint form, device const uchar* row, uint column) {
    float v[8];
    if (form == 0) {
        v[0] = ((device const float*)row)[column];
    } else if (form == 1) {
        v[0] = as_type<float>(uint(((device const ushort*)row)[column]) << 16);
    } else if (form == 2) {
        decode_e4m3_word(row[column], v);
    } else {
        decode_e2m1_word(uint(row[column / 2]) >> (4 * (column & 1)) & 15u, v);
    }
    return v[0];
}

// Columns `column` to `column + 7` without scale and factor; zeros from `cols` on. Returns `nan_codes` of them.
inline uint decode8(uint form, device const uchar* row, uint column, uint cols, thread float* v) {
    if (!WHOLE) {
        uint nan = 0;
        for (uint i = 0; i < 8; i++) {
            v[i] = column + i < cols ? decode1(form, row, column + i) : 0.0f;
            if (form == 2 && column + i < cols) nan |= nan_codes(row[column + i]);
        }
        return nan;
    } else if (form == 0) {
        device const float4* w = (device const float4*)(row + ulong(column) * 4);
        float4 a = w[0];
        float4 b = w[1];
        v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
        v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
    } else if (form == 1) {
        uint4 w = *(device const uint4*)(row + ulong(column) * 2);
        v[0] = as_type<float>(w.x << 16); v[1] = as_type<float>(w.x & 0xffff0000u);
        v[2] = as_type<float>(w.y << 16); v[3] = as_type<float>(w.y & 0xffff0000u);
        v[4] = as_type<float>(w.z << 16); v[5] = as_type<float>(w.z & 0xffff0000u);
        v[6] = as_type<float>(w.w << 16); v[7] = as_type<float>(w.w & 0xffff0000u);
    } else if (form == 2) {
        uint2 w = *(device const uint2*)(row + column);
        decode_e4m3_word(w.x, v);
        decode_e4m3_word(w.y, v + 4);
        return nan_codes(w.x) | nan_codes(w.y);
    } else {
        decode_e2m1_word(*(device const uint*)(row + column / 2), v);
    }
    return 0;
}

// Eight activations; zeros from `cols` on.
inline void load8(device const float* x, uint column, uint cols, thread float* v) {
    if (WHOLE) {
        device const float4* p = (device const float4*)(x + column);
        float4 a = p[0];
        float4 b = p[1];
        v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
        v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
    } else {
        for (uint i = 0; i < 8; i++) v[i] = column + i < cols ? x[column + i] : 0.0f;
    }
}
