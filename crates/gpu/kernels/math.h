// Functions whose rounding differs between GPUs, made of +, -, *, fma, division and bit operations alone, so that every
// device gives the same bits. Errors in units of the last place, measured by tests/functions.rs: exp, log1p and rsqrt under 0.6,
// softplus 1.04, silu 1.8, sigmoid 2.0. Subnormal results are zero.

// e^x: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial in r, and the rounding errors of r and of 1 + r carried along.
inline float exp_precise(float x) {
    if (x != x) return x;
    if (x > 88.722839f) return as_type<float>(0x7f800000u);
    if (x < -87.336544f) return 0.0f;
    float shifted = fma(x, 1.44269504f, 12582912.0f);
    float n = shifted - 12582912.0f;
    int k = int(n);
    float high = fma(-n, 0.693145752f, x); // 16 bits of ln 2: exact
    float low = n * 1.42860677e-6f;        // the rest
    float r = high - low;
    float lost = (high - r) - low;
    float p = 2.48015873e-5f; // 1/8!
    p = fma(p, r, 1.98412698e-4f);
    p = fma(p, r, 1.38888889e-3f);
    p = fma(p, r, 8.33333333e-3f);
    p = fma(p, r, 4.16666667e-2f);
    p = fma(p, r, 1.66666667e-1f);
    p = fma(p, r, 0.5f);
    float q = fma(r * r, p, lost);
    float s = 1.0f + r;
    float rest = r - (s - 1.0f);
    float y = s + (q + rest);
    // Two steps, because 2^128 is no single.
    int half_k = k >> 1;
    return y * as_type<float>(uint(half_k + 127) << 23) * as_type<float>(uint(k - half_k + 127) << 23);
}

// ln(1 + u) for u >= 0.
inline float log1p_precise(float u) {
    if (u != u || u > 3.4028235e38f) return u;
    if (u < 5.9604645e-8f) return u;
    float s = 1.0f + u;
    // The rounding error of s.
    float lost = u < 1.0f ? u - (s - 1.0f) : 1.0f - (s - u);
    uint b = as_type<uint>(s);
    int k = int(b >> 23) - 127;
    uint m = b & 0x7fffffu;
    // Mantissas from sqrt(2) on count to the next power, so that |f| <= 0.42.
    bool upper = m > 0x3504f3u;
    k += upper ? 1 : 0;
    float f = as_type<float>(m | (upper ? 0x3f000000u : 0x3f800000u)) - 1.0f;
    float c = k < 64 ? lost * as_type<float>(uint(127 - k) << 23) : 0.0f;
    if (k == 0) {
        f = u;
        c = 0.0f;
    }
    // ln(1 + f) = f - f^2/2 + t (f^2/2 + R), t = f/(2 + f), R = 2 (t^2/3 + t^4/5 + ...).
    float t = precise::divide(f, 2.0f + f);
    float z = t * t;
    float p = 0.153846154f; // 2/13
    p = fma(p, z, 0.181818182f);
    p = fma(p, z, 0.222222222f);
    p = fma(p, z, 0.285714286f);
    p = fma(p, z, 0.4f);
    p = fma(p, z, 0.666666667f);
    float square = f * f;
    float half_square = 0.5f * square;
    // Rounding error of half the square.
    float square_lost = 0.5f * fma(f, f, -square);
    float tail = t * fma(p, z, half_square);
    float n = float(k);
    c = precise::divide(c, 1.0f + f);
    float base = n * 0.693145752f;
    float small = fma(n, 1.42860677e-6f, c) + (tail - square_lost);
    // base + f - half_square + small, the larger first with its rounding error.
    float a = f - half_square;
    float a_lost = (f - a) - half_square;
    float sum = base + a;
    float sum_lost = base == 0.0f ? 0.0f : a - (sum - base);
    return sum + (small + (a_lost + sum_lost));
}

// ln(1 + e^x); x itself above 20.
inline float softplus(float x) {
    return x > 20.0f ? x : log1p_precise(exp_precise(x));
}

// 1/(1 + e^-x).
inline float sigmoid(float x) {
    return precise::divide(1.0f, 1.0f + exp_precise(-x));
}

// x/(1 + e^-x).
inline float silu(float x) {
    return precise::divide(x, 1.0f + exp_precise(-x));
}

// 1/sqrt(x) for positive normal x, corrected once.
inline float rsqrt_precise(float x) {
    float y = precise::divide(1.0f, precise::sqrt(x));
    float high = x * y;
    float low = fma(x, y, -high);
    float error = fma(-low, y, fma(-high, y, 1.0f));
    return fma(0.5f * y, error, y);
}
