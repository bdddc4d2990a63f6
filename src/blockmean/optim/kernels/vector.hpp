// Short vectors of float or double, as wide as the instruction set that this file is compiled for, and the storage types
// of parameters. Only what gcc and clang offer on every processor, except for roots and half precision.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if !defined(VECTOR_BYTES)
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#endif
#if VECTOR_BYTES == 64
#define MM(name) _mm512_##name
#elif defined(__AVX2__)
#define MM(name) _mm256_##name
#elif defined(__x86_64__)
#define MM(name) _mm_##name
#endif
#define ALWAYS inline __attribute__((always_inline))
#define INLINE static ALWAYS

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between functions of this file only

namespace {

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

template <class A> struct Lanes;
template <> struct Lanes<float> {
    static constexpr int W = VECTOR_BYTES / 4;
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t M __attribute__((vector_size(VECTOR_BYTES)));
};
template <> struct Lanes<double> {
    static constexpr int W = VECTOR_BYTES / 8;
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t M __attribute__((vector_size(VECTOR_BYTES)));
};
template <class A> using Vec = typename Lanes<A>::V;
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));

template <class V, class T> INLINE V bits(T x) {
    V out;
    static_assert(sizeof(out) == sizeof(x), "");
    std::memcpy(&out, &x, sizeof(out));
    return out;
}

template <class V, class S> INLINE V fill(S x) { return x - V{}; }  // −0 − 0 is −0: every bit survives

// a b + c, rounded once where the processor can, as torch's own kernels do.
#if defined(__FMA__)
INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return MM(fmadd_ps)(a, b, c); }
INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return MM(fmadd_pd)(a, b, c); }
#elif defined(__aarch64__)
INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return bits<Vec<float>>(vfmaq_f32(bits<float32x4_t>(c), bits<float32x4_t>(a), bits<float32x4_t>(b)));
}
INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
    return bits<Vec<double>>(vfmaq_f64(bits<float64x2_t>(c), bits<float64x2_t>(a), bits<float64x2_t>(b)));
}
#else
template <class V> INLINE V fma(V a, V b, V c) { return a * b + c; }
#endif

// ------------------------------------------------------------------ roots

