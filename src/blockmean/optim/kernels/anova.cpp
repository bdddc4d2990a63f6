// A step of Anova for one matrix, compiled once for every instruction set: VARIANT is the name of the one at hand.
//
//     pass 1    GV = G V,  UG = Uᵀ G,  rows_i = ‖G_i‖²
//     between   K = Uᵀ GV,  R = GV − U K,  L = UG − K Vᵀ,  LL = L Lᵀ;  averages of all of these;  left, right and d
//     pass 2    M ← lerp(M, G, 1 − β₁),   θ ← (1 − η w) θ − η/w₁ (c d_i M_i + left_i · right)
//     refresh   U and V turn to what they follow, X and Y; M V and Uᵀ M are taken anew
//
// Every product runs through one tile in registers. Its right factor has whole vectors only: what is as long as the rows
// of G is cut into panels of 48 columns, one after the other in memory, the last one padded with zeros. Pass 1 packs 48
// rows of such a panel, which both products take from the L1 cache; so G is read from memory once. Sums over rows are
// those of fixed chunks, added in order: results do not depend on threads.
#include <cmath>

#include "anova.hpp"
#include "vector.hpp"

using namespace blockmean;

namespace {

constexpr double FORGET = 0.95;      // ρ
constexpr double LEAST = 0x1p-18;    // share of a row's square that its remainder has at least
constexpr double NOISE = 0x1p-19;    // what is smaller than this share of a whole counts as noise
constexpr double LOWEST = 0.7, HIGHEST = 5.0, LIFT = 3e-3;  // the range of c, which lifts no rate above LIFT
constexpr double INERTIA = 1e-3;     // how much of the old columns is added to new ones of length 1
constexpr double CLOSEST = 1e-5;     // smallest diagonal entry of a Cholesky factor of unit columns to be trusted
constexpr float SMALLEST = 0x1p-63f;  // the root of the smallest normal number

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

// out[r, :] = Σ_p a[r, p] b[p, :] for HIGH rows of N vectors, of which the first `rows` count. A function of its own: what
// surrounds it would take the registers that it needs for addresses.
template <int N, class A>
__attribute__((noinline)) void tile(int64_t rows, int64_t depth, Factor<A> a, const A* b, int64_t stride, A* out) {
    const A* at[HIGH];
    Vec<A> sum[HIGH][N] = {};
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; ++r) at[r] = a.at + (r < rows ? r : rows - 1) * a.row;  // the last row stands in
    for (int64_t p = 0, offset = 0; p < depth; ++p, offset += a.column, b += stride) {
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
#pragma GCC unroll 8
    for (int r = 0; r < HIGH; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) store(out + (r * N + v) * Lanes<A>::W, sum[r][v]);
}

// The same for as many vectors as n columns need, WIDE at most; finish(r, j, sum) takes the vector from column j of row r.
template <class A, class F>
INLINE void product(int64_t rows, int64_t n, int64_t depth, Factor<A> a, const A* b, int64_t stride, F finish) {
    constexpr int lanes = Lanes<A>::W;
    alignas(LINE) A out[HIGH * WIDE * lanes];
    const int64_t vectors = least<int64_t>((n + lanes - 1) / lanes, WIDE);
    if (vectors == WIDE) tile<WIDE>(rows, depth, a, b, stride, out);
    else if (WIDE > 2 && vectors == 2) tile<2>(rows, depth, a, b, stride, out);
    else tile<1>(rows, depth, a, b, stride, out);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < vectors; ++v) finish(r, v * lanes, load(out + (r * vectors + v) * lanes));
}

struct Nothing {
    void operator()(int64_t) const {}
};

