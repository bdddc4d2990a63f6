// Products of small and of long matrices: one tile in registers, and what packs its factors. For anova.cpp, once for every
// instruction set.
#pragma once

#include "vector.hpp"

namespace {

constexpr int HIGH = VECTOR_BYTES == 64 ? 8 : 6;  // rows of a tile
constexpr int WIDE = VECTOR_BYTES == 64 ? 3 : 2;  // vectors of each: sums, factors and a broadcast fill the registers
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

// Lines of memory that a product asks for in its first steps, one in each: far enough ahead of their use, and never more
// at a time than the processor can wait for.
struct Lines {
    const void* const* at = nullptr;
    int64_t count = 0;
};

// out[r, :] = Σ_p a[r, p] b[p, :] for HIGH rows of N vectors, of which the first `rows` count. A function of its own: what
// surrounds it would take the registers that it needs for addresses.
template <int N, class A>
__attribute__((noinline)) void tile(int64_t rows, int64_t depth, Factor<A> a, const A* b, int64_t stride, A* out, Lines lines) {
    const A* at[HIGH];
    Vec<A> sum[HIGH][N] = {};
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; ++r) at[r] = a.at + (r < rows ? r : rows - 1) * a.row;  // the last row stands in
    int64_t p = 0, offset = 0;
    const auto add = [&]() __attribute__((always_inline)) {
        Vec<A> x[N];
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) x[v] = load(b + v * Lanes<A>::W);
#pragma GCC unroll 8
        for (int r = 0; r < HIGH; ++r) {
            const Vec<A> y = fill<Vec<A>>(at[r][offset]);
#pragma GCC unroll 3
            for (int v = 0; v < N; ++v) sum[r][v] = fma(y, x[v], sum[r][v]);
        }
        ++p, offset += a.column, b += stride;
    };
    while (p < least(lines.count, depth)) __builtin_prefetch(lines.at[p]), add();
    while (p < depth) add();
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) store(out + (r * N + v) * Lanes<A>::W, sum[r][v]);
}

// The same for as many vectors as n columns need, WIDE at most; finish(r, j, sum) takes the vector from column j of row r.
template <class A, class F>
INLINE void product(int64_t rows, int64_t n, int64_t depth, Factor<A> a, const A* b, int64_t stride, Lines lines, F finish) {
    constexpr int lanes = Lanes<A>::W;
    alignas(LINE) A out[HIGH * WIDE * lanes];
    const int64_t vectors = least<int64_t>((n + lanes - 1) / lanes, WIDE);
    if (vectors == WIDE) tile<WIDE>(rows, depth, a, b, stride, out, lines);
    else if (WIDE > 2 && vectors == 2) tile<2>(rows, depth, a, b, stride, out, lines);
    else tile<1>(rows, depth, a, b, stride, out, lines);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < vectors; ++v) finish(r, v * lanes, load(out + (r * vectors + v) * lanes));
}

struct Nothing {
    Lines operator()(int64_t) const { return {}; }
};

// C ← β C + α A B, (m, n). B is padded to whole vectors, C need not be. ahead(i): lines to ask for with row i of A.
template <class A, class F = Nothing>
void multiply(int64_t m, int64_t n, int64_t depth, Factor<A> a, const A* b, int64_t b_stride, A* c, int64_t c_stride,
              A alpha = 1, A beta = 0, F ahead = F{}) {
    constexpr int lanes = Lanes<A>::W;
    const Vec<A> by = fill<Vec<A>>(alpha), old = fill<Vec<A>>(beta);
    for (int64_t j = 0; j < n; j += WIDE * lanes)
        for (int64_t i = 0; i < m; i += HIGH) {
            const Factor<A> part = {a.at + i * a.row, a.row, a.column};
            const Lines lines = j == 0 ? ahead(i) : Lines{};
            product(least<int64_t>(HIGH, m - i), n - j, depth, part, b + j, b_stride, lines, [&](int64_t r, int64_t v, Vec<A> x) {
                A* at = c + (i + r) * c_stride + j + v;
                const int64_t rest = n - j - v;
                if (rest >= lanes) {
                    store(at, beta == 0 ? by * x : fma(old, load(at), by * x));
                } else {
                    store(at, beta == 0 ? by * x : fma(old, load(at, int(rest)), by * x), int(rest));
                }
            });
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

INLINE double sum(V x) {
    double out = 0;
    for (int l = 0; l < W; ++l) out += x[l];
    return out;
}

double dot(const float* a, const float* b, int64_t n) {
    V out = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) out = fma(load(a + i), load(b + i), out);
    if (i < n) out = fma(load(a + i, int(n - i)), load(b + i, int(n - i)), out);
    return sum(out);
}

}  // namespace
