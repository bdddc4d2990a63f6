// What the kernels of Anova share with library.cpp, and the structs that Python fills in.
#pragma once

#include "passes.hpp"

namespace blockmean {

constexpr int64_t PANEL = 48;  // columns of a panel: a whole number of tiles for every instruction set
constexpr int64_t BLOCK = 48;  // rows of a block: with a panel of them, all that a product needs fits into the L1 cache

inline int64_t padded(int64_t n) { return (n + 15) & ~int64_t(15); }  // to whole vectors, and lines of the cache

// `NUMBERS` in anova.py has the same fields.
struct AnovaRule {
    double beta1, mean_beta, beta2, lr, weight_decay, eps, sign;
};

enum Scalar { VARIANCE, REST_VARIANCE, FACTOR, W1, WM, WE };  // the end of grand_means

// What a refresh knows of U or of V; w is the number of columns, k or q.
struct Side {
    float *basis, *sketch;  // U and X, or V and Y: entry (i, j) at i · row + j · column
    int64_t length, w, row, column;
    float *turned;       // (length, padded w), the new basis
    double *Z;           // (length, padded w), the same while it is being made
    double *gram;        // (w, padded w)
    double *block;       // (BLOCK, padded w)
    double *scale;       // (padded w), of the columns of the sketch: 1 over their lengths, or 0
    float *turn, *kept;  // (w, padded w), what second moments and sketches turn by
};

// A matrix, and where its numbers are: first those that `read` leaves for `write`, then those of one phase.
struct Matrix {
    char* param;
    const char* grad;
    float *M, *unit, *input, *grand;
    int64_t units, inputs, k, q;
    Dtype dtype;
    int64_t* refresh;  // 1 if due; becomes −1 where a column of U or V is zero, and torch has to do it
    double bound_means, bound_rest;  // of |m̂| / √v̂

    float *GV;      // (O, padded q)
    float *UG;      // (panels, k, PANEL)
    float *rows;    // (O)
    double *total;  // squared length of G or M, that of the rest of it, and whether a refresh may turn

    float *packed_U;  // (O, padded k)
    float *packed_V;  // (I, padded q)
    float *parts;   // (chunks, panels, k, PANEL), UG of each chunk; UG itself if there is only one
    float *left;    // (O, q + k)
    float *right;   // (panels, q + k, PANEL)
    float *scale;   // (O), of M in a step
    float *K, *mixed, *spare;  // (k, padded q)
    float *KT;      // (q, padded k)
    float *LL;      // (k, padded k)
    double *squares_R;  // (q)
    float *inverse_R;   // (q)
    float *inverse_L;   // (k)
    float *squares_E;   // (O)
    float *block;   // (BLOCK, padded q or k, whichever is more)
    Side of_units, of_inputs;

    int64_t unit_stride() const { return 2 * k + q + 1; }
    float* U() const { return unit; }
    float* X() const { return unit + k; }
    float* MV() const { return unit + 2 * k; }
    float* v_E() const { return unit + 2 * k + q; }
    float* VT() const { return input; }
    float* YT() const { return input + q * inputs; }
    float* UM() const { return input + 2 * q * inputs; }
    float* K_m() const { return grand; }
    float* v_K() const { return grand + k * q; }
    float* v_R() const { return grand + 2 * k * q; }
    float* v_L() const { return v_R() + q; }
    float& scalar(Scalar which) const { return v_L()[k + which]; }
    int64_t panels() const { return (inputs + PANEL - 1) / PANEL; }

    // Rows of a task. It depends on nothing but the matrix: so do sums over rows, to the last bit.
    int64_t chunk() const {
        constexpr int64_t MOST = 8 * BLOCK;
        const int64_t chunks = (units + MOST - 1) / MOST, rows = (units + chunks - 1) / chunks;
        return (rows + BLOCK - 1) / BLOCK * BLOCK;
    }
    int64_t chunks() const { return (units + chunk() - 1) / chunk(); }
};

// A part of a step, of some rows of a matrix or of all of it.
struct Phase {
    void (*run)(const Matrix&, const AnovaRule&, int64_t begin, int64_t end);
    bool by_chunk = false, only_refresh = false;

    int64_t rows(const Matrix& m) const { return by_chunk ? m.chunk() : m.units; }
    void take(const Matrix& m, const AnovaRule& rule, int64_t begin) const {
        const int64_t end = begin + rows(m);
        if (!only_refresh || *m.refresh == 1) run(m, rule, begin, end < m.units ? end : m.units);
    }
};

struct AnovaKernels {
    Phase read[3], write[6];
};

extern const AnovaKernels anova_plain;
#if defined(__x86_64__)
extern const AnovaKernels anova_avx2, anova_avx512;
#endif

}  // namespace blockmean
