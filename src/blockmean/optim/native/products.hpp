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
    const auto add = [&](const A* b, const A* const* l, int64_t at) __attribute__((always_inline)) {
        Vec<A> right[vectors];
        for (int v = 0; v < vectors; ++v) right[v] = cut && v == vectors - 1 ? load(b + v * W, last) : load(b + v * W);
        for (int m = 0; m < rows; ++m)
            for (int v = 0; v < vectors; ++v) sum[m][v] += l[m][at] * right[v];
    };
    const A* l[rows];
    for (int m = 0; m < rows; ++m) l[m] = left + m * by_row;
    int64_t k = 0;
    const A* b = B.data;
    if (by_column == 1)  // rows far apart: with four entries of each at a time it takes two thirds of the time
        for (; k + 4 <= K; k += 4) {
            for (int u = 0; u < 4; ++u, b += B.row) add(b, l, u);
            for (int m = 0; m < rows; ++m) l[m] += 4;
        }
    for (; k < K; ++k, b += B.row) {
        add(b, l, 0);
        for (int m = 0; m < rows; ++m) l[m] += by_column;
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

// Some rows of C: tiles of `vectors`, and narrower ones for the columns that are left.
template <class A, int rows, int vectors>
void strip(int64_t N, int64_t K, const A* left, int64_t by_row, int64_t by_column, Place<const A> B, Place<const A> from,
           Place<A> C, A alpha) {
    constexpr int W = Lanes<A>::W;
    int64_t n = 0;
    for (; n + vectors * W <= N; n += vectors * W)
        tile<A, rows, vectors, false>(K, left, by_row, by_column, B.at(0, n), from.at(0, n), C.at(0, n), alpha, 0);
    for (; n + 2 * W <= N; n += 2 * W)
        tile<A, rows, 2, false>(K, left, by_row, by_column, B.at(0, n), from.at(0, n), C.at(0, n), alpha, 0);
    for (; n + W <= N; n += W)
        tile<A, rows, 1, false>(K, left, by_row, by_column, B.at(0, n), from.at(0, n), C.at(0, n), alpha, 0);
    if (n < N)
        tile<A, rows, 1, true>(K, left, by_row, by_column, B.at(0, n), from.at(0, n), C.at(0, n), alpha, int(N - n));
}

// Strips of six rows times two vectors, four times three or three times four fill the registers with sums; the rows are
// shared out so that narrower strips, which have to wait for their sums, remain for five rows and fewer.
template <class A>
void product(int64_t M, int64_t N, int64_t K, const A* left, int64_t by_row, int64_t by_column, Place<const A> B,
             Place<const A> from, Place<A> C, A alpha) {
    typedef void (*Strip)(int64_t, int64_t, const A*, int64_t, int64_t, Place<const A>, Place<const A>, Place<A>, A);
    for (int64_t m = 0, rows; m < M; m += rows) {
        const int64_t rest = M - m;
        Strip next;
        if (TILE_ROWS > 6 && rest >= TILE_ROWS) rows = TILE_ROWS, next = strip<A, TILE_ROWS, 2>;
        else if (rest == 6 || (rest > 8 && rest != 11)) rows = 6, next = strip<A, 6, 2>;
        else if (rest == 4 || rest > 6) rows = 4, next = strip<A, 4, 3>;
        else if (rest >= 3) rows = 3, next = strip<A, 3, 4>;
        else if (rest == 2) rows = 2, next = strip<A, 2, 4>;
        else rows = 1, next = strip<A, 1, 4>;
        next(N, K, left + m * by_row, by_row, by_column, B, from.at(m), C.at(m), alpha);
    }
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
