// Two steps of the plain kernels against loops in double, for processors that the tests in Python do not run on.
#include <cmath>
#include <cstdio>
#include <vector>

#include "passes.hpp"
#include "solve.hpp"

using namespace blockmean;

namespace {

constexpr int64_t BLOCKS = 8, INNER = 301, D = BLOCKS * INNER;
int failures = 0;

void expect(const char* what, double found, double expected, double tolerance) {
    if (std::fabs(found - expected) <= tolerance * (1 + std::fabs(expected))) return;
    std::printf("%s: %.17g instead of %.17g\n", what, found, expected);
    ++failures;
}

template <class T> void check(Dtype dtype, double tolerance, bool local) {
    std::vector<T> p(D), g(D), m(D), r(D);
    std::vector<double> P(D), M(D), R(D);
    for (int64_t i = 0; i < D; ++i) {
        p[i] = T(std::sin(double(i))), g[i] = T(std::cos(3.0 * i)), m[i] = T(0.1 * std::sin(2.0 * i)), r[i] = T(0.01 * (i % 7));
        P[i] = p[i], M[i] = m[i], R[i] = r[i];
    }
    const Rule rule{WEIGHTED, true, false, 0.9, 0.99, 1e-8, 0.1, -1};
    const Piece piece{reinterpret_cast<char*>(p.data()), reinterpret_cast<char*>(m.data()),
                      reinterpret_cast<char*>(r.data()), 1, BLOCKS, INNER, dtype, 0, true,
                      reinterpret_cast<char*>(g.data()), 1.5, 2.5, 0.01};
    const double factor[BLOCKS] = {0.1, -0.2, 0.3, 0, 1, -1, 0.5, 2}, kappa[BLOCKS] = {1, 1.5, 2, 1, 3, 1, 0.5, 1};
    double sums[4 * BLOCKS], c[BLOCKS];
    const Task task{0, 0, D, -1};
    if (local) {
        Rule squares = rule;
        squares.sums = SQUARES;
        Task parts[STREAMS];
        const Task* tasks[STREAMS];
        const Piece* pieces[STREAMS];
        double* out[STREAMS];
        for (int s = 0; s < STREAMS; ++s) {
            parts[s] = {0, D / STREAMS * s, D / STREAMS * (s + 1), -1};
            tasks[s] = parts + s, pieces[s] = &piece, out[s] = sums + BLOCKS / STREAMS * s;
        }
        kernels_plain.streams(squares, pieces, tasks, out, BLOCKS);
        kernels_plain.local(rule, piece, task, sums, BLOCKS, factor, kappa);
    } else {
        kernels_plain.sums(rule, piece, task, sums, BLOCKS);
        for (int64_t b = 0; b < BLOCKS; ++b) c[b] = correction(sums[3 * BLOCKS + b], sums[2 * BLOCKS + b], factor[b]);
        kernels_plain.apply(rule, piece, task, c, kappa);
    }
    for (int64_t b = 0; b < BLOCKS; ++b) {
        double expected[4] = {0, 0, 0, 0};
        for (int64_t i = b * INNER; i < (b + 1) * INNER; ++i) {
            const double grad = -double(g[i]);
            M[i] += 0.1 * (grad - M[i]), R[i] = 0.99 * R[i] + 0.01 * grad * grad;
            const double zeta = std::sqrt(2.5 * R[i]), w = zeta / std::sqrt(zeta + 1e-8);
            expected[0] += grad, expected[1] += grad * grad, expected[2] += 2.5 * R[i], expected[3] += 1.5 * w * M[i];
        }
        for (int64_t i = b * INNER; i < (b + 1) * INNER; ++i) {
            const double zeta = std::sqrt(2.5 * R[i]), z = zeta + 1e-8, w = zeta / std::sqrt(z);
            const double common = w * expected[3] / expected[2] * factor[b];
            P[i] -= 0.01 * (kappa[b] * 1.5 * M[i] / z + common + 0.1 * P[i]);
            expect("first moment", double(m[i]), M[i], tolerance);
            expect("second moment", double(r[i]), R[i], tolerance);
            expect("parameter", double(p[i]), P[i], tolerance);
        }
        for (int k = 0; k < 4; ++k) expect("sum", sums[k * BLOCKS + b], expected[k], 10 * tolerance);
    }
}

void check_root() {  // of a diagonal matrix that two reflections have mixed
    const double A[4] = {2.5, 1.5, 1.5, 2.5}, b[2] = {1, 3};  // eigenvalues 4 and 1
    double out[2], numbers[2 * 2 + 4 * 2];
    std::vector<Rotation> rotations(rotations_for(2));
    if (!times_root_plain(A, 2, 0.1, b, out, numbers, rotations.data())) ++failures;
    expect("root", out[0], -1, 1e-12);  // mean 2 times ½ − 1, and nothing of the difference
    expect("root", out[1], -1, 1e-12);
}

}  // namespace

int main() {
    for (bool local : {false, true}) {
        check<float>(FLOAT32, 1e-6, local);
        check<double>(FLOAT64, 1e-13, local);
    }
    check_root();
    return failures != 0;
}
