// Steps of the plain kernels against loops in double, for processors that the tests in Python do not run on.
#include <cmath>
#include <cstdio>
#include <vector>

#include "passes.hpp"

using namespace blockmean;

extern "C" const char* blockmean_instructions(const char* wanted);
extern "C" int blockmean_sums(const int64_t* columns, int64_t count, const Rule*, int threads, double* out, int64_t stride);
extern "C" void blockmean_apply(const int64_t* columns, int64_t count, const Rule*, int threads, const double* c,
                                const double* kappa);
extern "C" void blockmean_solve_and_apply(const int64_t* columns, int64_t count, const Rule*, int threads,
                                          double* const* states, double* out, int64_t stride);

namespace {

constexpr int64_t BLOCKS = 8, INNER = 301, D = BLOCKS * INNER;
int failures = 0;

void expect(const char* what, double found, double expected, double tolerance) {
    if (std::fabs(found - expected) <= tolerance * (1 + std::fabs(expected))) return;
    std::printf("%s: %.17g instead of %.17g\n", what, found, expected);
    ++failures;
}

template <class T> void check(Dtype dtype, double tolerance, bool by_block) {
    std::vector<T> p(D), g(D), m(D), r(D);
    std::vector<double> P(D), M(D), R(D);
    for (int64_t i = 0; i < D; ++i) {
        p[i] = T(std::sin(double(i))), g[i] = T(std::cos(3.0 * i)), m[i] = T(0.1 * std::sin(2.0 * i)), r[i] = T(0.01 * (i % 7));
        P[i] = p[i], M[i] = m[i], R[i] = r[i];
    }
    const auto address = [](std::vector<T>& x) { return reinterpret_cast<int64_t>(x.data()); };
    const int64_t columns[] = {address(p), address(g), address(m), address(r), 1, BLOCKS, INNER};
    const Rule rule{by_block ? SQUARES : WEIGHTED, 1, dtype, 0.9, 0.99, 1e-8, 0.1, -1, 1, 0.1, 1.5, 2.5, 0.01};
    double factor[BLOCKS] = {0.1, -0.2, 0.3, 0, 1, -1, 0.5, 2}, kappa[BLOCKS] = {1, 1.5, 2, 1, 3, 1, 0.5, 1};
    double sums[4 * BLOCKS], c[BLOCKS], U[BLOCKS] = {}, energy[BLOCKS] = {};
    if (!blockmean_sums(columns, 1, &rule, 2, sums, BLOCKS)) ++failures;
    if (by_block) {
        double* const states[] = {U, energy};
        blockmean_solve_and_apply(columns, 1, &rule, 2, states, sums, BLOCKS);
    } else {
        for (int64_t b = 0; b < BLOCKS; ++b) c[b] = sums[3 * BLOCKS + b] / sums[2 * BLOCKS + b] * factor[b];
        blockmean_apply(columns, 1, &rule, 2, c, kappa);
    }
    for (int64_t b = 0; b < BLOCKS; ++b) {
        double expected[4] = {0, 0, 0, 0};
        for (int64_t i = b * INNER; i < (b + 1) * INNER; ++i) {
            const double grad = -double(g[i]);
            M[i] += 0.1 * (grad - M[i]), R[i] = 0.99 * R[i] + 0.01 * grad * grad;
            const double zeta = std::sqrt(2.5 * R[i]), w = zeta / std::sqrt(zeta + 1e-8);
            expected[0] += grad, expected[1] += grad * grad, expected[2] += 2.5 * R[i], expected[3] += 1.5 * w * M[i];
        }
        if (by_block) {  // A_ii of a first step is u² / Σ g²
            const double A = expected[0] * expected[0] / expected[1];
            kappa[b] = 1 / std::sqrt(std::fmax(0.1, (INNER - std::fmax(1, A)) / (INNER - 1)));
            factor[b] = 1 / std::sqrt(std::fmax(1, A)) - kappa[b];
            expect("U", U[b], 0.01 * expected[0] * expected[0], 10 * tolerance);
            expect("energy", energy[b], 0.01 * expected[1], 10 * tolerance);
        }
        for (int64_t i = b * INNER; i < (b + 1) * INNER; ++i) {
            const double zeta = std::sqrt(2.5 * R[i]), z = zeta + 1e-8, w = zeta / std::sqrt(z);
            const double common = w * expected[3] / expected[2] * factor[b];
            P[i] -= 0.01 * (kappa[b] * 1.5 * M[i] / z + common + 0.1 * P[i]);
            expect("first moment", double(m[i]), M[i], tolerance);
            expect("second moment", double(r[i]), R[i], tolerance);
            expect("parameter", double(p[i]), P[i], tolerance);
        }
        for (int k = 0; k < (by_block ? 2 : 4); ++k) expect("sum", sums[k * BLOCKS + b], expected[k], 10 * tolerance);
    }
}

}  // namespace

int main() {
    if (!blockmean_instructions("plain")) return 2;
    for (bool by_block : {false, true}) {
        check<float>(FLOAT32, 1e-6, by_block);
        check<double>(FLOAT64, 1e-13, by_block);
    }
    return failures != 0;
}
