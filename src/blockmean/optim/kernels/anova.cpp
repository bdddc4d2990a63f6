// A step of Anova for one matrix, compiled once for every instruction set: VARIANT is the name of the one at hand.
//
//     pass 1    GV = G V,  UG = Uᵀ G,  rows_i = ‖G_i‖²
//     between   K = Uᵀ GV,  R = GV − U K,  L = UG − K Vᵀ,  LL = L Lᵀ;  averages of all of these;  left, right and d
//     pass 2    M ← lerp(M, G, 1 − β₁),   θ ← (1 − η w) θ − η/w₁ (c d_i M_i + left_i · right)
//     refresh   U and V turn to what they follow, X and Y; M V and Uᵀ M are taken anew
//
// Every product runs through one tile in registers. Its right factor has whole vectors only: what is as long as the rows
// of G is cut into panels of 48 columns, one after the other in memory, the last one padded with zeros. Pass 1 packs 96
// rows of such a panel, which both products take from the L1 cache; so G is read from memory once. Sums over rows are
// those of fixed chunks, added in order: results do not depend on threads.
#include <cmath>

#include "anova.hpp"
#include "products.hpp"

using namespace blockmean;

namespace {

constexpr double FORGET = 0.95;      // ρ
constexpr double LEAST = 0x1p-18;    // share of a row's square that its remainder has at least
constexpr double NOISE = 0x1p-19;    // what is smaller than this share of a whole counts as noise
constexpr double LOWEST = 0.7, HIGHEST = 20.0, MAX_RATE = 7e-3, GENTLE = 3e-2;  // limits of c, as in decomposition.py
constexpr float FACTOR_NEWS = 0.2f;   // how much c takes from each measurement
constexpr double INERTIA = 1e-3;     // how much of the old columns is added to new ones of length 1
constexpr double CLOSEST = 1e-5;     // smallest diagonal entry of a Cholesky factor of unit columns to be trusted
constexpr double SAFE = 1e-3;        // with all of them above, one Cholesky factor is enough
constexpr int64_t TALL = 96;         // rows of G at a time in pass 1
constexpr int64_t LONG = 8 * BLOCK;  // terms of a sum in float: short ones round less
constexpr float SMALLEST = 0x1p-63f;  // the root of the smallest normal number

// f(p, c, n, wide) for every panel: its first column, its columns, and those with padding.
template <class F> INLINE void over_panels(const Matrix& m, F f) {
    for (int64_t p = 0, c = 0; c < m.inputs; ++p, c += PANEL) {
        const int64_t n = least(PANEL, m.inputs - c);
        f(p, c, n, (n + W - 1) / W * W);
    }
}

// f(T{}) for the storage type of a matrix.
template <class F> void with_type(const Matrix& m, F f) {
    if (m.dtype == BFLOAT16) return f(bfloat16{});
    if (m.dtype == FLOAT16) return f(float16{});
    f(float{});
}

// f(i, rows) for every block of rows.
template <class F> INLINE void over_blocks(int64_t begin, int64_t end, F f) {
    for (int64_t i = begin; i < end; i += BLOCK) f(i, least(BLOCK, end - i));
}

// ------------------------------------------------------------------ pass 1

void pack(const Matrix& m, const AnovaRule&, int64_t, int64_t) {
    const int64_t k = padded(m.k), q = padded(m.q);
    copy(m.units, m.k, m.U(), m.unit_stride(), 1, m.packed_U, k, k);
    over_blocks(0, m.inputs, [&](int64_t i, int64_t rows) {
        copy(rows, m.q, m.VT() + i, 1, m.inputs, m.packed_V + i * q, q, q);
    });
}

// Products of some rows of G, or of M, with what is packed.
template <class T>
void project_rows(const Matrix& m, const T* G, double sign, int64_t begin, int64_t end) {
    typedef Lanes<float>::M M;
    const M flip = bits<M>(fill<V>(sign < 0 ? -0.0f : 0.0f));
    const int64_t k = padded(m.k), q = padded(m.q);
    float* parts = m.parts + begin / m.chunk() * m.panels() * m.k * PANEL;
    alignas(LINE) float panel[TALL * PANEL];
    for (int64_t i = begin; i < end; i += TALL) {
        const int64_t rows = least(TALL, end - i);
        V squares[TALL] = {};
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
            const T* next = c + PANEL < m.inputs ? G + i * m.inputs + c + PANEL : G + (i + TALL) * m.inputs;
            const auto ahead = [&](int64_t row) {
                Ahead some{least<int64_t>(HIGH, rows - row)};
                some.add(next + row * m.inputs, m.inputs);
                return some;
            };
            multiply<float>(rows, q, n, {panel, PANEL, 1}, m.packed_V + c * q, q, m.GV + i * q, q, 1, c > 0, ahead);
            float* part = parts + p * m.k * PANEL;
            multiply<float>(m.k, wide, rows, {m.packed_U + i * k, 1, k}, panel, PANEL, part, PANEL, 1, i > begin);
        });
        for (int64_t r = 0; r < rows; ++r) m.rows[i + r] = float(sum(squares[r]));
    }
}