// C ← β C + α A B, (m, n). B is padded to whole vectors, C need not be. ahead(i) is called before row i of C.
template <class A, class F = Nothing>
void multiply(int64_t m, int64_t n, int64_t depth, Factor<A> a, const A* b, int64_t b_stride, A* c, int64_t c_stride,
              A alpha = 1, A beta = 0, F ahead = F{}) {
    constexpr int lanes = Lanes<A>::W;
    const Vec<A> by = fill<Vec<A>>(alpha), old = fill<Vec<A>>(beta);
    for (int64_t j = 0; j < n; j += WIDE * lanes)
        for (int64_t i = 0; i < m; i += HIGH) {
            if (j == 0) ahead(i);
            const Factor<A> part = {a.at + i * a.row, a.row, a.column};
            product(least<int64_t>(HIGH, m - i), n - j, depth, part, b + j, b_stride, [&](int64_t r, int64_t v, Vec<A> x) {
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

// f(p, c, n, wide) for every panel: its first column, its columns, and those with padding.
template <class F> INLINE void over_panels(const Matrix& m, F f) {
    for (int64_t p = 0, c = 0; c < m.inputs; ++p, c += PANEL) {
        const int64_t n = least(PANEL, m.inputs - c);
        f(p, c, n, (n + W - 1) / W * W);
    }
}

// f(i, rows) for every block of rows.
template <class F> INLINE void over_blocks(int64_t begin, int64_t end, F f) {
    for (int64_t i = begin; i < end; i += BLOCK) f(i, least(BLOCK, end - i));
}

// ------------------------------------------------------------------ pass 1

void pack(const Matrix& m, const AnovaRule&, int64_t, int64_t) {
    const int64_t q = padded(m.q);
    over_blocks(0, m.inputs, [&](int64_t i, int64_t rows) {
        copy(rows, m.q, m.VT() + i, 1, m.inputs, m.packed + i * q, q, q);
    });
}

// Products of some rows of G, or of M, with (O, k) and packed (I, q).
template <class T>
void project_rows(const Matrix& m, const T* G, double sign, const float* U, int64_t stride, int64_t begin, int64_t end) {
    typedef Lanes<float>::M M;
    const M flip = bits<M>(fill<V>(sign < 0 ? -0.0f : 0.0f));
    const int64_t q = padded(m.q);
    float* parts = m.parts + begin / m.chunk() * m.panels() * m.k * PANEL;
    alignas(LINE) float panel[BLOCK * PANEL];
    over_blocks(begin, end, [&](int64_t i, int64_t rows) {
        V squares[BLOCK] = {};
        over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t wide) {
            for (int64_t r = 0; r < rows; ++r) {
                const T* from = G + (i + r) * m.inputs + c;
                float* to = panel + r * PANEL;
                V square = squares[r];
                for (int64_t j = 0; j < n; j += W) {
                    const V g = bits<V>(bits<M>(n - j >= W ? load(from + j) : load(from + j, int(n - j))) ^ flip);
                    store(to + j, g);
                    square = fma(g, g, square);
                }
                squares[r] = square;
            }
            // Meanwhile the next panel comes from memory: rows so short are no stream to the processor.
            const T* next = c + PANEL < m.inputs ? G + i * m.inputs + c + PANEL : G + (i + BLOCK) * m.inputs;
            const auto ahead = [&](int64_t row) {
                for (int64_t r = row; r < row + HIGH && r < rows; ++r)
                    for (int64_t j = 0; j < PANEL; j += LINE / int64_t(sizeof(T)))
                        __builtin_prefetch(next + r * m.inputs + j);
            };
            multiply<float>(rows, q, n, {panel, PANEL, 1}, m.packed + c * q, q, m.GV + i * q, q, 1, c > 0, ahead);
            multiply<float>(m.k, wide, rows, {U + i * stride, 1, stride}, panel, PANEL, parts + p * m.k * PANEL, PANEL, 1,
                            i > begin);
        });
        for (int64_t r = 0; r < rows; ++r) m.rows[i + r] = float(sum(squares[r]));
    });
}

void project(const Matrix& m, const AnovaRule& rule, int64_t begin, int64_t end) {
    const auto with = [&](auto t) {
        typedef decltype(t) T;
        project_rows(m, reinterpret_cast<const T*>(m.grad), rule.sign, m.U(), m.unit_stride(), begin, end);
    };
    if (m.dtype == BFLOAT16) return with(bfloat16{});
    if (m.dtype == FLOAT16) return with(float16{});
    with(0.0f);
}

// Sums over chunks and rows.
void gather(const Matrix& m, const AnovaRule&, int64_t, int64_t) {
    const int64_t size = m.panels() * m.k * PANEL;
    for (int64_t part = 1; part < m.chunks(); ++part)
        for (int64_t i = 0; i < size; ++i) m.UG[i] = (part == 1 ? m.parts[i] : m.UG[i]) + m.parts[part * size + i];
    double total = 0;
    for (int64_t i = 0; i < m.units; ++i) total += m.rows[i];
    m.total[0] = double(float(total));  // infinite where float32 has no such number
}

// ------------------------------------------------------------------ between the passes

void lerp(float& x, double y, double weight) { x = float(x + weight * (y - x)); }

double root(float v, double weight, double floor) { return most(std::sqrt(v / weight) + floor, double(SMALLEST)); }

// Vᵀ, the upper part of `right`.
void pack_right(const Matrix& m) {
    over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t) {
        copy(m.q, n, m.VT() + c, m.inputs, 1, m.right + p * (m.q + m.k) * PANEL, PANEL, PANEL);
    });
}