#if defined(MM)
INLINE Vec<float> root(Vec<float> x) { return MM(sqrt_ps)(x); }
INLINE Vec<double> root(Vec<double> x) { return MM(sqrt_pd)(x); }
#elif defined(__aarch64__)
INLINE Vec<float> root(Vec<float> x) { return bits<Vec<float>>(vsqrtq_f32(bits<float32x4_t>(x))); }
INLINE Vec<double> root(Vec<double> x) { return bits<Vec<double>>(vsqrtq_f64(bits<float64x2_t>(x))); }
#else
INLINE Vec<float> root(Vec<float> x) {
    for (int i = 0; i < Lanes<float>::W; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
}
INLINE Vec<double> root(Vec<double> x) {
    for (int i = 0; i < Lanes<double>::W; ++i) x[i] = __builtin_sqrt(x[i]);
    return x;
}
#endif

// 2 x^-½: a division and a product less than x^-½. Exact to two units in the last place for normal numbers; `careful`
// also takes zero and infinity.
INLINE Vec<double> twice_inverse_root(Vec<double> x, bool) { return 2.0 / root(x); }
INLINE Vec<float> twice_inverse_root(Vec<float> x, bool careful) {
#if defined(__AVX2__)
#if VECTOR_BYTES == 64
    const Vec<float> y = _mm512_rsqrt14_ps(x);
#else
    const Vec<float> y = _mm256_rsqrt_ps(x);
#endif
    if (!careful) return y * fma(-(x * y), y, fill<Vec<float>>(3.0f));  // a step of Newton's method doubles the digits
#endif
    return 2.0f / root(x);
}

// ------------------------------------------------------------------ memory

template <class T> struct Arithmetic { typedef float type; };  // of a storage type
template <> struct Arithmetic<double> { typedef double type; };

template <class A> INLINE Vec<A> load(const A* p) {
    Vec<A> x;
    std::memcpy(&x, p, sizeof(x));
    return x;
}
template <class A> INLINE void store(A* p, Vec<A> x) { std::memcpy(p, &x, sizeof(x)); }

INLINE Vec<float> load(const bfloat16* p) {
    Halves x;
    std::memcpy(&x, p, sizeof(x));
    return bits<Vec<float>>(__builtin_convertvector(x, Words) << 16);
}
INLINE void store(bfloat16* p, Vec<float> x) {
    Words word = bits<Words>(x);
    Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;  // to nearest, ties to even
    rounded = x == x ? rounded : Words{} + 0x7fc0u;
    Halves out = __builtin_convertvector(rounded, Halves);
    std::memcpy(p, &out, sizeof(out));
}

#if !defined(__F16C__)
INLINE float widen(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu, word;
    if (rest >= 0x7c00u) {
        word = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
    } else if (rest >= 0x400u) {
        word = sign | ((rest + (112u << 10)) << 13);
    } else {  // subnormal: a multiple of 2^-24
        float tiny = float(rest) * 0x1p-24f;
        word = bits<uint32_t>(tiny) | sign;
    }
    return bits<float>(word);
}
INLINE uint16_t narrow(float x) {
    uint32_t word = bits<uint32_t>(x), sign = (word >> 16) & 0x8000u, rest = word & 0x7fffffffu;
    if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to infinity
    if (rest < 0x38800000u) {  // subnormal: adding 0.5 lets the processor round to a multiple of 2^-24
        float shifted = bits<float>(rest) + 0.5f;
        return uint16_t(sign | (bits<uint32_t>(shifted) - 0x3f000000u));
    }
    return uint16_t(sign | ((rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}
#endif

INLINE Vec<float> load(const float16* p) {
    Halves half;
    std::memcpy(&half, p, sizeof(half));
#if VECTOR_BYTES == 64
    return _mm512_cvtph_ps(bits<__m256i>(half));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(bits<__m128i>(half));
#else
    Vec<float> x;
    for (int i = 0; i < Lanes<float>::W; ++i) x[i] = widen(half[i]);
    return x;
#endif
}
INLINE void store(float16* p, Vec<float> x) {
#if defined(__F16C__)
    const Halves half = bits<Halves>(MM(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT));
#else
    Halves half;
    for (int i = 0; i < Lanes<float>::W; ++i) half[i] = narrow(x[i]);
#endif
    std::memcpy(p, &half, sizeof(half));
}

// ------------------------------------------------------------------ the first n lanes

template <class A> INLINE typename Lanes<A>::M first_lanes(int n) {
    typename Lanes<A>::M index;
    for (int i = 0; i < Lanes<A>::W; ++i) index[i] = i;  // folded into a constant
    return index < n;
}

// Lanes from n on are zero.
template <class T> INLINE Vec<typename Arithmetic<T>::type> load(const T* p, int n) {
    T padded[Lanes<typename Arithmetic<T>::type>::W] = {};
    for (int i = 0; i < n; ++i) padded[i] = p[i];
    return load(padded);
}
// Memory from n on stays as it is.
template <class T> INLINE void store(T* p, Vec<typename Arithmetic<T>::type> x, int n) {
    T padded[Lanes<typename Arithmetic<T>::type>::W];
    store(padded, x);
    for (int i = 0; i < n; ++i) p[i] = padded[i];
}
#if VECTOR_BYTES == 32
template <> ALWAYS Vec<float> load(const float* p, int n) {
    return _mm256_maskload_ps(p, bits<__m256i>(first_lanes<float>(n)));
}
template <> ALWAYS void store(float* p, Vec<float> x, int n) {
    _mm256_maskstore_ps(p, bits<__m256i>(first_lanes<float>(n)), x);
}
#elif VECTOR_BYTES == 64
template <> ALWAYS Vec<float> load(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
template <> ALWAYS void store(float* p, Vec<float> x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x); }
#endif

// ------------------------------------------------------------------ sums in double

template <class A> struct Total;
template <> struct Total<double> {
    Vec<double> lanes = {};
    ALWAYS void add(Vec<double> x) { lanes += x; }
    ALWAYS double sum() const {
        double out = 0;
        for (int i = 0; i < Lanes<double>::W; ++i) out += lanes[i];
        return out;
    }
};
template <> struct Total<float> {
    Total<double> low, high;
    ALWAYS void add(Vec<float> x) {
        typedef float Half __attribute__((vector_size(VECTOR_BYTES / 2)));
        Half halves[2];
        std::memcpy(halves, &x, sizeof(x));
        low.add(__builtin_convertvector(halves[0], Vec<double>));
        high.add(__builtin_convertvector(halves[1], Vec<double>));
    }
    ALWAYS double sum() const {
        Total<double> both;
        both.add(low.lanes + high.lanes);
        return both.sum();
    }
};

}  // namespace