void project(const Matrix& m, const AnovaRule& rule, int64_t begin, int64_t end) {
    with_type(m, [&](auto t) {
        project_rows(m, reinterpret_cast<const decltype(t)*>(m.grad), rule.sign, begin, end);
    });
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

// From the nearer end, as torch's: with weight 1, x − x must not leave rounding errors of a large x behind.
INLINE float lerp(float& x, float y, float weight) {
    return x = weight < 0.5f ? x + weight * (y - x) : y - (1 - weight) * (y - x);
}

INLINE float inverse_root(float v, float floor) { return 1 / most(std::sqrt(v) + floor, SMALLEST); }

// Vᵀ, the upper part of `right`.
void pack_right(const Matrix& m) {
    over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t) {
        copy(m.q, n, m.VT() + c, m.inputs, 1, m.right + p * (m.q + m.k) * PANEL, PANEL, PANEL);
    });
}

// K Vᵀ is subtracted from what the lower part of `right` has in a panel.
void subtract(const Matrix& m, const float* K, int64_t stride, int64_t p, int64_t wide) {
    float *upper = m.right + p * (m.q + m.k) * PANEL, *lower = upper + m.q * PANEL;
    multiply<float>(m.k, wide, m.q, {K, stride, 1}, upper, PANEL, lower, PANEL, -1, 1);
}

