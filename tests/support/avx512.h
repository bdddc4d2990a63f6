// The intrinsics of AVX-512 that the kernels use, lane by lane, for processors without it: `make avx512` runs the tests of
// the kernels with these. What is tested is everything but the instructions themselves: masks, widths, the order of sums.
#pragma once

#include <immintrin.h>

#include <cstring>

namespace stand_in {

#define EACH(lanes) for (int i = 0; i < (lanes); ++i)

static inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    EACH(16) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
static inline __m512d fmadd_pd(__m512d a, __m512d b, __m512d c) {
    EACH(8) c[i] = __builtin_fma(a[i], b[i], c[i]);
    return c;
}
static inline __m512 sqrt_ps(__m512 x) {
    EACH(16) x[i] = __builtin_sqrtf(x[i]);
    return x;
}
static inline __m512d sqrt_pd(__m512d x) {
    EACH(8) x[i] = __builtin_sqrt(x[i]);
    return x;
}
// An estimate with 14 digits, no better than the processor's.
static inline __m512 rsqrt14_ps(__m512 x) {
    EACH(16) {
        const float exact = 1 / __builtin_sqrtf(x[i]);
        unsigned bits;
        std::memcpy(&bits, &exact, sizeof(bits));
        bits &= ~0x1ffu;
        float rough;
        std::memcpy(&rough, &bits, sizeof(rough));
        x[i] = rough;
    }
    return x;
}
static inline __m512 maskz_loadu_ps(__mmask16 mask, const void* from) {
    __m512 x = {};
    EACH(16) if (mask >> i & 1) x[i] = static_cast<const float*>(from)[i];
    return x;
}
static inline void mask_storeu_ps(void* to, __mmask16 mask, __m512 x) {
    EACH(16) if (mask >> i & 1) static_cast<float*>(to)[i] = x[i];
}
static inline __m256 half(__m512 x, int which) {
    __m256 out;
    EACH(8) out[i] = x[8 * which + i];
    return out;
}
static inline __m512 cvtph_ps(__m256i x) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(x)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    __m512 out;
    EACH(16) out[i] = i < 8 ? low[i] : high[i - 8];
    return out;
}
static inline __m256i cvtps_ph(__m512 x) {
    const __m128i low = _mm256_cvtps_ph(half(x, 0), _MM_FROUND_TO_NEAREST_INT);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm256_cvtps_ph(half(x, 1), _MM_FROUND_TO_NEAREST_INT), 1);
}

#undef EACH

}  // namespace stand_in

#define _mm512_fmadd_ps stand_in::fmadd_ps
#define _mm512_fmadd_pd stand_in::fmadd_pd
#define _mm512_sqrt_ps stand_in::sqrt_ps
#define _mm512_sqrt_pd stand_in::sqrt_pd
#define _mm512_rsqrt14_ps stand_in::rsqrt14_ps
#define _mm512_maskz_loadu_ps stand_in::maskz_loadu_ps
#define _mm512_mask_storeu_ps stand_in::mask_storeu_ps
#define _mm512_cvtph_ps stand_in::cvtph_ps
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) stand_in::cvtps_ph(x)
