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

// Tensors as they lie in memory, outer × blocks × inner entries each: a column per field, `count` numbers long. `CTensors`
// in __init__.py has the same fields.
struct Tensors {
    int64_t count;
    char* const* param;
    char* const* grad;
    char* const* first;  // null for AdaGrad
    char* const* second;
    const int64_t *outer, *blocks, *inner, *dtype;
    const double *gain, *gain_r, *rate;  // m̂/m, r̂/r, η
};

// One of them.
struct Tensor {
    char* param;
    const char* grad;
    char* first;  // null for AdaGrad
    char* second;
    int64_t outer, blocks, inner;
    Dtype dtype;
    double gain, gain_r, rate;
};

// `CRule` in __init__.py has the same fields.
struct Rule {
    Sums sums;
    int64_t adam;
    double beta1, beta2, eps, weight_decay, sign, floor, smallest_lambda;
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
    // U and energy are those of the tensor. For Adam, and blocks of two entries or more in one run of at most CACHED_BYTES. False if the sums of a block are not
    // finite: its parameters stay.
    bool (*by_block)(const Rule&, const Task&, double* U, double* energy);
};

extern const Kernels kernels_plain;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
#endif

}  // namespace blockmean