// K = Uᵀ GV.
void grand(const Matrix& m) {
    const int64_t q = padded(m.q), stride = m.unit_stride();
    for (int64_t i = 0; i < m.units; i += LONG) {
        const int64_t rows = least(LONG, m.units - i);
        multiply<float>(m.k, q, rows, {m.U() + i * stride, 1, stride}, m.GV + i * q, q, m.K, q, 1, i > 0);
    }
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
    const double O = double(m.units), I = double(m.inputs);
    const float fresh = float(1 - rule.beta1), means = float(1 - rule.mean_beta), rest = float(1 - rule.beta2);
    lerp(m.scalar(W1), 1, fresh), lerp(m.scalar(WM), 1, means), lerp(m.scalar(WE), 1, rest);
    const double w1 = m.scalar(W1), wm = m.scalar(WM), wE = m.scalar(WE);
    // Rounding errors are those of what M remembers, too (decomposition.py, `remembered`).
    const auto sum = [](const float* v, int64_t n) { double all = 0; for (; n; --n) all += *v++; return all; };
    const double known = sum(m.v_K(), m.k * m.q) + O * sum(m.v_R(), m.q) + I * sum(m.v_L(), m.k);
    pack_right(m);
    grand(m), sum_squares(m);
    lerp(m.scalar(VARIANCE), float(m.total[0] / (O * I)), rest);
    lerp(m.scalar(REST_VARIANCE), float(m.total[1] / (O * I)), rest);
    copy(m.q, m.k, m.K, 1, q, m.KT, k, k);
    multiply<float>(m.units, m.k, m.q, {m.GV, q, 1}, m.KT, k, m.X(), stride, float(1 - FORGET), float(FORGET));

    const double noise = NOISE * std::sqrt(m.total[0] + known);
    const float by_wm = float(1 / wm), by_wE = float(1 / wE);
    const auto floor = [&](double entries) { return float(rule.eps + noise / std::sqrt(entries)); };
    const float floor_K = floor(1), floor_R = floor(O), floor_L = floor(I), floor_E = floor(O * I);
    const double lr = most(rule.lr, GENTLE / (HIGHEST * HIGHEST)), gentle = std::sqrt(GENTLE / lr);
    const double c = most(least(double(m.scalar(FACTOR)), least(MAX_RATE / lr, gentle)), LOWEST);
    const float by_w1 = float(1 / w1), sigma = std::sqrt(m.scalar(VARIANCE) * by_wE) + float(rule.eps);
    const float lifted = 1 / (float(c) * most(sigma, SMALLEST));
    for (int64_t j = 0; j < m.q; ++j) {
        const float v = lerp(m.v_R()[j], float(m.squares_R[j] / O), means);
        m.inverse_R[j] = inverse_root(v * by_wm, floor_R);
    }
    for (int64_t a = 0; a < m.k; ++a) {
        m.inverse_L[a] = inverse_root(lerp(m.v_L()[a], m.LL[a * k + a] / float(I), means) * by_wm, floor_L);
        const float *__restrict new_K = m.K + a * q, *__restrict inverse_R = m.inverse_R;
        float *__restrict K = m.K_m() + a * m.q, *__restrict v = m.v_K() + a * m.q, *__restrict mixed = m.mixed + a * q;
        for (int64_t j = 0; j < m.q; ++j) {
            lerp(K[j], new_K[j], fresh), lerp(v[j], new_K[j] * new_K[j], means);
            // A grand mean that agrees over steps moves as with one σ for all entries (decomposition.py, `lift_of`).
            const float root = most(std::sqrt(v[j] * by_wm) + floor_K, SMALLEST), rho = K[j] / root * by_w1;
            mixed[j] = K[j] * (most(1 / root, least(rho * rho, 1.0f) * lifted) - inverse_R[j]);
        }
        for (int64_t j = m.q; j < q; ++j) mixed[j] = 0;
    }
    // right = [Vᵀ; UM − K_m Vᵀ]
    over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t wide) {
        const float* UG = m.UG + p * m.k * PANEL;
        multiply<float>(m.q, n, m.k, {m.K, 1, q}, UG, PANEL, m.YT() + c, m.inputs, float(1 - FORGET), float(FORGET));
        for (int64_t a = 0; a < m.k; ++a) {
            float *__restrict UM = m.UM() + a * m.inputs + c, *__restrict lower = m.right + (p * rank + m.q + a) * PANEL;
            for (int64_t j = 0; j < n; ++j) lower[j] = lerp(UM[j], UG[a * PANEL + j], fresh);
        }
        subtract(m, m.K_m(), m.q, p, wide);
    });
    // left = c [U (K_m/rK) + (MV − U K_m)/rR − d MV | U/rL − d U], and all that multiplies it
    const double step = -rule.lr / w1 * c;
    over_blocks(0, m.units, [&](int64_t i, int64_t rows) {
        multiply<float>(rows, m.q, m.k, {m.U() + i * stride, stride, 1}, m.mixed, q, m.left + i * rank, rank);
        for (int64_t r = i; r < i + rows; ++r) {
            const float *__restrict U = m.U() + r * stride, *__restrict GV = m.GV + r * q, *__restrict by_R = m.inverse_R;
            float *__restrict MV = m.MV() + r * stride, *__restrict left = m.left + r * rank;
            const float v = lerp(m.v_E()[r * stride], m.squares_E[r] / float(I), rest), by = float(step);
            const float d = inverse_root(v * by_wE, floor_E);
            m.scale[r] = by * d;
            for (int64_t j = 0; j < m.q; ++j) left[j] = by * (left[j] + lerp(MV[j], GV[j], fresh) * (by_R[j] - d));
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
    alignas(LINE) float low_rank[HIGH * PANEL];
    for (int64_t i = begin; i < end; i += HIGH) {
        const int64_t rows = least<int64_t>(HIGH, end - i);
        over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t) {
            const int64_t corner = i * m.inputs + c;
            Ahead ahead{rows};
            ahead.add(m.M + corner, m.inputs), ahead.add(param + corner, m.inputs), ahead.add(grad + corner, m.inputs);
            for (int64_t j = 0; j < n; j += WIDE * W, ahead.rows = 0) {
                const auto keep = [&](int64_t r, int64_t v, V product) __attribute__((always_inline)) {
                    store(low_rank + r * PANEL + j + v * W, product);
                };
                const float* right = m.right + p * rank * PANEL + j;
                product<float>(rows, n - j, rank, {m.left + i * rank, rank, 1}, right, PANEL, ahead, keep);
            }
            for (int64_t r = 0; r < rows; ++r) {
                const V scale = fill<V>(m.scale[i + r]);
                const auto change = [&](V product, V g, V& x, V& theta) {
                    x = fma(fresh, bits<V>(bits<M>(g) ^ flip) - x, x);
                    theta = fma(decay, theta, fma(scale, x, product));
                };
                const int64_t at = corner + r * m.inputs;
                int64_t j = 0;
                for (; j + W <= n; j += W) {
                    V x = load(m.M + at + j), theta = load(param + at + j);
                    change(load(low_rank + r * PANEL + j), load(grad + at + j), x, theta);
                    store(m.M + at + j, x), store(param + at + j, theta);
                }
                if (const int rest = int(n - j)) {
                    V x = load(m.M + at + j, rest), theta = load(param + at + j, rest);
                    change(load(low_rank + r * PANEL + j), load(grad + at + j, rest), x, theta);
                    store(m.M + at + j, x, rest), store(param + at + j, theta, rest);
                }
            }
        });
    }
}