// A K Vᵀ is subtracted from what the lower part of `right` has in a panel.
void subtract(const Matrix& m, const float* K, int64_t stride, int64_t p, int64_t wide) {
    float *upper = m.right + p * (m.q + m.k) * PANEL, *lower = upper + m.q * PANEL;
    multiply<float>(m.k, wide, m.q, {K, stride, 1}, upper, PANEL, lower, PANEL, -1, 1);
}

// K = Uᵀ GV for any (O, k).
void grand(const Matrix& m, const float* U, int64_t stride) {
    const int64_t q = padded(m.q);
    for (int64_t i = 0; i < m.units; i += 8 * BLOCK)
        multiply<float>(m.k, q, least(8 * BLOCK, m.units - i), {U + i * stride, 1, stride}, m.GV + i * q, q, m.K, q, 1, i > 0);
}

// The sums of squares of GV, UG and K: of R and L, which are formed, and of E, which is not: ‖E‖² = ‖G‖² − ‖K‖² − ‖R‖²
// − ‖L‖² is exact, and the squares of its rows are estimated (decomposition.py, `mean_squares`).
void sum_squares(const Matrix& m) {
    const int64_t k = padded(m.k), q = padded(m.q), stride = m.unit_stride();
    double of_K = 0, of_R = 0, of_L = 0;
    for (int64_t j = 0; j < m.q; ++j) m.squares_R[j] = 0;
    over_blocks(0, m.units, [&](int64_t i, int64_t rows) {
        copy(rows, q, m.GV + i * q, q, 1, m.block, q, q);
        multiply<float>(rows, q, m.k, {m.U() + i * stride, stride, 1}, m.K, q, m.block, q, -1, 1);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < m.q; ++j) m.squares_R[j] += double(m.block[r * q + j]) * m.block[r * q + j];
    });
    over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t wide) {
        float* lower = m.right + (p * (m.q + m.k) + m.q) * PANEL;
        copy(m.k, PANEL, m.UG + p * m.k * PANEL, PANEL, 1, lower, PANEL, PANEL);
        subtract(m, m.K, q, p, wide);
        copy(n, m.k, lower, 1, PANEL, m.block, k, k);  // Lᵀ
        multiply<float>(m.k, k, n, {lower, PANEL, 1}, m.block, k, m.LL, k, 1, c > 0);
    });
    for (int64_t a = 0; a < m.k; ++a)
        for (int64_t j = 0; j < m.q; ++j) of_K += double(m.K[a * q + j]) * m.K[a * q + j];
    for (int64_t j = 0; j < m.q; ++j) of_R += m.squares_R[j];
    for (int64_t a = 0; a < m.k; ++a) of_L += m.LL[a * k + a];
    const double without_V = m.total[0] - of_K - of_R, rest = most(without_V - of_L, 0.0), part = rest / without_V;
    const double share = part == part ? least(most(part, 0.0), 1.0) : 0;
    m.total[1] = rest;
    over_blocks(0, m.units, [&](int64_t i, int64_t rows) {
        multiply<float>(rows, k, m.k, {m.U() + i * stride, stride, 1}, m.LL, k, m.block, k);
        for (int64_t r = 0; r < rows; ++r) {
            const float *GV = m.GV + (i + r) * q, *U = m.U() + (i + r) * stride, row = m.rows[i + r];
            const double f = row - dot(GV, GV, m.q), of_units = dot(m.block + r * k, U, m.k);
            m.squares_E[i + r] = float(most(most(std::fabs(f - of_units), share * f), LEAST * row));
        }
    });
}

