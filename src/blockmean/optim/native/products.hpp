// Products of a matrix with a few columns or rows, blocked for vector registers.
#pragma once

#include "vector.hpp"

namespace {

constexpr int TILE_ROWS = VECTOR_BYTES == 64 ? 12 : 6;  // times two vectors: the sums that the registers hold

// A matrix in memory: entry (i, j) is at data[i * row + j]. Nothing at all stands for zeros.
template <class A> struct Place {
    A* data = nullptr;
    int64_t row = 0;
    Place at(int64_t i, int64_t j = 0) const { return {data ? data + i * row + j : data, row}; }
    operator Place<const A>() const { return {data, row}; }
};

// C = from + alpha A B for a tile of `rows` × `vectors`, of whose last vector only `last` lanes exist (0: all of them).
template <class A, int rows, int vectors, bool cut>
INLINE void tile(int64_t K, const A* left, int64_t by_row, int64_t by_column, Place<const A> B, Place<const A> from,
                 Place<A> C, A alpha, int last) {
    constexpr int W = Lanes<A>::W;
    Vec<A> sum[rows][vectors] = {};
    for (int64_t k = 0; k < K; ++k) {
        const A* b = B.data + k * B.row;
        Vec<A> right[vectors];
        for (int v = 0; v < vectors; ++v) right[v] = cut && v == vectors - 1 ? load(b + v * W, last) : load(b + v * W);
        for (int m = 0; m < rows; ++m)
            for (int v = 0; v < vectors; ++v) sum[m][v] += left[m * by_row + k * by_column] * right[v];
    }
    for (int m = 0; m < rows; ++m)
        for (int v = 0; v < vectors; ++v) {
            const bool part = cut && v == vectors - 1;
            const A* in = from.data ? from.data + m * from.row + v * W : nullptr;
            Vec<A> x = alpha * sum[m][v];
            if (in) x += part ? load(in, last) : load(in);
            A* out = C.data + m * C.row + v * W;
            if (part) store(out, x, last);
            else store(out, x);
        }
}

template <class A, int rows>
void strip(int64_t N, int64_t K, const A* left, int64_t by_row, int64_t by_column, Place<const A> B, Place<const A> from,
           Place<A> C, A alpha) {
    constexpr int W = Lanes<A>::W;
    int64_t n = 0;
    for (; n + 2 * W <= N; n += 2 * W)
        tile<A, rows, 2, false>(K, left, by_row, by_column, B.at(0, n), from.at(0, n), C.at(0, n), alpha, 0);
    if (n + W <= N) {
        tile<A, rows, 1, false>(K, left, by_row, by_column, B.at(0, n), from.at(0, n), C.at(0, n), alpha, 0);
        n += W;
    }
    if (n < N)
        tile<A, rows, 1, true>(K, left, by_row, by_column, B.at(0, n), from.at(0, n), C.at(0, n), alpha, int(N - n));
}

template <class A>
void product(int64_t M, int64_t N, int64_t K, const A* left, int64_t by_row, int64_t by_column, Place<const A> B,
             Place<const A> from, Place<A> C, A alpha) {
    int64_t m = 0;
    for (; m + TILE_ROWS <= M; m += TILE_ROWS)
        strip<A, TILE_ROWS>(N, K, left + m * by_row, by_row, by_column, B, from.at(m), C.at(m), alpha);
    for (; m + 3 <= M; m += 3) strip<A, 3>(N, K, left + m * by_row, by_row, by_column, B, from.at(m), C.at(m), alpha);
    for (; m < M; ++m) strip<A, 1>(N, K, left + m * by_row, by_row, by_column, B, from.at(m), C.at(m), alpha);
}

// C = from + alpha L B, (M × K) times (K × N). `from` may be C.
template <class A>
void multiply(int64_t M, int64_t N, int64_t K, Place<const A> L, Place<const A> B, Place<const A> from, Place<A> C,
              A alpha = 1) {
    product<A>(M, N, K, L.data, L.row, 1, B, from, C, alpha);
}

// C = from + alpha Lᵀ B, with L (K × M).
template <class A>
void multiply_transposed(int64_t M, int64_t N, int64_t K, Place<const A> L, Place<const A> B, Place<const A> from,
                         Place<A> C, A alpha = 1) {
    product<A>(M, N, K, L.data, 1, L.row, B, from, C, alpha);
}

}  // namespace
