// Products of matrices one side of which is short, blocked for vector registers.
#pragma once

#include "vector.hpp"

namespace {

constexpr int SUMS = VECTOR_BYTES == 64 ? 24 : 12;  // vectors of sums that the registers hold, operands not counted
constexpr int ACROSS = 3;                           // most vectors of a tile side by side
constexpr int most_rows(int vectors) { return vectors * 12 < SUMS ? 12 : SUMS / vectors; }  // of a tile
template <class A> constexpr int PANEL = ACROSS * Lanes<A>::W;

// A matrix in memory: entry (i, j) is at data[i * row + j]. Nothing at all stands for zeros. Rows that a product reads
// or writes by whole vectors have room for them.
template <class A> struct Place {
    A* data = nullptr;
    int64_t row = 0;
    Place at(int64_t i, int64_t j = 0) const { return {data ? data + i * row + j : data, row}; }
    operator Place<const A>() const { return {data, row}; }
};

// A matrix in panels of so many columns, one after the other: whatever its width, a panel is one run of memory, its
// rows a constant distance apart. The last panel ends with the vector that has the last column, filled up with zeros.
template <class A> struct Panels {
    A* data;
    int64_t rows;
    Place<A> at(int64_t panel, int64_t row = 0) const { return {data + (panel * rows + row) * PANEL<A>, PANEL<A>}; }
};

// C = from + alpha L B for a tile of `rows` × `vectors`. L is transposed, its K rows `by` apart; or, IN_PANELS, it is a
// matrix in panels that are `by` apart.
template <class A, int rows, int vectors, bool IN_PANELS>
void tile(int64_t K, const A* left, int64_t by, Place<const A> B, Place<const A> from, Place<A> C, A alpha) {
    constexpr int W = Lanes<A>::W;
    Vec<A> sum[rows][vectors] = {};
    const A* b = B.data;
    const auto add = [&](const A* l) __attribute__((always_inline)) {
        Vec<A> right[vectors];
        for (int v = 0; v < vectors; ++v) right[v] = load(b + v * W);
        for (int m = 0; m < rows; ++m)
            for (int v = 0; v < vectors; ++v) sum[m][v] += l[m * (IN_PANELS ? PANEL<A> : 1)] * right[v];
        b += B.row;
    };
    for (; IN_PANELS && K > PANEL<A>; K -= PANEL<A>, left += by)
        for (int k = 0; k < PANEL<A>; ++k) add(left + k);
    for (int64_t k = 0; k < K; ++k, left += IN_PANELS ? 1 : by) add(left);
#pragma GCC unroll 12
    for (int m = 0; m < rows; ++m)  // unrolled, so that the sums need no memory
#pragma GCC unroll 3
        for (int v = 0; v < vectors; ++v) {
            const Vec<A> x = alpha * sum[m][v];
            store(C.data + m * C.row + v * W, from.data ? x + load(from.data + m * from.row + v * W) : x);
        }
}

template <class A, int vectors, bool IN_PANELS, int rows = most_rows(vectors)>
void tile(int64_t of, int64_t K, const A* left, int64_t by, Place<const A> B, Place<const A> from, Place<A> C, A alpha) {
    if (of == rows) tile<A, rows, vectors, IN_PANELS>(K, left, by, B, from, C, alpha);
    else if constexpr (rows > 1) tile<A, vectors, IN_PANELS, rows - 1>(of, K, left, by, B, from, C, alpha);
}

// So many rows or vectors (fewer than 2³², of which a quotient takes less time) in as few tiles as possible, all about
// equal: small tiles wait for their sums.
struct Tiles {
    int64_t each, larger;  // the first `larger` ones have one more
    Tiles(int64_t all, int64_t most) {
        const uint32_t count = uint32_t(all + most - 1) / uint32_t(most);
        each = uint32_t(all) / count, larger = all - each * count;
    }
    int64_t next() { return larger-- > 0 ? each + 1 : each; }
};

// C = from + alpha L B: M × N, with K terms each; N whole vectors. `from` may be C.
template <class A, bool IN_PANELS>
void product(int64_t M, int64_t N, int64_t K, const A* left, int64_t by, Place<const A> B, Place<const A> from, Place<A> C,
             A alpha) {
    constexpr int W = Lanes<A>::W;
    if (!M || !N) return;
    Tiles columns(N / W, ACROSS);
    for (int64_t n = 0, across; n < N; n += across * W) {
        across = columns.next();
        const auto run = across == 3 ? tile<A, 3, IN_PANELS> : across == 2 ? tile<A, 2, IN_PANELS> : tile<A, 1, IN_PANELS>;
        Tiles strips(M, most_rows(int(across)));
        for (int64_t m = 0, rows; m < M; m += rows) {
            rows = strips.next();
            const A* l = left + m * (IN_PANELS ? PANEL<A> : 1);
            run(rows, K, l, by, B.at(0, n), from.at(m, n), C.at(m, n), alpha);
        }
    }
}

// C = from + alpha Lᵀ B, with L (K × M).
template <class A>
void multiply(int64_t M, int64_t N, int64_t K, Place<const A> L, Place<const A> B, Place<const A> from, Place<A> C,
              A alpha = 1) {
    product<A, false>(M, N, K, L.data, L.row, B, from, C, alpha);
}

// C = from + alpha L B, with M rows of L from `row` on.
template <class A>
void multiply(int64_t M, int64_t N, int64_t K, Panels<A> L, int64_t row, Place<const A> B, Place<const A> from, Place<A> C,
              A alpha = 1) {
    product<A, true>(M, N, K, L.at(0, row).data, L.rows * PANEL<A>, B, from, C, alpha);
}

}  // namespace
