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

// finish(r, v, Σ_p a[r, p] b[p, :]) for HIGH rows of N vectors, of which the first `rows` count. A function of its own:
// what surrounds it would take the registers that it needs for addresses.
template <int N, class A, class F>
__attribute__((noinline)) void tile(int64_t rows, int64_t depth, Factor<A> a, const A* b, int64_t stride, Ahead ahead,
                                    const F& finish) {
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
    for (int r = 0; r < HIGH; ++r) {
        if (r == rows) break;
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) finish(r, v, sum[r][v]);
    }
}

// The same for as many vectors as n columns need, WIDE at most.
template <class A, class F>
INLINE void product(int64_t rows, int64_t n, int64_t depth, Factor<A> a, const A* b, int64_t stride, const Ahead& ahead,
                    const F& finish) {
    const int64_t vectors = (n + Lanes<A>::W - 1) / Lanes<A>::W;
    if (vectors >= WIDE) return tile<WIDE>(rows, depth, a, b, stride, ahead, finish);
    if (WIDE > 2 && vectors == 2) return tile<2>(rows, depth, a, b, stride, ahead, finish);
    tile<1>(rows, depth, a, b, stride, ahead, finish);
}

struct Nothing {
    Ahead operator()(int64_t) const { return {}; }
};

// C ← β C + α A B, (m, n). B is padded to whole vectors, C need not be. next(i): what to ask for with row i of A.
template <class A, class F = Nothing>
void multiply(int64_t m, int64_t n, int64_t depth, Factor<A> a, const A* b, int64_t b_stride, A* c, int64_t c_stride,
              A alpha = 1, A beta = 0, F next = F{}) {
    constexpr int lanes = Lanes<A>::W;
    const Vec<A> by = fill<Vec<A>>(alpha), old = fill<Vec<A>>(beta);
    for (int64_t j = 0; j < n; j += WIDE * lanes)
        for (int64_t i = 0; i < m; i += HIGH) {
            const Factor<A> part = {a.at + i * a.row, a.row, a.column};
            product(least<int64_t>(HIGH, m - i), n - j, depth, part, b + j, b_stride, j ? Ahead{} : next(i),
                    [&](int64_t r, int64_t v, Vec<A> sum) __attribute__((always_inline)) {
                        A* at = c + (i + r) * c_stride + j + v * lanes;
                        const int64_t rest = n - j - v * lanes;
                        if (rest >= lanes) {
                            store(at, beta == 0 ? by * sum : fma(old, load(at), by * sum));
                        } else {
                            store(at, beta == 0 ? by * sum : fma(old, load(at, int(rest)), by * sum), int(rest));
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

INLINE float sum(V x) {
    typedef float Four __attribute__((vector_size(16)));
    Four parts[W / 4];
    std::memcpy(parts, &x, sizeof(x));
    for (int half = W / 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

float dot(const float* a, const float* b, int64_t n) {
    V out = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) out = fma(load(a + i), load(b + i), out);
    if (i < n) out = fma(load(a + i, int(n - i)), load(b + i, int(n - i)), out);
    return sum(out);
}

}  // namespace
