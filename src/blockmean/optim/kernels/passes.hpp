// What the kernels of every instruction set share with library.cpp, and the structs that Python fills in.
#pragma once

#include <cstdint>

namespace blockmean {

enum Dtype : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

// The sums of pass 1, row by row, as passes.py lists them.
enum Sums : int64_t {
    GRADIENT,    // Σ g
    SQUARES,     // Σ g, Σ g²
    PAPER,       // Σ g, Σ z
    CONSISTENT,  // Σ g, Σ z, Σ w g
    WEIGHTED,    // Σ g, Σ g², Σ ζ², Σ w m̂
    CAPPED,      // the same, Σ (m̂/z)², Σ w²
};
constexpr int ROWS[] = {1, 2, 2, 3, 4, 6};
constexpr int MOST_ROWS = 6;

// A tensor as it lies in memory: outer × blocks × inner entries.
struct Shape {
    int64_t outer, blocks, inner;
};

struct Tensor : Shape {
    char* param;
    const char* grad;
    char* first;  // null for AdaGrad
    char* second;
};

// What all tensors of a run share; gain, gain_r and rate are m̂/m, r̂/r and η. `RULE` in __init__.py has the same fields.
struct Rule {
    Sums sums;
    int64_t adam;
    Dtype dtype;
    double beta1, beta2, eps, weight_decay, sign, floor, smallest_lambda, gain, gain_r, rate;
};

// Some blocks of a tensor, or a part of a single large block: entries begin to end of every row of blocks × inner.
struct Task {
    const Tensor* tensor;
    int64_t begin, end;
    int64_t block;  // the first block of the tensor, among those of the list
    double* out;    // where its sums go: row k at out[k * stride]
    int64_t stride;
};

constexpr int64_t CACHED_BYTES = 1 << 16;  // longest block that `by_block` takes, in the arithmetic's dtype

struct Kernels {
    const char* name;
    void (*sums)(const Rule&, const Task&);
    // Update moments and parameters. c and kappa start with the tensor's own first block; null for c = 0 and κ = 1.
    void (*apply)(const Rule&, const Task&, const double* c, const double* kappa);
    // The solve of "weighted" for AdaGrad and "balanced" for Adam, and the update. U and energy are those of the tensor,
    // whose blocks lie in one run each of at most CACHED_BYTES.
    void (*by_block)(const Rule&, const Task&, double* U, double* energy);
};

extern const Kernels kernels_plain;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
#endif

}  // namespace blockmean
