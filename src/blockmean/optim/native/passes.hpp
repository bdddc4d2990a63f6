// What the kernels of every instruction set share with the module that calls them.
#pragma once

#include <cstdint>

namespace blockmean {

enum Dtype { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, DTYPES };

// The sums of pass 1, row by row, as passes.py lists them.
enum Sums {
    GRADIENT,    // Σ g
    SQUARES,     // Σ g, Σ g²: what has to be known of all gradients before the first block changes
    PAPER,       // Σ g, Σ z
    CONSISTENT,  // Σ g, Σ z, Σ w g
    WEIGHTED,    // Σ g, Σ g², Σ ζ², Σ w m̂
    CAPPED,      // the same, Σ (m̂/z)², Σ w²
    SUMS
};
constexpr int ROWS[SUMS] = {1, 2, 2, 3, 4, 6};
constexpr int MOST_ROWS = 6;

struct Rule {
    Sums sums;
    bool adam, careful;  // careful: z can be zero
    double beta1, beta2, eps, weight_decay, sign;
};

// A tensor as it lies in memory: outer × blocks × inner entries.
struct Piece {
    char* param;
    char* first;   // null for AdaGrad
    char* second;
    int64_t outer, blocks, inner;
    Dtype dtype;
    int64_t block;       // the first of its blocks among those of the list
    bool is_local;       // whether its blocks are short and lie in one run each, as `local` wants them
    const char* grad;    // the rest changes with every step
    double gain, gain_r, rate;
};

// Some blocks of a piece, or a part of a single large block: entries begin to end of every row of blocks × inner.
struct Task {
    int64_t piece, begin, end;
    int64_t part;  // which partial sum it has, −1 if its blocks are its own
};

constexpr int STREAMS = 4;
constexpr int64_t LOCAL_BYTES = 1 << 15;  // longest block that `local` takes, in the arithmetic's dtype

// c of a block that stands alone, from b and Σ ζ²; `factor` is A^-½ − κ.
static inline double correction(double b, double square, double factor) { return square > 0 ? b / square * factor : 0; }

struct Kernels {
    const char* name;
    // Sums over the blocks of a task into out[row * stride], starting with the block that holds `begin`.
    void (*sums)(const Rule&, const Piece&, const Task&, double* out, int64_t stride);
    // The same for STREAMS tasks at once, of one dtype and with blocks that lie in one run each. For SQUARES, PAPER and
    // CONSISTENT sums.
    void (*streams)(const Rule&, const Piece* const*, const Task* const*, double* const* out, int64_t stride);
    // Update moments and parameters. c and kappa start with the piece's own first block; null for c = 0 and κ = 1.
    void (*apply)(const Rule&, const Piece&, const Task&, const double* c, const double* kappa);
    // Sums, solve and update, block by block; sums, factor and kappa start with the piece's own first block. False if the
    // sums of a block are not finite: its parameters stay. For WEIGHTED sums, and blocks that lie in one run of at most
    // LOCAL_BYTES.
    bool (*local)(const Rule&, const Piece&, const Task&, double* sums, int64_t stride, const double* factor,
                  const double* kappa);
};

extern const Kernels kernels_plain;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
#endif

}  // namespace blockmean
