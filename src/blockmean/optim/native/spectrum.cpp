// (A^-½ − I) b for a small symmetric matrix, with eigenvalues raised to a floor, without any eigenvector.
//
// Where A is near I, which is where blocks depend little on each other, by the binomial series of C = A − I:
//
//     (I + C)^-½ b − b = Σ_j y_j,   y_0 = b,   y_j = −(2j − 1)/(2j) C y_j−1
//
// n² operations for a term, and no digit lost to a difference. Elsewhere A = H T Hᵀ with T tridiagonal, by Householder's
// reflections; T = Z diag(w) Zᵀ by implicit QL steps, products of rotations. Both are applied to b one by one, and in
// reverse to f(w) ∘ (H Z)ᵀ b: (4/3) n³ operations in all, where computing Z would take four times as many.
//
// Compiled once for every instruction set. Nothing of the standard library is used: a function of it that is compiled
// here for one processor could be linked into code for another.
#include "solve.hpp"

using namespace blockmean;

namespace {

constexpr double EPSILON = 0x1p-52;

double dot(const double* a, const double* b, int64_t n) {
    double lanes[4] = {0, 0, 0, 0}, sum = 0;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int l = 0; l < 4; ++l) lanes[l] += a[i + l] * b[i + l];
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum + ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
}

// The series, if ‖C‖_∞ says that no eigenvalue is below the floor and that about n terms are enough, which cost no more
// than eigenvalues. What is left out of the sum is below the rounding error of its largest entry.
bool add_up_series(const double* C, int64_t n, double floor, const double* b, double* out, double* term, double* next) {
    double norm = 0;
    for (int64_t i = 0; i < n; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j) sum += __builtin_fabs(C[i * n + j]);
        if (!(sum < 1)) return false;  // NaN as well
        norm = sum > norm ? sum : norm;
    }
    if (1 - norm < floor) return false;
    int64_t terms = 1;
    for (double power = norm; power > EPSILON; power *= norm)
        if (++terms > n + 32) return false;
    for (int64_t i = 0; i < n; ++i) term[i] = b[i], out[i] = 0;
    for (int64_t k = 1; k <= terms; ++k) {
        const double factor = -double(2 * k - 1) / double(2 * k);
        double longest = 0, whole = 0;
        for (int64_t i = 0; i < n; ++i) {
            next[i] = factor * dot(C + i * n, term, n);
            out[i] += next[i];
            const double size = __builtin_fabs(next[i]), total = __builtin_fabs(out[i]);
            longest = size > longest ? size : longest;
            whole = total > whole ? total : whole;
        }
        if (longest * norm <= EPSILON / 4 * (1 - norm) * whole) break;  // a bound on all terms that would follow
        double* const last = term;
        term = next, next = last;
    }
    return true;
}

// y ← y − beta (vᵀ y) v, the reflection that v stands for.
void reflect(const double* v, double beta, double* y, int64_t n) {
    const double factor = beta * dot(v, y, n);
    for (int64_t i = 0; i < n; ++i) y[i] -= factor * v[i];
}

// A becomes T, with diagonal d and e beside it; row k of A keeps the reflection k from entry k + 1 on.
void tridiagonalise(double* A, int64_t n, double* d, double* e, double* beta, double* w) {
    for (int64_t k = 0; k < n; ++k) {
        d[k] = A[k * n + k];
        if (k + 1 == n) break;
        const int64_t m = n - k - 1;
        double *v = A + k * n + k + 1, *rest = A + (k + 1) * n + k + 1;
        const double below = dot(v + 1, v + 1, m - 1);
        e[k] = v[0];
        beta[k] = 0;
        if (below == 0) continue;
        e[k] = __builtin_copysign(__builtin_sqrt(v[0] * v[0] + below), -v[0]);
        v[0] -= e[k];
        beta[k] = 2 / (v[0] * v[0] + below);
        for (int64_t i = 0; i < m; ++i) w[i] = beta[k] * dot(rest + i * n, v, m);
        const double half = beta[k] / 2 * dot(v, w, m);
        for (int64_t i = 0; i < m; ++i) w[i] -= half * v[i];
        for (int64_t i = 0; i < m; ++i) {
            double* row = rest + i * n;
            for (int64_t j = 0; j < m; ++j) row[j] -= v[i] * w[j] + w[i] * v[j];
        }
    }
}