// Averages of everything, and the factors of the step.
void precondition(const Matrix& m, const AnovaRule& rule, int64_t, int64_t) {
    const int64_t k = padded(m.k), q = padded(m.q), stride = m.unit_stride(), rank = m.q + m.k;
    const double O = double(m.units), I = double(m.inputs), fresh = 1 - rule.beta1, means = 1 - rule.mean_beta,
                 rest = 1 - rule.beta2;
    lerp(m.scalar(W1), 1, fresh), lerp(m.scalar(WM), 1, means), lerp(m.scalar(WE), 1, rest);
    const double w1 = m.scalar(W1), wm = m.scalar(WM), wE = m.scalar(WE);
    pack_right(m);
    grand(m, m.U(), stride);
    sum_squares(m);
    lerp(m.scalar(VARIANCE), m.total[0] / (O * I), rest), lerp(m.scalar(REST_VARIANCE), m.total[1] / (O * I), rest);
    copy(m.q, m.k, m.K, 1, q, m.KT, k, k);
    multiply<float>(m.units, m.k, m.q, {m.GV, q, 1}, m.KT, k, m.X(), stride, float(1 - FORGET), float(FORGET));

    const double noise = NOISE * std::sqrt(m.total[0]);
    for (int64_t j = 0; j < m.q; ++j) {
        lerp(m.v_R()[j], m.squares_R[j] / O, means);
        m.inverse_R[j] = float(1 / root(m.v_R()[j], wm, rule.eps + noise / std::sqrt(O)));
    }
    for (int64_t a = 0; a < m.k; ++a) {
        lerp(m.v_L()[a], m.LL[a * k + a] / I, means);
        m.inverse_L[a] = float(1 / root(m.v_L()[a], wm, rule.eps + noise / std::sqrt(I)));
        for (int64_t j = 0; j < q; ++j) m.mixed[a * q + j] = 0;
        for (int64_t j = 0; j < m.q; ++j) {
            const int64_t at = a * m.q + j;
            const double K = m.K[a * q + j];
            lerp(m.K_m()[at], K, fresh), lerp(m.v_K()[at], K * K, means);
            const double inverse = 1 / root(m.v_K()[at], wm, rule.eps + noise);
            m.mixed[a * q + j] = float(m.K_m()[at] * (inverse - m.inverse_R[j]));
        }
    }
    // right = [Vᵀ; UM − K_m Vᵀ]
    over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t wide) {
        const float* UG = m.UG + p * m.k * PANEL;
        multiply<float>(m.q, n, m.k, {m.K, 1, q}, UG, PANEL, m.YT() + c, m.inputs, float(1 - FORGET), float(FORGET));
        for (int64_t a = 0; a < m.k; ++a) {
            float *UM = m.UM() + a * m.inputs + c, *lower = m.right + (p * rank + m.q + a) * PANEL;
            for (int64_t j = 0; j < n; ++j) lower[j] = UM[j] += float(fresh) * (UG[a * PANEL + j] - UM[j]);
        }
        subtract(m, m.K_m(), m.q, p, wide);
    });
    // left = c [U (K_m/rK) + (MV − U K_m)/rR − d MV | U/rL − d U], and all that multiplies it
    const double limit = most(LIFT / most(rule.lr, LIFT / HIGHEST), LOWEST);
    const double step = -rule.lr / w1 * least(double(m.scalar(FACTOR)), limit);
    const double floor = rule.eps + noise / std::sqrt(O * I);
    over_blocks(0, m.units, [&](int64_t i, int64_t rows) {
        multiply<float>(rows, m.q, m.k, {m.U() + i * stride, stride, 1}, m.mixed, q, m.left + i * rank, rank);
        for (int64_t r = i; r < i + rows; ++r) {
            const float *U = m.U() + r * stride, *GV = m.GV + r * q;
            float *MV = m.MV() + r * stride, *left = m.left + r * rank, &v = m.v_E()[r * stride];
            lerp(v, m.squares_E[r] / I, rest);
            const float d = float(1 / root(v, wE, floor)), by = float(step);
            m.scale[r] = float(step * d);
            for (int64_t j = 0; j < m.q; ++j) {
                MV[j] += float(fresh) * (GV[j] - MV[j]);
                left[j] = by * (left[j] + MV[j] * (m.inverse_R[j] - d));
            }
            for (int64_t a = 0; a < m.k; ++a) left[m.q + a] = by * U[a] * (m.inverse_L[a] - d);
        }
    });
}

