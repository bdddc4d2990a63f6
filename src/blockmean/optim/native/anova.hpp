// What Anova's kernels of every instruction set share with the module that calls them.
#pragma once

#include "passes.hpp"

namespace blockmean {

// The state of a matrix in the order of anova.py: moments of the remainder, U, Vᵀ, what they follow, and the averages
// and squares of the means.
enum State {
    MEAN, SQUARE, UNITS, INPUTS, UNITS_SKETCH, INPUTS_SKETCH, GRAND_AVG, UNIT_AVG, INPUT_AVG, GRAND_SQ, UNIT_SQ,
    INPUT_SQ, STATES
};

struct Matrix {
    Dtype dtype;
    int64_t units, inputs, unit_means, input_means;
    int64_t inner;  // of a convolution stored with its channels last: kernel positions; else 1
    char* param;
    char* state[STATES];
    const char* grad;  // the rest changes with every step
    double square;     // ‖G‖²
};

// The numbers of one step, parts.Step in Python.
struct Step {
    bool maximize, turns;
    double beta1, beta2, mean_beta, rate, decay, unbias_means, unbias_rest, longest_means, longest_rest;
    double forget, eps, noise, smallest;
};

struct AnovaKernels {
    // ‖G‖². Changes nothing else.
    void (*sums)(Matrix&);
    void (*apply)(const Matrix&, const Step&);
    // Turn U and V; false if that takes new columns, and nothing has changed.
    bool (*turn)(const Matrix&);
};

extern const AnovaKernels anova_plain;
#if defined(__x86_64__)
extern const AnovaKernels anova_avx2, anova_avx512;
#endif

}  // namespace blockmean