void update(const Matrix& m, const AnovaRule& rule, int64_t begin, int64_t end) {
    with_type(m, [&](auto t) { update_rows<decltype(t)>(m, rule, begin, end); });
}

// ------------------------------------------------------------------ refresh

// A = Rᵀ R for a symmetric A, (w, stride); A becomes R⁻¹. Returns the smallest diagonal entry of R, or NaN.
double invert_root(double* A, int64_t w, int64_t stride, double* line) {
    double smallest = 1;
    for (int64_t j = 0; j < w; ++j)
        if (A[j * (stride + 1)] == 0) A[j * (stride + 1)] = 1;  // a zero column stays zero
    for (int64_t j = 0; j < w; ++j) {
        double* row = A + j * stride;
        const double diagonal = std::sqrt(row[j]);
        if (!(diagonal >= smallest)) smallest = diagonal;  // once it is no number, so are all others
        for (int64_t c = j; c < w; ++c) row[c] /= diagonal;
        for (int64_t i = j + 1; i < w; ++i)
            for (int64_t c = i; c < w; ++c) A[i * stride + c] -= row[i] * row[c];
    }
    for (int64_t i = w - 1; i >= 0; --i) {  // R⁻¹ from the last row on: R_ii x_i = e_i − Σ_{j>i} R_ij x_j
        double* row = A + i * stride;
        for (int64_t c = 0; c < stride; ++c) line[c] = row[c], row[c] = c == i;
        for (int64_t j = i + 1; j < w; ++j)
            for (int64_t c = j; c < w; ++c) row[c] -= line[j] * A[j * stride + c];
        for (int64_t c = i; c < w; ++c) row[c] /= line[i];
    }
    return smallest;
}