// ------------------------------------------------------------------ pass 2

template <class T> void update_rows(const Matrix& m, const AnovaRule& rule, int64_t begin, int64_t end) {
    typedef Lanes<float>::M M;
    const M flip = bits<M>(fill<V>(rule.sign < 0 ? -0.0f : 0.0f));
    const V fresh = fill<V>(float(1 - rule.beta1)), decay = fill<V>(float(1 - rule.lr * rule.weight_decay));
    const int64_t rank = m.q + m.k;
    T* const param = reinterpret_cast<T*>(m.param);
    const T* const grad = reinterpret_cast<const T*>(m.grad);
    over_blocks(begin, end, [&](int64_t first, int64_t rows) {
        over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t) {
            for (int64_t i = first; i < first + rows; i += HIGH) {
                // The rows of the next tile come from memory meanwhile.
                const bool last = i + HIGH >= first + rows;
                const int64_t next = last ? first * m.inputs + c + PANEL : (i + HIGH) * m.inputs + c;
                for (int64_t r = 0; r < HIGH; ++r)
                    for (int64_t j = 0; j < PANEL; j += LINE / 4) {
                        const int64_t at = next + r * m.inputs + j;
                        __builtin_prefetch(m.M + at, 1);
                        __builtin_prefetch(param + at, 1);
                        __builtin_prefetch(grad + at);
                    }
                const Factor<float> left = {m.left + i * rank, rank, 1};
                const int64_t high = least<int64_t>(HIGH, first + rows - i);
                for (int64_t j = 0; j < n; j += WIDE * W) {
                    const float* right = m.right + p * rank * PANEL + j;
                    product(high, n - j, rank, left, right, PANEL, [&](int64_t r, int64_t v, V low_rank) {
                        const int64_t at = (i + r) * m.inputs + c + j + v;
                        const int rest = int(least<int64_t>(n - j - v, W));
                        const V scale = fill<V>(m.scale[i + r]);
                        const auto change = [&](V g, V& x, V& theta) {
                            x = fma(fresh, bits<V>(bits<M>(g) ^ flip) - x, x);
                            theta = fma(decay, theta, fma(scale, x, low_rank));
                        };
                        if (rest == W) {
                            V x = load(m.M + at), theta = load(param + at);
                            change(load(grad + at), x, theta);
                            store(m.M + at, x), store(param + at, theta);
                        } else {
                            V x = load(m.M + at, rest), theta = load(param + at, rest);
                            change(load(grad + at, rest), x, theta);
                            store(m.M + at, x, rest), store(param + at, theta, rest);
                        }
                    });
                }
            }
        });
    });
}

void update(const Matrix& m, const AnovaRule& rule, int64_t begin, int64_t end) {
    if (m.dtype == BFLOAT16) return update_rows<bfloat16>(m, rule, begin, end);
    if (m.dtype == FLOAT16) return update_rows<float16>(m, rule, begin, end);
    update_rows<float>(m, rule, begin, end);
}

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern const AnovaKernels blockmean::JOIN(anova_, VARIANT) = {pack,   project, gather, precondition, update,
                                                             nullptr, nullptr, nullptr};
