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
INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if VECTOR_BYTES == 64
    return bits<Vec<float>>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#elif defined(__FMA__)
    return bits<Vec<float>>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#elif defined(__aarch64__)
    return bits<Vec<float>>(vfmaq_f32(bits<float32x4_t>(c), bits<float32x4_t>(a), bits<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}
INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#if VECTOR_BYTES == 64
    return bits<Vec<double>>(_mm512_fmadd_pd(bits<__m512d>(a), bits<__m512d>(b), bits<__m512d>(c)));
#elif defined(__FMA__)
    return bits<Vec<double>>(_mm256_fmadd_pd(bits<__m256d>(a), bits<__m256d>(b), bits<__m256d>(c)));
#elif defined(__aarch64__)
    return bits<Vec<double>>(vfmaq_f64(bits<float64x2_t>(c), bits<float64x2_t>(a), bits<float64x2_t>(b)));
#else
    return a * b + c;
#endif
}

// ------------------------------------------------------------------ roots

INLINE Vec<float> root(Vec<float> x) {
#if VECTOR_BYTES == 64
    return bits<Vec<float>>(_mm512_sqrt_ps(bits<__m512>(x)));
#elif defined(__AVX2__)
    return bits<Vec<float>>(_mm256_sqrt_ps(bits<__m256>(x)));
#elif defined(__x86_64__)
    return bits<Vec<float>>(_mm_sqrt_ps(bits<__m128>(x)));
#elif defined(__aarch64__)
    return bits<Vec<float>>(vsqrtq_f32(bits<float32x4_t>(x)));
#else
    for (int i = 0; i < Lanes<float>::W; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

INLINE Vec<double> root(Vec<double> x) {
#if VECTOR_BYTES == 64
    return bits<Vec<double>>(_mm512_sqrt_pd(bits<__m512d>(x)));
#elif defined(__AVX2__)
    return bits<Vec<double>>(_mm256_sqrt_pd(bits<__m256d>(x)));
#elif defined(__x86_64__)
    return bits<Vec<double>>(_mm_sqrt_pd(bits<__m128d>(x)));
#elif defined(__aarch64__)
    return bits<Vec<double>>(vsqrtq_f64(bits<float64x2_t>(x)));
#else
    for (int i = 0; i < Lanes<double>::W; ++i) x[i] = __builtin_sqrt(x[i]);
    return x;
#endif
}

// 2 x^-½: a division and a product less than x^-½. Exact to two units in the last place for normal numbers; `careful`
// also takes zero and infinity.
INLINE Vec<double> twice_inverse_root(Vec<double> x, bool) { return 2.0 / root(x); }
INLINE Vec<float> twice_inverse_root(Vec<float> x, bool careful) {
    if (careful) return 2.0f / root(x);
#if VECTOR_BYTES == 64
    Vec<float> y = bits<Vec<float>>(_mm512_rsqrt14_ps(bits<__m512>(x)));
#elif defined(__AVX2__)
    Vec<float> y = bits<Vec<float>>(_mm256_rsqrt_ps(bits<__m256>(x)));
#else
    return 2.0f / root(x);
#endif
#if defined(__AVX2__)
    return y * fma(-(x * y), y, fill<Vec<float>>(3.0f));  // one step of Newton's method doubles the digits
#endif
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
#if VECTOR_BYTES == 64
    return bits<Vec<float>>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
    return bits<Vec<float>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    Vec<float> x;
    for (int i = 0; i < Lanes<float>::W; ++i) x[i] = widen(p[i].bits);
    return x;
#endif
}
INLINE void store(float16* p, Vec<float> x) {
#if VECTOR_BYTES == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(bits<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(bits<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < Lanes<float>::W; ++i) p[i].bits = narrow(x[i]);
#endif
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
    return bits<Vec<float>>(_mm256_maskload_ps(p, bits<__m256i>(first_lanes<float>(n))));
}
template <> ALWAYS Vec<double> load(const double* p, int n) {
    return bits<Vec<double>>(_mm256_maskload_pd(p, bits<__m256i>(first_lanes<double>(n))));
}
template <> ALWAYS void store(float* p, Vec<float> x, int n) {
    _mm256_maskstore_ps(p, bits<__m256i>(first_lanes<float>(n)), bits<__m256>(x));
}
template <> ALWAYS void store(double* p, Vec<double> x, int n) {
    _mm256_maskstore_pd(p, bits<__m256i>(first_lanes<double>(n)), bits<__m256d>(x));
}
#elif VECTOR_BYTES == 64
template <> ALWAYS Vec<float> load(const float* p, int n) {
    return bits<Vec<float>>(_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p));
}
template <> ALWAYS Vec<double> load(const double* p, int n) {
    return bits<Vec<double>>(_mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), p));
}
template <> ALWAYS void store(float* p, Vec<float> x, int n) {
    _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), bits<__m512>(x));
}
template <> ALWAYS void store(double* p, Vec<double> x, int n) {
    _mm512_mask_storeu_pd(p, __mmask8((1u << n) - 1), bits<__m512d>(x));
}
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
#if VECTOR_BYTES == 64
        __m512 all = bits<__m512>(x);
        low.add(bits<Vec<double>>(_mm512_cvtps_pd(_mm512_castps512_ps256(all))));
        high.add(bits<Vec<double>>(_mm512_cvtps_pd(_mm512_extractf32x8_ps(all, 1))));
#elif defined(__AVX2__)
        __m256 all = bits<__m256>(x);
        low.add(bits<Vec<double>>(_mm256_cvtps_pd(_mm256_castps256_ps128(all))));
        high.add(bits<Vec<double>>(_mm256_cvtps_pd(_mm256_extractf128_ps(all, 1))));
#else
        low.add(Vec<double>{x[0], x[1]});
        high.add(Vec<double>{x[2], x[3]});
#endif
    }
    ALWAYS double sum() const {
        Total<double> both;
        both.add(low.lanes + high.lanes);
        return both.sum();
    }
};

}  // namespace
