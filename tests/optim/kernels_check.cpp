// Two steps of the plain kernels against loops in double, for processors that the tests in Python do not run on.
#include <cmath>
#include <cstdio>
#include <vector>

#include "passes.hpp"
#include "solve.hpp"

using namespace blockmean;

namespace {

constexpr int64_t BLOCKS = 5, INNER = 37, D = BLOCKS * INNER;
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
    const double c[BLOCKS] = {0.1, -0.2, 0.3, 0, 1}, kappa[BLOCKS] = {1, 1.5, 2, 1, 3};
    double sums[4 * BLOCKS];
    const Task task{0, 0, D, -1};
    if (local) {
        struct Numbers { const double *c, *kappa; } numbers{c, kappa};
        const Solve solve = [](void* context, int64_t block, double& own, double& factor) {
            own = static_cast<Numbers*>(context)->c[block], factor = static_cast<Numbers*>(context)->kappa[block];
            return true;
        };
        kernels_plain.local(rule, piece, task, sums, BLOCKS, solve, &numbers);
    } else {
        kernels_plain.sums(rule, piece, task, sums, BLOCKS);
        kernels_plain.apply(rule, piece, task, c, kappa);
    }
    for (int64_t b = 0; b < BLOCKS; ++b) {
        double expected[4] = {0, 0, 0, 0};
        for (int64_t i = b * INNER; i < (b + 1) * INNER; ++i) {
            const double grad = -double(g[i]);
            M[i] += 0.1 * (grad - M[i]), R[i] = 0.99 * R[i] + 0.01 * grad * grad;
            const double zeta = std::sqrt(2.5 * R[i]), z = zeta + 1e-8, w = zeta / std::sqrt(z);
            expected[0] += grad, expected[1] += grad * grad, expected[2] += 2.5 * R[i], expected[3] += 1.5 * w * M[i];
            P[i] -= 0.01 * (kappa[b] * 1.5 * M[i] / z + w * c[b] + 0.1 * P[i]);
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