// The new basis: columns of the sketch at length 1, with a little of the old ones, made orthonormal by their Gram matrix,
// twice if that is nearly singular. Returns whether they are far enough from parallel.
bool orthonormalize_side(const Side& s) {
    const int64_t w = s.w, stride = padded(w);
    for (int64_t a = 0; a < stride; ++a) s.scale[a] = 0;
    over_blocks(0, s.length, [&](int64_t i, int64_t rows) {
        double* Z = s.Z + i * stride;
        copy(rows, w, s.sketch + i * s.row, s.row, s.column, Z, stride, stride);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t a = 0; a < stride; ++a) s.scale[a] += Z[r * stride + a] * Z[r * stride + a];
    });
    double longest = 0;
    for (int64_t a = 0; a < w; ++a) longest = most(longest, s.scale[a] = std::sqrt(s.scale[a]));
    for (int64_t a = 0; a < w; ++a)  // noise must not decide where a column points
        s.scale[a] = s.scale[a] > NOISE * longest ? 1 / s.scale[a] : 0;
    over_blocks(0, s.length, [&](int64_t i, int64_t rows) {
        copy(rows, w, s.basis + i * s.row, s.row, s.column, s.block, stride, stride);
        double* Z = s.Z + i * stride;
        for (int64_t r = 0; r < rows * stride; r += stride)
            for (int64_t a = 0; a < stride; ++a) Z[r + a] = Z[r + a] * s.scale[a] + INERTIA * s.block[r + a];
    });
    for (int again = 0; again < 2; ++again) {
        over_blocks(0, s.length, [&](int64_t i, int64_t rows) {
            const double* Z = s.Z + i * stride;
            multiply<double>(w, stride, rows, {Z, 1, stride}, Z, stride, s.gram, stride, 1, i > 0);
        });
        const double smallest = invert_root(s.gram, w, stride, s.block);
        if (!(smallest > CLOSEST)) return false;
        over_blocks(0, s.length, [&](int64_t i, int64_t rows) {
            double* Z = s.Z + i * stride;
            multiply<double>(rows, stride, w, {Z, stride, 1}, s.gram, stride, s.block, stride);
            copy(rows, stride, s.block, stride, 1, Z, stride, stride);
            copy(rows, stride, Z, stride, 1, s.turned + i * stride, stride, stride);
        });
        if (smallest > SAFE) break;
    }
    return true;
}

bool has_zero_column(const Side& s) {
    for (int64_t a = 0; a < s.w; ++a) {
        int64_t i = 0;
        while (i < s.length && s.basis[i * s.row + a * s.column] == 0) ++i;
        if (i == s.length) return true;
    }
    return false;
}

void orthonormalize(const Matrix& m, const AnovaRule&, int64_t, int64_t) {
    if (has_zero_column(m.of_units) || has_zero_column(m.of_inputs)) {
        *m.refresh = -1;
        return;
    }
    const bool of_units = orthonormalize_side(m.of_units), of_inputs = orthonormalize_side(m.of_inputs);
    m.total[2] = of_units && of_inputs;
}

void project_average(const Matrix& m, const AnovaRule&, int64_t begin, int64_t end) {
    project_rows(m, m.M, 1.0, begin, end);
}

// AᵀB, (w, padded w), for an A that lies as the basis does, and the new basis B.
void with_new_basis(const Side& s, const float* A, float* out) {
    const int64_t stride = padded(s.w);
    for (int64_t i = 0; i < s.length; i += LONG) {
        const int64_t rows = least(LONG, s.length - i);
        const Factor<float> part = {A + i * s.row, s.column, s.row};
        multiply<float>(s.w, stride, rows, part, s.turned + i * stride, stride, out, stride, 1, i > 0);
    }
}

// W ← W_new and S ← W_new W_newᵀ S; what second moments turn by is (Wᵀ W_new)∘².
void refresh_side(const Side& s, float* block) {
    const int64_t w = s.w, stride = padded(w);
    with_new_basis(s, s.basis, s.turn);
    for (int64_t i = 0; i < w * stride; ++i) s.turn[i] *= s.turn[i];
    float* const product = reinterpret_cast<float*>(s.gram);
    with_new_basis(s, s.sketch, product);
    copy(w, w, product, 1, stride, s.kept, stride, stride);
    const auto put = [&](const float* from, float* to, int64_t rows) {
        for (int64_t a = 0; a < w; ++a)
            for (int64_t r = 0; r < rows; ++r) to[r * s.row + a * s.column] = from[r * stride + a];
    };
    over_blocks(0, s.length, [&](int64_t i, int64_t rows) {
        const float* basis = s.turned + i * stride;
        put(basis, s.basis + i * s.row, rows);
        multiply<float>(rows, stride, w, {basis, stride, 1}, s.kept, stride, block, stride);
        put(block, s.sketch + i * s.row, rows);
    });
}