// Eigenvalues of T into d, by QL steps with implicit shifts; the rotations in order. False if they do not converge.
bool diagonalise(double* d, double* e, int64_t n, Rotation* rotations, int64_t room, int64_t& count) {
    e[n - 1] = 0;
    for (int64_t l = 0; l < n; ++l) {
        for (int turns = 0;; ++turns) {
            int64_t m = l;
            while (m + 1 < n && __builtin_fabs(e[m]) > EPSILON * (__builtin_fabs(d[m]) + __builtin_fabs(d[m + 1]))) ++m;
            if (m == l) break;
            if (turns == 60) return false;
            double g = (d[l + 1] - d[l]) / (2 * e[l]);
            g = d[m] - d[l] + e[l] / (g + __builtin_copysign(__builtin_sqrt(g * g + 1), g));
            double s = 1, c = 1, p = 0;
            int64_t i = m - 1;
            for (; i >= l; --i) {
                const double f = s * e[i], b = c * e[i], r = __builtin_sqrt(f * f + g * g);
                e[i + 1] = r;
                if (r == 0) {
                    d[i + 1] -= p;
                    e[m] = 0;
                    break;
                }
                s = f / r, c = g / r;
                g = d[i + 1] - p;
                const double t = (d[i] - g) * s + 2 * c * b;
                p = s * t;
                d[i + 1] = g + p;
                g = c * t - b;
                if (count == room) return false;
                rotations[count++] = {i, c, s};
            }
            if (i >= l) continue;
            d[l] -= p;
            e[l] = g;
            e[m] = 0;
        }
    }
    return true;
}

bool times_root(const double* matrix, int64_t n, double floor, const double* b, double* out, double* numbers,
                Rotation* rotations) {
    double *A = numbers, *d = A + n * n, *e = d + n, *beta = e + n, *w = beta + n;
    for (int64_t i = 0; i < n * n; ++i) A[i] = matrix[i];
    for (int64_t i = 0; i < n; ++i) A[i * n + i] -= 1;
    if (add_up_series(A, n, floor, b, out, d, e)) return true;
    for (int64_t i = 0; i < n; ++i) A[i * n + i] = matrix[i * n + i];
    tridiagonalise(A, n, d, e, beta, w);
    for (int64_t i = 0; i < n; ++i)
        if (!__builtin_isfinite(d[i]) || (i + 1 < n && !__builtin_isfinite(e[i]))) return false;
    int64_t count = 0;
    if (!diagonalise(d, e, n, rotations, rotations_for(n), count)) return false;
    double largest = d[0];
    for (int64_t i = 0; i < n; ++i) largest = d[i] > largest ? d[i] : largest;
    // Eigenvalues below the rounding error of the largest are rounding errors themselves.
    const double noise = EPSILON * largest, bound = floor > noise ? floor : noise;
    for (int64_t i = 0; i < n; ++i) out[i] = b[i];
    for (int64_t k = 0; k + 1 < n; ++k) reflect(A + k * n + k + 1, beta[k], out + k + 1, n - k - 1);
    for (int64_t k = 0; k < count; ++k) {
        const Rotation& r = rotations[k];
        const double x = out[r.i], y = out[r.i + 1];
        out[r.i] = r.c * x - r.s * y;
        out[r.i + 1] = r.s * x + r.c * y;
    }
    for (int64_t i = 0; i < n; ++i) out[i] *= 1 / __builtin_sqrt(d[i] < bound ? bound : d[i]) - 1;
    for (int64_t k = count; k-- > 0;) {
        const Rotation& r = rotations[k];
        const double x = out[r.i], y = out[r.i + 1];
        out[r.i] = r.c * x + r.s * y;
        out[r.i + 1] = r.c * y - r.s * x;
    }
    for (int64_t k = n - 1; k-- > 0;) reflect(A + k * n + k + 1, beta[k], out + k + 1, n - k - 1);
    return true;
}

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern const TimesRoot blockmean::JOIN(times_root_, VARIANT) = times_root;
