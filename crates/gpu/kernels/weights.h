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

// Four E4M3 codes, first in the low byte. Where no instruction decodes a pair, they come as values times 2^-8: a half has the same
// layout with one exponent bit more; then the two NaN codes become numbers, which `nan_codes` finds.
inline void decode_e4m3_word(uint word, thread float* v) {
#ifdef MSL_E4M3_PAIR
    half2 low = as_type<half2>(e4m3_pair(ushort(word)));
    half2 high = as_type<half2>(e4m3_pair(ushort(word >> 16)));
    v[0] = float(low.x);
    v[1] = float(low.y);
    v[2] = float(high.x);
    v[3] = float(high.y);
#else
    uint low = word << 8;
    half2 even = as_type<half2>((low & 0x80008000u) | ((low & 0x7f007f00u) >> 1));
    half2 odd = as_type<half2>((word & 0x80008000u) | ((word & 0x7f007f00u) >> 1));
    v[0] = float(even.x);
    v[1] = float(odd.x);
    v[2] = float(even.y);
    v[3] = float(odd.y);
#endif
}

// The highest bit of a byte is set where it holds a NaN code that decoding lost; the other bits mean nothing.
inline uint nan_codes(uint word) {
#ifdef MSL_E4M3_PAIR
    return 0;
#else
    return (word & 0x7f7f7f7fu) + 0x01010101u;
#endif
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
#ifdef MSL_E4M3_PAIR
    if (form == 2) return 1.0f;
#endif
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

// The words of eight codes, and those words decoded: apart, so that the next ones can be on their way meanwhile.
struct Raw {
    uint w[8];
};

inline Raw load_raw(uint form, device const uchar* row, uint column) {
    Raw raw;
    if (form == 0) {
        device const uint4* from = (device const uint4*)(row + ulong(column) * 4);
        uint4 a = from[0];
        uint4 b = from[1];
        raw.w[0] = a.x; raw.w[1] = a.y; raw.w[2] = a.z; raw.w[3] = a.w;
        raw.w[4] = b.x; raw.w[5] = b.y; raw.w[6] = b.z; raw.w[7] = b.w;
    } else if (form == 1) {
        uint4 a = *(device const uint4*)(row + ulong(column) * 2);
        raw.w[0] = a.x; raw.w[1] = a.y; raw.w[2] = a.z; raw.w[3] = a.w;
    } else if (form == 2) {
        uint2 a = *(device const uint2*)(row + column);
        raw.w[0] = a.x; raw.w[1] = a.y;
    } else {
        raw.w[0] = *(device const uint*)(row + column / 2);
    }
    return raw;
}

inline uint decode_raw(uint form, Raw raw, thread float* v) {
    if (form == 0) {
        for (uint i = 0; i < 8; i++) v[i] = as_type<float>(raw.w[i]);
    } else if (form == 1) {
        for (uint i = 0; i < 4; i++) {
            v[2 * i] = as_type<float>(raw.w[i] << 16);
            v[2 * i + 1] = as_type<float>(raw.w[i] & 0xffff0000u);
        }
    } else if (form == 2) {
        decode_e4m3_word(raw.w[0], v);
        decode_e4m3_word(raw.w[1], v + 4);
        return nan_codes(raw.w[0]) | nan_codes(raw.w[1]);
    } else {
        decode_e2m1_word(raw.w[0], v);
    }
    return 0;
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
    }
    return decode_raw(form, load_raw(form, row, column), v);
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
