// Metal Shading Language for NVRTC: what the kernels use of metal_stdlib, as CUDA C++. Compiled with
// --device-as-default-execution-space and without any header of the CUDA toolkit.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long msl_ulong;
typedef uint uint32_t;
#define ulong msl_ulong
#define device
#define thread
#define threadgroup
#define constant const

namespace msl {
template <class T> struct id { using type = T; };
template <bool B, class T = void> struct enable {};
template <class T> struct enable<true, T> { using type = T; };

template <class T, int N> struct vec;
template <class T> struct count { static constexpr int n = 0; using element = T; };
template <class T, int M> struct count<vec<T, M>> { static constexpr int n = M; using element = T; };

template <class V> inline void fill(V&, int) {}
template <class V, class A, class... R> inline void fill(V& v, int i, const A& a, const R&... rest) {
    using E = typename V::element;
    if constexpr (count<A>::n == 0) {
        v[i] = (E)a;
        fill(v, i + 1, rest...);
    } else {
        for (int k = 0; k < count<A>::n; k++) v[i + k] = (E)a[k];
        fill(v, i + count<A>::n, rest...);
    }
}

template <int N> struct lanes;
#define MSL_VEC(N, ALIGN, ...) \
    template <class T> struct alignas(ALIGN * sizeof(T)) vec<T, N> { \
        using element = T; \
        T __VA_ARGS__; \
        vec() = default; \
        template <class A> explicit vec(const A& a) { \
            if constexpr (count<A>::n == 0) { for (int k = 0; k < N; k++) (*this)[k] = (T)a; } \
            else { static_assert(count<A>::n == N, "length"); fill(*this, 0, a); } \
        } \
        template <class A, class B, class... R> vec(const A& a, const B& b, const R&... r) { fill(*this, 0, a, b, r...); } \
        T& operator[](int i) { return (&x)[i]; } \
        const T& operator[](int i) const { return (&x)[i]; } \
    };
MSL_VEC(2, 2, x, y)
MSL_VEC(3, 4, x, y, z)
MSL_VEC(4, 4, x, y, z, w)
#undef MSL_VEC

#define MSL_OP(op) \
    template <class T, int N> inline vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
        vec<T, N> r; \
        for (int k = 0; k < N; k++) r[k] = (T)(a[k] op b[k]); \
        return r; \
    } \
    template <class T, int N> inline vec<T, N> operator op(const vec<T, N>& a, typename id<T>::type b) { \
        vec<T, N> r; \
        for (int k = 0; k < N; k++) r[k] = (T)(a[k] op b); \
        return r; \
    } \
    template <class T, int N> inline vec<T, N> operator op(typename id<T>::type a, const vec<T, N>& b) { \
        vec<T, N> r; \
        for (int k = 0; k < N; k++) r[k] = (T)(a op b[k]); \
        return r; \
    } \
    template <class T, int N, class B> inline vec<T, N>& operator op##=(vec<T, N>& a, const B& b) { return a = a op b; }
MSL_OP(+) MSL_OP(-) MSL_OP(*) MSL_OP(/) MSL_OP(&) MSL_OP(|) MSL_OP(^) MSL_OP(<<) MSL_OP(>>)
#undef MSL_OP
template <class T, int N> inline vec<T, N> operator-(const vec<T, N>& a) {
    vec<T, N> r;
    for (int k = 0; k < N; k++) r[k] = -a[k];
    return r;
}
template <class T, int N> inline vec<T, N> operator~(const vec<T, N>& a) {
    vec<T, N> r;
    for (int k = 0; k < N; k++) r[k] = ~a[k];
    return r;
}
}  // namespace msl