// M in new coordinates, which `project_average` has left in GV and UG, and second moments.
void refresh_moments(const Matrix& m) {
    const int64_t k = padded(m.k), q = padded(m.q), stride = m.unit_stride();
    const Side &units = m.of_units, &inputs = m.of_inputs;
    grand(m);
    copy(m.k, m.q, m.K, q, 1, m.K_m(), m.q, m.q);
    copy(m.units, m.q, m.GV, q, 1, m.MV(), stride, m.q);
    over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t) {
        copy(m.k, n, m.UG + p * m.k * PANEL, PANEL, 1, m.UM() + c, m.inputs, n);
    });
    copy(m.k, m.q, m.v_K(), m.q, 1, m.mixed, q, q);
    multiply<float>(m.k, q, m.k, {units.turn, 1, k}, m.mixed, q, m.spare, q);
    multiply<float>(m.k, m.q, m.q, {m.spare, q, 1}, inputs.turn, q, m.v_K(), m.q);
    multiply<float>(1, m.q, m.q, {m.v_R(), m.q, 1}, inputs.turn, q, m.inverse_R, q);
    multiply<float>(1, m.k, m.k, {m.v_L(), m.k, 1}, units.turn, k, m.inverse_L, k);
    copy(1, m.q, m.inverse_R, q, 1, m.v_R(), q, m.q);
    copy(1, m.k, m.inverse_L, k, 1, m.v_L(), k, m.k);
}

// U and V turn, unless columns are nearly parallel. Second moments are raised until |m̂| ≤ b √v̂ holds for M in its new
// coordinates, and c follows what is measured (refresh.py, `bound_` and `measure_factor_`).
void turn(const Matrix& m, const AnovaRule& rule, int64_t, int64_t) {
    const int64_t k = padded(m.k), q = padded(m.q), stride = m.unit_stride();
    if (m.total[2] != 0) {
        refresh_side(m.of_units, m.block), refresh_side(m.of_inputs, m.block);
        refresh_moments(m);
    } else {
        copy(m.units, m.q, m.MV(), stride, 1, m.GV, q, q);
        over_panels(m, [&](int64_t p, int64_t c, int64_t n, int64_t) {
            copy(m.k, n, m.UM() + c, m.inputs, 1, m.UG + p * m.k * PANEL, PANEL, PANEL);
        });
        copy(m.k, m.q, m.K_m(), m.q, 1, m.K, q, q);
    }
    pack_right(m);
    sum_squares(m);
    const double O = double(m.units), I = double(m.inputs), wm = m.scalar(WM), wE = m.scalar(WE);
    const auto by_bound = [&](double w, double bound) { return w / (bound * bound * m.scalar(W1) * m.scalar(W1)); };
    const double means = by_bound(wm, m.bound_means), rest = by_bound(wE, m.bound_rest);
    const auto raise = [](float& v, double least_v) { v = most(v, float(least_v)); };
    const auto root = [&](float v) { return most(std::sqrt(v / wm) + rule.eps, double(SMALLEST)); };
    double gain = 0;
    for (int64_t a = 0; a < m.k; ++a) {
        const double square = m.LL[a * k + a];
        raise(m.v_L()[a], square / I * means), gain += square / root(m.v_L()[a]);
        for (int64_t j = 0; j < m.q; ++j) {
            const double of_K = double(m.K[a * q + j]) * m.K[a * q + j];
            float& v = m.v_K()[a * m.q + j];
            raise(v, of_K * means), gain += of_K / root(v);
        }
    }
    for (int64_t j = 0; j < m.q; ++j) {
        raise(m.v_R()[j], m.squares_R[j] / O * means), gain += m.squares_R[j] / root(m.v_R()[j]);
    }
    for (int64_t i = 0; i < m.units; ++i) raise(m.v_E()[i * stride], m.squares_E[i] / I * rest);
    const double left = most(m.total[1] - LEAST * m.total[0], 0.0), sigma = std::sqrt(m.scalar(VARIANCE) / wE);
    if (left > 0) gain += left / std::sqrt(m.scalar(REST_VARIANCE) / wE);  // what may be rounding counts as no gain
    const double factor = m.total[0] / sigma / gain;
    if (m.total[0] > 0) lerp(m.scalar(FACTOR), float(least(most(factor, LOWEST), HIGHEST)), FACTOR_NEWS);
}

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern const AnovaKernels blockmean::JOIN(anova_, VARIANT) = {
    {{pack}, {project, true}, {gather}},
    {{precondition}, {update, true}, {orthonormalize, false, true}, {project_average, true, true}, {gather, false, true},
     {turn, false, true}},
};
