// Between the passes: what correction.py computes with torch, for steps in which every tensor takes part.
#pragma once

#include <cstdint>
#include <vector>

namespace blockmean {

// The rows of one tensor's blocks in the statistics of its component.
struct Rows {
    double* U;       // (count, width), or (count,) where width is 0: coupling "none"
    double* energy;  // (count,), null if the form has none
    int64_t count, width;
    int64_t block;   // its first block in the group
    int64_t column;  // its first block in the component
    int64_t origin;  // the first entry of A of its component
    double size;     // entries of every block
};

// A rotation of the entries i and i + 1.
struct Rotation {
    int64_t i;
    double c, s;
};

struct Solver {
    std::vector<Rows> rows;
    std::vector<double> scale, own;  // (L,) each: N, and n of the blocks that take part; `prepare`: A^-½ − κ, and A^-½
    std::vector<double> numbers;     // room for `TimesRoot`
    std::vector<Rotation> rotations;
};

struct Form {
    bool weighted, raw, keeps_diagonal, keeps_trace;
    double beta;  // decay of U, negative for sums
    double floor, smallest_lambda, cap;  // cap: negative for none
};

// Sums, (rows, L), and numbers per block, (L,) each.
struct Vectors {
    const double* sums;
    int64_t stride;
    double *common, *change;  // N b and (A^-½ − I) N b
    double *c, *kappa;        // kappa: null if κ is 1 everywhere
};

// U ← U + u uᵀ, or its average; common, and A for every component, or directly change if blocks are not coupled.
void accumulate(Solver&, const Form&, const Vectors&, double* A);

// out = (A^-½ − I) b for the n×n matrix A, its eigenvalues raised to `floor` and to the rounding error of the largest.
// False if the eigenvalues are not finite or do not converge. Needs room for n² + 4n numbers and `rotations_for(n)`.
typedef bool (*TimesRoot)(const double* A, int64_t n, double floor, const double* b, double* out, double* numbers,
                          Rotation* rotations);
constexpr int64_t rotations_for(int64_t n) { return 4 * n * n + 16; }  // about n² are needed
extern const TimesRoot times_root_plain;
#if defined(__x86_64__)
extern const TimesRoot times_root_avx2, times_root_avx512;
#endif

// c = N [change + (1 − κ) common], and κ where the form keeps the trace.
void correct(const Solver&, const Form&, const Vectors&);

// Both for some blocks of a tensor, where blocks are weighted, not coupled and not capped. U, A and κ follow from the
// gradients alone, so all but c can be prepared before the moments are known: c = b / Σ ζ² · (A^-½ − κ).
void prepare(Solver&, const Form&, const Vectors&, const Rows&, int64_t begin, int64_t end);
void conclude(const Solver&, const Vectors&, const Rows&, int64_t begin, int64_t end);

}  // namespace blockmean