// IEEE half: every operation rounds once.
struct half {
    ushort bits;
    half() = default;
    template <class T> explicit half(T v) { float f = (float)v; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f)); }
    operator float() const { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits)); return f; }
};
inline half operator+(half a, half b) { half r; asm("add.rn.f16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r; }
inline half operator-(half a, half b) { half r; asm("sub.rn.f16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r; }
inline half operator*(half a, half b) { half r; asm("mul.rn.f16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r; }
inline half operator-(half a) { half r; r.bits = a.bits ^ 0x8000; return r; }

#define MSL_NAMES(T) \
    using T##2_t = msl::vec<T, 2>; \
    using T##3_t = msl::vec<T, 3>; \
    using T##4_t = msl::vec<T, 4>;
MSL_NAMES(float) MSL_NAMES(half) MSL_NAMES(uint) MSL_NAMES(int) MSL_NAMES(ushort) MSL_NAMES(short)
MSL_NAMES(uchar) MSL_NAMES(char) MSL_NAMES(msl_ulong) MSL_NAMES(bool)
#undef MSL_NAMES
#define float2 float2_t
#define float3 float3_t
#define float4 float4_t
#define half2 half2_t
#define half3 half3_t
#define half4 half4_t
#define uint2 uint2_t
#define uint3 uint3_t
#define uint4 uint4_t
#define int2 int2_t
#define int3 int3_t
#define int4 int4_t
#define ushort2 ushort2_t
#define ushort3 ushort3_t
#define ushort4 ushort4_t
#define short2 short2_t
#define short4 short4_t
#define uchar2 uchar2_t
#define uchar4 uchar4_t
#define char2 char2_t
#define char4 char4_t
#define ulong2 msl_ulong2_t

// CUDA has functions of these names for other types, so that a call would not know which is meant.
#define fma metal_fma
#define abs metal_abs
#define fabs metal_fabs
#define floor metal_floor
#define ceil metal_ceil
#define trunc metal_trunc
#define rint metal_rint
#define sqrt metal_sqrt
#define min metal_min
#define max metal_max
#define fmin metal_fmin
#define fmax metal_fmax
#define isnan metal_isnan
#define isinf metal_isinf
#define isfinite metal_isfinite
#define copysign metal_copysign
#define ldexp metal_ldexp

namespace metal {
using namespace msl;

template <class T, class U> inline T as_type(const U& u) {
    static_assert(sizeof(T) == sizeof(U), "as_type between sizes");
    T t;
    memcpy(&t, &u, sizeof(T));
    return t;
}

// Each function of one, two or three values works on vectors element by element.
#define MSL_UNARY(name, ...) \
    template <class T> inline typename enable<count<T>::n == 0, T>::type name(T a) { return __VA_ARGS__; } \
    template <class T, int N> inline vec<T, N> name(const vec<T, N>& a) { \
        vec<T, N> r; \
        for (int k = 0; k < N; k++) r[k] = name(a[k]); \
        return r; \
    }
#define MSL_BINARY(name, ...) \
    template <class T> inline typename enable<count<T>::n == 0, T>::type name(T a, typename id<T>::type b) { return __VA_ARGS__; } \
    template <class T, int N> inline vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b) { \
        vec<T, N> r; \
        for (int k = 0; k < N; k++) r[k] = name(a[k], b[k]); \
        return r; \
    } \
    template <class T, int N> inline vec<T, N> name(const vec<T, N>& a, typename id<T>::type b) { return name(a, vec<T, N>(b)); }

namespace raw {
inline float abs(float a) { return __int_as_float(__float_as_int(a) & 0x7fffffff); }
inline int abs(int a) { return a < 0 ? -a : a; }
// NaN loses against a number, as in Metal.
inline float fmin(float a, float b) { float r; asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
inline float fmax(float a, float b) { float r; asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return fmin(a, b); }
inline float max(float a, float b) { return fmax(a, b); }
inline float floor(float a) { float r; asm("cvt.rmi.f32.f32 %0, %1;" : "=f"(r) : "f"(a)); return r; }
inline float ceil(float a) { float r; asm("cvt.rpi.f32.f32 %0, %1;" : "=f"(r) : "f"(a)); return r; }
inline float trunc(float a) { float r; asm("cvt.rzi.f32.f32 %0, %1;" : "=f"(r) : "f"(a)); return r; }
inline float rint(float a) { float r; asm("cvt.rni.f32.f32 %0, %1;" : "=f"(r) : "f"(a)); return r; }
inline float sqrt(float a) { float r; asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a)); return r; }
inline float divide(float a, float b) { float r; asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
inline float fma(float a, float b, float c) { float r; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c)); return r; }
inline half fma(half a, half b, half c) {
    half r;
    asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits), "h"(c.bits));
    return r;
}
}  // namespace raw

MSL_UNARY(abs, raw::abs(a))
MSL_UNARY(fabs, raw::abs(a))
MSL_UNARY(floor, raw::floor(a))
MSL_UNARY(ceil, raw::ceil(a))
MSL_UNARY(trunc, raw::trunc(a))
MSL_UNARY(rint, raw::rint(a))
MSL_UNARY(isnan, a != a)
MSL_BINARY(min, raw::min(a, (T)b))
MSL_BINARY(max, raw::max(a, (T)b))
MSL_BINARY(fmin, raw::fmin(a, b))
MSL_BINARY(fmax, raw::fmax(a, b))
template <class T> inline T clamp(T v, typename id<T>::type lo, typename id<T>::type hi) { return min(max(v, lo), hi); }
template <class T, int N> inline vec<T, N> clamp(const vec<T, N>& v, typename id<T>::type lo, typename id<T>::type hi) {
    return min(max(v, lo), hi);
}
inline bool isinf(float a) { return raw::abs(a) == __int_as_float(0x7f800000); }
inline bool isfinite(float a) { return raw::abs(a) < __int_as_float(0x7f800000); }
inline float fma(float a, float b, float c) { return raw::fma(a, b, c); }
inline half fma(half a, half b, half c) { return raw::fma(a, b, c); }
template <class T, int N> inline vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
    vec<T, N> r;
    for (int k = 0; k < N; k++) r[k] = raw::fma(a[k], b[k], c[k]);
    return r;
}
template <class T> inline T select(T a, T b, bool c) { return c ? b : a; }
inline float copysign(float a, float b) {
    return __int_as_float((__float_as_int(a) & 0x7fffffff) | (__float_as_int(b) & 0x80000000));
}
inline float ldexp(float a, int e) {  // two steps: exact where the result is a normal number
    int h = e / 2, l = e - h;
    return a * __int_as_float((h + 127) << 23) * __int_as_float((l + 127) << 23);
}
template <class T, int N> inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
    T s = a[0] * b[0];
    for (int k = 1; k < N; k++) s = s + a[k] * b[k];
    return s;
}
#define MSL_BYTE_SUM
#define MSL_FUNNEL
#if __CUDA_ARCH__ >= 890
#define MSL_E4M3_PAIR
inline uint e4m3_pair(ushort codes) { uint r; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes)); return r; }
#endif
inline uint funnel(uint high, uint low, uint n) { return __funnelshift_r(low, high, n); }
inline uint byte_sum(uint v, uint seed) { uint r; asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(v), "r"(0x01010101u), "r"(seed)); return r; }
inline uint popcount(uint v) { return __popc(v); }
inline uint clz(uint v) { return __clz(v); }
inline uint ctz(uint v) { return v ? __ffs(v) - 1 : 32; }
inline uint mulhi(uint a, uint b) { return __umulhi(a, b); }
inline uint extract_bits(uint v, uint at, uint n) { uint r; asm("bfe.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(v), "r"(at), "r"(n)); return r; }
inline uint rotate(uint v, uint n) { return __funnelshift_l(v, v, n); }

namespace precise {
inline float sqrt(float a) { return raw::sqrt(a); }
inline float divide(float a, float b) { return raw::divide(a, b); }
}  // namespace precise
inline float sqrt(float a) { return raw::sqrt(a); }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

// Shuffles of any value of whole words.
#define MSL_SHUFFLE(name, call) \
    template <class T> inline T name(T v, uint n) { \
        static_assert(sizeof(T) % 4 == 0, "whole words"); \
        uint w[sizeof(T) / 4]; \
        memcpy(w, &v, sizeof(T)); \
        for (uint k = 0; k < sizeof(T) / 4; k++) w[k] = call(0xffffffffu, w[k], n); \
        memcpy(&v, w, sizeof(T)); \
        return v; \
    }
MSL_SHUFFLE(simd_shuffle, __shfl_sync)
MSL_SHUFFLE(simd_broadcast, __shfl_sync)
MSL_SHUFFLE(simd_shuffle_xor, __shfl_xor_sync)
MSL_SHUFFLE(simd_shuffle_down, __shfl_down_sync)
MSL_SHUFFLE(simd_shuffle_up, __shfl_up_sync)
#undef MSL_SHUFFLE
template <class T> inline T simd_broadcast_first(T v) { return simd_broadcast(v, 0u); }
template <class T> inline T simd_sum(T v) {
    for (uint m = 16; m; m >>= 1) v = v + simd_shuffle_xor(v, m);
    return v;
}
template <class T> inline T simd_max(T v) {
    for (uint m = 16; m; m >>= 1) v = max(v, simd_shuffle_xor(v, m));
    return v;
}
template <class T> inline T simd_min(T v) {
    for (uint m = 16; m; m >>= 1) v = min(v, simd_shuffle_xor(v, m));
    return v;
}
inline bool simd_any(bool v) { return __any_sync(0xffffffffu, v); }
inline bool simd_all(bool v) { return __all_sync(0xffffffffu, v); }
template <class T> inline T simd_prefix_exclusive_sum(T v) {
    uint lane = threadIdx.x & 31;
    T s = v;
    for (uint m = 1; m < 32; m <<= 1) {
        T o = simd_shuffle_up(s, m);
        if (lane >= m) s = s + o;
    }
    return s - v;
}

enum memory_order { memory_order_relaxed };
struct atomic_uint { uint v; };
struct atomic_int { int v; };
inline uint atomic_fetch_add_explicit(atomic_uint* a, uint n, memory_order) { return atomicAdd(&a->v, n); }
inline int atomic_fetch_add_explicit(atomic_int* a, int n, memory_order) { return atomicAdd(&a->v, n); }
inline uint atomic_fetch_or_explicit(atomic_uint* a, uint n, memory_order) { return atomicOr(&a->v, n); }
inline uint atomic_fetch_max_explicit(atomic_uint* a, uint n, memory_order) { return atomicMax(&a->v, n); }
inline uint atomic_fetch_min_explicit(atomic_uint* a, uint n, memory_order) { return atomicMin(&a->v, n); }
inline uint atomic_load_explicit(const atomic_uint* a, memory_order) { return *(const volatile uint*)&a->v; }
inline void atomic_store_explicit(atomic_uint* a, uint n, memory_order) { *(volatile uint*)&a->v = n; }

// 8x8 matrices: lane l of a simdgroup holds elements (row, col) and (row, col + 1), row = l / 4, col = l % 4 * 2. How a
// device spreads them is its own matter; kernels only load, store and multiply.
template <class T, int R, int C> struct simdgroup_matrix { T e[2]; };
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
template <class T, int R, int C> inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) { return {{v, v}}; }
inline uint msl_lane() { uint l; asm("mov.u32 %0, %%laneid;" : "=r"(l)); return l; }
template <class T, class P>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const P* p, msl_ulong stride = 8, msl::vec<msl_ulong, 2> origin = msl::vec<msl_ulong, 2>(0, 0), bool transpose = false) {
    uint l = msl_lane(), r = l / 4, c = l % 4 * 2;
    p += origin.y * stride + origin.x;
    for (uint k = 0; k < 2; k++) m.e[k] = (T)(transpose ? p[(c + k) * stride + r] : p[r * stride + c + k]);
}
template <class T, class P>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, P* p, msl_ulong stride = 8, msl::vec<msl_ulong, 2> origin = msl::vec<msl_ulong, 2>(0, 0), bool transpose = false) {
    uint l = msl_lane(), r = l / 4, c = l % 4 * 2;
    p += origin.y * stride + origin.x;
    for (uint k = 0; k < 2; k++) (transpose ? p[(c + k) * stride + r] : p[r * stride + c + k]) = (P)m.e[k];
}
template <class A, class B>
inline void simdgroup_multiply_accumulate(simdgroup_float8x8& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, const simdgroup_float8x8& c) {
    uint l = msl_lane(), r = l / 4, col = l % 4 * 2;
    float s[2] = {c.e[0], c.e[1]};
    for (uint k = 0; k < 8; k++) {
        float left = simd_shuffle((float)a.e[k % 2], r * 4 + k / 2);
        uint from = k * 4 + col / 2;
        float b0 = simd_shuffle((float)b.e[0], from), b1 = simd_shuffle((float)b.e[1], from);
        s[0] = raw::fma(left, b0, s[0]);
        s[1] = raw::fma(left, b1, s[1]);
    }
    d.e[0] = s[0];
    d.e[1] = s[1];
}

inline uint3 msl_group() { return uint3(blockIdx.x, blockIdx.y, blockIdx.z); }
inline uint3 msl_groups() { return uint3(gridDim.x, gridDim.y, gridDim.z); }
inline uint3 msl_local() { return uint3(threadIdx.x, threadIdx.y, threadIdx.z); }
inline uint3 msl_size() { return uint3(blockDim.x, blockDim.y, blockDim.z); }
inline uint3 msl_all() { return msl_groups() * msl_size(); }
inline uint3 msl_grid() { return msl_group() * msl_size() + msl_local(); }
inline uint msl_count() { return blockDim.x * blockDim.y * blockDim.z; }
inline uint msl_index() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
template <class T> inline T msl_as(uint3 v) {
    if constexpr (count<T>::n == 0) return (T)v.x;
    else { T r; for (int k = 0; k < count<T>::n; k++) r[k] = (typename count<T>::element)v[k]; return r; }
}
template <class T> inline T msl_as(uint v) { return (T)v; }
}  // namespace metal
