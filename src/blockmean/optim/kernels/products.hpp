// Products of small and of long matrices: one tile in registers, and what packs its factors. For anova.cpp, once for every
// instruction set.
#pragma once

#include "anova.hpp"
#include "vector.hpp"

using namespace blockmean;

namespace {

constexpr int HIGH = VECTOR_BYTES == 64 ? 8 : 6;  // rows of a tile
constexpr int WIDE = VECTOR_BYTES == 64 ? 3 : 2;  // vectors of each: sums, factors and a broadcast fill the registers
constexpr int PACE = HIGH + HIGH / 4;               // rows of memory that it asks for while it runs
constexpr int LINE = 64;
typedef Vec<float> V;
constexpr int W = Lanes<float>::W;

template <class A> INLINE A least(A a, A b) { return a < b ? a : b; }
template <class A> INLINE A most(A a, A b) { return a > b ? a : b; }

// ------------------------------------------------------------------ products

template <class A> struct Factor {  // entry (r, p) at r · row + p · column
    const A* at;
    int64_t row, column;
};

// Memory that a product asks for meanwhile: the first bytes of some rows of up to three arrays. A few lines at a time, for
// the processor waits for no more.
struct Ahead {
    int64_t rows = 0;
    int arrays = 0;
    const char* at[3];
    int64_t stride[3];  // bytes

    template <class T> void add(const T* from, int64_t row) {
        at[arrays] = reinterpret_cast<const char*>(from), stride[arrays++] = row * int64_t(sizeof(T));
    }
    void ask() {
        for (int a = 0; a < arrays; at[a] += stride[a], ++a)
            for (int64_t byte = 0; byte < PANEL * 4; byte += LINE) __builtin_prefetch(at[a] + byte);
    }
};

// out[r, :] = Σ_p a[r, p] b[p, :] for HIGH rows of N vectors, of which the first `rows` count. A function of its own: what
// surrounds it would take the registers that it needs for addresses.
template <int N, class A>
__attribute__((noinline)) void tile(int64_t rows, int64_t depth, Factor<A> a, const A* b, int64_t stride, A* out,
                                    int64_t out_stride, Ahead ahead) {
    const A* at[HIGH];
    Vec<A> sum[HIGH][N] = {};
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; ++r) at[r] = a.at + (r < rows ? r : rows - 1) * a.row;  // the last row stands in
    int64_t p = 0, offset = 0;
    const auto add_until = [&](int64_t end) __attribute__((always_inline)) {
        for (; p < end; ++p, offset += a.column, b += stride) {
            Vec<A> x[N];
#pragma GCC unroll 3
            for (int v = 0; v < N; ++v) x[v] = load(b + v * Lanes<A>::W);
#pragma GCC unroll 8
            for (int r = 0; r < HIGH; ++r) {
                const Vec<A> y = fill<Vec<A>>(at[r][offset]);
#pragma GCC unroll 3
                for (int v = 0; v < N; ++v) sum[r][v] = fma(y, x[v], sum[r][v]);
            }
        }
    };
    for (int64_t r = 0, steps = depth / PACE; r <= ahead.rows; ++r) {
        const bool last = r == ahead.rows;
        if (!last) ahead.ask();
        add_until(last ? depth : p + steps);
    }
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) store(out + r * out_stride + v * Lanes<A>::W, sum[r][v]);
}

// The same for as many vectors as n columns need, WIDE at most. Returns how many.
template <class A>
INLINE int64_t product(int64_t rows, int64_t n, int64_t depth, Factor<A> a, const A* b, int64_t stride, A* out,
                       int64_t out_stride, const Ahead& ahead) {
    const int64_t vectors = (n + Lanes<A>::W - 1) / Lanes<A>::W;
    if (vectors >= WIDE) return tile<WIDE>(rows, depth, a, b, stride, out, out_stride, ahead), WIDE;
    if (WIDE > 2 && vectors == 2) return tile<2>(rows, depth, a, b, stride, out, out_stride, ahead), 2;
    return tile<1>(rows, depth, a, b, stride, out, out_stride, ahead), 1;
}

struct Nothing {
    Ahead operator()(int64_t) const { return {}; }
};

// C ← β C + α A B, (m, n). B is padded to whole vectors, C need not be. next(i): what to ask for with row i of A.
template <class A, class F = Nothing>
void multiply(int64_t m, int64_t n, int64_t depth, Factor<A> a, const A* b, int64_t b_stride, A* c, int64_t c_stride,
              A alpha = 1, A beta = 0, F next = F{}) {
    constexpr int lanes = Lanes<A>::W;
    constexpr int64_t wide = WIDE * lanes;
    alignas(LINE) A out[HIGH * wide];
    const Vec<A> by = fill<Vec<A>>(alpha), old = fill<Vec<A>>(beta);
    for (int64_t j = 0; j < n; j += wide)
        for (int64_t i = 0; i < m; i += HIGH) {
            const Factor<A> part = {a.at + i * a.row, a.row, a.column};
            const int64_t rows = least<int64_t>(HIGH, m - i);
            const int64_t vectors = product(rows, n - j, depth, part, b + j, b_stride, out, wide, j ? Ahead{} : next(i));
            for (int64_t r = 0; r < rows; ++r) {
                A* at = c + (i + r) * c_stride + j;
                for (int64_t v = 0; v < vectors; ++v, at += lanes) {
                    const Vec<A> x = by * load(out + r * wide + v * lanes);
                    const int rest = int(least<int64_t>(n - j - v * lanes, lanes));
                    if (rest == lanes) {
                        store(at, beta == 0 ? x : fma(old, load(at), x));
                    } else {
                        store(at, beta == 0 ? x : fma(old, load(at, rest), x), rest);
                    }
                }
            }
        }
}

// Copy, convert, transpose: entry (i, j) from i · row + j · column to i · to_row + j, and zeros up to `width`.
template <class A, class B>
void copy(int64_t m, int64_t n, const B* from, int64_t row, int64_t column, A* to, int64_t to_row, int64_t width) {
    for (int64_t i = 0; i < m; ++i) {
        if (column == 1)
            for (int64_t j = 0; j < n; ++j) to[i * to_row + j] = A(from[i * row + j]);
        else
            for (int64_t j = 0; j < n; ++j) to[i * to_row + j] = A(from[i * row + j * column]);
        for (int64_t j = n; j < width; ++j) to[i * to_row + j] = 0;
    }
}

INLINE float sum(V x) {
    float lanes[W];
    store(lanes, x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    return lanes[0];
}

float dot(const float* a, const float* b, int64_t n) {
    V out = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) out = fma(load(a + i), load(b + i), out);
    if (i < n) out = fma(load(a + i, int(n - i)), load(b + i, int(n - i)), out);
    return sum(out);
}

}  // namespace
